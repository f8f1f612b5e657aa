"""Normalizations against their formulas, and the sum of their gradients over ranks that see different data."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from smp.config import Layout
from smp.layers import LayerNorm, RMSNorm
from smp.layers.norm import local_weights
from smp.parallel import collectives
from smp.parallel.context import ParallelContext, build_context
from tests.distributed import run_distributed
from tests.layers.whole import beyond, draw, error, gradient, leaf, load_all, part

TOKENS, FEATURES, EPS = 10, 12, 0.1  # an epsilon that shows
KINDS: dict[str, Any] = {
    "RMSNorm": RMSNorm,
    "LayerNorm": LayerNorm,
    "RMSNorm from 1": partial(RMSNorm, one_plus=True),
    "LayerNorm from 1": partial(LayerNorm, one_plus=True),
    "LayerNorm alone": partial(LayerNorm, bias=False),
}


def formula(kind: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As the docstrings of the layers state it."""
    if kind.endswith("from 1"):
        weight = 1 + weight
    if kind.startswith("RMSNorm"):
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    return normed if bias is None else normed + bias


def errors_of(mesh: Any, kind: str, split: bool, dtype: torch.dtype) -> dict[str, float]:
    layer = KINDS[kind](FEATURES, ParallelContext.of(mesh, sequence_parallel=split), eps=EPS).to(dtype)
    wholes = {name: leaf(w.double()) for name, w in load_all(layer).items()}
    x, target = draw(TOKENS, 3, FEATURES, seed=1, dtype=dtype), draw(TOKENS, 3, FEATURES, seed=2, dtype=dtype)
    exact = leaf(x.double())
    want = formula(kind, exact, wholes["weight"], wholes.get("bias"))
    want.backward(target.double())
    mine = leaf(part(x, mesh, split=split))
    got = layer(mine)
    got.backward(part(target, mesh, split=split))
    assert got.dtype == dtype and exact.grad is not None
    errors = {
        "y": error(got, part(want, mesh, split=split)),
        "dx": error(mine.grad, part(exact.grad, mesh, split=split)),
    }
    return errors | {f"d{name}": error(gradient(layer.get_parameter(name)), w.grad) for name, w in wholes.items()}


def gradients(mesh: Any, *, together: bool) -> tuple[list[torch.Tensor], int]:
    """Of three norms one behind the other, each rank with its own tokens, and how many sums they took."""
    context = ParallelContext.of(mesh, sequence_parallel=True)
    norms = [KINDS[kind](FEATURES, context, eps=EPS) for kind in ("RMSNorm", "LayerNorm", "RMSNorm from 1")]
    for layer in norms:
        load_all(layer)
    x, whole, sums = part(draw(TOKENS, FEATURES, seed=1), mesh, split=True), collectives.start_all_reduce, list[int]()

    def counted(x: torch.Tensor, group: collectives.Group) -> torch.Tensor:
        sums.append(x.numel())
        return whole(x, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "start_all_reduce", counted)
        own = local_weights(norms, x.dtype) if together else [None] * len(norms)
        for layer, mine in zip(norms, own, strict=True):
            x = layer(x, mine)
        x.square().sum().backward()
    return [gradient(parameter) for layer in norms for parameter in layer.parameters()], len(sums)


def measure(rank: int, world: int) -> dict[str, float]:
    mesh = build_context(Layout(tp=world), "cpu").tp
    (one, sums), (each, several) = (gradients(mesh, together=together) for together in (True, False))
    same = all(torch.equal(a, b) and a.any() for a, b in zip(one, each, strict=True))
    out: dict[str, float] = {"same bits": same, "sums together": sums, "sums of each": several}
    for tp, kind, split, dtype in itertools.product((1, 2), KINDS, (False, True), (torch.float32, torch.bfloat16)):
        mesh = build_context(Layout(dp_replicate=world // tp, tp=tp), "cpu").tp
        errors = errors_of(mesh, kind, split, dtype)
        out |= {f"{kind}, tp {tp}, {'split, ' if split else ''}{dtype}, {name}": e for name, e in errors.items()}
    return out


@pytest.fixture(scope="module")
def measured() -> list[dict[str, float]]:
    return run_distributed(measure, 2)


# one rounding of bf16 is 2^-9; torch's LayerNorm on a CPU adds up its bias gradient in bf16
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 5e-7), ("bfloat16", 2.0**-6)])
def test_values_and_gradients_are_those_of_the_formula(
    measured: list[dict[str, float]], dtype: str, bound: float
) -> None:
    for errors in measured:
        assert (errors["same bits"], errors["sums together"], errors["sums of each"]) == (1, 1, 3)
        chosen = {name: e for name, e in errors.items() if dtype in name}
        assert len(chosen) == 4 * (3 + 4 + 3 + 4 + 3)
        assert beyond(chosen, bound) == {}
