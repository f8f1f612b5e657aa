"""A short causal convolution of each channel followed by SiLU, the first step of linear recurrences.

    y_t = SiLU(sum over j < K of w_(K-1-j) x_(t-j) [+ bias])

where x_(t-j) counts only if it is of the same document. The backward pass computes the sum again from x, the weights
and the bias, so no activation besides x is kept. Bytes per element in fp32: forward 4 (K + 1), backward 4 (3 K + 3),
fewer where a cache holds neighbouring tokens; sums are in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from smp.kernels.registry import accumulation_dtype, define, first_derivative_only


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    before: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal convolution and SiLU, (rows, length, channels) -> the same shape.

    Args:
        x: tokens of each row, one after the other.
        weight: (channels, K).
        before: (rows, K - 1, channels), the tokens before the first; None: zeros.
        positions: int64 (rows, length), number of earlier tokens of the same document; None: ``before`` and the row are
            one document.
        bias: (channels,); None: there is none.
    """
    rows, _, channels = x.shape
    if before is None:
        before = x.new_zeros(rows, weight.shape[1] - 1, channels)
    # (rows, K - 1 + length, channels)
    return _Conv.apply(torch.cat((before, x), 1), weight, bias, positions)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, positions: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias, positions)
        return _forward_op(x, weight, bias, positions)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None]:
        x, weight, bias, positions = ctx.saved_tensors
        dx, dweight, dbias = _backward_op(dy, x, weight, bias, positions)
        return dx, dweight, None if bias is None else dbias, None


def _taps(size: int, positions: torch.Tensor | None) -> list[tuple[int, torch.Tensor | None]]:
    """The column of the weight for each number of tokens back, and where a token sees one so far back, (rows, length,
    1); None: everywhere."""
    # A token j back is of the same document where at least j of its tokens are before this one.
    return [(size - 1 - j, None if positions is None or j == 0 else (positions >= j)[..., None]) for j in range(size)]


def _sum(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, positions: torch.Tensor | None
) -> torch.Tensor:
    """The convolution before SiLU, (rows, length, channels), of x (rows, K - 1 + length, channels), in fp32 at
    least."""
    length, wide = x.shape[1] - weight.shape[1] + 1, accumulation_dtype(x.dtype)
    x, weight = x.to(wide), weight.to(wide)
    # (channels,) or 0-dim: the first addcmul broadcasts it.
    out = torch.zeros((), dtype=wide, device=x.device) if bias is None else bias.to(wide)
    for column, seen in _taps(weight.shape[1], positions):
        shifted = x[:, column : column + length]
        shifted = _masked(shifted, seen)
        # K fused multiply-adds and no ``conv1d``, which knows no borders of documents.
        out = torch.addcmul(out, shifted, weight[:, column])
    return out


def _masked(x: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    """Zeros where a token is of another document."""
    # Not a product: another document's inf would be NaN here.
    return x if seen is None else x.where(seen, x.new_zeros(()))


def _blocks(x: torch.Tensor, length: int) -> list[tuple[int, int]]:
    """(start, end) of the ranges of tokens that are computed at a time, on a CPU short enough for its cache."""
    step = _IN_CACHE if x.device.type == "cpu" else max(length, 1)
    return [(start, min(start + step, length)) for start in range(0, length, step)]


_IN_CACHE = 64
"""Tokens of a block on a CPU: with thousands of channels they fit in its cache."""


def _part(x: torch.Tensor | None, start: int, end: int) -> torch.Tensor | None:
    return None if x is None else x[:, start:end]


def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, positions: torch.Tensor | None
) -> torch.Tensor:
    history = weight.shape[1] - 1
    out = x.new_empty((x.shape[0], x.shape[1] - history, x.shape[2]))
    for start, end in _blocks(x, out.shape[1]):
        out[:, start:end] = F.silu(_sum(x[:, start : end + history], weight, bias, _part(positions, start, end)))
    return out


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, of the weight and of a bias, which is empty without one."""
    wide, history = accumulation_dtype(x.dtype), weight.shape[1] - 1
    dx, dweight = torch.zeros_like(x, dtype=wide), torch.zeros_like(weight, dtype=wide)
    dbias = torch.zeros(0 if bias is None else len(bias), dtype=wide, device=x.device)
    for start, end in _blocks(x, dy.shape[1]):
        # The sum is made again, block by block: only x is saved.
        part, block_positions = x[:, start : end + history].to(wide), _part(positions, start, end)
        summed = _sum(part, weight, bias, block_positions)
        share = summed.sigmoid()
        # The derivative of SiLU: s (1 + x (1 - s)).
        dsum = dy[:, start:end].to(wide) * share * (1 + summed * (1 - share))
        if bias is not None:
            dbias += dsum.sum((0, 1))
        for column, seen in _taps(weight.shape[1], block_positions):
            d = _masked(dsum, seen)
            # Columns of x begin with the history, so a tap is a shift by its column.
            dx[:, start + column : end + column].addcmul_(d, weight[:, column].to(wide))
            dweight[:, column] += (d * part[:, column : column + end - start]).sum((0, 1))
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)


_forward_op = define(
    "causal_conv(Tensor x, Tensor weight, Tensor? bias, Tensor? positions) -> Tensor",
    lambda x, weight, bias, positions: x.new_empty((x.shape[0], x.shape[1] - weight.shape[1] + 1, x.shape[2])),
    CompositeExplicitAutograd=_forward,
)
_backward_op = define(
    "causal_conv_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor? positions) "
    "-> (Tensor, Tensor, Tensor)",
    lambda dy, x, weight, bias, positions: (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape),
        weight.new_empty(0 if bias is None else len(bias)),
    ),
    CompositeExplicitAutograd=_backward,
)
