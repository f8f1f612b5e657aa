"""The gated delta net and attention's gate against transformers' Qwen3-Next in fp64, and on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smp.config import Layout
from smp.kernels.token_layout import TokenLayout
from smp.layers import GatedDeltaNet, add_adapters
from smp.layers.recurrences.documents import DocumentsNeed
from smp.parallel.context import ParallelContext, build_context
from tests.distributed import run_distributed
from tests.fake_group import fake_context
from tests.layers.whole import draw, error, gradient, leaf, load_all, part

BATCH, LENGTH, HIDDEN = 2, 9, 12
TOKENS = BATCH * LENGTH
SIZES: dict[str, Any] = {"key_dim": 4, "value_dim": 3}


def net_of(context: Any, key_heads: int = 2) -> GatedDeltaNet:
    return GatedDeltaNet(HIDDEN, key_heads, 4, context, **SIZES)


def token_layout(documents: torch.Tensor | None = None) -> TokenLayout:
    layout = TokenLayout(BATCH, LENGTH, position_ids=torch.arange(LENGTH).repeat(BATCH), document_ids=documents)
    need = DocumentsNeed(4)
    prepared = {need.key: need.prepare(layout, lambda: torch.full((TOKENS,), LENGTH))}
    return TokenLayout(BATCH, LENGTH, document_ids=documents, prepared=prepared)


def heads_together(parts: list[torch.Tensor], heads: int) -> torch.Tensor:
    """Rows of several projections as Qwen3-Next has them: for each key head those of each."""
    return torch.cat([x.unflatten(0, (heads, -1)) for x in parts], 1).flatten(0, 1)


def theirs() -> Any:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=4,
        linear_value_head_dim=3,
        rms_norm_eps=1e-6,
    )
    return modeling.Qwen3NextGatedDeltaNet(config, 0).double()


def test_it_is_transformers_qwen3_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and every gradient, in fp64: theirs casts to fp32 inside, which is left out for this."""
    module = theirs()
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    with fake_context() as context:
        net = net_of(context).double()
        load_all(net, seed=3)
        ours = {name: p.to_local() for name, p in net.named_parameters()}  # type: ignore[attr-defined]
        rows = [ours[f"{name}.weight"] for name in ("query", "key", "value", "gate", "beta", "decay")]
        wanted = {
            "in_proj_qkvz.weight": heads_together(rows[:4], 2),
            "in_proj_ba.weight": heads_together(rows[4:], 2),
            "conv1d.weight": torch.cat([ours[f"{name}_conv"] for name in ("query", "key", "value")])[:, None],
            **{"A_log": ours["decay_log"], "dt_bias": ours["decay_bias"], "norm.weight": ours["norm.weight"]},
            "out_proj.weight": ours["output.weight"],
        }
        module.load_state_dict(wanted)
        x, target = leaf(draw(TOKENS, HIDDEN, seed=1).double()), draw(TOKENS, HIDDEN, seed=2).double()
        y = net(x, token_layout())
        y.backward(target)
        their_x = leaf(x.detach())
        their_y = module(their_x.view(BATCH, LENGTH, HIDDEN)).flatten(0, 1)
        their_y.backward(target)
        assert error(y, their_y) <= 1e-9 and x.grad is not None and error(x.grad, their_x.grad) <= 1e-9
        grads = {name: gradient(p) for name, p in net.named_parameters()}
    their = {name: p.grad for name, p in module.named_parameters()}
    found = [grads[f"{name}.weight"] for name in ("query", "key", "value", "gate", "beta", "decay")]
    pairs = {
        "in_proj_qkvz.weight": heads_together(found[:4], 2),
        "in_proj_ba.weight": heads_together(found[4:], 2),
        "conv1d.weight": torch.cat([grads[f"{name}_conv"] for name in ("query", "key", "value")])[:, None],
        **{"A_log": grads["decay_log"], "dt_bias": grads["decay_bias"], "norm.weight": grads["norm.weight"]},
        "out_proj.weight": grads["output.weight"],
    }
    assert pairs.keys() == their.keys()
    for name, got in pairs.items():
        assert error(got, their[name]) <= 1e-9, name
        assert got.norm() > 1e-6, f"{name} says nothing"


