"""Kernels on a GPU: errors against fp64 beside PyTorch's own, odd inputs, and CUDA C++ beside Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from smp.kernels import cross_entropy, norm, rope, swiglu
from smp.kernels.cuda.library import library_path
from smp.kernels.experts import grouped
from smp.kernels.experts.grouped import grouped_product
from smp.layers import IGNORE_INDEX
from smp.layers.heads.cross_entropy import VocabShard, vocab_parallel_cross_entropy
from smp.parallel.collectives import Group
from tests.kernels.cases import OPERATIONS, error

pytestmark = pytest.mark.gpu
FILLS_THE_CARD = pytest.mark.xdist_group("large")  # two at a time may be more than 80 GB
TOKENS, HIDDEN, WIDTH, VOCABULARY = 512, 4096, 14336, 128_256
NEEDS_LIBRARY = pytest.mark.skipif(not library_path().exists(), reason="the CUDA C++ kernels are not built")
BACKENDS = ["triton", pytest.param("cuda", marks=NEEDS_LIBRARY)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_triton_equals_the_reference(operation: str, dtype: torch.dtype) -> None:
    """The same inputs as in the interpreter; a GPU rounds to nearest, so bf16 is half a unit nearer."""
    limit = 3e-6 if dtype == torch.float32 else 2**-8
    cases = OPERATIONS[operation](dtype, "triton", "cuda")
    errors = {f"{case}: {name}": error(*pair) for case, both in cases for name, pair in both.items()}
    assert len(errors) >= 18 and {name: e for name, e in errors.items() if e > limit} == {}


@NEEDS_LIBRARY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_equals_the_reference(dtype: torch.dtype) -> None:
    limit = 3e-6 if dtype == torch.float32 else 2**-8
    cases = OPERATIONS["cross_entropy"](dtype, "cuda", "cuda")
    errors = {f"{case}: {name}": error(*pair) for case, both in cases for name, pair in both.items()}
    assert len(errors) >= 18 and {name: e for name, e in errors.items() if e > limit} == {}


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Fresh bf16 numbers in fp64, so that every version starts from the same values."""
    return [torch.randn(shape, device="cuda").bfloat16().double() for shape in shapes]


