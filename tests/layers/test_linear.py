"""Column- and row-parallel layers against ``F.linear`` on whole weights, and the order of work in the backward pass."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from smp.config import Layout
from smp.layers import ColumnParallelLinear, RowParallelLinear, column_parallel
from smp.parallel.context import ParallelContext, build_context
from tests.distributed import run_distributed
from tests.fake_group import fake_context
from tests.layers.whole import beyond, draw, error, gradient, leaf, load, part
from tests.operations import order_of

TOKENS, IN, OUT, WORLD = 8, 12, 32, 4
KINDS: dict[str, int | None] = {"row": None, "column": None, "column, 4 parts": 4, "column, 2 parts": 2, "column, 1": 1}


def split(mesh: Any) -> ParallelContext:
    """Sequence-parallel."""
    return ParallelContext.of(mesh, sequence_parallel=True)


def plain(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and gradients of sum(y * target), in the inputs' dtype, with whole weights."""
    x, w, b = leaf(x), leaf(w), None if b is None else leaf(b)
    y = F.linear(x, w, b)
    y.backward(target)
    out: dict[str, Any] = {"y": y.detach(), "dx": x.grad, "dw": w.grad}
    return out if b is None else out | {"db": b.grad}


def shared_target(target: torch.Tensor, mesh: Any, parts: int | None) -> tuple[slice, torch.Tensor]:
    """This rank's columns, and its share of their gradient: 1/2, 1/4, ... among ranks with the same columns."""
    size, rank = mesh.size(), mesh.get_local_rank()
    cuts = size if parts is None or parts >= size else parts
    sharers, width = size // cuts, OUT // cuts
    first, place = rank // sharers * width, rank % sharers + 1
    columns = slice(first, first + width)
    return columns, target[..., columns] * 0.5 ** min(place, sharers - 1)  # the last two are equal


def errors_of(
    mesh: Any, kind: str, sp: bool, lead: tuple[int, ...], bias: bool, dtype: torch.dtype
) -> dict[str, tuple[float, float]]:
    """(error, error of plain torch in the same precision), both against plain torch in fp64."""
    x, w = draw(TOKENS, *lead, IN, seed=1, dtype=dtype), draw(OUT, IN, seed=2, dtype=dtype)
    b = draw(OUT, seed=3, dtype=dtype) if bias else None
    target = draw(TOKENS, *lead, OUT, seed=4, dtype=dtype)
    exact = plain(x.double(), w.double(), None if b is None else b.double(), target.double())
    usual = plain(x, w, b, target)
    context = ParallelContext.of(mesh, sequence_parallel=sp)
    if kind == "row":
        layer: Any = RowParallelLinear(IN, OUT, context, bias=bias).to(dtype)
        mine, columns, grad = leaf(part(x, mesh, -1)), slice(None), part(target, mesh, split=sp)
    else:
        layer = ColumnParallelLinear(IN, OUT, context, parts=KINDS[kind], bias=bias).to(dtype)
        columns, grad = shared_target(target, mesh, KINDS[kind])
        mine = leaf(part(x, mesh, split=sp))
    load(layer.weight, w)
    if b is not None:
        load(layer.bias, b)
    y = layer(mine)
    y.backward(grad)
    want_y = part(exact["y"], mesh, split=sp) if kind == "row" else exact["y"][..., columns]
    want_dx = part(exact["dx"], mesh, -1) if kind == "row" else part(exact["dx"], mesh, split=sp)
    got: dict[str, tuple[Any, Any]] = {"y": (y, want_y), "dx": (mine.grad, want_dx)}
    got["dw"] = gradient(layer.weight), exact["dw"]
    if b is not None:
        got["db"] = gradient(layer.bias), exact["db"]
    return {name: (error(*pair), error(usual[name], exact[name])) for name, pair in got.items()}


def all_errors(meshes: dict[int, Any]) -> dict[str, tuple[float, float]]:
    out = {}
    shapes: list[tuple[tuple[int, ...], bool]] = [((), False), ((3,), True), ((), True)]  # more dimensions, bias
    choices = itertools.product(meshes, KINDS, (False, True), shapes, (torch.float32, torch.bfloat16))
    for tp, kind, sp, (lead, bias), dtype in choices:
        name = f"tp {tp}, {kind}, {'sp, ' if sp else ''}{'bias, ' if bias else ''}{len(lead)} more dims, {dtype}"
        errors = errors_of(meshes[tp], kind, sp, lead, bias, dtype)
        out |= {f"{name}: {tensor}": pair for tensor, pair in errors.items()}
    return out


