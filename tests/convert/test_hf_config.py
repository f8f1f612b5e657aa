"""config.json to settings and back, without weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from smp.config import ConfigError
from smp.config.layers import layer_specs
from smp.convert.huggingface.config import architecture, from_hf, resolved, to_hf
from smp.convert.huggingface.text_part import text_config
from smp.models.presets import PRESETS

NAMED = {name: preset for name, preset in PRESETS.items() if "vocab_size" in preset}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
SCALING = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
QWEN = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 128}


@pytest.mark.parametrize("name", NAMED)
def test_named_sizes_there_and_back(name: str) -> None:
    config = resolved(**NAMED[name])
    content = to_hf(config, "bfloat16")
    assert architecture(from_hf(content)) == architecture(config)
    family = {
        "gpt-oss": "GptOss",
        "qwen3-30b": "Qwen3Moe",
        "qwen3-235b": "Qwen3Moe",
        "gpt": "GPT2LMHeadModel",
        "lla": "Llama",
        "mis": "Mistral",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
    }
    family |= {"mix": "Mixtral", "qwen1.5-moe": "Qwen2Moe", "olmoe": "Olmoe", "glm-4.5": "Glm4Moe"}
    family |= {"gemma-2": "Gemma2", "gemma-3": "Gemma3", "olmo-2": "Olmo2", "phi-3": "Mistral", "phi-4": "Llama"}
    family |= {"granite": "Granite", "command-r-": "Cohere", "command-r7b": "Cohere2", "smollm3": "SmolLM3"}
    family |= {"starcoder2": "Starcoder2", "glm-4-9b-0414": "Glm4", "glm": "Glm", "falcon": "Falcon"}
    family |= {"opt": "OPT", "bloom": "Bloom"}
    family = {
        "deepseek-v3.2": "DeepseekV32",
        "glm-5": "GlmMoeDsa",
        "llama4": "Llama4",
        "qwen3-next": "Qwen3Next",
        "granite-4.0-h": "GraniteMoeHybrid",
    } | family
    family |= {"mamba": "Mamba2", "nemotron": "NemotronH", "kimi-linear": "KimiLinear"}
    family = {"falcon-h1": "FalconH1"} | family | {"olmo-hybrid": "OlmoHybrid"}
    family |= {"deepseek-v2": "DeepseekV2", "deepseek-v3": "DeepseekV3"}
    expected = next(value for key, value in family.items() if name.startswith(key))
    assert content["architectures"][0] == expected.removesuffix("LMHeadModel") + (
        "LMHeadModel" if expected.startswith("GPT2") else "ForCausalLM"
    )


YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("rope", "settings"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"rope_scaling_type": "linear", "rope_scaling_factor": 4.0}),
        (YARN, {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "rope_original_max_position": 32768}),
        ({**YARN, "factor": None}, {"rope_scaling_factor": 4.0}),
        ({**YARN, "beta_fast": 16, "beta_slow": 2}, {"yarn_beta_fast": 16, "yarn_beta_slow": 2}),
        ({**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}, {"yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.7}),
        ({**YARN, "mscale": 1.0, "mscale_all_dim": 0}, {"yarn_mscale": None, "yarn_mscale_all_dim": None}),
        ({**YARN, "mscale": 1.0}, {"yarn_mscale": None}),
        ({**YARN, "truncate": False, "attention_factor": 1.5}, {"yarn_truncate": False, "yarn_attention_factor": 1.5}),
    ],
)
@pytest.mark.parametrize("architecture_name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_other_scalings_of_rope_both_ways(
    rope: dict[str, Any], settings: dict[str, Any], architecture_name: str
) -> None:
    config = from_hf(LLAMA | {"architectures": [architecture_name], "rope_scaling": rope})
    assert config.use_rope_scaling
    assert {name: getattr(config, name) for name in settings} == settings
    assert architecture(from_hf(to_hf(config, "float32"))) == architecture(config)


def test_dynamic_rope_counts_from_the_longest_position() -> None:
    """As transformers does: another original length in the file has no effect there."""
    said = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 7}
    config = from_hf(LLAMA | {"rope_scaling": said})
    assert config.rope_original_max_position == config.max_position_embeddings == LLAMA["max_position_embeddings"]
    assert to_hf(config, "float32")["rope_scaling"] == {"rope_type": "dynamic", "factor": 2.0}
    assert architecture(from_hf(to_hf(config, "float32"))) == architecture(config)
    longer = replace(config, max_position_embeddings=2 * config.max_position_embeddings)
    with pytest.raises(ConfigError, match="--rope-original-max-position"):
        to_hf(longer, "float32")


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("mlp", [False, True])
def test_biases_of_attention_and_of_mlps(attention: bool, mlp: bool) -> None:
    config = from_hf(LLAMA | {"attention_bias": attention, "mlp_bias": mlp})
    assert config.disable_bias_linear is not (attention and mlp)
    mixer, feed_forward = layer_specs(config)[0].mixer, layer_specs(config)[0].feed_forward
    assert mixer.bias is mixer.qkv_bias is attention and feed_forward.bias is mlp
    written = to_hf(config, "float32")
    assert (written["attention_bias"], written["mlp_bias"]) == (attention, mlp)
    assert architecture(from_hf(written)) == architecture(config)
    one_by_one = dict.fromkeys(("add_qkv_bias", "add_attention_output_bias", "add_mlp_bias"), True)
    if attention and mlp:
        assert architecture(replace(config, disable_bias_linear=True, **one_by_one)) == architecture(config)


def test_the_original_length_may_be_beside_the_scaling() -> None:
    config = from_hf(LLAMA | {"rope_scaling": {**YARN, "factor": None}, "original_max_position_embeddings": 16384})
    assert (config.rope_original_max_position, config.rope_scaling_factor) == (16384, 8.0)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **SCALING}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **SCALING}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **SCALING}},
    ],
)
def test_every_way_to_write_rope(rope: dict[str, Any]) -> None:
    assert architecture(from_hf(LLAMA | rope)) == architecture(resolved(**PRESETS["llama3.1-8b"]))


def test_what_is_left_out_means_what_it_means_to_transformers() -> None:
    bare = {key: value for key, value in LLAMA.items() if key not in ("rms_norm_eps", "num_key_value_heads")}
    config = from_hf(bare)
    assert (config.norm_epsilon, config.num_query_groups, config.rotary_base) == (1e-6, 32, 10000.0)
    assert from_hf({"model_type": "gpt2"}).hidden_size == 768
    with pytest.raises(ConfigError, match="there: vocab_size is missing"):
        from_hf({key: value for key, value in LLAMA.items() if key != "vocab_size"}, "there")


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"use_sliding_window": False}, None),
        ({"max_window_layers": 0}, 128),
        ({"max_window_layers": 32}, None),
        ({"layer_types": ["sliding_attention"] * 32}, 128),
        ({"layer_types": ["full_attention"] * 32}, None),
    ],
)
def test_windows_in_all_layers_or_none(changes: dict[str, Any], window: int | None) -> None:
    config = from_hf(QWEN | changes)
    assert config.window_size == window
    assert architecture(from_hf(to_hf(config, "float32"))) == architecture(config)


def test_windows_in_some_layers() -> None:
    config = from_hf(QWEN | {"max_window_layers": 16})
    assert [spec.mixer.window for spec in layer_specs(config)] == [None] * 16 + [128] * 16
    written = to_hf(config, "float32")
    assert written["layer_types"] == ["full_attention"] * 16 + ["sliding_attention"] * 16
    assert architecture(from_hf(written)) == architecture(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "there: LlamaForCausalLM with the model_type mistral is a contradiction"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"weights are quantized \(quantization_config, fp8\)"),
        ({"quantization_config": {"quant_method": "awq"}}, r"weights are quantized \(quantization_config, awq\)"),
        ({"rope_theta": "10000"}, "rope_theta '10000' is not a number"),
        ({"rope_theta": None}, "rope_theta None is not a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan is not a number"),
        ({"vocab_size": 10**400}, "vocab_size 1000.* is not an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers True is not an integer"),
        ({"hidden_act": ["silu"]}, r"hidden_act \['silu'\] is not supported"),
        (
            {"rope_scaling": {"rope_type": "llama3", **SCALING, "factor": "8"}},
            "--rope-scaling-factor '8' is not a value",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 without low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "RoPE of type linear without factor"),
        (
            {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}},
            "'ntk' is not supported, only default, llama3, linear, dyna",
        ),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "RoPE of type dynamic without factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 0.5}}, "--rope-scaling-factor 0.5 must be at least 1"),
        ({"attention_bias": "no"}, "attention_bias 'no' is not true or false"),
        ({"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 4}}, "--yarn-beta-fast 1 must be above"),
        ({"rope_scaling": [8.0]}, "RoPE of different kinds"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not a setting of LlamaForCausalLM"),
    ],
)
def test_values_that_cannot_be_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_hf(LLAMA | {"model_type": "llama"} | changes, "there")


@pytest.mark.parametrize("changes", [{"max_window_layers": "all"}, {"layer_types": 5}, {"sliding_window": 1.5}])
def test_windows_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(changes))} .* is not"):
        from_hf(QWEN | changes)


def test_a_fraction_of_a_channel_is_cut_off_as_by_transformers() -> None:
    """int(64 x 0.4) = 25 channels, an odd number; of 64 x 0.26 = 16.64 the 16 are taken."""
    neox = LLAMA | {"architectures": ["GPTNeoXForCausalLM"], "hidden_size": 2048, "rotary_emb_base": 10000}
    assert from_hf(neox | {"rotary_pct": 0.25}).rotary_percent == 0.25
    with pytest.raises(ConfigError, match="rotates 25 channels: RoPE needs an even number"):
        from_hf(neox | {"rotary_pct": 0.4})
    assert from_hf(neox | {"rotary_pct": 0.26}).rotary_channels == 16


def test_names_that_transformers_takes_for_gpt2() -> None:
    config = from_hf({"architectures": ["GPT2LMHeadModel"], "num_attention_heads": 16, "n_embd": 1024})
    assert (config.num_attention_heads, config.kv_channels, config.hidden_size) == (16, 64, 1024)


def test_ids_of_special_tokens_are_never_those_of_another_tokenizer() -> None:
    """What config.json leaves out is what transformers has for the family: 2 ends a text of any Llama."""
    written = to_hf(resolved(**PRESETS["llama3-8b"]), "float32")
    assert [written[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")] == [None, None, None]


def test_a_configuration_that_still_fits_is_kept() -> None:
    base = LLAMA | {"torch_dtype": "bfloat16", "bos_token_id": 128000, "custom": [1]}
    config = from_hf(base)
    assert to_hf(config, "float32", base) == base | {"torch_dtype": "float32"}
    other = resolved(**{**architecture(config), "num_layers": 2})
    written = to_hf(other, "float32", base)
    assert (written["num_hidden_layers"], written["bos_token_id"], "custom" in written) == (2, 128000, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu": False, "squared_relu": True}, "has no .*--squared-relu True"),
        ({"embedding_layernorm": True}, "has no --embedding-layernorm True"),
        ({"parallel_residual": True}, "has no --parallel-residual True"),
        ({"final_logit_softcapping": 30.0}, "has no --final-logit-softcapping 30.0"),
    ],
)
def test_models_that_no_family_computes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"no Hugging Face architecture of the table .* {message}"):
        to_hf(resolved(**{**PRESETS["llama3-8b"], **changes}), "float32")


GLM = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "vocab_size": 9, "hidden_size": 8}
GLM |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob false is not supported with a router of sigmoids"),
        ({"num_experts_per_tok": 1}, "norm_topk_prob true is not supported with a router of sigmoids"),
        ({"n_group": 8, "topk_group": 2}, "topk_group 2 of n_group 8 is not supported with num_experts_per_tok 8"),
        ({"scoring_func": "softmax"}, "a router that scores by 'softmax' is not supported, only 'sigmoid'"),
        ({"n_routed_experts": "many"}, "n_routed_experts 'many' is not an integer"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok 0 is not supported, only 1 and more"),
        ({"num_experts_per_tok": 200}, "--moe-router-topk 200 is above --num-experts 128"),
        ({"first_k_dense_replace": 2}, "leaves no layer with experts"),
    ],
)
def test_a_router_that_there_is_not_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_hf(GLM | more)
    assert message in str(error.value) and "\n" not in str(error.value)


DEEPSEEK = GLM | {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_key_value_heads": 2}
DEEPSEEK |= {"num_experts_per_tok": 3, "q_lora_rank": None, "first_k_dense_replace": 1}
MSCALE = {**YARN, "rope_type": "yarn", "mscale_all_dim": 0.7}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported, only 'greedy'"),
        ({"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05 is not supported, only 1e-06"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"num_key_value_heads": 1}, "--num-query-groups 1: with --multi-latent-attention all 2 heads"),
        ({"qk_rope_head_dim": 7}, "--qk-pos-emb-head-dim 7: RoPE needs an even number"),
        ({"rope_scaling": MSCALE}, "mscale_all_dim is supported with mscale, without attention_factor"),
        ({"rope_scaling": MSCALE | {"mscale": 1.0, "attention_factor": 2.0}}, "mscale_all_dim is supported with"),
    ],
)
def test_latent_attention_that_there_is_not_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_hf(DEEPSEEK | more)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_deepseek_is_said_as_other_programs_read_it() -> None:
    lite, v3 = (to_hf(resolved(**PRESETS[name]), "bfloat16") for name in ("deepseek-v2-lite", "deepseek-v3"))
    assert lite["topk_method"] == "greedy" and lite["q_lora_rank"] is None and lite["model_type"] == "deepseek_v2"
    assert v3["scoring_func"] == "sigmoid" and v3["topk_method"] == "noaux_tc" and v3["n_group"] == 8
    assert v3["rope_scaling"]["mscale_all_dim"] == 1.0 and v3["qk_rope_head_dim"] == 64


def test_one_expert_of_a_router_of_sigmoids_keeps_its_score() -> None:
    """Normalised it would be 1, whatever the score."""
    one = {"num_experts_per_tok": 1, "norm_topk_prob": False}
    model = from_hf(GLM | one)
    assert model.moe_router_topk == 1
    written = to_hf(resolved(**PRESETS["glm-4.5-air"] | {"moe_router_topk": 1}), "float32")
    assert {key: written[key] for key in one} == one


def test_groups_that_are_all_kept_are_none() -> None:
    model = from_hf(GLM | {"n_group": 4, "topk_group": 4})
    assert model.moe_router_num_groups is None and model.moe_layer_freq == "[0,1]" and model.rotary_percent == 0.5


def _published(architecture_name: str, layers: int, hidden: int, heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture_name],
        **{"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": vocab},
        **more,
    }


_LLAMA4: dict[str, Any] = {
    **{"model_type": "llama4_text", "intermediate_size": 8192, "intermediate_size_mlp": 16384, "head_dim": 128},
    **{"num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "attention_bias": False},
    **{"attention_chunk_size": 8192, "attn_temperature_tuning": 4, "floor_scale": 8192, "attn_scale": 0.1},
    **{"no_rope_layers": [], "num_experts_per_tok": 1, "hidden_act": "silu", "tie_word_embeddings": False},
    **{"for_llm_compressor": False, "output_router_logits": False, "router_aux_loss_coef": 0.001},
}
_LOW: dict[str, Any] = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
_LOW |= {"original_max_position_embeddings": 8192}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama4-scout": _published(
        *("Llama4ForCausalLM", 48, 5120, 40, 202048),
        **_LLAMA4,
        **{"max_position_embeddings": 10485760, "num_local_experts": 16, "interleave_moe_layer_step": 1},
        **{"use_qk_norm": True, "rope_scaling": _LOW},
    ),
    "llama4-maverick": text_config(
        {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "vision_config": {}}
        | {
            "text_config": _published(
                *("Llama4ForCausalLM", 48, 5120, 40, 202048),
                **_LLAMA4,
                **{"max_position_embeddings": 1048576, "num_local_experts": 128, "interleave_moe_layer_step": 2},
                **{"use_qk_norm": False, "rope_scaling": None, "architectures": None},
            )
        }
    ),
    "gemma-2-2b": _published(
        *("Gemma2ForCausalLM", 26, 2304, 8, 256000),
        **{"intermediate_size": 9216, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192},
        **{"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096},
        **{"rms_norm_eps": 1e-06, "rope_theta": 10000.0, "attention_bias": False, "cache_implementation": "hybrid"},
    ),
    "gemma-3-1b": _published(
        *("Gemma3ForCausalLM", 26, 1152, 4, 262144),
        **{"model_type": "gemma3_text", "intermediate_size": 6912, "num_key_value_heads": 1, "head_dim": 256},
        **{"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "max_position_embeddings": 32768},
        **{"sliding_window": 512, "sliding_window_pattern": 6, "rope_theta": 1000000, "rope_local_base_freq": 10000},
        **{"rope_scaling": None, "rms_norm_eps": 1e-06, "attn_logit_softcapping": None},
    ),
    "command-r7b": _published(
        *("Cohere2ForCausalLM", 32, 4096, 32, 256000),
        **{"intermediate_size": 14336, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192},
        **{"sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 50000, "logit_scale": 0.25},
        **{"layer_norm_eps": 1e-05, "attention_bias": False, "hidden_act": "silu", "use_parallel_block": True},
    ),
    "falcon-7b": _published(
        *("FalconForCausalLM", 32, 4544, 71, 65024),
        **{"alibi": False, "bias": False, "multi_query": True, "new_decoder_architecture": False},
        **{"parallel_attn": True, "layer_norm_epsilon": 1e-05},
    ),
    "bloom-560m": {
        **{"architectures": ["BloomForCausalLM"], "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16},
        **{"vocab_size": 250880, "layer_norm_epsilon": 1e-05, "seq_length": 2048, "pretraining_tp": 1},
        **{"apply_residual_connection_post_layernorm": False, "offset_alibi": 100},
    },
}
"""config.json as it lies beside the weights, from before transformers 5."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_the_named_sizes(name: str) -> None:
    assert architecture(from_hf(PUBLISHED[name])) == architecture(resolved(**PRESETS[name]))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma-2-2b", {"final_logit_softcapping": 0}, "final_logit_softcapping 0 is not supported, only above 0"),
        ("gemma-2-2b", {"layer_types": ["chunked_attention"] * 26}, "is not one of full_attention, sliding_attention"),
        ("gemma-2-2b", {"query_pre_attn_scalar": "256"}, "query_pre_attn_scalar '256' is not a number"),
        (
            "gemma-3-1b",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear"}}},
            "RoPE of type 'linear' in layers with a window is not supported, only 'default'",
        ),
        ("gemma-3-1b", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ("gemma-3-1b", {"architectures": ["Gemma3ForConditionalGeneration"]}, "it has layers for images"),
        ("llama4-scout", {"num_experts_per_tok": 2}, "num_experts_per_tok 2 is not supported, only 1"),
        (
            "llama4-scout",
            {"layer_types": ["full_attention"] * 48},
            "layer_types other than chunked_attention with RoPE",
        ),
        ("llama4-scout", {"attention_chunk_size": None}, "attention_chunk_size None is not an integer"),
        ("llama4-scout", {"no_rope_layers": [0] * 48}, "no_rope_layers without a layer that has RoPE"),
        ("llama4-scout", {"moe_layers": [48]}, "moe_layers [48] are no layers of 48"),
        ("command-r7b", {"use_qk_norm": True}, "use_qk_norm True is not supported"),
        ("falcon-7b", {"alibi": True}, "alibi True is not supported"),
        ("falcon-7b", {"parallel_attn": False}, "parallel_attn False is not supported"),
    ],
)
def test_what_these_families_have_beyond_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_hf(PUBLISHED[name] | changes)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("architecture_name", "more", "message"),
    [
        ("OPTForCausalLM", {"do_layer_norm_before": False}, "do_layer_norm_before False is not supported"),
        ("OPTForCausalLM", {"word_embed_proj_dim": 512}, "word_embed_proj_dim 512 is not supported, only 1024"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}},
            "RoPE of type longrope without a list short_factor",
        ),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers [1] is no list of a 0 or 1 for each layer"),
        ("GraniteForCausalLM", {"logits_scaling": 0}, "logits_scaling 0 is not supported, only above 0"),
        ("MptForCausalLM", {}, "it has ALiBi slopes of its own"),
    ],
)
def test_variants_that_are_not_there_are_refused(architecture_name: str, more: dict[str, Any], message: str) -> None:
    sizes = {"ffn_dim": 4096, "intermediate_size": 4096, "max_position_embeddings": 64}
    with pytest.raises(ConfigError) as error:
        from_hf(_published(architecture_name, 2, 1024, 16, 100, **sizes, **more))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"projectors_bias": True}, "projectors_bias True is not supported, only False"),
        ({"attention_bias": True}, "attention_bias True is not supported, only False"),
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate true is not supported"),
        ({"mamba_use_mlp": False}, "mamba_use_mlp False is not supported, only True"),
        ({"attn_layer_indices": [0, 2]}, r"attn_layer_indices \[0, 2\] is not supported, only None"),
        ({"key_multiplier": None}, "key_multiplier None is not a number"),
        ({"ssm_multipliers": [1.0, 2.0]}, r"ssm_multipliers \[1.0, 2.0\] is not a list of 5 numbers"),
        ({"mamba_d_ssm": None}, "mamba_n_heads x mamba_d_head is not the width of all heads, 2048"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_falcon_h1_has_not_is_refused(changes: dict[str, Any], message: str) -> None:
    content = to_hf(resolved(**PRESETS["falcon-h1-0.5b"]), "bfloat16")
    from_hf(content | {"mamba_use_mlp": True, "attn_layer_indices": None, "mlp_expansion_factor": 8})
    with pytest.raises(ConfigError, match=message):
        from_hf(content | changes)
