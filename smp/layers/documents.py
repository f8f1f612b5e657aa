"""Sequences that hold several documents: which tokens see which, as a mask or as spans of a variable-length kernel.

A mask has length^2 numbers for every sequence, and kernels that take one visit all of them: FlashAttention takes none.
Spans say where documents begin in the flattened tokens; FlashAttention's variable-length kernel visits nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from smp.parallel.rng import to_device


def document_mask(documents: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores of sequences that hold several documents: 0 where a token sees another, else -inf.

    Args:
        documents: integers (batch, length); a token sees itself and those before it that have its number.
        window: it sees itself and the window - 1 tokens before it; None: all before it.
        dtype: of the activations.

    Returns:
        (batch, 1, length, length), rows see columns.
    """
    before = distances(documents.shape[1], documents.device)
    seen = before >= 0
    if window is not None:
        seen = seen & (before < window)
    seen = seen & (documents[:, :, None] == documents[:, None, :])
    mask = torch.zeros(seen.shape, dtype=dtype, device=documents.device)
    return mask.masked_fill_(~seen, -torch.inf)[:, None]


def distances(length: int, device: torch.device, last: int | None = None) -> torch.Tensor:
    """(length, length): how far column is before row; of the ``last`` rows only."""
    place = torch.arange(length, device=device)
    return place[length - (last or length) :, None] - place[None, :]


@dataclass(frozen=True)
class Spans:
    """Where documents lie in the flattened tokens of a micro-batch.

    Attributes:
        starts: int32 (n + 1,), where each begins, then the number of tokens, as often as makes n a power of two: a
            program is then compiled for few sizes.
        longest: at least the tokens of the longest.
        window: how many tokens before and after it a token sees; -1 before it: all.
    """

    starts: torch.Tensor
    longest: int
    window: tuple[int, int]

    @staticmethod
    def of(documents: torch.Tensor, window: int | None, device: torch.device) -> Spans:
        """Spans of the numbers that :func:`document_mask` takes, on ``device``.

        Args:
            documents: integers (batch, length), on the CPU, so that the host waits for no device to count them.
            window: as there.

        Raises:
            ValueError: ``documents`` are on another device, or a number comes back after another one in its sequence.
        """
        if documents.device.type != "cpu":
            raise ValueError(f"documents are on {documents.device}: the host counts them, they must be on the CPU")
        first = torch.ones(documents.shape, dtype=torch.bool)
        first[:, 1:] = documents[:, 1:] != documents[:, :-1]
        ordered = documents.sort(dim=1).values
        if first.sum() != (ordered[:, 1:] != ordered[:, :-1]).sum() + len(documents):
            raise ValueError("a document's tokens are not next to each other: only a mask can say who sees whom")
        starts = first.flatten().nonzero().flatten().int()
        end = torch.full((_power_of_two(len(starts)) + 1,), documents.numel(), dtype=torch.int32)
        end[: len(starts)] = starts
        longest = min(_power_of_two(int(end.diff().max())), documents.shape[1])
        return Spans(to_device(end, device), longest, (-1 if window is None else window - 1, 0))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of each document by itself, (tokens, heads, head_dim) -> the same."""
        from torch.nn.attention.varlen import varlen_attn  # which imports triton, and most runs do without both

        starts, longest = self.starts, self.longest
        out = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=self.window)
        assert isinstance(out, torch.Tensor), "no other results were asked for"
        return out


def _power_of_two(number: int) -> int:
    """The least that is not below ``number``."""
    return 1 << (number - 1).bit_length()