class Reductions(TorchDispatchMode):
    """Notes the precision of all-reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.name() == "_c10d_functional::all_reduce":
            self.dtypes.append(str(out.dtype))
        return out


def backward_order(mesh: Any, sp: bool) -> list[str]:
    """What the backward pass of three projections of one input does, in turn."""
    context = ParallelContext.of(mesh, sequence_parallel=sp)
    layers = [ColumnParallelLinear(IN, OUT, context, bias=False) for _ in range(3)]
    for layer in layers:
        load(layer.weight, draw(OUT, IN, seed=5))
    x = leaf(part(draw(TOKENS, IN, seed=6), mesh, split=sp))
    loss = torch.stack(column_parallel(x, layers)).sum()
    return order_of(loss.backward, TOKENS)


def dtype_of_shared_sum(mesh: Any) -> list[str]:
    """Precision in which the gradient of a bf16 weight that all ranks hold is summed."""
    layer = ColumnParallelLinear(IN, OUT, split(mesh), parts=1, bias=False).to(torch.bfloat16)
    load(layer.weight, draw(OUT, IN, seed=5))
    with Reductions() as reductions:
        layer(draw(TOKENS // mesh.size(), IN, seed=6, dtype=torch.bfloat16)).sum().backward()
    return reductions.dtypes


def measure(rank: int, world: int) -> dict[str, Any]:
    meshes = {tp: build_context(Layout(dp_replicate=world // tp, tp=tp), "cpu").tp for tp in (1, 2, 4)}
    return {
        "errors": all_errors(meshes),
        "order": {sp: backward_order(meshes[2], sp) for sp in (False, True)},
        "sum": dtype_of_shared_sum(meshes[4]),
    }


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    return run_distributed(measure, WORLD)


def test_outputs_and_gradients_are_those_of_whole_weights_in_fp32(measured: list[dict[str, Any]]) -> None:
    for rank in measured:
        errors = {name: pair[0] for name, pair in rank["errors"].items() if "float32" in name}
        assert len(errors) > 200
        assert beyond(errors, 1e-6) == {}


def test_bf16_errors_are_those_of_plain_bf16(measured: list[dict[str, Any]]) -> None:
    """A sum over p ranks rounds each partial sum, and again after each addition, where plain torch rounds once."""
    for rank in measured:
        ratios = {name: ours / plain for name, (ours, plain) in rank["errors"].items() if "bfloat16" in name}
        assert len(ratios) > 200
        assert beyond(ratios, 3.0) == {}


def test_input_gradient_is_reduced_while_weight_gradients_are_computed(measured: list[dict[str, Any]]) -> None:
    for rank in measured:
        assert rank["order"][False] == ["dx"] * 3 + ["all_reduce"] + ["dw"] * 3 + ["wait_tensor"]
        gathered = ["all_gather_into_tensor", "dx", "dx", "dx", "wait_tensor"]
        reduced = ["reduce_scatter_tensor", "dw", "dw", "dw", "wait_tensor"]
        assert rank["order"][True] == gathered + reduced


def test_gradient_of_a_shared_weight_is_summed_in_fp32(measured: list[dict[str, Any]]) -> None:
    assert [rank["sum"] for rank in measured] == [["torch.float32"]] * WORLD


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: ColumnParallelLinear(8, 6, m), "dimension 0 of (6, 8) is not divisible by tensor-parallel size 4"),
        (lambda m: RowParallelLinear(6, 8, m), "dimension 1 of (8, 6) is not divisible by tensor-parallel size 4"),
        (lambda m: ColumnParallelLinear(8, 6, m, parts=3), "6 outputs in 3 parts cannot be shared by 4 ranks"),
        (lambda m: ColumnParallelLinear(8, 5, m, parts=2), "5 outputs in 2 parts cannot be shared by 4 ranks"),
        (lambda m: ColumnParallelLinear(8, 12, m, parts=6), "12 outputs in 6 parts cannot be shared by 4 ranks"),
        (
            lambda m: RowParallelLinear(8, 8, split(m))(torch.zeros(5, 2)),
            "reduce-scatter of 5 rows over 4 ranks: not divisible",
        ),
    ],
)
def test_impossible_sizes_are_named(make: Any, message: str) -> None:
    with fake_context(Layout(tp=4)) as context, pytest.raises(ValueError) as raised:
        make(context.tp)
    assert str(raised.value) == message


def test_a_mesh_of_two_dimensions_is_refused() -> None:
    with fake_context(Layout(dp_shard=2, tp=2)):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        with pytest.raises(ValueError, match="one-dimensional mesh"):
            ColumnParallelLinear(8, 8, mesh)


def test_layers_with_one_input_must_agree() -> None:
    with fake_context(Layout(tp=2, dp_shard=2)) as context:
        layer = ColumnParallelLinear(IN, OUT, context.tp)
        divided, elsewhere = (
            ColumnParallelLinear(IN, OUT, split(context.tp)),
            ColumnParallelLinear(IN, OUT, context.fsdp),
        )
        deferred = ColumnParallelLinear(IN, OUT, context.tp)
        deferred.sink = [].append
        for other in (divided, elsewhere, deferred):
            for pair in ([layer, other], [other, layer]):
                with pytest.raises(ValueError, match="differ in their group, sequence_parallel, product or sink"):
                    column_parallel(draw(TOKENS, IN, seed=1), pair)
