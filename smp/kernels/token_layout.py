"""Layout of a micro-batch's tokens: positions, documents, masks and dropout numbers, without process groups.

Rows of activations are the tokens of all sequences, one sequence after the other, then padding. Queries and keys of a
sequence are usually the same tokens. With a cache of keys, or when a rank holds a slice of each sequence, they are not:
then ``query_start`` and ``key_start`` say where in its sequence the first of each stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from smp.kernels.sequence_cut import SequenceCut, chunks_of_documents
from smp.kernels.transfer import to_device

Pattern = tuple[bool, int | None]
"""(causal, window): which keys the queries of a layer see; window None: no limit."""


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """The tokens of a micro-batch.

    Attributes:
        batch, length: number of sequences, and of queries in each.
        padding: rows after the last sequence. They see no key, and no query sees them.
        position_ids: int64 (tokens,), what RoPE and learned positions take.
        token_index: int64 (tokens,), global numbers that dropout is keyed by; None without dropout.
        local_token_index: this rank's part of ``token_index`` under sequence parallelism; by default the same.
        document_ids: integers (batch, length): a token sees only keys with its number. They may lie on the host, where
            a variable-length kernel needs them. None: a sequence is one document.
        query_start, key_start: where in its sequence the first query and the first key stand.
        key_length: keys of each sequence; by default ``length``.
        key_document_ids: integers (batch, key_length); by default ``document_ids``.
        query_positions, key_positions: int64 (batch, length) and (batch or 1, key_length), where each token stands in
            its sequence, when rows are at different positions: they count instead of ``query_start`` and ``key_start``.
        chunk: with them, tokens see only keys of their own chunk of so many positions.
        cache: keys and values of earlier tokens, in a forward pass that generates (``smp.layers.kv_cache``).
        prepared: what layers derive from the tokens, once for all that need the same, by the key of the need: rotary
            tables, scales of queries, layouts of chunks (see :mod:`smp.layers.token_needs`).
        masks: by pattern, (batch or 1, 1, length, key_length), added to scores. A core makes them for all layers.
        cu_seqlens_q, cu_seqlens_k: int32 (documents + 1,), where documents begin in queries and keys. Likewise.
        max_seqlen_q, max_seqlen_k: at least the tokens of the longest document.
        cut: the sequences are cut over ranks, and these are this rank's tokens; what documents there are it says. None:
            the tokens of whole sequences.
        plan: what a core that exchanges with other ranks derives from ``cut``, once for all layers.
    """

    batch: int
    length: int
    padding: int = 0
    position_ids: torch.Tensor | None = None
    token_index: torch.Tensor | None = None
    local_token_index: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None
    query_start: int = 0
    key_start: int = 0
    key_length: int | None = None
    key_document_ids: torch.Tensor | None = None
    query_positions: torch.Tensor | None = None
    key_positions: torch.Tensor | None = None
    chunk: int | None = None
    cache: Any = None
    prepared: Mapping[str, Any] = field(default_factory=dict)
    masks: Mapping[Pattern, torch.Tensor] = field(default_factory=dict)
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    cut: SequenceCut | None = None
    plan: Any = None

    def __post_init__(self) -> None:
        # The dataclass is frozen; this is its own construction.
        if self.local_token_index is None:
            object.__setattr__(self, "local_token_index", self.token_index)

    @property
    def num_queries(self) -> int:
        """Rows without padding."""
        return self.batch * self.length

    @property
    def num_tokens(self) -> int:
        """Rows with padding."""
        return self.batch * self.length + self.padding

    @property
    def keys(self) -> int:
        """Keys of each sequence."""
        return self.length if self.key_length is None else self.key_length

    @property
    def sees_itself(self) -> bool:
        """Whether each query's own key is among the keys, so that every query sees at least one."""
        if self.key_positions is not None:
            return self.cache.whole
        # Keys before the first query and after the last one.
        before, after = self.query_start - self.key_start, self.key_start + self.keys - self.query_start - self.length
        return before >= 0 and after >= 0 and self.key_document_ids is None

    def pattern(self, causal: bool, window: int | None) -> Pattern:
        """The mask pattern of a layer. A window that reaches the first key counts as None, so that such layers share a
        mask."""
        if self.key_positions is not None:
            return causal, window
        # Such a window hides nothing, and its mask would be made a second time.
        if window is not None and window > self.query_start + self.length - 1 - self.key_start:
            window = None
        return causal, window

    def needs_mask(self, pattern: Pattern) -> bool:
        """Whether a kernel's own "causal" flag is not enough. Its meaning differs between kernels where there are not
        as many keys as queries."""
        causal, window = pattern
        if self.key_positions is not None:
            return True
        shifted = self.query_start != self.key_start or self.length != self.keys
        return self.document_ids is not None or window is not None or (causal and shifted)

    def mask(self, pattern: Pattern, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """The mask that is added to scores, see :meth:`make_mask`: the one made for all layers, or a new one. None
        where a kernel's own "causal" flag is enough."""
        if not self.needs_mask(pattern):
            return None
        known = self.masks.get(pattern)
        return self.make_mask(pattern, dtype, device) if known is None else known

    def make_mask(self, pattern: Pattern, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """(batch or 1, 1, length, key_length): 0 where a query sees a key, else -inf."""
        causal, window = pattern
        queries, keys = self.positions(device)
        # ([batch,] length, key_length)
        distance = queries[..., :, None] - keys[..., None, :]
        seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            seen = seen & (distance < window)
        if self.chunk is not None:
            seen = seen & (queries[..., :, None] // self.chunk == keys[..., None, :] // self.chunk)
        # (batch or 1, length, key_length)
        seen = seen if seen.ndim == 3 else seen[None]
        # Ids may lie on the host, where a variable-length kernel counts them.
        if self.document_ids is not None:
            seen = seen & self._same_document(self.document_ids, device)
        return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)[:, None]

    def positions(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 ([batch or 1,] length) and ([batch or 1,] key_length): where queries and keys stand in sequences."""
        if self.query_positions is not None and self.key_positions is not None:
            return self.query_positions, self.key_positions
        return (
            torch.arange(self.query_start, self.query_start + self.length, device=device),
            torch.arange(self.key_start, self.key_start + self.keys, device=device),
        )

    def _same_document(self, document_ids: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Boolean (batch, length, key_length)."""
        key_ids = document_ids if self.key_document_ids is None else self.key_document_ids
        if key_ids.shape[1] != self.keys:
            raise ValueError(f"{key_ids.shape[1]} document ids for {self.keys} keys: give key_document_ids")
        return to_device(document_ids, device)[:, :, None] == to_device(key_ids, device)[:, None, :]

    def with_masks(self, patterns: Iterable[Pattern], dtype: torch.dtype, device: torch.device) -> TokenLayout:
        """The layout with the masks of ``patterns``, one for all layers that have the pattern."""
        needed = [pattern for pattern in dict.fromkeys(patterns) if self.needs_mask(pattern)]
        return replace(self, masks={pattern: self.make_mask(pattern, dtype, device) for pattern in needed})

    def in_chunks(self, size: int) -> TokenLayout:
        """The layout in which a token sees only tokens of its own chunk: ``size`` tokens of a document, counted from
        its beginning. A chunk is a document then, so that all cores compute it, and the layout has no masks yet.

        Raises:
            ValueError: there are documents, of which some tokens are missing.
        """
        if self.key_positions is not None:
            return replace(self, chunk=size, masks={})
        # The cut knows the documents; the layout of this rank's tokens has none.
        if self.cut is not None:
            return replace(self, cut=self.cut.in_chunks(size))
        # One chunk holds all.
        if self.query_start + self.length <= size:
            return self
        if self.document_ids is None:
            queries, keys = (
                (torch.arange(start, start + count) // size).expand(self.batch, count)
                for start, count in ((self.query_start, self.length), (self.key_start, self.keys))
            )
            # Equal on both sides: then one list of ids serves for queries and keys.
            same = self.sees_itself and self.length == self.keys
            return replace(self, document_ids=queries, key_document_ids=None if same else keys)
        if self.query_start or self.key_start or self.key_document_ids is not None or self.keys != self.length:
            raise ValueError("chunks are counted from the beginning of documents: their first tokens are missing")
        return replace(self, document_ids=chunks_of_documents(self.document_ids, size))

    def with_documents_found(self, device: torch.device) -> TokenLayout:
        """The layout with ``cu_seqlens_q`` and ``cu_seqlens_k`` on ``device``, counted on the host.

        Their number is a power of two, the last ones empty, and so are the longest lengths: a program is then compiled
        for few sizes. Each document's last query is its last key, as kernels expect where there are fewer queries.

        Raises:
            ValueError: document ids are on another device, or one comes back after another one in its sequence; or keys
                do not end where queries end.
        """
        if self.query_start + self.length != self.key_start + self.keys:
            raise ValueError("queries and keys of a sequence do not end together: only a mask can describe them")
        first = self._first_of_documents()
        starts = first.nonzero()  # (documents, 2)
        # Where each document begins among all keys, and among all queries: with fewer queries than
        # keys these are the last ones, and a document may have none.
        cu_k = starts[:, 0] * self.keys + starts[:, 1]
        cu_q = starts[:, 0] * self.length + (starts[:, 1] - (self.keys - self.length)).clamp(min=0)
        # Of documents too: numbers that change with every batch would be compiled anew.
        count = _power_of_two(len(starts))
        ends = (cu_q, self.batch * self.length), (cu_k, self.batch * self.keys)
        # Empty documents at the end: they have no queries, so they cost nothing.
        padded = [torch.cat((cu, cu.new_full((count + 1 - len(cu),), end))).int() for cu, end in ends]
        # Of the padded lists too, so that few sizes are ever seen.
        longest = [_power_of_two(int(cu.diff().max())) for cu in padded]
        return replace(
            self,
            cu_seqlens_q=to_device(padded[0], device),
            cu_seqlens_k=to_device(padded[1], device),
            max_seqlen_q=min(longest[0], self.length),
            max_seqlen_k=min(longest[1], self.keys),
        )

    def _first_of_documents(self) -> torch.Tensor:
        """Boolean (batch, key_length), on the CPU: where a document begins."""
        first = torch.zeros(self.batch, self.keys, dtype=torch.bool)
        first[:, 0] = True
        ids = self.document_ids if self.key_document_ids is None else self.key_document_ids
        if ids is None:
            return first
        if ids.device.type != "cpu":
            raise ValueError(f"document ids are on {ids.device}: the host counts them, they must be on the CPU")
        if ids.shape != first.shape:
            raise ValueError(f"document ids {tuple(ids.shape)} for keys {tuple(first.shape)}: give key_document_ids")
        first[:, 1:] = ids[:, 1:] != ids[:, :-1]
        # As many places where neighbours differ as there are different ids: none comes back.
        ordered = ids.sort(dim=1).values
        if first.sum() != (ordered[:, 1:] != ordered[:, :-1]).sum() + len(ids):
            raise ValueError("a document's tokens are not next to each other: only a mask can describe them")
        return first


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()
