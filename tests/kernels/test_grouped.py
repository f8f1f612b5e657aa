"""Where the products of experts are one kernel, and what a run says of it. (Their results: ``tests/layers/moe``.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from smp.kernels import matmul
from smp.kernels.experts.grouped import (
    describe_products,
    grouped_input_gradient,
    grouped_product,
    grouped_products,
    grouped_weight_gradient,
    has_kernel,
)

GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "dtype", "widths", "taken"),
    [
        ((9, 0), torch.bfloat16, (64, 48), True),
        ((10, 0), torch.bfloat16, (64, 48), True),
        ((8, 0), torch.bfloat16, (64, 48), False),
        ((12, 0), torch.bfloat16, (64, 48), False),
        ((9, 0), torch.float32, (64, 48), False),
        ((9, 0), torch.bfloat16, (64, 12), False),
    ],
)
def test_where_the_host_waits_the_run_says_so(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    widths: tuple[int, int],
    taken: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_kernel(GPU, dtype, widths, 8) == taken
    assert not has_kernel(GPU, dtype, widths, 1024), "torch raises an error for so many"
    (line,) = describe_products(GPU, dtype, widths, 8)
    assert ("the host waits" in line) != taken
    assert describe_products(torch.device("cpu"), dtype, widths, 8) == []


COUNTS = [[3, 0, 33, 64, 100], [70, 1, 2, 0, 137], [0, 31, 0, 0, 0], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("onednn", [False, True])
def test_products_of_any_numbers_of_rows_are_those_of_each_expert(
    counts: list[int], onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "SLOW_MKL", onednn and torch.backends.mkldnn.is_available())
    monkeypatch.setattr(matmul, "COPIES_PAY", True)
    monkeypatch.setattr(matmul, "SMALLEST", 1)
    compare(counts, torch.float32, rtol=1e-5, atol=2e-5)


def test_experts_are_torchs_where_onednn_gains_little(
    seen: set[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their numbers of rows are what they are then."""
    monkeypatch.setattr(matmul, "COPIES_PAY", False)
    multiply([33, 70], 103, torch.float32)
    assert seen == shapes_of({33, 70})


@pytest.mark.parametrize("counts", COUNTS)
def test_products_in_bf16_are_those_of_each_expert(counts: list[int]) -> None:
    compare(counts, torch.bfloat16, rtol=2**-7, atol=0.1)


