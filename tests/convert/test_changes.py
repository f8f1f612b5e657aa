"""Every setting of a model, classified by building: whether weights fit a model that has another value of it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import nn

from smp.checkpoint import collect_logical_rows
from smp.config import ConfigError, ModelConfig, resolve_model
from smp.config.command_line.fields import flag_of
from smp.convert.changes import changes, changes_of_files, fits, misfit, saved_model
from smp.convert.huggingface.config import FREE
from smp.models.build import new_model
from tests.fake_group import fake_context

PLAIN: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "vocab_size": 50, "ffn_hidden_size": 48}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 16}
SHARED = EXPERTS | {"moe_shared_expert_intermediate_size": 16}
SIGMOID = EXPERTS | {"moe_router_score_function": "sigmoid"}
GROUPS = EXPERTS | {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
CAPACITY = EXPERTS | {"moe_expert_capacity_factor": 1.0}
LATENT = {"multi_latent_attention": True, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_head_dim": 8, "v_head_dim": 8}
LATENT |= {"qk_pos_emb_head_dim": 4}
DSA: dict[str, Any] = LATENT | {"experimental_attention_variant": "dsa", "dsa_indexer_head_dim": 8}
LINEAR: dict[str, Any] = {"linear_attention_type": "gated_delta_net", "linear_num_key_heads": 2}
LINEAR |= {"linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5}
MAMBA: dict[str, Any] = {"linear_attention_type": "mamba2", "mamba_num_heads": 4, "mamba_num_groups": 2}
MAMBA |= {"mamba_head_dim": 6, "mamba_state_dim": 5}
YARN = {"use_rope_scaling": True, "rope_scaling_type": "yarn"}
DYNAMIC = {"use_rope_scaling": True, "rope_scaling_type": "dynamic"}
FACTORS = {"longrope_short_factor": "1 1 1 1", "longrope_long_factor": "2 2 2 2", "rope_original_max_position": 64}
LONG = {"use_rope_scaling": True, "rope_scaling_type": "longrope"} | FACTORS
WINDOW, NO_ROPE = {"window_size": 8}, {"no_rope_freq": "2"}
PLAIN_MLP, QUICK = {"swiglu": False}, {"swiglu": False, "quick_geglu": True}
LEARNED = {"position_embedding_type": "learned_absolute"}

# name of a setting: (what else the model has, the other value, or all that has to change with it).
OTHER: dict[str, list[tuple[dict[str, Any], Any]]] = {
    "model": [({}, "llama3-8b")],
    "model_implementation": [({}, "smp")],
    "model_config": [({}, "config.json")],
    "num_layers": [({}, 3)],
    "layer_types": [({}, "attention")],
    "hidden_size": [({}, 64)],
    "ffn_hidden_size": [({}, 64), (EXPERTS, 64)],
    "num_attention_heads": [({"kv_channels": 8}, 2), ({}, 2)],
    "num_query_groups": [({}, 2)],
    "kv_channels": [({}, 16)],
    "max_position_embeddings": [({}, 4096), (LEARNED, 4096), (LONG, 4096), ({"attention_chunk_size": 2048}, 4096)],
    "vocab_size": [({}, 51)],
    "make_vocab_size_divisible_by": [({}, 64)],
    "position_embedding_type": [({}, "none"), ({}, "alibi"), ({}, "learned_absolute")],
    "position_embedding_offset": [(LEARNED, 2)],
    "rotary_base": [({}, 500000.0)],
    "rotary_percent": [({}, 0.5)],
    "rotary_interleaved": [({}, True)],
    "no_rope_freq": [({}, "2"), (NO_ROPE, "[0,1]")],
    "attn_temperature_tuning": [(NO_ROPE, True)],
    "attn_scale": [(NO_ROPE | {"attn_temperature_tuning": True}, 0.2)],
    "floor_scale": [(NO_ROPE | {"attn_temperature_tuning": True}, 64)],
    "rotary_base_local": [(WINDOW, 5000.0)],
    "use_rope_scaling": [({}, True)],
    "rope_scaling_type": [({"use_rope_scaling": True}, "yarn"), ({"use_rope_scaling": True}, "linear")],
    "rope_scaling_factor": [(YARN, 4.0), (DYNAMIC, 4.0)],
    "rope_low_freq_factor": [({"use_rope_scaling": True}, 2.0)],
    "rope_high_freq_factor": [({"use_rope_scaling": True}, 8.0)],
    "rope_original_max_position": [(YARN, 64), (DYNAMIC, 64)],
    "longrope_short_factor": [(LONG, "2 2 2 2")],
    "longrope_long_factor": [(LONG, "3 3 3 3")],
    "longrope_attention_factor": [(LONG, 1.5)],
    "yarn_beta_fast": [(YARN, 16.0)],
    "yarn_beta_slow": [(YARN, 2.0)],
    "yarn_truncate": [(YARN, False)],
    "yarn_attention_factor": [(YARN, 1.5)],
    "yarn_mscale": [(YARN | {"yarn_mscale": 0.5, "yarn_mscale_all_dim": 1.0}, 0.7)],
    "yarn_mscale_all_dim": [(YARN | {"yarn_mscale": 0.5, "yarn_mscale_all_dim": 1.0}, 0.7)],
    "normalization": [({"layernorm_bias": True}, "LayerNorm")],
    "norm_epsilon": [({}, 1e-6)],
    "apply_layernorm_1p": [({}, True)],
    "layernorm_bias": [({"normalization": "LayerNorm"}, False)],
    "norm_placement": [({}, "post"), ({}, "sandwich")],
    "embedding_layernorm": [({}, True)],
    "swiglu": [({}, False)],
    "geglu": [(PLAIN_MLP, True)],
    "quick_geglu": [(PLAIN_MLP, True), ({"swiglu": False, "geglu": True}, {"quick_geglu": True, "geglu": False})],
    "activation_func_clamp_value": [(QUICK, 7.0)],
    "glu_linear_offset": [(QUICK, 1.0)],
    "relu": [(PLAIN_MLP, True)],
    "squared_relu": [(PLAIN_MLP, True)],
    "tanh_gelu": [(PLAIN_MLP, True)],
    "untie_embeddings_and_output_weights": [({}, False)],
    "scalar_head": [({}, True)],
    "disable_bias_linear": [({}, False)],
    "add_qkv_bias": [({}, True)],
    "add_attention_output_bias": [({}, True)],
    "add_mlp_bias": [({}, True), (EXPERTS, True)],
    "qk_layernorm": [({}, True)],
    "qk_layernorm_across_heads": [({"qk_layernorm": True}, True)],
    "qk_l2_norm": [({}, True)],
    "multi_latent_attention": [({}, True)],
    "q_lora_rank": [(LATENT, 16), (LATENT, None)],
    "kv_lora_rank": [(LATENT, 16)],
    "qk_head_dim": [(LATENT, 16)],
    "qk_pos_emb_head_dim": [(LATENT, 8)],
    "v_head_dim": [(LATENT, 16)],
    "latent_norm_epsilon": [(LATENT | {"qk_layernorm": True}, 0.1)],
    "experimental_attention_variant": [(LATENT, "dsa")],
    "dsa_indexer_n_heads": [(DSA, 4)],
    "dsa_indexer_head_dim": [(DSA, 6)],
    "dsa_indexer_topk": [(DSA, 16)],
    "dsa_indexer_rope_interleaved": [(DSA, True)],
    "dsa_indexer_loss_coeff": [(DSA, 0.0)],
    "dsa_indexer_use_sparse_loss": [(DSA, True)],
    "dsa_indexer_warmup": [(DSA, True)],
    "attention_output_gate": [({}, True)],
    "linear_attention_type": [({}, LINEAR)],
    "linear_attention_freq": [(LINEAR, "2"), (LINEAR | {"linear_attention_freq": "2"}, "[1,0]")],
    "linear_conv_kernel_dim": [(LINEAR, 3)],
    "linear_key_head_dim": [(LINEAR, 4)],
    "linear_allow_neg_eigval": [(LINEAR, True)],
    "linear_norm_epsilon": [(LINEAR, 0.1)],
    "linear_norm_placement": [(LINEAR | {"linear_attention_freq": "2"}, "post")],
    "linear_value_head_dim": [(LINEAR, 4)],
    "linear_num_key_heads": [(LINEAR, 4)],
    "linear_num_value_heads": [(LINEAR, 8)],
    "linear_attention_parallel": [(MAMBA, True), (LINEAR, True)],
    "attention_out_multiplier": [(MAMBA | {"linear_attention_parallel": True}, 0.5)],
    "ssm_out_multiplier": [(MAMBA | {"linear_attention_parallel": True}, 0.5)],
    "mamba_rms_norm": [(MAMBA, False)],
    "ssm_multipliers": [(MAMBA, "1 1 1 1 2")],
    "mlp_multipliers": [({}, "1 2")],
    "hybrid_layer_pattern": [({}, "*-")],
    "mamba_state_dim": [(MAMBA, 4)],
    "mamba_head_dim": [(MAMBA, 4)],
    "mamba_num_groups": [(MAMBA, 4)],
    "mamba_num_heads": [(MAMBA, 8)],
    "mamba_dt_min": [(MAMBA, 0.1)],
    "mamba_dt_max": [(MAMBA, 0.5)],
    "window_size": [({}, 8), (WINDOW, 16)],
    "window_attn_skip_freq": [(WINDOW, "2")],
    "attention_chunk_size": [({}, 8)],
    "softmax_scale": [({}, 0.5)],
    "softmax_type": [({}, "learnable")],
    "attn_logit_softcapping": [({}, 30.0)],
    "final_logit_softcapping": [({}, 30.0)],
    "logit_scale": [({}, 0.5)],
    "embedding_multiplier": [({}, 2.0)],
    "residual_multiplier": [({}, 0.5)],
    "num_experts": [({}, 4), (EXPERTS, 8)],
    "moe_router_topk": [(EXPERTS, 3)],
    "moe_ffn_hidden_size": [(EXPERTS, 24)],
    "moe_shared_expert_intermediate_size": [(EXPERTS, 16)],
    "moe_layer_freq": [(EXPERTS, "2"), (EXPERTS | {"moe_layer_freq": "2"}, "[1,0]")],
    "moe_router_score_function": [(EXPERTS, "sigmoid")],
    "moe_router_pre_softmax": [(EXPERTS, True)],
    "moe_router_topk_scaling_factor": [(EXPERTS, 2.5)],
    "moe_apply_probs_on_input": [(SIGMOID | {"moe_router_topk": 1}, True)],
    "moe_router_num_groups": [
        (EXPERTS | {"num_experts": 8, "moe_router_num_groups": 2, "moe_router_group_topk": 1}, 4)
    ],
    "moe_router_group_topk": [(GROUPS, 2)],
    "moe_router_group_score": [(GROUPS, "max")],
    "moe_router_enable_expert_bias": [(SIGMOID, True)],
    "moe_router_bias_update_rate": [(SIGMOID | {"moe_router_enable_expert_bias": True}, 0.01)],
    "moe_shared_expert_gate": [(SHARED, True)],
    "moe_router_load_balancing_type": [(EXPERTS | {"moe_aux_loss_coeff": 0.1}, "seq_aux_loss"), (EXPERTS, "sinkhorn")],
    "moe_aux_loss_coeff": [(EXPERTS, 0.1)],
    "moe_z_loss_coeff": [(EXPERTS, 0.1)],
    "moe_expert_capacity_factor": [(EXPERTS, 1.0)],
    "moe_token_drop_policy": [(CAPACITY, "position")],
    "moe_pad_expert_input_to_capacity": [(CAPACITY, True)],
    "mtp_num_layers": [({}, 1), ({"mtp_num_layers": 2}, 1)],
    "mtp_loss_scaling_factor": [({"mtp_num_layers": 1}, 0.3)],
    "parallel_residual": [({}, True)],
    "parallel_residual_shared_norm": [({"parallel_residual": True}, True)],
    "init_method_std": [({}, 0.1)],
    "hidden_dropout": [({}, 0.1)],
    "attention_dropout": [({}, 0.1)],
}
UNSAID = {"model", "model_implementation", "model_config", "init_method_std", "make_vocab_size_divisible_by"}
"""They mean nothing where weights are read."""
SAME = {
    ("layer_types", 0),
    ("linear_attention_freq", 1),
    ("ffn_hidden_size", 1),
    ("no_rope_freq", 1),
    ("moe_layer_freq", 1),
}
"""Other words for the same model."""


def pair(name: str, given: dict[str, Any], value: Any) -> tuple[ModelConfig, ModelConfig]:
    base, other = PLAIN | given, value if isinstance(value, dict) else {name: value}
    return resolve_model(ModelConfig(**base)), resolve_model(ModelConfig(**base | other))


CASES = [(name, number) for name, values in OTHER.items() for number in range(len(values))]
PAIRS = {(name, number): pair(name, *OTHER[name][number]) for name, number in CASES}


def built(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Everything a checkpoint has of the model, without the vocabulary's padding."""
    rows = collect_logical_rows(model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (rows.get(f"model.{name}", t.shape[0]), *t.shape[1:]) for name, t in tensors.items()}


