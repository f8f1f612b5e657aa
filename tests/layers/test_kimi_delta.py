"""Kimi delta attention against transformers' in fp64, and on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smp.config import Layout
from smp.kernels.token_layout import TokenLayout
from smp.layers import KimiDeltaAttention, add_adapters
from smp.layers.recurrences.documents import DocumentsNeed
from smp.parallel.context import ParallelContext, build_context
from tests.distributed import run_distributed
from tests.fake_group import fake_context
from tests.layers.test_delta_net import BATCH, HIDDEN, LENGTH, TOKENS, token_layout
from tests.layers.whole import draw, error, gradient, leaf, load_all, part

HEADS, WIDTH = 4, 5
PROJECTED = ("query", "key", "value", "beta", "decay_down", "decay_up", "gate_down", "gate_up")
THEIRS = {
    **{"query": "q_proj", "key": "k_proj", "value": "v_proj", "beta": "b_proj", "output": "o_proj"},
    **{"decay_down": "forget_gate.f_a_proj", "decay_up": "forget_gate.f_b_proj"},
    **{"gate_down": "g_a_proj", "gate_up": "g_b_proj", "norm": "o_norm"},
}


def mixer_of(context: Any) -> KimiDeltaAttention:
    return KimiDeltaAttention(HIDDEN, HEADS, context, head_dim=WIDTH, norm_eps=1e-3)


def theirs() -> Any:
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    from transformers import KimiLinearConfig

    sizes = {"linear_num_heads": HEADS, "linear_head_dim": WIDTH}
    config = KimiLinearConfig(hidden_size=HIDDEN, num_hidden_layers=2, rms_norm_eps=1e-3, **sizes)
    return modeling.KimiLinearDeltaAttention(config, 0).double()


def as_theirs(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        **{f"{other}.weight": tensors[f"{name}.weight"] for name, other in THEIRS.items()},
        "conv1d.weight": torch.cat([tensors[f"{name}_conv"] for name in ("query", "key", "value")])[:, None],
        "forget_gate.A_log": tensors["decay_log"].view(1, 1, HEADS, 1),
        "forget_gate.dt_bias": tensors["decay_bias"],
    }


def test_it_is_transformers_kimi_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and every gradient, in fp64: theirs casts to fp32 inside, which is left out for this."""
    module = theirs()
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    with fake_context() as context:
        mixer = mixer_of(context).double()
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


def results(rank: int, world: int, sp: bool) -> dict[str, torch.Tensor]:
    """Output and gradients, whole, of sum(y * target), in fp64 but for sums of replicated weights' gradients."""
    mesh = build_context(Layout(tp=world), "cpu").tp
    mixer = mixer_of(ParallelContext.of(mesh, sequence_parallel=sp))
    add_adapters(mixer, ["*"], 2, 3.0)
    mixer.double().requires_grad_(True)
    load_all(mixer, seed=3)
    x = leaf(part(draw(TOKENS, HIDDEN, seed=1), mesh, split=sp).double())
    target = draw(TOKENS, HIDDEN, seed=2).double()
    y = mixer(x, token_layout(torch.tensor([[0] * 4 + [1] * 5, [0] * 9])))
    y.backward(part(target, mesh, split=sp))
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad} | {name: gradient(p) for name, p in mixer.named_parameters()}


@pytest.mark.parametrize("sp", [False, True])
def test_every_layout_computes_the_same_and_its_gradients(sp: bool) -> None:
    one, ranks = run_distributed(results, 1, False)[0], run_distributed(results, 2, sp)
    names = [name.removesuffix(".lora.a") for name in one if name.endswith(".lora.a")]
    assert sorted(names) == sorted([*PROJECTED, "output"])
    for name, want in one.items():
        for rank, got in enumerate(ranks):
            mine = want.chunk(2)[rank] if sp and name in ("y", "dx") else want
            assert error(got[name], mine) <= 1e-6, name
            assert want.abs().max() > 1e-3, f"{name} says nothing"


def test_ranks_that_do_not_divide_the_heads_are_an_error() -> None:
    with fake_context(Layout(tp=3)) as context, pytest.raises(ValueError, match="4 heads do not split over 3 ranks"):
        mixer_of(context.tp)
