"""Weights in FP8 with a scale for each block, as DeepSeek-V3's and R1's files have them, read as bf16.

A matrix W (rows, columns) is two tensors: ``NAME``, E4M3 of the same shape, and ``NAME_scale_inv``, fp32, one number
for each block of, in DeepSeek's files, 128 x 128; the last of a row or column may be cut. W is their product, in fp32,
rounded to bf16 (fp8_cast_bf16.py of DeepSeek's repository).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smp.checkpoint import CheckpointError
from smp.convert.store import PieceStore, Stored

SCALES = "_scale_inv"


class Fp8BlockStore(PieceStore):
    """``store`` with each pair of tensors (weight, scales) as one bf16 tensor under the weight's name.

    Args:
        store: what lies in the files.
        block: rows and columns that share a scale.

    Raises:
        CheckpointError: a tensor of a pair is missing or of another shape or dtype.
    """

    def __init__(self, store: PieceStore, block: tuple[int, int]) -> None:
        self.files, self.pieces, self.notes = store.files, store.pieces, list(store.notes)
        self.tensors, self.block = dict(store.tensors), block
        self._in_fp8 = {name for name, stored in store.tensors.items() if stored.dtype == torch.float8_e4m3fn}
        # From both sides: a scale without a matrix is as wrong as a matrix without scales.
        scaled = {name.removesuffix(SCALES) for name in store.tensors if name.endswith(SCALES)}
        for name in sorted(self._in_fp8 | scaled):
            shape = store.tensors[name].shape if name in self._in_fp8 else ()
            # Rounded up: the last block of a row or column may be cut off.
            blocks = tuple(-(-n // size) for n, size in zip(shape, block, strict=False))
            if len(shape) != 2 or self.tensors.pop(name + SCALES, None) != Stored(blocks, torch.float32):
                raise CheckpointError(f"{self.where(name)}: tensor {name} and its scales are no matrix in FP8")
            self.tensors[name] = Stored(shape, torch.bfloat16)

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        if name not in self._in_fp8:
            super().read_into(name, offsets, out)
            return
        numbers = torch.empty(out.shape, dtype=torch.float8_e4m3fn)
        super().read_into(name, offsets, numbers)
        # The blocks that the region meets, whole ones at its edges too.
        first = [start // size for start, size in zip(offsets, self.block, strict=True)]
        # Rounded up: also the block in which the region ends.
        ends = [-(-(start + n) // size) for start, n, size in zip(offsets, out.shape, self.block, strict=True)]
        scales = torch.empty([end - start for start, end in zip(first, ends, strict=True)])
        super().read_into(name + SCALES, first, scales)
        for dim, (start, size) in enumerate(zip(offsets, self.block, strict=True)):
            # A scale for each row, then for each column: what a block shares is repeated over it.
            # (rows or columns of the region,) -> index of the block's scale
            block_of_each = torch.arange(start, start + out.shape[dim]) // size - first[dim]
            scales = scales.index_select(dim, block_of_each)
        out.copy_(numbers.float() * scales)
