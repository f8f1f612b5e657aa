"""Products of linear layers in fp32 on a CPU whose MKL is slow: oneDNN's, equal to those of ``F.linear``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from smp.kernels import matmul
from smp.kernels.matmul import linear, weight_gradient
from smp.kernels.product import DENSE
from smp.kernels.weight_gradient import accumulate_weight_gradient
from smp.layers.heads.cross_entropy import VocabShard, linear_cross_entropy
from smp.parallel.collectives import Group
from smp.training.cost.meter import Meter

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
SIZES = [  # rows, in, out: of blocks and heads, and what is narrow on one side
    (128, 256, 688),
    (256, 688, 256),
    (4096, 256, 128),
    (100, 512, 5000),
    (512, 2048, 256),
    (37, 300, 301),
    (2048, 512, 8),
    (2048, 8, 512),
]


class Operators(TorchDispatchMode):
    """What runs, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def products(self) -> set[str]:
        kinds = {"smp.linear.default": "oneDNN", "mkldnn._linear_pointwise.default": "oneDNN"}
        return {kinds.get(name, "torch") for name in self.names if name in kinds or ".mm." in name or ".addmm." in name}


@pytest.fixture(autouse=True)
def slow_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a wide processor of AMD's, whatever this one is."""
    monkeypatch.setattr(matmul, "SLOW_MKL", True)
    monkeypatch.setattr(matmul, "COPIES_PAY", True)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def all_of(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """A result and the gradients of its inputs by one gradient of it."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = run(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, draw(*y.shape, seed=9).to(y.dtype))]


@pytest.mark.parametrize(("rows", "width", "out"), SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_results_and_gradients_are_those_of_float64(rows: int, width: int, out: int, bias: bool) -> None:
    inputs = [draw(rows, width), draw(out, width), *([draw(out)] if bias else [])]
    with Operators() as seen:
        found = all_of(linear, *inputs)
    assert seen.products() == {"oneDNN"}
    exact = all_of(F.linear, *(x.double() for x in inputs))
    plain = all_of(F.linear, *inputs)
    for own, want, other in zip(found, exact, plain, strict=True):
        assert relative(own, want) <= 1e-6 and own.shape == other.shape and own.stride() == other.stride()


@pytest.mark.parametrize(("rows", "width", "out"), SIZES)
def test_the_three_products_of_a_layer(rows: int, width: int, out: int) -> None:
    x, weight, grad = draw(rows, width), draw(out, width), draw(rows, out)
    want = x.double() @ weight.double().t(), grad.double() @ weight.double(), grad.double().t() @ x.double()
    with Operators() as seen:
        found = DENSE.forward(x, weight), DENSE.input_gradient(grad, weight), DENSE.weight_gradient(grad, x)
    assert seen.products() == {"oneDNN"}
    total = torch.ones(out, width)
    accumulate_weight_gradient(total, grad, x)
    found += (total - 1,)
    for own, exact in zip(found, (*want, want[2]), strict=True):
        assert relative(own, exact) <= 2e-6 and own.is_contiguous()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
        lambda x: x.repeat_interleave(2, 0)[::2],
        lambda x: x.repeat_interleave(2, 1)[:, ::2],
        lambda x: x[:1].expand_as(x),
    ],
    ids=["transposed", "cut", "every other row", "every other column", "one row"],
)
def test_operands_may_be_any_views(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    inputs = view(draw(128, 256)), view(draw(160, 256))
    grad = view(draw(128, 160))
    for own, exact in zip(all_of(linear, *inputs), all_of(F.linear, *(x.double() for x in inputs)), strict=True):
        assert relative(own, exact) <= 1e-6
    want = grad.double().t() @ inputs[0].double()
    assert relative(weight_gradient(grad, inputs[0]), want) <= 1e-6


@pytest.mark.parametrize(
    "bias",
    [
        lambda: draw(320)[::2],
        lambda: draw(1).expand(160),
        lambda: draw(160, 3)[:, 0],
        lambda: draw(1)[0],
        lambda: draw(1),
        lambda: draw(128, 160),
    ],
    ids=["every other", "one for all", "a column", "a number", "a vector of one", "one for each row"],
)
def test_a_bias_may_be_what_torch_takes(bias: Callable[[], torch.Tensor]) -> None:
    inputs = draw(128, 256), draw(160, 256), bias()
    wanted = all_of(F.linear, *(x.double() for x in inputs))
    for own, exact in zip(all_of(linear, *inputs), wanted, strict=True):
        assert relative(own, exact) <= 1e-6


@pytest.mark.parametrize("leading", [(), (1,)])
def test_windows_that_overlap(leading: tuple[int, ...]) -> None:
    wave, weight = draw(*leading, 400 + 160 * 76), draw(256, 400)
    run = lambda product: lambda wave, weight: product(wave.unfold(-1, 400, 160), weight)  # noqa: E731
    exact = all_of(run(F.linear), wave.double(), weight.double())
    assert all(relative(own, want) <= 1e-6 for own, want in zip(all_of(run(linear), wave, weight), exact, strict=True))
    y = linear(draw(128, 400), wave.flatten().unfold(0, 400, 160))
    assert relative(y, draw(128, 400).double() @ wave.double().flatten().unfold(0, 400, 160).t()) <= 1e-6


@pytest.mark.parametrize("rows, width, out", [(1024, 128, 5000), (64, 256, 5000), (2048, 512, 8), (300, 300, 301)])
def test_onednn_gets_matrices_in_one_piece(rows: int, width: int, out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of columns of a wider matrix it takes a thousand times as long: 20 s for the output layer of a small model."""
    given, product = list[torch.Tensor](), torch.ops.mkldnn._linear_pointwise

    def watched(x: torch.Tensor, weight: torch.Tensor, *more: Any) -> torch.Tensor:
        given.extend((x, weight))
        result: torch.Tensor = product(x, weight, *more)
        return result

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", watched)
    x, weight, grad = (
        torch.randn(rows, 2 * width)[:, :width],
        torch.randn(out, width + 1)[:, 1:],
        torch.randn(rows, out),
    )
    results = linear(x, weight), linear(grad, weight.t()), weight_gradient(grad, x)
    total = torch.zeros(out, width)
    accumulate_weight_gradient(total, grad, x)
    expected = grad.double().t() @ x.double()
    wide = [x.double() @ weight.double().t(), grad.double() @ weight.double(), expected, expected]
    for ours, theirs in zip((*results, total), wide, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())
    assert len(given) >= 4
    assert all(matrix.is_contiguous() or matrix.t().is_contiguous() for matrix in given)


def test_transforms_and_other_layouts_are_torchs() -> None:
    x, weight = draw(128, 256), draw(160, 256)

    def loss(run: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda w: run(x, w).square().sum()

    ours, plain = (torch.func.grad(loss(run))(weight) for run in (linear, F.linear))
    assert relative(ours, plain.double()) <= 1e-6
    _, tangent = torch.func.jvp(loss(linear), (weight,), (weight,))
    assert relative(tangent, 2 * loss(F.linear)(weight).double()) <= 1e-5
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        assert torch.autograd.forward_ad.unpack_dual(linear(dual, weight)).tangent is not None
    leaf = weight.clone().requires_grad_()
    y = linear(x, leaf, draw(160).requires_grad_())
    (batched,) = torch.autograd.grad(y, leaf, torch.stack([y.detach(), y.detach() * 2]), is_grads_batched=True)
    assert relative(batched[1], 2 * batched[0].double()) <= 1e-6
    assert relative(linear(x, weight.to_sparse()).to_dense(), x.double() @ weight.double().t()) <= 1e-6
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        linear(x, draw(160, 255))


def test_compiled_transforms_are_torchs() -> None:
    """A Function is not told, while a compiler traces, which gradients they need: theirs were zero."""
    x, weight, tangent = torch.randn(64, 256), torch.randn(256, 256), torch.randn(256, 256)

    def loss(product: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = product(x, weight).square().sum()
        return result

    def all_of(product: Any) -> Any:
        grad = torch.func.grad(functools.partial(loss, product))

        def run(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            along = torch.func.jvp(lambda w: product(x, w), (weight,), (tangent,))[1]
            return grad(weight, x), along, torch.func.vmap(grad, (None, 0))(weight, torch.stack([x, 2 * x]))

        return run

    compiled = torch.compile(all_of(linear), backend="aot_eager")(weight, x)
    for ours, theirs in zip(compiled, all_of(F.linear)(weight, x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_rows_that_are_data_compile() -> None:
    x, weight = torch.randn(64, 256), torch.randn(256, 256)
    kept = torch.arange(64) % 3 > 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(lambda: linear(x[kept], weight), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(run(), F.linear(x[kept], weight))


def test_torchs_own_counter_of_flops_sees_it() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        linear(draw(128, 256).requires_grad_(), draw(160, 256).requires_grad_()).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 128 * 256 * 160


@pytest.mark.parametrize("grad", [True, False])
def test_the_result_is_nobodys_view(grad: bool) -> None:
    """Or FSDP2 warns of every module that returns it."""
    x, weight = draw(2, 128, 256).requires_grad_(grad), draw(688, 256)
    with Operators() as operators:
        assert not linear(x, weight)._is_view()
    assert operators.products() == {"oneDNN"}


def test_leading_dimensions_are_rows() -> None:
    x, weight, bias = draw(4, 16, 4, 256), draw(160, 256), draw(160)
    found, exact = all_of(linear, x, weight, bias), all_of(F.linear, x.double(), weight.double(), bias.double())
    assert found[0].shape == (4, 16, 4, 160)
    assert all(relative(own, want) <= 1e-6 for own, want in zip(found, exact, strict=True))


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (draw(256), draw(16384, 256)),
        (draw(31, 512), draw(512, 512)),
        (draw(64, 64), draw(64, 64)),
        (draw(0, 512), draw(512, 512)),
        (draw(512, 0), draw(512, 0)),
        (draw(512, 512).double(), draw(512, 512).double()),
        (draw(512, 512).bfloat16(), draw(512, 512).bfloat16()),
        (draw(512, 16384), draw(16384)),
    ],
    ids=["one row", "few rows", "small", "no rows", "no columns", "fp64", "bf16", "a vector for a matrix"],
)
def test_what_stays_torchs(x: torch.Tensor, weight: torch.Tensor) -> None:
    with Operators() as seen:
        y = linear(x, weight)
    assert "oneDNN" not in seen.products() and torch.equal(y, F.linear(x, weight))


def test_it_can_be_switched_off_and_autocast_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = draw(128, 256), draw(160, 256)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None), Operators() as off:
        linear(x, weight)
    monkeypatch.setattr(matmul, "SLOW_MKL", False)
    with Operators() as elsewhere:
        linear(x, weight)
    assert off.products() == elsewhere.products() == {"torch"}


@pytest.mark.parametrize(
    ("capabilities", "wide"),
    [({}, False), ({"sse4a": True, "avx512_bf16": True}, False), ({"sse4a": True, "avx_vnni": True}, True)],
)
def test_a_wide_processor_is_known_by_its_instructions(
    capabilities: dict[str, bool], wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = torch.cpu.get_capabilities()
    assert {"sse4a", "avx_vnni", "avx512_vp2intersect"} <= known.keys() or known.get("architecture") != "x86_64"
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(matmul, "SLOW_MKL", matmul._mkl_is_slow())
    assert matmul._is_wide_amd() == (wide and torch.backends.mkl.is_available())


def test_what_needs_a_copy_is_torchs_where_onednn_gains_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "COPIES_PAY", False)
    x, weight = draw(128, 256).requires_grad_(), draw(160, 256).requires_grad_()
    with Operators() as forward:
        y = linear(x, weight)
    with Operators() as both:
        found = torch.autograd.grad(y, (x, weight), draw(*y.shape, seed=9))
    with Operators() as total:
        sums = torch.zeros(160, 256)
        accumulate_weight_gradient(sums, draw(128, 160), x.detach())
    assert forward.products() == {"oneDNN"}
    assert both.products() == {"oneDNN", "torch"} and total.products() == {"torch"}
    wide = x.double(), weight.double()
    exact = torch.autograd.grad(F.linear(*wide), wide, draw(*y.shape, seed=9).double())
    assert all(relative(own, want) <= 2e-6 for own, want in zip(found, exact, strict=True))


def test_the_gradient_of_a_gradient() -> None:
    def penalty(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        first = torch.autograd.grad(run(*leaves).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    inputs = draw(128, 256), draw(160, 256)
    found, exact = penalty(linear, *inputs), penalty(F.linear, *(x.double() for x in inputs))
    assert all(relative(own, want) <= 2e-6 for own, want in zip(found, exact, strict=True))


def test_only_what_a_gradient_needs_is_kept() -> None:
    x, weight = draw(128, 256), draw(160, 256)
    for trained, kept in ((x, weight), (weight, x)):
        seen: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=seen: s.append(t) or t, lambda t: t):
            linear(*(t.detach().requires_grad_(t is trained) for t in (x, weight)))
        assert [t.data_ptr() for t in seen] == [kept.data_ptr()]


def test_recompute_gives_the_same_bits() -> None:
    inputs = draw(128, 256), draw(160, 256)
    again = all_of(
        lambda *given: checkpoint(lambda x, w: linear(x * 1, w).relu(), *given, use_reentrant=False), *inputs
    )
    for own, want in zip(again, all_of(lambda x, w: linear(x * 1, w).relu(), *inputs), strict=True):
        assert torch.equal(own, want)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_graph_has_the_operator_and_the_same_bits(dynamic: bool) -> None:
    called: list[int] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        called.append(sum(node.target is torch.ops.smp.linear.default for node in graph.graph.nodes))
        assert "aten.mm" not in str(graph.graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    run = torch.compile(lambda x, w, b: linear(x, w, b).relu(), fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in (128, 200):
        inputs = draw(rows, 256), draw(160, 256), draw(160)
        for own, want in zip(all_of(run, *inputs), all_of(lambda *g: linear(*g).relu(), *inputs), strict=True):
            assert torch.equal(own, want)
    assert called[:2] == [1, 2], "forward, and both gradients"


def test_the_operator_traces() -> None:
    torch.library.opcheck(torch.ops.smp.linear.default, (draw(64, 16), draw(8, 16), draw(8)))


def test_work_and_memory_of_tensors_without_data_are_those_of_a_real_step() -> None:
    def step(meter: Meter, *inputs: torch.Tensor) -> tuple[int, int, int]:
        leaves = [x.requires_grad_() for x in inputs]
        with meter.counting(), meter.phase("forward"):
            linear(*leaves).sum().backward()
        return meter.counts.flops, meter.peaks["backward"], meter.peaks["forward"]

    real = step(Meter({}), draw(128, 256), draw(5000, 256))
    with FakeTensorMode():
        fake = step(Meter({}), torch.empty(128, 256), torch.empty(5000, 256))
    assert real == fake and real[0] == 3 * 2 * 128 * 256 * 5000


@pytest.mark.parametrize("tokens", [256, 300])
def test_the_loss_of_a_head_takes_it_too(tokens: int) -> None:
    """300: the last chunk has 44 tokens."""
    hidden, weight, labels = draw(tokens, 128), draw(2000, 128), torch.arange(tokens)
    weights, shard = torch.full((tokens,), 1 / tokens), VocabShard.of(Group("", 1, 0), 2000, 2000)

    def loss(h: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        leaves = [h.detach().requires_grad_(), w.detach().requires_grad_()]
        value = linear_cross_entropy(*leaves, labels, weights, shard, chunk_tokens=128)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    with Operators() as seen:
        found = loss(hidden, weight)
    assert seen.products() == {"oneDNN"}
    wide = [x.double().requires_grad_() for x in (hidden, weight)]
    value = F.cross_entropy(wide[0] @ wide[1].t(), labels)
    for own, want in zip(found, [value, *torch.autograd.grad(value, wide)], strict=True):
        assert relative(own, want.detach()) <= 2e-6
