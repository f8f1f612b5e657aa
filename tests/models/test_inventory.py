"""The inventory against the model that is built: names, shapes, placements, linear layers, for every named size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch.distributed.tensor import DTensor, Replicate, Shard

from smp.checkpoint import collect_logical_rows
from smp.config import Layout, ModelConfig, resolve_model
from smp.config.rules.finetune import ALL_LINEAR
from smp.layers.adapters.lora import choose
from smp.layers.linear import linear_layers
from smp.models.gpt import GPT
from smp.models.inventory import inventory
from smp.models.part import ModelPart
from smp.models.presets import PRESETS
from tests.fake_group import fake_context


def shrunk(name: str, **changes: object) -> ModelConfig:
    """The named size with all its switches and small numbers; where it groups heads, fewer groups than 4 ranks."""
    model = ModelConfig(**PRESETS[name])
    grouped = model.num_query_groups != model.num_attention_heads
    small = {
        "num_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 8,
        "num_query_groups": 2 if grouped else 8,
        "kv_channels": (6 if model.rotary_percent == 1 else 8) if model.kv_channels else None,
        "ffn_hidden_size": 48,
        "max_position_embeddings": 16,
        "vocab_size": 301,
    }
    if model.multi_latent_attention:
        small |= {"kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5}
        small["q_lora_rank"] = None if model.q_lora_rank is None else 14
    if model.moe_layer_freq.startswith("["):
        small["moe_layer_freq"] = "[0]*1+[1]*2"
    if model.hybrid_layer_pattern is not None:
        small["hybrid_layer_pattern"] = (
            "M*E" if model.num_experts else "M*-" if "*" in model.hybrid_layer_pattern else "MMM"
        )
    if model.mamba_num_heads is not None:
        small |= {"mamba_num_heads": 8, "mamba_head_dim": 6, "mamba_state_dim": 5, "num_query_groups": 8}
        small["mamba_num_groups"] = 1 if model.mamba_num_groups == 1 else 4
    if model.hybrid_layer_pattern is not None and "*" not in model.hybrid_layer_pattern:
        small["ffn_hidden_size"] = None
    if model.linear_attention_type in ("kda", "gated_delta_net"):
        small |= {"linear_num_key_heads": 4, "linear_num_value_heads": 4 if model.linear_attention_type == "kda" else 8}
        small |= {"linear_key_head_dim": 6, "linear_value_head_dim": 6}
    if model.linear_attention_freq is not None:
        small["linear_attention_freq"] = "3"  # the last of these layers has attention
    return resolve_model(replace(model, **(small | changes)))  # type: ignore[arg-type]


MODELS = {name: shrunk(name) for name in PRESETS} | {
    "parallel residual, LayerNorm, biases, untied": shrunk(
        "debug", parallel_residual=True, normalization="LayerNorm", disable_bias_linear=False, swiglu=False
    ),
    "norms over all heads": shrunk("debug", num_query_groups=8, qk_layernorm=True, qk_layernorm_across_heads=True),
    "a bias everywhere, norms of queries and keys": shrunk("debug", disable_bias_linear=False, qk_layernorm=True),
    "no positions, one key/value head": shrunk("gpt2", position_embedding_type="none", num_query_groups=1),
    "multi-token prediction": shrunk("debug", mtp_num_layers=2),
    "a vocabulary that is padded to other sizes": shrunk("gpt2", make_vocab_size_divisible_by=7),
}
EXPERTS = {
    "experts": shrunk("llama3-8b", num_experts=4, moe_ffn_hidden_size=16),
    "experts in some layers, and a shared one": shrunk(
        "debug", num_experts=8, moe_shared_expert_intermediate_size=24, moe_layer_freq="[0]+[1]*2"
    ),
    "experts with biases, and sinks": shrunk("gpt-oss-20b", num_experts=8, moe_ffn_hidden_size=16),
}
MODELS |= EXPERTS
LAYOUTS_OF_EXPERTS = [
    Layout(dp_shard=4, ep=4),
    Layout(dp_shard=2, ep=2, tp=4),
    Layout(dp_shard=2, ep=4, tp=2, etp=1),
    Layout(tp=4, etp=2),
]
PARTS = ([ModelPart(0, 1, embedding=True)], [ModelPart(1, 1)], [ModelPart(2, 1, head=True)])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_built_model_is_the_inventory(tp: int) -> None:
    with fake_context(Layout(tp=tp)) as context:
        for name, config in MODELS.items():
            assert _built(GPT(config, context.tp)) == _described(config, tp), name


def test_adapters_go_on_every_linear_layer_by_default() -> None:
    with fake_context(Layout()) as context:
        for name, config in MODELS.items():
            if config.mtp_num_layers is not None:  # fine-tuning leaves those layers out
                continue
            model = GPT(config, context)
            chosen = {layer for layers in choose(model, ALL_LINEAR.split(",")).values() for layer in layers}
            assert chosen == linear_layers(model).keys(), name


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "multi-token prediction"])
def test_a_part_that_is_built_is_that_part_of_the_inventory(name: str) -> None:
    config = MODELS[name]
    with fake_context(Layout(tp=2)) as context:
        for parts in (*PARTS, [*PARTS[0], *PARTS[2]]):
            assert _built(GPT(config, context.tp, parts=parts)) == _described(config, 2, parts), str(parts)


def test_fewer_key_value_heads_than_ranks_are_replicated() -> None:
    layouts = (Layout(tp=2), Layout(tp=4))
    placed = {p.name: [p.placement(layout) for layout in layouts] for p in inventory(MODELS["qwen2.5-7b"])}
    assert placed["layers.0.attention.query.weight"] == placed["layers.0.attention.query.bias"] == [0, 0]
    assert placed["layers.0.attention.key.weight"] == placed["layers.0.attention.value.bias"] == [0, None]


@pytest.mark.parametrize("layout", LAYOUTS_OF_EXPERTS, ids=str)
def test_experts_are_spread_as_the_inventory_says(layout: Layout) -> None:
    with fake_context(layout) as context:
        for config in EXPERTS.values():
            model = GPT(config, context)
            for p in inventory(config):
                built = model.get_parameter(p.name)
                assert isinstance(built, DTensor) and tuple(built.shape[1:]) == p.shape[1:]
                assert tuple(built.to_local().shape) == p.local_shape(layout), p.name
                spread = built.device_mesh.mesh_dim_names == ("ep", "tp")
                assert spread == (p.chosen is not None)


Described = dict[str, tuple[tuple[int, ...], tuple[int, ...], Shard | Replicate, str, bool]]


def _described(config: ModelConfig, tp: int, parts: Sequence[ModelPart] | None = None) -> Described:
    """Name -> global shape, shape on a rank, placement, dimension of the mesh, whether it can have an adapter."""
    layout = Layout(tp=tp)
    found = list(inventory(config, parts))
    assert len({p.name for p in found}) == len(found)
    dims = {p.name: p.placement(layout) for p in found}
    placements = {name: Replicate() if dim is None else Shard(dim) for name, dim in dims.items()}
    return {p.name: (p.shape, p.local_shape(layout), placements[p.name], p.group, p.linear) for p in found}


def _built(model: GPT) -> Described:
    rows, linear = collect_logical_rows(model), linear_layers(model)
    out: Described = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names is not None
        shape = (rows.get(f"model.{name}", parameter.shape[0]), *parameter.shape[1:])
        module, _, kind = name.rpartition(".")
        (placement,), (group,) = parameter.placements, parameter.device_mesh.mesh_dim_names
        assert isinstance(placement, (Shard, Replicate))
        out[name] = (shape, tuple(parameter.to_local().shape), placement, group, kind == "weight" and module in linear)
    return out