def test_there_is_a_case_for_every_setting() -> None:
    own = {field.name for field in fields(ModelConfig)} - {"transformers_config"}  # of another implementation
    assert OTHER.keys() == own


def test_what_the_inventory_says_is_what_building_says() -> None:
    """All cases, and every pair of models that the cases have between them."""
    with fake_context() as context:
        made = {case: [built(new_model(model, context)) for model in both] for case, both in PAIRS.items()}
    for (name, number), (one, other) in made.items():
        trained, asked = PAIRS[name, number]
        assert fits(trained, asked) == (one == other), (name, number)
        # The setting that changed is the one that is named.
        blamed = misfit(trained, asked)
        assert blamed is None if one == other else blamed == name, (name, number)
    # Both kinds, or this would compare nothing.
    kept = {case for case, (one, other) in made.items() if one == other}
    assert len(kept) > 60 and len(made) - len(kept) > 30
    plain = {case: both[0] for case, both in made.items()}
    models = list(PAIRS.items())
    for case, (trained, _) in models:
        assert [c for c, (m, _) in models if fits(trained, m)] == [c for c in plain if plain[c] == plain[case]], case


def test_what_changes_no_tensor_is_said_by_its_flag() -> None:
    for (name, number), (trained, asked) in PAIRS.items():
        said = [part.split(" ")[0] for part in changes(trained, asked).split(", ")]
        if name in UNSAID or (name, number) in SAME:
            assert said == [""], (name, number)
        elif misfit(trained, asked) is None:
            assert flag_of(name) in said and all(flag.startswith("--") for flag in said), (name, number)
        assert changes(trained, trained) == ""
        # What another program's file cannot know is not held against it.
        free = name in FREE or name in UNSAID or (name, number) in SAME
        assert (changes_of_files(trained, asked) == "") == free, (name, number)


