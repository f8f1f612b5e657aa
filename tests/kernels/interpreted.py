"""Errors of all Triton kernels in Triton's interpreter, as JSON: ``python -m tests.kernels.interpreted``."""

from __future__ import annotations

import json

import torch

from smp.kernels.triton import norm
from tests.kernels.cases import OPERATIONS, error


def many_partial_sums() -> dict[str, float]:
    """Of a norm's backward pass, which here has few: more than a program takes at once."""
    partial = torch.randn(2, norm.SUM_PARTS + 44, 70)
    sums = torch.full((70,), torch.nan), torch.full((70,), torch.nan)
    norm.sum_partials(partial, *sums)
    return {
        f"norm, float32, many parts: {i}": error(got, want)
        for i, (got, want) in enumerate(zip(sums, partial.sum(1), strict=True))
    }


def check_outputs() -> None:
    """Outputs of an operator share no memory, which its schema says, and compilers rely on."""
    x, w, rows = torch.randn(6, 8), torch.randn(8), torch.rand(6)
    for mean, has_bias in ((rows, True), (torch.empty(0), False)):
        torch.library.opcheck(torch.ops.smp.norm_backward.default, (x, None, x, w, mean, rows, has_bias, "triton"))


def main() -> None:
    check_outputs()
    errors = {
        f"{operation}, {str(dtype).removeprefix('torch.')}, {case}: {name}": error(got, want)
        for operation, cases in OPERATIONS.items()
        for dtype in (torch.float32, torch.bfloat16)
        for case, both in cases(dtype, "triton")
        for name, (got, want) in both.items()
    }
    errors |= many_partial_sums()
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