def compare(counts: list[int], dtype: torch.dtype, *, rtol: float, atol: float) -> None:
    """Results and gradients of two grouped products of the same rows, with those of a product for each expert."""
    torch.manual_seed(0)  # of 300 others one has a sum of two products in bf16 that is as near to 0 as its rounding is
    x = torch.randn(sum(counts), 48, dtype=dtype, requires_grad=True)
    second = torch.randn(5, 48, 40, dtype=dtype).transpose(1, 2).requires_grad_()
    weights = [torch.randn(5, 40, 48, dtype=dtype, requires_grad=True), second]
    outputs = grouped_products(x, weights, torch.tensor(counts))
    grads = [torch.randn_like(y) for y in outputs]
    found = torch.autograd.grad(outputs, [x, *weights], grads)
    wide, *matrices = (each.detach().double().requires_grad_() for each in (x, *weights))
    expected = [
        torch.cat([rows @ own.t() for rows, own in zip(wide.split(counts), matrix, strict=True)]) for matrix in matrices
    ]
    gradients = torch.autograd.grad(expected, [wide, *matrices], [grad.double() for grad in grads])
    for own, reference in zip((*outputs, *found), (*expected, *gradients), strict=True):
        torch.testing.assert_close(own.double(), reference, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_experts_rows_do_not_reach_the_gradients_of_others(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Infinite rows of one expert, and rows behind the last one's that nothing wrote."""
    monkeypatch.setattr(matmul, "SLOW_MKL", torch.backends.mkldnn.is_available())
    monkeypatch.setattr(matmul, "COPIES_PAY", True)
    monkeypatch.setattr(matmul, "SMALLEST", 1)
    grad, x = (torch.randn(240, width, dtype=dtype) for width in (40, 48))
    counts = [33, 70, 67]
    x[33], grad[34], x[170:], grad[170:] = torch.inf, torch.inf, torch.nan, torch.nan
    dw = grouped_weight_gradient(grad, x, torch.tensor(counts))
    assert [bool(each.isfinite().all()) for each in dw] == [True, False, True]
    y = grouped_product(x, torch.randn(3, 40, 48, dtype=dtype), torch.tensor(counts))
    dx = grouped_input_gradient(grad, torch.randn(3, 40, 48, dtype=dtype), torch.tensor(counts))
    for rows, spoilt in ((y, 33), (dx, 34)):
        assert (~rows[:170].isfinite().all(1)).nonzero().flatten().tolist() == [spoilt]
    for expert, (own, other) in enumerate(zip(grad[:170].split(counts), x[:170].split(counts), strict=True)):
        if expert != 1:
            expected = own.double().t() @ other.double()
            tolerances = (1e-5, 2e-5) if dtype == torch.float32 else (2**-7, 0.1)
            torch.testing.assert_close(dw[expert].double(), expected, rtol=tolerances[0], atol=tolerances[1])


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, ...]]:
    """Shapes of the left operands of products, all of which oneDNN makes where it takes the dtype."""
    shapes = set()

    def recorded(multiply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def record(x: torch.Tensor, *others: Any, **settings: Any) -> torch.Tensor:
            shapes.add(tuple(x.shape))
            return multiply(x, *others, **settings)

        return record

    monkeypatch.setattr(matmul, "linear_op", recorded(matmul.linear_op))
    monkeypatch.setattr(torch, "mm", recorded(torch.mm))
    monkeypatch.setattr(torch.nn.functional, "linear", recorded(torch.nn.functional.linear))
    monkeypatch.setattr(matmul, "SLOW_MKL", True)
    monkeypatch.setattr(matmul, "COPIES_PAY", True)
    monkeypatch.setattr(matmul, "SMALLEST", 1)
    return shapes


def multiply(counts: list[int], n: int, dtype: torch.dtype) -> None:
    """Forward and backward, 48 -> 40."""
    x = torch.randn(n, 48, dtype=dtype, requires_grad=True)
    weight = torch.randn(len(counts), 40, 48, dtype=dtype, requires_grad=True)
    (y,) = grouped_products(x, [weight], torch.tensor(counts))
    y.sum().backward()


def shapes_of(numbers: set[int]) -> set[tuple[int, ...]]:
    """Left operands of the three products of so many rows."""
    return {shape for n in numbers for shape in ((n, 48), (n, 40), (40, n))}


needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@needs_onednn
@DTYPES
def test_onednn_gets_few_different_numbers_of_rows(dtype: torch.dtype, seen: set[tuple[int, ...]]) -> None:
    for first in range(33, 65):  # experts of 33 to 64 rows
        multiply([first, 64, 97 - first, 139], 300, dtype)
    assert seen == shapes_of({*range(34, 65, 2), 144})


@needs_onednn
@DTYPES
def test_also_where_an_expert_has_all_rows(dtype: torch.dtype, seen: set[tuple[int, ...]]) -> None:
    """With one expert on a process their number is another one in each step."""
    for n in range(193, 257):
        multiply([n], n, dtype)
    assert seen == shapes_of(set(range(200, 257, 8)))


@needs_onednn
def test_few_rows_stay_as_few(seen: set[tuple[int, ...]]) -> None:
    """In bf16 a product of a few rows takes as much less time."""
    multiply([1, 2, 3, 17, 31, 8], 62, torch.bfloat16)
    assert seen == shapes_of({1, 2, 3, 17, 31, 8})
