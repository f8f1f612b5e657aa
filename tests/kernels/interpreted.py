"""Errors of all Triton kernels in Triton's interpreter, as JSON: ``python -m tests.kernels.interpreted``."""

from __future__ import annotations

import json

import torch

from smp.kernels.experts import permute
from smp.kernels.triton import norm
from tests.kernels.cases import OPERATIONS, error, sorted_choices


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


def check_order_of_sums() -> None:
    """A token's rows are added in the order of its choices, and how many tokens there are beside it does not show."""
    order, inverse = sorted_choices(40, 3, "drawn")
    rows, weights, dy = torch.randn(120, 1030), torch.rand(40, 3), torch.randn(40, 1030)
    (drows, dweights), y = (
        permute._combine_backward_op(dy, rows, weights, order, inverse, "triton"),
        permute._combine_op(rows, weights, inverse.view(40, 3), "triton"),
    )
    wanted = torch.zeros_like(y)
    for i in range(3):
        wanted += weights[:, i, None] * rows[inverse.view(40, 3)[:, i]]
    assert torch.equal(y, wanted)
    few, own = inverse.view(40, 3)[:2], inverse[:6].sort().values  # rows of the first two tokens
    assert torch.equal(permute._combine_op(rows, weights[:2], few, "triton"), y[:2])
    less = torch.searchsorted(own, inverse[:6]), order[own]
    alone = permute._combine_backward_op(dy[:2], rows[own], weights[:2], less[1], less[0], "triton")
    assert torch.equal(alone[0], drows[own]) and torch.equal(alone[1], dweights[:2])


def main() -> None:
    check_outputs()
    check_order_of_sums()
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
