"""Cross-entropy, norms, SwiGLU and RoPE in C++ beside their twins in PyTorch: errors against fp64 no larger than the
twins', odd sizes, strides, several threads, NaN, and dtypes that C++ does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from smp.kernels import Kernels, cross_entropy, norm, rope, swiglu
from smp.kernels.cpp.library import DTYPES, why_not
from smp.kernels.swiglu import FusedSwiglu

Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if why := why_not(request.param):
        pytest.skip(why)
    torch.manual_seed(0)
    return request.param


@pytest.fixture(params=(1, 3))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, of the whole tensor."""
    return float((got.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30))


def as_exact(cpp: Callable[[str], Tensors], exact: Tensors) -> None:
    """C++ is as near to fp64 as its twin, or nearer, but for two roundings of fp32."""
    for ours, twin, want in zip(cpp("cpp"), cpp("torch"), exact, strict=True):
        assert ours.dtype == twin.dtype and ours.shape == twin.shape
        assert error(ours, want) <= 1.1 * error(twin, want) + 2 * torch.finfo(torch.float32).eps


def wide(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if t is None else t.double() for t in tensors]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 17), (33, 5000)])
def test_cross_entropy(dtype: torch.dtype, threads: int, rows: int, columns: int) -> None:
    valid = max(1, columns - 3)
    logits = (6 * torch.randn(rows, columns + 9)).to(dtype)[:, 2 : columns + 2]  # rows with a stride, not aligned
    logits[0, 0] = 300.0
    ids, weights = torch.randint(-2, valid + 2, (rows,)), torch.rand(rows)
    weights[rows // 2] = 0.0

    def run(backend: str) -> Tensors:
        whole = logits.clone(memory_format=torch.contiguous_format)
        stats = cross_entropy.softmax_stats(whole, ids, valid, backend)
        return stats, cross_entropy.logits_to_gradient(whole, stats, ids, valid, weights, backend)

    z = logits.double()
    stats = cross_entropy.softmax_stats_reference(z, ids, valid)
    cross_entropy.logits_to_gradient_reference(z, stats, ids, valid, weights.double())
    as_exact(run, (stats, z))
    strided = torch.empty(rows, columns + 9, dtype=dtype)[:, 2 : columns + 2].copy_(logits)
    of_strided = cross_entropy.softmax_stats(strided, ids, valid, "cpp")
    cross_entropy.logits_to_gradient(strided, of_strided, ids, valid, weights, "cpp")
    assert torch.equal(of_strided, run("cpp")[0]) and torch.equal(strided, run("cpp")[1])
    assert not strided[:, valid:].any()


def test_cross_entropy_of_what_is_not_a_number(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 40).to(dtype)
    logits[0, 7], logits[1], logits[2, 3] = torch.nan, -torch.inf, -torch.inf
    stats = cross_entropy.softmax_stats(logits, torch.arange(4), 40, "cpp")
    twin = cross_entropy.softmax_stats_reference(logits, torch.arange(4), 40)
    assert stats[1, 0].isnan() and twin[1, 0].isnan(), "so is its loss"
    torch.testing.assert_close(stats[:, 1:], twin[:, 1:])
    cross_entropy.logits_to_gradient(logits, stats, torch.arange(4), 40, torch.ones(4), "cpp")
    assert logits[0].isnan().all() and logits[2:].isfinite().all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("rows", "features"), [(1, 3), (9, 40), (600, 65)])
def test_norms(dtype: torch.dtype, threads: int, bias: bool, adds: bool, rows: int, features: int) -> None:
    x, dy, more, dmore = (torch.randn(rows, features).to(dtype) for _ in range(4))
    weight, shift = torch.randn(features), torch.randn(features).to(dtype) if bias else None
    residual, dtotal = (more, dmore) if adds else (None, None)
    weight = weight if features == 40 else weight.to(dtype)  # fp32 beside bf16, too
    total = x + residual if residual is not None else x
    _, _, mean, scale = norm.forward_reference(total.double(), None, *wide(weight, shift), 1e-5)  # type: ignore[arg-type]

    def forward(backend: str) -> Tensors:
        y, _, _, scale = norm._forward_op(x, residual, weight, shift, 1e-5, backend)
        return y, scale

    def backward(backend: str) -> Tensors:
        kept = mean.float(), scale.float()
        dx, dweight, dbias = norm._backward_op(dy, dtotal, total, weight, *kept, bias, backend)
        return (dx, dweight, dbias) if bias else (dx, dweight)

    exact = norm.forward_reference(total.double(), None, *wide(weight, shift), 1e-5)  # type: ignore[arg-type]
    as_exact(forward, (exact[0], exact[3]))
    if residual is not None:
        assert torch.equal(norm._forward_op(x, residual, weight, shift, 1e-5, "cpp")[1], total)
    gradients = norm.backward_reference(*wide(dy, dtotal, total, weight), mean, scale, bias)  # type: ignore[arg-type]
    as_exact(backward, gradients if bias else gradients[:2])


