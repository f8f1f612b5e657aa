"""The Mamba-2 mixer against transformers' in fp64, and on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smp.config import Layout
from smp.kernels.token_layout import TokenLayout
from smp.layers import Mamba2, add_adapters
from smp.layers.recurrences.documents import DocumentsNeed
from smp.parallel.context import ParallelContext, build_context
from tests.distributed import run_distributed
from tests.fake_group import fake_context
from tests.layers.test_delta_net import BATCH, HIDDEN, LENGTH, TOKENS, token_layout
from tests.layers.whole import draw, error, gradient, leaf, load_all, part

HEADS = 4
SIZES: dict[str, Any] = {"head_dim": 6, "state_dim": 5, "norm_eps": 1e-3}
PROJECTED = ("gate", "value", "key", "query", "step")
CONVOLVED = ("value", "key", "query")


def mixer_of(context: Any, groups: int = 2, **options: Any) -> Mamba2:
    return Mamba2(HIDDEN, HEADS, groups, context, **SIZES | options)


def theirs(groups: int, limits: tuple[float, float]) -> Any:
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    from transformers import Mamba2Config

    config = Mamba2Config(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_heads=HEADS,
        head_dim=6,
        state_size=5,
        n_groups=groups,
        time_step_limit=limits,
        layer_norm_epsilon=1e-3,
        chunk_size=4,
    )
    return modeling.Mamba2Mixer(config, 0).double()


def as_theirs(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "in_proj.weight": torch.cat([tensors[f"{name}.weight"] for name in PROJECTED]),
        "conv1d.weight": torch.cat([tensors[f"{name}_conv"] for name in CONVOLVED])[:, None],
        "conv1d.bias": torch.cat([tensors[f"{name}_conv_bias"] for name in CONVOLVED]),
        **{"A_log": tensors["decay_log"], "dt_bias": tensors["step_bias"], "D": tensors["skip"]},
        **{"norm.weight": tensors["norm.weight"], "out_proj.weight": tensors["output.weight"]},
    }


@pytest.mark.parametrize(("groups", "limits"), [(1, (0.0, torch.inf)), (2, (0.6, 0.75))])
def test_it_is_transformers_mamba2(groups: int, limits: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and every gradient, in fp64: theirs casts to fp32 inside, which is left out for this."""
    module = theirs(groups, limits)
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    with fake_context() as context:
        mixer = mixer_of(context, groups, step_limits=limits).double()
        load_all(mixer, seed=3)
        module.load_state_dict(as_theirs({n: p.to_local() for n, p in mixer.named_parameters()}))  # type: ignore[attr-defined]
        x, target = leaf(draw(TOKENS, HIDDEN, seed=1).double()), draw(TOKENS, HIDDEN, seed=2).double()
        y = mixer(x, token_layout())
        y.backward(target)
        their_x = leaf(x.detach())
        their_y = module(their_x.view(BATCH, LENGTH, HIDDEN)).flatten(0, 1)
        their_y.backward(target)
        assert error(y, their_y) <= 1e-9 and x.grad is not None and error(x.grad, their_x.grad) <= 1e-9
        found = as_theirs({name: gradient(p) for name, p in mixer.named_parameters()})
    their = {name: p.grad for name, p in module.named_parameters()}
    assert found.keys() == their.keys()
    for name, got in found.items():
        assert error(got, their[name]) <= 1e-9, name
        assert got.norm() > 1e-6, f"{name} says nothing"


def test_packed_documents_are_separate_ones() -> None:
    documents = torch.tensor([[0, 0, 1, 2, 2, 2, 2, 2, 2], [0] * 9])
    with fake_context() as context:
        mixer = mixer_of(context).double()
        load_all(mixer, seed=3)
        x = draw(TOKENS, HIDDEN, seed=1).double()
        packed = mixer(x, token_layout(documents))
        for start, end in ((0, 2), (2, 3), (3, 9), (9, 18)):
            row = TokenLayout(1, end - start, position_ids=torch.arange(end - start))
            need = DocumentsNeed(4)
            alone = TokenLayout(1, end - start, prepared={need.key: need.prepare(row, lambda: torch.zeros(0))})
            assert error(packed[start:end], mixer(x[start:end], alone)) <= 1e-12


def results(rank: int, world: int, sp: bool, groups: int) -> dict[str, torch.Tensor]:
    """Output and gradients, whole, of sum(y * target), in fp64."""
    mesh = build_context(Layout(tp=world), "cpu").tp
    mixer = mixer_of(ParallelContext.of(mesh, sequence_parallel=sp), groups)
    add_adapters(mixer, ["*"], 2, 3.0)
    mixer.double().requires_grad_(True)
    load_all(mixer, seed=3)
    x = leaf(part(draw(TOKENS, HIDDEN, seed=1), mesh, split=sp).double())
    target = draw(TOKENS, HIDDEN, seed=2).double()
    y = mixer(x, token_layout(torch.tensor([[0] * 4 + [1] * 5, [0] * 9])))
    y.backward(part(target, mesh, split=sp))
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad} | {name: gradient(p) for name, p in mixer.named_parameters()}


@pytest.mark.parametrize(("sp", "groups"), [(False, 2), (True, 1)])
def test_every_layout_computes_the_same_and_its_gradients(sp: bool, groups: int) -> None:
    """With groups of each rank's own, and with one that all share."""
    one, ranks = run_distributed(results, 1, False, groups)[0], run_distributed(results, 2, sp, groups)
    names = [name.removesuffix(".lora.a") for name in one if name.endswith(".lora.a")]
    assert sorted(names) == sorted([*PROJECTED, "output"])
    for name, want in one.items():
        for rank, got in enumerate(ranks):
            mine = want.chunk(2)[rank] if sp and name in ("y", "dx") else want
            assert error(got[name], mine) <= 1e-6, name
            assert want.abs().max() > 1e-3, f"{name} says nothing"


def test_ranks_that_do_not_divide_heads_or_groups_are_an_error() -> None:
    with fake_context(Layout(tp=4)) as context, pytest.raises(ValueError, match="4 heads on 2 of keys do not split"):
        mixer_of(context.tp)
    with fake_context() as context, pytest.raises(ValueError, match="4 heads on 3 of keys"):
        mixer_of(context.tp, 3)
