"""Errors of all Triton kernels in Triton's interpreter, as JSON: ``python -m tests.kernels.interpreted``."""

from __future__ import annotations

import json

import torch

from smp.kernels.experts import grouped, permute
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


def check_rows_that_are_loaded_ahead() -> None:
    """Of a norm's backward pass: the same bits."""
    x, dy, w, rows = torch.randn(40, 2100), torch.randn(40, 2100), torch.randn(2100), torch.rand(40)
    for mean, has_bias in ((rows, True), (torch.empty(0), False)):
        one, two = (norm.backward(dy, x, x, w, mean, rows, has_bias, stages) for stages in (1, 2))
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def check_products_of_experts() -> None:
    """What others got wrong: memory of a weight's gradient that an expert without rows leaves as it was, gradients that
    are not contiguous, weights that lie transposed, no rows at all."""
    counts = torch.tensor([0, 5, 0, 9])
    x, weight = torch.randn(14, 24), torch.randn(4, 24, 40).transpose(1, 2)  # (experts, 40, 24)
    grad = torch.randn(40, 14).t()
    results = []
    for backend in ("triton", "torch"):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        shift = torch.zeros(4, 40, requires_grad=True)
        y = grouped.add_rows_of_groups(grouped.grouped_product(*leaves, counts, backend), shift, counts, backend)
        results.append((y, *torch.autograd.grad(y, (*leaves, shift), grad)))
    for mine, wanted in zip(*results, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)
    poison = [torch.full((4, 40, 24), torch.nan) for _ in range(4)]
    del poison
    dw = grouped._weight_gradient_op(grad, x, counts, "triton")
    assert not dw[[0, 2]].any() and dw.isfinite().all()
    nothing = grouped._weight_gradient_op(grad[:0], x[:0], 0 * counts, "triton")
    assert nothing.shape == (4, 40, 24) and not nothing.any()
    assert grouped._forward_op(x[:0], weight, 0 * counts, "triton").shape == (0, 40)
    for dtype, gradients, message in ((torch.float64, 1, "bf16 and fp32"), (torch.float32, 3, "two products")):
        try:
            grouped._input_gradient_op([grad.to(dtype)] * gradients, [weight] * gradients, counts, "triton")
        except ValueError as error:
            assert message in str(error)
        else:
            raise AssertionError("is not refused")


def main() -> None:
    check_outputs()
    check_rows_that_are_loaded_ahead()
    check_products_of_experts()
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
