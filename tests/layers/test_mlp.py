"""The feed-forward part against its formula on whole weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from smp.config import Layout
from smp.layers import MLP
from smp.parallel.context import ParallelContext, build_context
from tests.distributed import run_distributed
from tests.fake_group import fake_context
from tests.layers.whole import beyond, draw, error, gradient, leaf, load_all, part

TOKENS, HIDDEN, FFN = 6, 8, 12
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": lambda x: x * torch.special.ndtr(x),
    "tanh_gelu": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "squared_relu": lambda x: x.clamp(min=0) ** 2,
}


def formula(x: torch.Tensor, w: dict[str, torch.Tensor], activation: str) -> torch.Tensor:
    def linear(y: torch.Tensor, name: str) -> torch.Tensor:
        return y @ w[f"{name}.weight"].t() + w.get(f"{name}.bias", torch.zeros(()))

    up = linear(x, "up")
    if activation != "swiglu":
        return linear(ACTIVATIONS[activation](up), "down")
    gate = linear(x, "gate")
    return linear(gate * torch.sigmoid(gate) * up, "down")


def errors_of(mesh: Any, activation: Any, bias: bool, sp: bool) -> dict[str, float]:
    layer = MLP(HIDDEN, FFN, ParallelContext.of(mesh, sequence_parallel=sp), activation=activation, bias=bias)
    wholes = load_all(layer)
    x, target = leaf(draw(TOKENS, HIDDEN, seed=1)), draw(TOKENS, HIDDEN, seed=2)
    want = formula(x, wholes, activation)
    want.backward(target)
    mine = leaf(part(x, mesh, split=sp))
    got = layer(mine)
    got.backward(part(target, mesh, split=sp))
    assert x.grad is not None
    errors = {"y": error(got, part(want, mesh, split=sp)), "dx": error(mine.grad, part(x.grad, mesh, split=sp))}
    return errors | {name: error(gradient(layer.get_parameter(name)), w.grad) for name, w in wholes.items()}


def measure(rank: int, world: int) -> dict[str, float]:
    out = {}
    meshes = {tp: build_context(Layout(dp_replicate=world // tp, tp=tp), "cpu").tp for tp in (1, 2)}
    for tp, activation, bias, sp in itertools.product(meshes, ("swiglu", *ACTIVATIONS), (False, True), (False, True)):
        errors = errors_of(meshes[tp], activation, bias, sp)
        name = f"{activation}, tp {tp}{', bias' if bias else ''}{', sp' if sp else ''}"
        out |= {f"{name}: {tensor}": e for tensor, e in errors.items()}
    return out


def test_values_and_gradients_are_those_of_the_formula() -> None:
    for errors in run_distributed(measure, 2):
        assert sum(name.endswith(": y") for name in errors) == 2 * 4 * 2 * 2
        assert sum(name.endswith(": gate.bias") for name in errors) == 2 * 2
        assert beyond(errors, 2e-6) == {}


def test_an_unknown_activation_is_refused() -> None:
    with fake_context() as context, pytest.raises(ValueError, match="'sigmoid' is not one of swiglu, geglu"):
        MLP(HIDDEN, FFN, context.tp, activation="sigmoid")  # type: ignore[arg-type]
