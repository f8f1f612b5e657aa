"""Weights in 4 bits: NF4, with a scale for each 64 elements (QLoRA: Dettmers et al. 2023, arXiv 2305.14314, part 3).

An element is one of 16 values, quantiles of a normal distribution, times the largest magnitude of its block. Blocks are
64 elements in a row of the whole matrix, as bitsandbytes takes them. With double quantization the scales, less their
mean, are 8-bit numbers themselves, with a scale for each 256 of them.

A packed row holds everything that dequantizing it needs. So FSDP and DTensor cut and gather a packed matrix by rows as
any other weight, without knowing the format. For k blocks, that is 64 k elements:

==================  =========================================  ================================
bytes               with double quantization                   without
==================  =========================================  ================================
32 k                two elements each, the first in the upper half
k, or 4 k           8-bit scales, padded to a multiple of 4    fp32 scales
4                   fp32 mean of the scales                    -
4                   int32: how many of the first nested        -
                    scale's 256 are in earlier blocks
4 (k / 256 + 2)     fp32 nested scales                         -
==================  =========================================  ================================

The bytes are stored as bf16 numbers, which FSDP gathers without a cast. An element takes about 4.2 or 4.5 bits.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import unset_fake_temporarily

from smp.config.rules.qlora import BLOCK, NESTED, nested_of_row, packed_row_bytes
from smp.kernels.matmul import linear

_CHUNK = 1 << 22
"""Elements that are widened at once."""
# Dettmers et al. 2023, appendix E: the code book that bitsandbytes has.
_CODES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_SMALLEST = 1e-38


@cache
def _dynamic_codes() -> tuple[float, ...]:
    """The 256 values of an 8-bit number with a growing exponent (Dettmers 2016, arXiv 1511.04561): 2^i means of equal
    steps between 0.1 and 1 at each power of ten, of both signs, and 0 and 1."""
    values = [0.0, 1.0]
    with unset_fake_temporarily():  # a dry run's tensors have no numbers
        for exponent in range(7):
            bounds = torch.linspace(0.1, 1, 2**exponent + 1)
            means = (10 ** (exponent - 6)) * (bounds[:-1] + bounds[1:]) / 2
            values += [*means.tolist(), *(-means).tolist()]
    return tuple(sorted(values))


@cache
def _table(codes: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """The codes on the device, copied once: for a copy in each step the host would wait."""
    with unset_fake_temporarily():  # what is kept outlives a dry run
        return torch.tensor(codes, device=device)


def _scaled(blocks: torch.Tensor, codes: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(index of the nearest code of each element, largest magnitude of each block); blocks are the last dimension."""
    largest = blocks.abs().amax(-1)
    # A block of zeros: its elements are 0 under any scale.
    scaled = (blocks * (1 / largest.clamp(min=_SMALLEST)).unsqueeze(-1)).clamp(-1, 1)
    table = _table(codes, blocks.device)
    # The borders are the middles between neighbouring codes, so this finds the nearest.
    index = torch.bucketize(scaled, (table[:-1] + table[1:]) / 2, out_int32=True)
    return index.to(torch.uint8), largest


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, 64 k) -> (uint8 (rows, 32 k), two elements each; fp32 scales (rows, k))."""
    # (rows, k, 64)
    index, scales = _scaled(weight.float().unflatten(1, (-1, BLOCK)), _CODES)
    index = index.flatten(1)
    # The first of a pair is in the upper half, as bitsandbytes has it.
    return (index[:, ::2] << 4) | index[:, 1::2], scales


def pack(
    halves: torch.Tensor, scales: torch.Tensor, whole: torch.Tensor | None, first: tuple[int, int]
) -> torch.Tensor:
    """Rows of a packed matrix, bf16 (rows, :func:`width`).

    Args:
        halves, scales: of :func:`quantize`.
        whole: the scales of the whole matrix, for double quantization; None: there is none.
        first: row of ``whole`` and block in it where ``scales`` begins.
    """
    rows, k = scales.shape
    if whole is None:
        return torch.cat([halves, scales.view(torch.uint8)], 1).view(torch.bfloat16)
    offset = whole.mean(dtype=torch.float64).float()  # in fp32 it would depend on the number of threads
    # Less their mean: the codes are symmetric around 0, and scales are positive.
    flat = F.pad((whole - offset).reshape(-1), (0, -whole.numel() % NESTED)).view(-1, NESTED)
    index, nested = _scaled(flat, _dynamic_codes())
    index = index.view(-1)[: whole.numel()].view(whole.shape)
    # Codes were made of the whole matrix, so that every layout has the same ones; a rank packs its own.
    own = index[first[0] : first[0] + rows, first[1] : first[1] + k]
    # Number of the first block of each row, counted over the whole matrix: nested scales go on across rows.
    begin = torch.arange(first[0], first[0] + rows, device=halves.device) * whole.shape[1] + first[1]
    used = begin[:, None] // NESTED + torch.arange(nested_of_row(k), device=halves.device)  # (rows, nested scales)
    parts = [
        halves,
        F.pad(own, (0, -k % 4)),
        offset.repeat(rows).view(torch.uint8).view(rows, 4),
        (begin % NESTED).int().view(torch.uint8).view(rows, 4),
        # The last row may ask for one more than there is, which it then does not use.
        nested[used.clamp(max=len(nested) - 1)].view(torch.uint8),
    ]
    return torch.cat(parts, 1).view(torch.bfloat16)


def widen(packed: torch.Tensor, dtype: torch.dtype, *, double: bool) -> torch.Tensor:
    """A packed matrix, or some rows of one, in ``dtype``: (rows, :func:`width`) -> (rows, in)."""
    k = blocks_of(packed.shape[1], double=double)
    codes = _table(_CODES, packed.device)
    # One look-up for a byte, not two for its halves.
    pairs = torch.stack([codes.repeat_interleave(16), codes.repeat(16)], 1)  # (256, 2): of a byte its two elements
    # (rows, in), filled some rows at a time: intermediate values are fp32 and would take several times as much.
    out = torch.empty(packed.shape[0], k * BLOCK, dtype=dtype, device=packed.device)
    size = max(1, _CHUNK // (k * BLOCK))
    for start in range(0, packed.shape[0], size):
        # bf16 numbers are bytes here; a view of another width needs rows that lie together.
        rows = packed[start : start + size].contiguous().view(torch.uint8)
        # (rows, k, 64)
        values = F.embedding(rows[:, : k * BLOCK // 2].int(), pairs).view(-1, k, BLOCK)
        scales = _scales(rows, k) if double else rows[:, k * BLOCK // 2 :].contiguous().view(torch.float32)
        out[start : start + size] = (values * scales.unsqueeze(-1)).flatten(1)
    return out


def _scales(rows: torch.Tensor, k: int) -> torch.Tensor:
    """fp32 (rows, k), of rows with double quantization."""
    _, index, _, offset, phase, nested = rows.split([32 * k, k, -k % 4, 4, 4, 4 * nested_of_row(k)], 1)
    block = phase.contiguous().view(torch.int32) + torch.arange(k, device=rows.device)
    # A row's first block may lie in the middle of 256 that share a nested scale: ``phase`` says how far.
    scale = nested.contiguous().view(torch.float32).gather(1, block // NESTED)
    codes = _table(_dynamic_codes(), rows.device)
    return F.embedding(index.int(), codes[:, None]).squeeze(-1) * scale + offset.contiguous().view(torch.float32)


def width(in_features: int, *, double: bool) -> int:
    """Numbers in a row of the packed form of a matrix (out, in); raises as ``packed_row_bytes``."""
    return packed_row_bytes(in_features, double=double) // 2


@cache
def blocks_of(packed_width: int, *, double: bool) -> int:
    """Blocks of a row, from its :func:`width`."""
    # Starts from above: each block takes at least 32 bytes, 16 numbers.
    k = packed_width // 16
    while k and width(k * BLOCK, double=double) > packed_width:
        k -= 1
    assert width(k * BLOCK, double=double) == packed_width, f"no row of NF4 has {packed_width} numbers"
    return k


class Nf4:
    """Products with a frozen matrix that is stored in 4 bits; the backward pass dequantizes it again.

    Args:
        double: its scales are quantized, too.
    """

    differentiable = False

    def __init__(self, *, double: bool) -> None:
        self.double = double

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear(x, widen(weight, x.dtype, double=self.double))

    def input_gradient(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # Widened again and not saved: in bf16 the wide matrix is about four times the packed one.
        return linear(grad, widen(weight, grad.dtype, double=self.double).t())

    def weight_gradient(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("a weight in 4 bits is not trained")

    def in_features(self, weight: torch.Tensor) -> int:
        return BLOCK * blocks_of(weight.shape[1], double=self.double)
