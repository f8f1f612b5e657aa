"""Wrong elements of the FP8 kernels in Triton's interpreter, as JSON: ``python -m tests.kernels.interpreted_fp8``.

Its casts to 8 bits do not round as a GPU's do (``tests/gpu/test_fp8.py`` compares those bit for bit), so numbers here
need no rounding.
"""

from __future__ import annotations

import json

import torch

from smp.kernels.precision.fp8 import E4M3, E5M2, LARGEST, inverse_scale, largest, quantise
from smp.kernels.triton import fp8


def main() -> None:
    wrong = {}
    generator = torch.Generator().manual_seed(0)
    for rows, width in ((5, 300), (3, 2050), (130, 17), (1, 16), (16, 1)):
        exponents = torch.randint(-3, 4, (rows, width), generator=generator)
        signs = torch.randint(0, 2, (rows, width), generator=generator) * 2 - 1
        for dtype in (torch.float32, torch.bfloat16):
            whole = torch.zeros(rows, width + 8, dtype=dtype)
            x = whole[:, :width].copy_(signs * torch.exp2(exponents.float()))
            y = x.clone(memory_format=torch.contiguous_format)
            wrong[f"{rows} x {width}, {dtype}, largest"] = int(fp8.largest(y) != largest(y))
            y.view(-1)[-1] = torch.nan
            wrong[f"{rows} x {width}, {dtype}, not a number"] = int(not fp8.largest(y).isnan())
            for number in (E4M3, E5M2):
                for dim in (None, 0, 1):
                    inverse = inverse_scale(largest(x, dim), number)
                    data = quantise(x, inverse, number).data
                    got = fp8.quantise(x, inverse.contiguous(), number, LARGEST[number])
                    wrong[f"{rows} x {width}, {dtype}, {number}, by {dim}"] = different(got, data)
            for padded in (rows, rows + 16 - rows % 16):
                turned = fp8.transpose(data, padded)
                wrong[f"{rows} x {width}, {dtype}, transposed to {padded}"] = different(
                    turned[:, :rows], data.t()
                ) + int(turned[:, rows:].view(torch.uint8).count_nonzero())
    print(json.dumps(wrong))


def different(a: torch.Tensor, b: torch.Tensor) -> int:
    assert a.shape == b.shape and a.dtype == b.dtype
    return int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum())


if __name__ == "__main__":
    main()
