"""Continuous batching: which texts are in the cache, and whether prompts or one token of every text come next.

Finished texts leave at once, and the last text moves into their slot, so that texts are always in the first slots and
rows of a batch are views of the cache. Waiting prompts come in when an eighth of the slots is free. Texts that begin
alike, the samples of a prompt, are computed once and copied.

Every rank that has a part of these texts runs the same scheduler on the same tokens, so none has to tell another.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import torch

from smp.generation.texts import Stops, Text, take
from smp.kernels.sequence_cut import cut_sequences
from smp.layers.kv_cache import NOWHERE, CacheView, KVCache
from smp.models.micro_batch import MicroBatch
from smp.parallel.collectives import Group

PROMPT_TOKENS = 4096
"""Tokens of prompts that go through the model at once. A longer one goes in pieces, but under context parallelism."""


@dataclass(frozen=True)
class Forward:
    """One forward pass.

    Attributes:
        micro_batch: its input.
        texts: whose next tokens come from it; none of a piece of a prompt before its last.
        rows: of each, the row of the logits.
    """

    micro_batch: MicroBatch
    texts: tuple[Text, ...] = ()
    rows: tuple[int, ...] = ()


class Slots:
    """Texts that are written together.

    Args:
        count: number of slots.
        waiting: texts that wait for one; others may take from it too.
        device: of the model.
        longest: tokens of the longest sequence of the model.
        new_rope_at: lengths at which a text gets other frequencies of RoPE; it is computed anew then.
        cp: the ranks that share the tokens of each text.
    """

    def __init__(
        self,
        count: int,
        waiting: deque[Text],
        device: torch.device,
        longest: int,
        new_rope_at: range = range(0),
        cp: Group | None = None,
    ) -> None:
        self.cache, self.waiting, self.device, self.longest = KVCache(count, device, cp), waiting, device, longest
        self.cp, self.new_rope_at = cp, new_rope_at
        self.texts: list[Text] = []  # text i is in slot i
        self.columns: list[int] = []  # that each has filled on this rank
        self._coming: tuple[list[list[int]], list[Text], list[int]] | None = None  # a prompt in pieces
        self._done = 0  # tokens of it

    def next(self) -> Forward | None:
        """The next forward pass; None: all texts are finished."""
        free = self.cache.slots - len(self.texts)
        if self._coming is not None:
            return self._piece(*self._coming)
        # Prompts come in several at a time: a pass over the prompt of each text that ends would
        # stop all other texts for one prompt.
        if self.waiting and (not self.texts or free >= max(1, self.cache.slots // 8)):
            return self._prompts(*self._taken(free))
        return self._tokens() if self.texts else None

    def finish(self, forward: Forward, ids: list[int], log_probs: list[float], stops: Stops) -> list[Text]:
        """Append the tokens that a pass gave; returns the texts that ended.

        Raises:
            ValueError: the logits were not finite.
        """
        take(forward.texts, ids, log_probs, stops)
        # From the last slot on: the text that moves into a free one stays.
        for slot in reversed(range(len(self.texts))):
            text = self.texts[slot]
            if text.finish is None and len(text.ids) in self.new_rope_at:
                # Its cached keys are rotated by frequencies that no longer hold: it comes in again
                # as a prompt.
                self.waiting.appendleft(text)
            elif text.finish is None:
                continue
            self._leave(slot)
        return [text for text in forward.texts if text.finish is not None]

    def _leave(self, slot: int) -> None:
        """Free a slot; the last text moves into it."""
        last = len(self.texts) - 1
        if slot < last:
            self.cache.copy(last, slot, self.columns[last])
            self.texts[slot], self.columns[slot] = self.texts[last], self.columns[last]
        del self.texts[last], self.columns[last]

    def _taken(self, free: int) -> tuple[list[list[int]], list[Text], list[int]]:
        """Takes waiting texts for ``free`` slots: (sequences to compute, the texts, index of each text's sequence)."""
        sequences: dict[tuple[int, ...], int] = {}
        texts: list[Text] = []
        longest = 0
        while self.waiting and len(texts) < free:
            ids = tuple(self.waiting[0].ids)
            longest = max(longest, len(ids))
            # Padded to the longest: so many tokens would go through the model. A copy adds none.
            if texts and ids not in sequences and longest * (len(sequences) + 1) > PROMPT_TOKENS:
                break
            sequences.setdefault(ids, len(sequences))
            texts.append(self.waiting.popleft())
        rows = [sequences[tuple(text.ids)] for text in texts]
        # The first of each sequence has the slot in which it is computed, the copies come after.
        first = [rows.index(row) for row in range(len(sequences))]
        order = [*first, *(i for i in range(len(texts)) if i not in set(first))]
        return [list(ids) for ids in sequences], [texts[i] for i in order], [rows[i] for i in order]

    def _prompts(self, sequences: list[list[int]], texts: list[Text], rows: list[int]) -> Forward:
        """A forward pass over prompts, or over the first piece of a long one."""
        if self.cp is not None:
            return self._cut_prompts(sequences, texts, rows)
        if len(sequences[0]) > PROMPT_TOKENS:
            self._coming, self._done = (sequences, texts, rows), 0
            return self._piece(sequences, texts, rows)
        length = max(map(len, sequences))
        positions = torch.arange(length, device=self.device).expand(len(sequences), length)
        # Index of each prompt's last token among batch x length: its logits give the first new
        # token.
        last = [row * length + len(ids) - 1 for row, ids in enumerate(sequences)]
        ids = _padded(sequences, length)
        return self._enter(ids, positions, positions, last, 0, sequences, texts, rows)

    def _piece(self, sequences: list[list[int]], texts: list[Text], rows: list[int]) -> Forward:
        """A forward pass over the next piece of a long prompt, which is computed alone (and copied for its samples)."""
        (ids,), start = sequences, self._done
        self._done = end = min(start + PROMPT_TOKENS, len(ids))
        positions = torch.arange(start, end, device=self.device)[None]
        # The first piece sees itself alone (keys 0, the training kernels); later ones see the cache
        # up to their own end.
        new, keys = torch.tensor([ids[start:end]]), end if start else 0
        if end < len(ids):
            return Forward(self._micro_batch(new, positions, positions, None, keys, [len(ids)], len(self.texts)))
        self._coming = None
        return self._enter(new, positions, positions, [end - start - 1], keys, sequences, texts, rows)

    def _cut_prompts(self, sequences: list[list[int]], texts: list[Text], rows: list[int]) -> Forward:
        """A forward pass over prompts under context parallelism: this rank computes its part of each."""
        assert self.cp is not None
        length = max(map(len, sequences))
        # Zig-zag chunks, two for each rank, see smp.kernels.sequence_cut.
        length += -length % (2 * self.cp.size)
        cut = cut_sequences(len(sequences), length, self.cp.size)
        index = cut.index(self.cp.rank)  # (batch, length / cp): positions of this rank's tokens
        last_columns = [(index[row] == len(ids) - 1).nonzero().flatten().tolist() for row, ids in enumerate(sequences)]
        last = [row * index.shape[1] + found[0] if found else -1 for row, found in enumerate(last_columns)]
        columns = torch.arange(index.shape[1], device=self.device).expand_as(index)
        ids, start = _padded(sequences, length).gather(1, index), len(self.texts)
        # Before ``positions`` is written: growing the cache makes a new tensor of it.
        self.cache.reserve(index.shape[1])
        # What a former text of the slot left must not be seen.
        self.cache.positions[start : start + len(sequences)] = NOWHERE
        lengths = torch.tensor([[len(ids)] for ids in sequences])
        # Padding stands nowhere, or written tokens would see it instead of their own.
        known = index.masked_fill(index >= lengths, NOWHERE).to(self.device)
        self.cache.positions[start : start + len(sequences), : index.shape[1]] = known
        # Padding may reach past the model's longest sequence, where there is no rotary table or
        # embedding.
        positions = index.clamp(max=self.longest - 1).to(self.device)
        forward = self._enter(ids, positions, columns, last, 0, sequences, texts, rows)
        return replace(forward, micro_batch=replace(forward.micro_batch, cut=cut))

    def _enter(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        columns: torch.Tensor,
        last: list[int],
        keys: int,
        sequences: list[list[int]],
        texts: list[Text],
        rows: list[int],
    ) -> Forward:
        """The pass that ends prompts, whose texts have slots from here on."""
        start, lengths = len(self.texts), [len(ids) for ids in sequences]
        micro_batch = self._micro_batch(ids, positions, columns, last, keys, lengths, start)
        self.texts += texts
        # Under context parallelism a slot is filled to the padded length of the batch. Its padding
        # has position NOWHERE and is not seen. Otherwise tokens overwrite the padding.
        filled = columns.shape[1] if self.cp is not None else 0
        self.columns += [filled or lengths[row] for row in rows]
        return Forward(micro_batch, tuple(texts), tuple(rows))

    def copied(self, forward: Forward) -> None:
        """After a pass: let the other samples of its prompts begin as the one that was computed."""
        view = forward.micro_batch.cache
        assert view is not None
        # ``_taken`` put the computed texts first and their copies after them.
        for slot, row in enumerate(forward.rows[len(view.columns) :], view.start + len(view.columns)):
            self.cache.copy(view.start + row, slot, self.columns[slot])

    def _tokens(self) -> Forward:
        """A forward pass over the last token of every text."""
        positions = [len(text.ids) - 1 for text in self.texts]
        ids = torch.tensor([[text.ids[-1]] for text in self.texts])
        # From the host in one piece.
        position_ids, columns = torch.tensor([positions, self.columns]).to(self.device)[..., None]
        keys, lengths = max(self.columns) + 1, [len(text.ids) for text in self.texts]
        micro_batch = self._micro_batch(ids, position_ids, columns, list(range(len(ids))), keys, lengths, 0)
        if self.cp is None:
            self.columns = [column + 1 for column in self.columns]
        else:
            # A written token n of a text is kept by rank n mod cp. The layers of every rank write its key to
            # the next free column; on the ranks that do not keep it the column is marked as
            # NOWHERE.
            own = [position % self.cp.size == self.cp.rank for position in positions]
            known = position_ids[:, 0].masked_fill(torch.tensor(own).logical_not().to(self.device), NOWHERE)
            self.cache.positions[torch.arange(len(own), device=self.device), columns[:, 0]] = known
            # Another rank's token is written over by the next.
            self.columns = [column + mine for column, mine in zip(self.columns, own, strict=True)]
        return Forward(micro_batch, tuple(self.texts), tuple(range(len(ids))))

    def _micro_batch(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        columns: torch.Tensor,
        last: list[int] | None,
        keys: int,
        lengths: list[int],
        start: int,
    ) -> MicroBatch:
        self.cache.reserve(max(keys, columns.shape[1]))
        wanted = None if last is None else torch.tensor(last, device=self.device)
        whole = torch.tensor(lengths, device=self.device)[:, None].expand(ids.shape)
        view = CacheView(self.cache, start, columns, keys, wanted)
        return MicroBatch(ids.to(self.device), position_ids=positions, sequence_lengths=whole, cache=view)


def idle(device: torch.device) -> Forward:
    """A forward pass of a rank without texts, which takes part in the collectives of other ranks' experts."""
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    cache = KVCache(1, device)
    cache.reserve(1)
    view = CacheView(cache, 0, zero, 0, zero[0])
    return Forward(MicroBatch(zero, position_ids=zero, sequence_lengths=zero + 1, cache=view))


def _padded(sequences: list[list[int]], length: int) -> torch.Tensor:
    """int64 (sequences, length), padded with zeros at the end, which the causal mask hides from all other tokens."""
    return torch.tensor([ids + [0] * (length - len(ids)) for ids in sequences])
