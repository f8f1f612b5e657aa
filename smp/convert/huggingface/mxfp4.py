"""Experts' weights in MXFP4 (OCP Microscaling Formats 1.0), as GPT-OSS's files have them, read as bf16.

The matrices (out, in) of a layer's experts are two tensors: ``..._blocks``, uint8 (experts, out, in / 32, 16), two
numbers of 4 bits in a byte, the first in its low half; and ``..._scales``, uint8 (experts, out, in / 32), each of 32
numbers along ``in``. A number is one of 16 values times 2^(scale - 127): exact in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smp.checkpoint import CheckpointError
from smp.convert.store import PieceStore, Stored

BLOCKS, SCALES = "_blocks", "_scales"
# E2M1: sign, two bits of exponent, one of mantissa.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])  # sign, two bits of exponent, one of mantissa


class Mxfp4Store(PieceStore):
    """``store`` with each pair of tensors (blocks, scales) as one bf16 tensor (experts, out, in) under the name of the
    blocks.

    Raises:
        CheckpointError: a tensor of a pair is missing or of another shape.
    """

    def __init__(self, store: PieceStore) -> None:
        self.files, self.pieces, self.notes = store.files, store.pieces, list(store.notes)
        self.tensors = dict(store.tensors)
        for name in [name for name in store.tensors if name.endswith(BLOCKS)]:
            blocks, scales = self.tensors[name], self.tensors.pop(_scales_of(name), None)
            # Scales have the shape of blocks without the last dimension, 16 bytes.
            wanted = Stored(blocks.shape[:-1], torch.uint8)
            if scales != wanted or len(blocks.shape) != 4 or blocks.shape[-1] != 16 or blocks.dtype != torch.uint8:
                raise CheckpointError(f"{self.where(name)}: tensor {name} and its scales are no matrices in MXFP4")
            experts, rows, groups, _ = blocks.shape
            # 16 bytes hold 32 numbers.
            self.tensors[name] = Stored((experts, rows, 32 * groups), torch.bfloat16)

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        if not name.endswith(BLOCKS):
            super().read_into(name, offsets, out)
            return
        *front, column = offsets
        # Whole groups of 32 columns, which share a scale.
        first, end = column // 32, -(-(column + out.shape[-1]) // 32)
        blocks = torch.empty(*out.shape[:-1], end - first, 16, dtype=torch.uint8)
        scales = torch.empty(*out.shape[:-1], end - first, dtype=torch.uint8)
        super().read_into(name, (*front, first, 0), blocks)
        super().read_into(_scales_of(name), (*front, first), scales)
        start = column - 32 * first
        out.copy_(dequantized(blocks, scales)[..., start : start + out.shape[-1]])


def _scales_of(name: str) -> str:
    return name.removesuffix(BLOCKS) + SCALES


def dequantized(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 (..., groups, 16) and (..., groups) -> bf16 (..., 32 groups)."""
    # The low half of a byte is the first number.
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # (..., groups, 32)
    values = _VALUES.index_select(0, codes.flatten().int()).view(codes.shape)
    # Exact: a power of two changes the exponent only.
    return torch.ldexp(values, scales.int()[..., None] - 127).to(torch.bfloat16).flatten(-2)