def results(run: Callable[..., Any], inputs: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Outputs and the inputs' gradients, for output gradients that depend on nothing but their shape."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    outputs = run(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.linspace(-1, 1, y.numel(), device="cuda", dtype=torch.float64).view(y.shape) for y in outputs]
    torch.autograd.backward(outputs, [g.to(y.dtype) for g, y in zip(grads, outputs, strict=True)])
    return [*(y.detach() for y in outputs), *(x.grad for x in leaves if x.grad is not None)]


def table() -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.rand(TOKENS, 1, 64, device="cuda") * 6
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def compare(name: str, backend: str) -> dict[str, tuple[float, float]]:
    """Per output and gradient: our error and that of PyTorch in bf16, both against fp64."""
    eps, shard = 1e-5, VocabShard.of(Group("", 1, 0), VOCABULARY, VOCABULARY)
    cos, sin = table()
    labels = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda")
    labels[::7] = IGNORE_INDEX
    plain: dict[str, Any] = {
        "rms_norm": lambda x, w: F.rms_norm(x, (HIDDEN,), w, eps),
        "layer_norm": lambda x, w, b: F.layer_norm(x, (HIDDEN,), w, b, eps),
        "add_norm": lambda x, a, w: (F.rms_norm(x + a, (HIDDEN,), w, eps), x + a),
        "swiglu": lambda g, u: F.silu(g) * u,
        "rope": lambda q, k: rope.rope(q, k, cos, sin, 128),
        "cross_entropy": lambda z: F.cross_entropy(z, labels, reduction="none", ignore_index=IGNORE_INDEX),
    }
    ours: dict[str, Any] = {
        "rms_norm": lambda x, w: norm.norm(x, w, None, eps, backend),
        "layer_norm": lambda x, w, b: norm.norm(x, w, b, eps, backend),
        "add_norm": lambda x, a, w: norm.add_norm(x, a, w, None, eps, backend),
        "swiglu": lambda g, u: swiglu.swiglu(g, u, backend),
        "rope": lambda q, k: rope.rope(q, k, cos, sin, 128, backend),
        "cross_entropy": lambda z: vocab_parallel_cross_entropy(z, labels, shard, backend=backend),
    }
    row, weight = (TOKENS, HIDDEN), (HIDDEN,)
    shapes: dict[str, list[tuple[int, ...]]] = {
        "rms_norm": [row, weight],
        "layer_norm": [row, weight, weight],
        "add_norm": [row, row, weight],
        "swiglu": [(TOKENS, WIDTH), (TOKENS, WIDTH)],
        "rope": [(TOKENS, 32 * 128), (TOKENS, 8 * 128)],
        "cross_entropy": [(TOKENS, VOCABULARY)],
    }
    inputs = tensors(*shapes[name])
    want = results(plain[name], inputs, torch.float64)
    got = results(ours[name], inputs, torch.bfloat16)
    torchs = results(plain[name], inputs, torch.bfloat16)

    def off(y: torch.Tensor, reference: torch.Tensor) -> float:
        return ((y.double() - reference).norm() / reference.norm()).item()

    return {str(i): (off(g, w), off(t, w)) for i, (g, t, w) in enumerate(zip(got, torchs, want, strict=True))}


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "add_norm", "swiglu", "rope"])
def test_errors_are_at_most_twice_pytorchs(name: str) -> None:
    errors = compare(name, "triton")
    assert {key: e for key, e in errors.items() if not e[0] <= 2 * e[1] + 1e-7} == {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_error_of_cross_entropy_is_at_most_twice_pytorchs(backend: str) -> None:
    errors = compare("cross_entropy", backend)
    assert {key: e for key, e in errors.items() if not e[0] <= 2 * e[1] + 1e-7} == {}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offset", [0, 1])
def test_logits_that_are_part_of_a_larger_matrix(backend: str, offset: int) -> None:
    """Row strides that 8 does not divide, starts that 16 bytes do not."""
    whole = torch.randn(5, 1003, device="cuda").bfloat16()
    logits, columns = whole[:, offset : offset + 1000], torch.arange(5, device="cuda") * 199
    want = cross_entropy.softmax_stats(logits, columns, 997)
    torch.testing.assert_close(cross_entropy.softmax_stats(logits, columns, 997, backend), want, rtol=1e-5, atol=1e-5)
    untouched, weights = whole.clone(), torch.rand(5, device="cuda")
    gradient = logits.clone()
    cross_entropy.logits_to_gradient(gradient, want, columns, 997, weights)
    cross_entropy.logits_to_gradient(logits, want, columns, 997, weights, backend)
    torch.testing.assert_close(logits, gradient, rtol=2**-7, atol=1e-6)
    assert torch.equal(whole[:, offset + 1000 :], untouched[:, offset + 1000 :])
    assert torch.equal(whole[:, :offset], untouched[:, :offset])


@FILLS_THE_CARD
@pytest.mark.parametrize("backend", BACKENDS)
def test_more_than_two_to_the_31_logits(backend: str) -> None:
    """A row number times a stride no longer fits into 32 bits: 17,000 rows of 128,256."""
    rows = 17_000
    logits = torch.zeros(rows, VOCABULARY, device="cuda", dtype=torch.bfloat16)
    logits[-1, -1] = 30.0
    columns = torch.full((rows,), VOCABULARY - 1, device="cuda")
    stats = cross_entropy.softmax_stats(logits, columns, VOCABULARY, backend)
    assert stats[0, 0].item() == 0.0 and stats[1, 0].item() == pytest.approx(
        torch.tensor(float(VOCABULARY)).log().item(), rel=1e-5
    )
    assert stats[0, -1].item() == stats[2, -1].item() == 30.0 and stats[1, -1].item() == pytest.approx(0.0, abs=1e-3)
    cross_entropy.logits_to_gradient(logits, stats, columns, VOCABULARY, torch.ones(rows, device="cuda"), backend)
    assert logits[0, -1].item() == pytest.approx(-1.0, rel=1e-2) and logits[-1, 0].item() == pytest.approx(
        0.0, abs=1e-6
    )


@FILLS_THE_CARD
@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "rope"])
def test_the_last_row_of_more_than_two_to_the_31_elements(name: str) -> None:
    """Forward and backward of all rows beside those of the last ones alone."""
    width = 8192
    rows = (1 << 31) // width + 3
    x, weight = (
        torch.randn(rows, width, device="cuda", dtype=torch.bfloat16),
        torch.randn(width, device="cuda").bfloat16(),
    )
    angle = torch.rand(rows, 1, 128, device="cuda")

    def run(x: torch.Tensor, angle: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        if name == "rms_norm":
            y = norm.norm(x, weight, None, 1e-5, "triton")
        elif name == "swiglu":
            y = swiglu.swiglu(x, x, "triton")
        else:
            y = rope.rope(x, x[:, :128], angle.cos(), angle.sin(), 128, "triton")[0].flatten(1)
        (dx,) = torch.autograd.grad(y, x, y.detach())
        return [y.detach()[-4:], dx[-4:]]

    for got, want in zip(run(x, angle), run(x[-4:], angle[-4:]), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 300), (torch.bfloat16, 9000), (torch.float32, 700)])