def test_swiglu(dtype: torch.dtype, threads: int) -> None:
    both = (4 * torch.randn(70, 2 * 301)).to(dtype)
    both[0, :4] = torch.tensor([100.0, -100.0, 1e30, -1e30]).to(dtype)
    gate, up = both.chunk(2, dim=1)  # halves of one tensor
    da = torch.randn(70, 301).to(dtype)
    exact = swiglu.forward_reference(gate.double(), up.double())
    of_exact = swiglu.backward_reference(da.double(), gate.double(), up.double(), True)
    as_exact(lambda backend: (FusedSwiglu(backend).forward(gate, up),), (exact,))
    as_exact(lambda backend: FusedSwiglu(backend).backward(da, gate, up, again=True), of_exact)
    assert torch.equal(FusedSwiglu("cpp").backward(da, gate, up, again=True)[2], swiglu.swiglu(gate, up, "cpp"))


@pytest.mark.parametrize(("dim", "rotated"), [(64, 64), (20, 12), (6, 2)])
@pytest.mark.parametrize("inverse", [False, True])
def test_rope(dtype: torch.dtype, threads: int, dim: int, rotated: int, inverse: bool) -> None:
    q, k = torch.randn(90, 3, dim).to(dtype), torch.randn(90, 1, dim).to(dtype)
    angles = (6 * torch.rand(90, 1, rotated // 2)).repeat(1, 1, 2)
    table = angles.cos(), angles.sin()
    exact = rope._reference(q.double(), k.double(), *table, inverse)
    as_exact(lambda backend: rope._rope_op(q, k, *table, inverse, backend), exact)
    made = rope._rope_op(q, k, *table, inverse, "cpp")
    rope._rope_in_place_op(q, k, *table, inverse, "cpp")
    assert torch.equal(q, made[0]) and torch.equal(k, made[1])


def test_bits_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5000, 48).to(dtype), torch.randn(48).to(dtype)
    logits, ids = torch.randn(64, 4000).to(dtype), torch.arange(64)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        _, _, mean, scale = norm._forward_op(x, None, weight, None, 1e-5, "cpp")
        stats = cross_entropy.softmax_stats(logits, ids, 4000, "cpp")
        found.append((stats, scale, *norm._backward_op(x, None, x, weight, mean, scale, False, "cpp")[:2]))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_a_model_that_was_made_double_has_pytorchs_numbers() -> None:
    """It was built for fp32, and ``.double()`` came after; a tensor of another dtype is never read as one of C++'s."""
    if why := why_not(torch.float32):
        pytest.skip(why)
    x = torch.randn(6, 16, dtype=torch.float64)
    weight, ids = torch.randn(16, dtype=torch.float64), torch.arange(6)
    table = torch.rand(6, 1, 16, dtype=torch.float64)
    runs: list[tuple[ModuleType, Callable[[str], torch.Tensor]]] = [
        (cross_entropy, lambda backend: cross_entropy.softmax_stats(x, ids, 16, backend)),
        (norm, lambda backend: norm._forward_op(x, x, weight, None, 1e-5, backend)[0]),
        (norm, lambda backend: norm._forward_op(x.float(), x.float(), weight, None, 1e-5, backend)[0]),
        (swiglu, lambda backend: swiglu._forward_op(x, x.float(), backend)),
        (rope, lambda backend: rope._rope_op(x[:, None], x[:, None], table, table, False, backend)[0]),
    ]
    for module, run in runs:
        torch.testing.assert_close(run("cpp"), run("torch"), msg=module.__name__)


def test_a_tensor_on_a_gpu_is_never_read_as_one_of_the_hosts() -> None:
    from smp.kernels.registry import _on_its_device

    with pytest.raises(RuntimeError, match="the cpp kernels are for CPUs"):
        _on_its_device(lambda *_: None)(torch.zeros(1), "cpp")


def test_which_operations_it_has() -> None:
    Kernels(cross_entropy="cpp", norm="cpp", swiglu="cpp", rope="cpp")
    with pytest.raises(ValueError, match="router runs on torch, triton; there is no 'cpp'"):
        Kernels(router="cpp")
