"""Attention and Mamba-2 in one layer against transformers' Falcon-H1 in fp64, and on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smp.config import Layout, ModelConfig, resolve_model
from smp.config.layers import layer_specs
from smp.kernels import TORCH
from smp.layers import ParallelMixers, add_adapters
from smp.layers.block import TransformerBlock
from smp.layers.parallel_mixers import mixers_of
from smp.models.build_layers import Build
from smp.models.micro_batch import MicroBatch
from smp.models.tokens import TokenPreparation
from smp.parallel.context import ParallelContext, build_context
from tests.distributed import run_distributed
from tests.fake_group import fake_context
from tests.layers.test_mamba import as_theirs
from tests.layers.whole import draw, error, gradient, leaf, load_all, part

BATCH, LENGTH, HIDDEN = 2, 9, 12
TOKENS = BATCH * LENGTH
SIZES: dict[str, Any] = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, "num_query_groups": 2}
SIZES |= {"kv_channels": 6, "ffn_hidden_size": 20, "vocab_size": 50, "norm_epsilon": 1e-3}
SIZES |= {"linear_attention_type": "mamba2", "linear_attention_parallel": True, "mamba_num_heads": 4}
SIZES |= {"mamba_num_groups": 2, "mamba_head_dim": 6, "mamba_state_dim": 5}
FACTORS: dict[str, Any] = {"softmax_scale": 6**-0.5 * 0.7 * 1.3**2, "attention_out_multiplier": 1.3 * 0.6}
FACTORS |= {"ssm_out_multiplier": 0.8, "mlp_multipliers": "1.4 0.6"}
# Numbers of a few bits: transformers keeps these in fp32.
FACTORS |= {"ssm_multipliers": " ".join(str(1.2 * x) for x in (0.75, 1.5, 1.25, 0.875, 2.0))}


def block_of(context: Any, **settings: Any) -> TransformerBlock:
    model = resolve_model(ModelConfig(**SIZES | settings))
    return Build.of(model, ParallelContext.of(context), TORCH).block(layer_specs(model)[0])


def run(block: TransformerBlock, x: torch.Tensor, context: Any, documents: torch.Tensor | None = None) -> torch.Tensor:
    """The block on sequences of ``LENGTH`` tokens."""
    context = ParallelContext.of(context)
    sharing: dict[str, Any] = {"sequence_parallel": context.sequence_parallel, "seed": 0, "num_layers": 1}
    made = TokenPreparation(mixers_of(block.attention), TORCH.attention, context.tp_group, drops=False, **sharing)
    places = None
    if documents is not None:
        first = torch.where(documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0, torch.arange(LENGTH), 0)
        places = torch.arange(LENGTH) - first.cummax(1).values
    batch = MicroBatch(torch.zeros(BATCH, LENGTH, dtype=torch.int64), position_ids=places, document_ids=documents)
    y = block(x, made.prepared(made.of(batch, True), x).layout)
    assert isinstance(y, torch.Tensor)
    return y


def theirs(has_norm: bool) -> Any:
    modeling = pytest.importorskip("transformers.models.falcon_h1.modeling_falcon_h1")
    from transformers import FalconH1Config

    config = FalconH1Config(
        **{"vocab_size": 50, "hidden_size": HIDDEN, "intermediate_size": 20, "num_hidden_layers": 1},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": 1e-3},
        **{"mamba_d_ssm": 24, "mamba_n_heads": 4, "mamba_d_head": 6, "mamba_n_groups": 2, "mamba_d_state": 5},
        **{"mamba_chunk_size": 4, "mamba_rms_norm": has_norm, "mamba_norm_before_gate": False},
        **{"key_multiplier": 0.7, "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.6},
        **{"ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8, "ssm_multipliers": [0.75, 1.5, 1.25, 0.875, 2.0]},
        mlp_multipliers=[1.4, 0.6],
    )
    config._attn_implementation = "eager"
    return modeling.FalconH1Model(config).double().layers[0].eval()


def of_their_layer(tensors: dict[str, torch.Tensor], has_norm: bool) -> dict[str, torch.Tensor]:
    """By their names."""
    mamba = {name.removeprefix("attention.recurrence."): tensor for name, tensor in tensors.items()}
    mamba = as_theirs(mamba if has_norm else mamba | {"norm.weight": torch.zeros(0)})
    if not has_norm:
        del mamba["norm.weight"]
    parts = {"query": "q", "key": "k", "value": "v", "output": "o"}
    return {
        **{f"mamba.{name}": tensor for name, tensor in mamba.items()},
        **{f"self_attn.{to}_proj.weight": tensors[f"attention.attention.{own}.weight"] for own, to in parts.items()},
        **{f"feed_forward.{own}_proj.weight": tensors[f"mlp.{own}.weight"] for own in ("gate", "up", "down")},
        "input_layernorm.weight": tensors["attention_norm.weight"],
        "pre_ff_layernorm.weight": tensors["mlp_norm.weight"],
    }


@pytest.mark.parametrize("has_norm", [False, True])
def test_it_is_transformers_falcon_h1(has_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's output and every gradient, in fp64: theirs casts to fp32 inside, which is left out for this. Without
    RoPE, whose tables are fp32 in both."""
    layer = theirs(has_norm)
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    with fake_context() as context:
        block = block_of(context, **FACTORS, mamba_rms_norm=has_norm, position_embedding_type="none").double()
        load_all(block, seed=3)
        layer.load_state_dict(of_their_layer({n: p.to_local() for n, p in block.named_parameters()}, has_norm))  # type: ignore[attr-defined]
        x, target = leaf(draw(TOKENS, HIDDEN, seed=1).double()), draw(TOKENS, HIDDEN, seed=2).double()
        y = run(block, x, context)
        y.backward(target)
        their_x = leaf(x.detach())
        mask = torch.full((1, 1, LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)
        still = torch.ones(1, LENGTH, 6).double(), torch.zeros(1, LENGTH, 6).double()
        their_y = layer(their_x.view(BATCH, LENGTH, HIDDEN), attention_mask=mask, position_embeddings=still)[0]
        their_y.flatten(0, 1).backward(target)
        assert error(y, their_y.flatten(0, 1)) <= 1e-9
        assert x.grad is not None and error(x.grad, their_x.grad) <= 1e-9
        found = of_their_layer({name: gradient(p) for name, p in block.named_parameters()}, has_norm)
    their = {name: p.grad for name, p in layer.named_parameters()}
    assert found.keys() == their.keys()
    for name, got in found.items():
        assert error(got, their[name]) <= 1e-9, name
        assert got.norm() > 1e-6, f"{name} says nothing"


def results(rank: int, world: int, sp: bool) -> dict[str, torch.Tensor]:
    """Output and gradients, whole, of sum(y * target), in fp64, with adapters on all projections."""
    context = ParallelContext.of(build_context(Layout(tp=world), "cpu").tp, sequence_parallel=sp)
    block = block_of(context, **FACTORS)
    add_adapters(block, ["*"], 2, 3.0)
    block.double().requires_grad_(True)
    load_all(block, seed=3)
    x = leaf(part(draw(TOKENS, HIDDEN, seed=1), context.tp, split=sp).double())
    target = draw(TOKENS, HIDDEN, seed=2).double()
    y = run(block, x, context, torch.tensor([[0] * 4 + [1] * 5, [0] * 9]))
    y.backward(part(target, context.tp, split=sp))
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad} | {name: gradient(p) for name, p in block.named_parameters()}


def test_every_layout_computes_the_same_and_its_gradients() -> None:
    one = run_distributed(results, 1, False)[0]
    assert {name.split(".")[1] for name in one if name.endswith("query.lora.a")} == {"attention", "recurrence"}
    for sp in (False, True):
        for rank, got in enumerate(run_distributed(results, 2, sp)):
            for name, want in one.items():
                mine = want.chunk(2)[rank] if sp and name in ("y", "dx") else want
                assert error(got[name], mine) <= 1e-6, name
                assert want.abs().max() > 1e-4, f"{name} says nothing"


def test_mixers_that_cannot_share_a_layer() -> None:
    with fake_context() as context:
        mixer = block_of(context).attention
        assert isinstance(mixer, ParallelMixers)
        first, second = mixer.mixers
        second.sequence_parallel = not first.sequence_parallel
        with pytest.raises(ValueError, match="differ in sequence_parallel"):
            ParallelMixers({"one": first, "other": second}, (1.0, 1.0))
        second.sequence_parallel, second.measures = first.sequence_parallel, True  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="other: a mixer with a loss of its own is alone"):
            ParallelMixers({"one": first, "other": second}, (1.0, 1.0))
