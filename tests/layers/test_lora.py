"""Adapters on column- and row-parallel layers against the formula on whole matrices, in fp64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smp.config import Layout
from smp.layers import MLP, ColumnParallelLinear, RowParallelLinear, adapters_off, add_adapters, init_weights
from smp.layers.adapters.lora import adapters_of
from smp.parallel.context import ParallelContext, build_context
from tests.distributed import run_distributed
from tests.fake_group import fake_context
from tests.layers.test_linear import KINDS, shared_target
from tests.layers.whole import beyond, draw, error, gradient, leaf, load, part

TOKENS, IN, OUT, RANK, WORLD = 8, 12, 32, 3, 4
ALPHA, DROPOUT = 5.0, 0.4


def plain(x: Any, w: Any, a: Any, b: Any, target: Any, keep: Any) -> dict[str, torch.Tensor]:
    """Output and gradients of sum(y * target), with whole matrices."""
    x, a, b = leaf(x.double()), leaf(a.double()), leaf(b.double())
    y = F.linear(x, w.double()) + ALPHA / RANK * F.linear(F.linear(x * keep.double(), a), b)
    y.backward(target.double())
    return {"y": y.detach(), "dx": x.grad, "da": a.grad, "db": b.grad}


def layer_of(mesh: Any, kind: str, sp: bool, dropout: float) -> Any:
    context = ParallelContext.of(mesh, sequence_parallel=sp)
    if kind == "row":
        layer: Any = nn.ModuleDict({"x": RowParallelLinear(IN, OUT, context, bias=False)})
    else:
        layer = nn.ModuleDict({"x": ColumnParallelLinear(IN, OUT, context, parts=KINDS[kind], bias=False)})
    add_adapters(layer, ["x"], RANK, ALPHA, dropout=dropout, seed=7)
    return layer["x"]


def kept(layer: Any, mesh: Any) -> torch.Tensor:
    """What dropout multiplies the whole input with: the adapter's masks, from all of its channels."""
    from smp.kernels.dropout import keyed_dropout

    numbers, ones = 100 + torch.arange(TOKENS), torch.ones(TOKENS, IN)
    return keyed_dropout(ones, layer.lora.key, numbers, layer.lora.dropout)


def errors_of(mesh: Any, kind: str, sp: bool, dropout: float) -> dict[str, float]:
    x, w, target = draw(TOKENS, IN, seed=1), draw(OUT, IN, seed=2), draw(TOKENS, OUT, seed=4)
    a, b = draw(RANK, IN, seed=5), draw(OUT, RANK, seed=6)
    layer = layer_of(mesh, kind, sp, dropout)
    exact = plain(x, w, a, b, target, kept(layer, mesh))
    for parameter, whole in ((layer.weight, w), (layer.lora.a, a), (layer.lora.b, b)):
        load(parameter, whole)
    numbers = 100 + torch.arange(TOKENS)
    if kind == "row":
        mine, columns, grad = leaf(part(x, mesh, -1)), slice(None), part(target, mesh, split=sp)
    else:
        columns, grad = shared_target(target, mesh, KINDS[kind])
        mine, numbers = leaf(part(x, mesh, split=sp)), part(numbers, mesh, split=sp)
    y = layer(mine, token_index=numbers)
    y.backward(grad)
    assert layer.weight.grad is None, "the frozen weight has a gradient"
    want_y = part(exact["y"], mesh, split=sp) if kind == "row" else exact["y"][..., columns]
    want_dx = part(exact["dx"], mesh, -1) if kind == "row" else part(exact["dx"], mesh, split=sp)
    return {
        "y": error(y, want_y),
        "dx": error(mine.grad, want_dx),
        "da": error(gradient(layer.lora.a), exact["da"]),
        "db": error(gradient(layer.lora.b), exact["db"]),
    }


def all_errors(rank: int, world_size: int) -> dict[str, float]:
    meshes = {tp: build_context(Layout(dp_shard=world_size // tp, tp=tp), "cpu").tp for tp in (1, 2, 4)}
    out = {}
    for tp, kind, sp, dropout in itertools.product(meshes, KINDS, (False, True), (0.0, DROPOUT)):
        for name, value in errors_of(meshes[tp], kind, sp, dropout).items():
            out[f"tp {tp}, {kind}, sp {sp}, dropout {dropout}: {name}"] = value
    return out


def test_every_layout_computes_the_formula_and_its_gradients() -> None:
    for errors in run_distributed(all_errors, WORLD):
        assert len(errors) == 3 * len(KINDS) * 2 * 2 * 4
        assert not beyond(errors, 1e-6)


def initial(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    mesh = build_context(Layout(tp=world_size), "cpu").tp
    mlp = MLP(IN, OUT, mesh)
    add_adapters(mlp, ["up", "down"], RANK, ALPHA)
    init_weights(mlp, seed=3)
    return {name: p.full_tensor() for name, p in mlp.named_parameters()}  # type: ignore[operator]


def test_first_values_do_not_depend_on_the_layout_and_change_nothing() -> None:
    alone, shared = run_distributed(initial, 1)[0], run_distributed(initial, 2)[0]
    assert alone.keys() == shared.keys() and all(torch.equal(alone[n], shared[n]) for n in alone)
    assert alone["up.lora.a"].std().item() == pytest.approx((3 * IN) ** -0.5, rel=0.3)
    assert not alone["up.lora.b"].any() and alone["down.lora.a"].any()


@pytest.fixture
def mlp() -> Any:
    with fake_context() as context:
        module = MLP(IN, OUT, context.tp)
        init_weights(module, seed=0)
        yield module


def test_patterns_choose_layers_and_the_rest_is_frozen(mlp: Any) -> None:
    chosen = add_adapters(mlp, ["u*", "down", "gone"], RANK, ALPHA)
    assert chosen == {"u*": ["up"], "down": ["down"], "gone": []}
    trained = {name for name, p in mlp.named_parameters() if p.requires_grad}
    assert trained == {"up.lora.a", "up.lora.b", "down.lora.a", "down.lora.b"}
    assert set(adapters_of(mlp)) == {"up", "down"}


def test_switched_off_adapters_add_nothing(mlp: Any) -> None:
    x = draw(TOKENS, IN, seed=1)
    before = mlp(x)
    add_adapters(mlp, ["*"], RANK, ALPHA)
    init_weights(mlp, seed=0)
    assert torch.equal(mlp(x), before), "B is zero at the start"
    with torch.no_grad():
        for adapter in adapters_of(mlp).values():
            adapter.b.to_local().normal_()  # type: ignore[operator]
    changed = mlp(x)
    with adapters_off(mlp):
        assert torch.equal(mlp(x), before)
    assert torch.equal(mlp(x), changed) and not torch.allclose(changed, before)


def test_dropout_without_numbers_is_refused(mlp: Any) -> None:
    add_adapters(mlp, ["up"], RANK, ALPHA, dropout=0.5)
    with pytest.raises(ValueError, match="keyed by"):
        mlp(draw(TOKENS, IN, seed=1))