def test_it_is_transformers_olmo_hybrid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates up to 2, and a projection for each part."""
    modeling = pytest.importorskip("transformers.models.olmo_hybrid.modeling_olmo_hybrid")
    from transformers import OlmoHybridConfig

    sizes = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 3,
    }
    module = modeling.OlmoHybridGatedDeltaNet(OlmoHybridConfig(hidden_size=HIDDEN, **sizes), 0).double()
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    names = {"query": "q", "key": "k", "value": "v", "gate": "g", "beta": "b", "decay": "a", "output": "o"}

    def as_theirs(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            **{f"{other}_proj.weight": tensors[f"{name}.weight"] for name, other in names.items()},
            "conv1d.weight": torch.cat([tensors[f"{name}_conv"] for name in ("query", "key", "value")])[:, None],
            **{
                "A_log": tensors["decay_log"],
                "dt_bias": tensors["decay_bias"],
                "o_norm.weight": tensors["norm.weight"],
            },
        }

    with fake_context() as context:
        net = GatedDeltaNet(HIDDEN, 2, 4, context, **SIZES, norm_eps=1e-5, negative=True).double()
        load_all(net, seed=3)
        module.load_state_dict(as_theirs({n: p.to_local() for n, p in net.named_parameters()}))  # type: ignore[attr-defined]
        x, target = leaf(draw(TOKENS, HIDDEN, seed=1).double()), draw(TOKENS, HIDDEN, seed=2).double()
        y = net(x, token_layout())
        y.backward(target)
        their_x = leaf(x.detach())
        their_y = module(their_x.view(BATCH, LENGTH, HIDDEN)).flatten(0, 1)
        their_y.backward(target)
        assert error(y, their_y) <= 1e-9 and x.grad is not None and error(x.grad, their_x.grad) <= 1e-9
        found = as_theirs({name: gradient(p) for name, p in net.named_parameters()})
    their = {name: p.grad for name, p in module.named_parameters()}
    assert found.keys() == their.keys()
    for name, got in found.items():
        assert error(got, their[name]) <= 1e-9, name
        assert got.norm() > 1e-6, f"{name} says nothing"


def test_packed_documents_are_separate_ones() -> None:
    documents = torch.tensor([[0, 0, 1, 2, 2, 2, 2, 2, 2], [0] * 9])
    with fake_context() as context:
        net = net_of(context).double()
        load_all(net, seed=3)
        x = draw(TOKENS, HIDDEN, seed=1).double()
        packed = net(x, token_layout(documents))
        for start, end in ((0, 2), (2, 3), (3, 9), (9, 18)):
            row = TokenLayout(1, end - start, position_ids=torch.arange(end - start))
            need = DocumentsNeed(4)
            alone = TokenLayout(1, end - start, prepared={need.key: need.prepare(row, lambda: torch.zeros(0))})
            assert error(packed[start:end], net(x[start:end], alone)) <= 1e-12


def results(rank: int, world: int, sp: bool) -> dict[str, torch.Tensor]:
    """Output and gradients, whole, of sum(y * target), in fp64 but for sums of the norm's gradient."""
    mesh = build_context(Layout(tp=world), "cpu").tp
    net = net_of(ParallelContext.of(mesh, sequence_parallel=sp))
    add_adapters(net, ["*"], 2, 3.0)
    net.double().requires_grad_(True)
    load_all(net, seed=3)
    x = leaf(part(draw(TOKENS, HIDDEN, seed=1), mesh, split=sp).double())
    target = draw(TOKENS, HIDDEN, seed=2).double()
    y = net(x, token_layout(torch.tensor([[0] * 4 + [1] * 5, [0] * 9])))
    y.backward(part(target, mesh, split=sp))
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad} | {name: gradient(p) for name, p in net.named_parameters()}


@pytest.mark.parametrize("sp", [False, True])
def test_every_layout_computes_the_same_and_its_gradients(sp: bool) -> None:
    one, ranks = run_distributed(results, 1, False)[0], run_distributed(results, 2, sp)
    names = [name.removesuffix(".lora.a") for name in one if name.endswith(".lora.a")]
    assert sorted(names) == sorted(["query", "key", "value", "gate", "beta", "decay", "output"])
    for name, want in one.items():
        for rank, got in enumerate(ranks):
            mine = want.chunk(2)[rank] if sp and name in ("y", "dx") else want
            assert error(got[name], mine) <= 1e-6, name
            assert want.abs().max() > 1e-3, f"{name} says nothing"


def test_ranks_that_do_not_divide_the_heads_are_an_error() -> None:
    with fake_context(Layout(tp=4)) as context, pytest.raises(ValueError, match="4 heads on 2 of keys do not split"):
        net_of(context.tp)
    with fake_context() as context, pytest.raises(ValueError, match="4 heads on 3 of keys"):
        net_of(context.tp, 3)