def test_products_of_many_experts_and_tiles(dtype: torch.dtype, rows: int) -> None:
    """Random loads of 128 experts, some of which get nothing; a program takes many tiles, of both kinds."""
    numbers = torch.randint(0, 2 * rows // 128, (128,)) * (torch.rand(128) > 0.2)
    counts, n = numbers.cuda(), int(numbers.sum())
    x = torch.randn(n, 520, device="cuda", dtype=dtype, requires_grad=True)
    w = torch.randn(128, 392, 520, device="cuda", dtype=dtype, requires_grad=True)
    grad, outputs = torch.randn(n, 392, device="cuda", dtype=dtype), []
    for inputs, backend in (((x, w), "triton"), ((x.double(), w.double()), "torch")):
        y = grouped_product(*inputs, counts, backend)
        outputs.append((y, *torch.autograd.grad(y, inputs, grad.to(y.dtype))))
    limit = 2**-8 if dtype == torch.bfloat16 else 3e-6
    for mine, exact in zip(*outputs, strict=True):
        assert (mine.double() - exact).norm() <= limit * exact.norm()


@FILLS_THE_CARD
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_of_more_than_two_to_the_31_numbers(backend: str) -> None:
    """Of four experts; the last one's beside these alone. torch's product was reported to leave memory there
    (pytorch/torchtitan#1932)."""
    last, width, out = 70, 4096, 64
    counts = torch.tensor([(1 << 31) // width, 0, 1, last], device="cuda")
    x, grad = (torch.zeros(int(counts.sum()), n, device="cuda", dtype=torch.bfloat16) for n in (width, out))
    for rows in (x, grad):
        rows[-last:] = torch.randn(last, rows.shape[1], device="cuda")
    w = torch.randn(4, out, width, device="cuda").bfloat16()
    tails, alone, own = (x[-last:].clone(), grad[-last:].clone()), counts[3:].clone(), w[3:].clone()
    y, few = grouped._forward_op(x, w, counts, backend), grouped._forward_op(tails[0], own, alone, backend)
    dx = grouped._input_gradient_op([grad], [w], counts, backend)
    dw = grouped._weight_gradient_op(grad, x, counts, backend)
    few_dw = grouped._weight_gradient_op(tails[1], tails[0], alone, backend)
    few_dx = grouped._input_gradient_op([tails[1]], [own], alone, backend)
    for many, wanted in ((y[-last:], few), (dx[-last:], few_dx), (dw[3:], few_dw)):
        assert (many.float() - wanted.float()).norm() <= 2**-8 * wanted.float().norm()
    assert not y[:-last].any() and not dw[:3].any() and not dx[-last - 4 : -last].any()


@FILLS_THE_CARD
def test_the_last_expert_of_more_than_two_to_the_31_weights() -> None:
    """300 experts of 4,096 x 2,048, of which only the last two have rows: beside these alone."""
    counts = torch.zeros(300, dtype=torch.int64, device="cuda")
    counts[-2:] = torch.tensor([70, 130], device="cuda")
    w = torch.randn(2, 4096, 2048, device="cuda", dtype=torch.bfloat16)
    many = torch.zeros(300, 4096, 2048, device="cuda", dtype=torch.bfloat16)
    many[-2:] = w
    x, grad = (torch.randn(200, n, device="cuda", dtype=torch.bfloat16) for n in (2048, 4096))
    y, dx, dw = (
        grouped._forward_op(x, many, counts, "triton"),
        grouped._input_gradient_op([grad], [many], counts, "triton"),
        grouped._weight_gradient_op(grad, x, counts, "triton"),
    )
    assert torch.equal(y, grouped._forward_op(x, w, counts[-2:], "triton"))
    assert torch.equal(dx, grouped._input_gradient_op([grad], [w], counts[-2:], "triton"))
    assert torch.equal(dw[-2:], grouped._weight_gradient_op(grad, x, counts[-2:], "triton"))
    assert not dw[:-2].any()


def test_the_weight_gradient_is_added_in_fp32() -> None:
    from smp.kernels.weight_gradient import accumulate_weight_gradient

    dy, x = torch.randn(512, 256, device="cuda").bfloat16(), torch.randn(512, 128, device="cuda").bfloat16()
    total = torch.empty(256, 128, device="cuda")
    accumulate_weight_gradient(total, dy, x, first=True)
    accumulate_weight_gradient(total, dy, x)
    want = 2 * dy.double().t() @ x.double()
    assert ((total - want).norm() / want.norm()).item() < 1e-5  # bf16 rounding of the product would be 2e-3


@pytest.mark.parametrize("counts", [[7, 0, 13, 20, 0], [0, 0, 0, 0, 40], [8, 8, 8, 8, 8], [0, 0, 0, 0, 0]])
@pytest.mark.parametrize("sizes", [(64, 128), (64, 12)])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_products_of_experts(counts: list[int], sizes: tuple[int, int], backend: str) -> None:
    """torch's grouped kernel, for widths that it does not take a loop; and Triton's."""
    width, out = sizes
    rows = sum(counts)
    x, grad = (torch.randn(rows, n, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in sizes)
    w = torch.randn(5, out, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    wanted = torch.cat([rows @ wide[1][e].t() for e, rows in enumerate(wide[0].split(counts))])
    wanted.backward(grad.double())
    got = grouped_product(x, w, torch.tensor(counts, device="cuda"), backend)
    del (poison := [torch.full_like(w, torch.nan) for _ in range(4)])[:]  # what is not written shows
    assert not poison
    got.backward(grad.detach())
    for mine, exact in ((got, wanted), (x.grad, wide[0].grad), (w.grad, wide[1].grad)):
        assert mine is not None and exact is not None
        assert (mine.double() - exact).norm() <= 2**-8 * exact.norm()
    assert w.grad is not None and not w.grad[[e for e, n in enumerate(counts) if not n]].any()