def test_the_line_reads_well() -> None:
    trained = resolve_model(ModelConfig(**PLAIN))
    longer = replace(trained, rotary_base=500000.0, max_position_embeddings=8192, hidden_dropout=0.1, window_size=64)
    assert changes(trained, longer) == (
        "--max-position-embeddings 2048 -> 8192, --rotary-base 10000 -> 500000, --window-size none -> 64, "
        "--hidden-dropout 0 -> 0.1"
    )


def test_a_setting_that_brings_others_is_the_one_that_is_named() -> None:
    trained = resolve_model(ModelConfig(**PLAIN))
    for given, name in (
        ({"num_layers": 3, "model": "x", "rotary_base": 5.0}, "num_layers"),
        ({"rotary_base": 5.0, "multi_latent_attention": True, "kv_lora_rank": 8}, "multi_latent_attention"),
        ({"window_size": 4, "window_attn_skip_freq": "[1,0,1]", "num_layers": 3}, "num_layers"),
    ):
        assert misfit(trained, resolve_model(ModelConfig(**PLAIN | given))) == name


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_layers": "2"}, "is not a value of this setting"),
        ({"hidden_size": [64]}, "is not a value of this setting"),
        ({"rotary_base": float("nan")}, "is not a value of this setting"),
        ({"num_query_groups": 3}, "--num-query-groups"),
    ],
)
def test_settings_of_no_model_are_one_line(change: dict[str, Any], why: str) -> None:
    saved = vars(resolve_model(ModelConfig(**PLAIN)))
    assert saved_model(saved, "there") == ModelConfig(**saved)
    with pytest.raises(ConfigError, match=why) as error:
        saved_model(saved | change, "there")
    assert str(error.value).startswith("there: ") and "\n" not in str(error.value)


def test_no_tensor_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked on a login node, of models of any size."""
    monkeypatch.setattr(torch, "empty", None)
    big = resolve_model(ModelConfig(num_layers=126, hidden_size=16384, num_attention_heads=128, vocab_size=128256))
    assert misfit(big, replace(big, rotary_base=5e5)) is None and misfit(big, replace(big, num_layers=127))
