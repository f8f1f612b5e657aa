import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from smp.config import Config, ModelConfig, TrainingConfig, load_config, resolve
from smp.convert.huggingface.config import to_hf
from smp.models.arithmetic import count_parameters
from smp.models.presets import PRESETS

PUBLISHED = {  # parameters as the authors' checkpoints hold them, a tied matrix once
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
    "llama4-scout": 107_769_861_120,  # the text part
    "llama4-maverick": 400_711_848_960,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "granite-3.1-2b": 2_533_531_648,
    "granite-3.1-8b": 8_170_848_256,
    "command-r-35b": 34_980_831_232,
    "command-r7b": 8_028_033_024,
    "smollm3-3b": 3_075_098_624,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "glm-4-9b": 9_399_951_360,
    "glm-4-9b-0414": 9_400_279_040,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "opt-125m": 125_239_296,
    "opt-6.7b": 6_658_473_984,
    "bloom-560m": 559_214_592,
    "bloom-7b1": 7_069_016_064,
}
FIRST = ("debug", "gpt", "llama", "mistral", "qwen2.5", "qwen3-")
"""Begin the names of sizes whose transformers model ``hugging_face`` makes itself; others go through our converter."""
OWN = [name for name in PRESETS if name.startswith(FIRST) and "num_experts" not in PRESETS[name]]
CONVERTED = [name for name in PRESETS if name not in OWN]


def preset(name: str) -> ModelConfig:
    """The named size with its derived defaults."""
    model = ModelConfig(model=name, **PRESETS[name])
    model = replace(model, vocab_size=model.vocab_size or 1000)
    return resolve(Config(model=model, training=TrainingConfig(dry_run=True)), world_size=1).model


ROUNDED = (
    *("mamba2-2.7b", "mamba-codestral-7b", "granite-4.0-h-micro", "granite-4.0-h-tiny", "granite-4.0-h-small"),
    *("nemotron-h-8b", "nemotron-3-nano-30b-a3b", "kimi-linear-48b-a3b", "olmo-hybrid-7b"),
    *("falcon-h1-0.5b", "falcon-h1-7b"),
)
"""Of which the authors name a rounded number."""


def test_every_published_size_is_checked() -> None:
    # OpenAI published no exact number for GPT-3; GLM's and Qwen3-Next's files also hold layers that predict further
    # tokens
    assert set(PRESETS) - set(PUBLISHED) == {
        "debug",
        "gpt3-175b",
        "glm-4.5",
        "glm-4.5-air",
        "qwen3-next-80b-a3b",
        "deepseek-v3.2",
        "glm-5",
        *ROUNDED,
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_number(name: str) -> None:
    model = preset(name)
    assert model.vocab_size is not None
    assert count_parameters(model, model.vocab_size).total == PUBLISHED[name]


def test_gpt3_is_the_papers() -> None:
    model = preset("gpt3-175b")
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.kv_channels) == (96, 12288, 96, 128)
    assert round(count_parameters(model, 50257).total / 1e9) == 175


def hugging_face(model: ModelConfig, layers: int) -> int:
    """Parameters of the transformers model with our values and ``layers`` layers."""
    transformers = pytest.importorskip("transformers")
    import torch

    shared = {"vocab_size": model.vocab_size, "tie_word_embeddings": not model.untie_embeddings_and_output_weights}
    if model.normalization == "LayerNorm":
        assert model.model.startswith("gpt") and model.ffn_hidden_size == 4 * model.hidden_size
        sizes = {"n_embd": model.hidden_size, "n_head": model.num_attention_heads, "n_layer": layers}
        config = transformers.GPT2Config(n_positions=model.max_position_embeddings, **sizes, **shared)
    else:
        family = "Qwen3" if model.qk_layernorm else "Qwen2" if model.add_qkv_bias else "Llama"
        config = getattr(transformers, family + "Config")(
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_hidden_size,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.num_query_groups,
            head_dim=model.kv_channels,
            num_hidden_layers=layers,
            **shared,
        )
    with torch.device("meta"):
        return sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())


@pytest.mark.parametrize("name", CONVERTED)
def test_parameters_of_a_converted_configuration_are_those_of_the_transformers_model(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    model = preset(name)
    content = to_hf(model, "float32")
    config = transformers.AutoConfig.for_model(content.pop("model_type"), **content)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    assert model.vocab_size is not None
    assert count_parameters(model, model.vocab_size).total == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize("name", OWN)
def test_parameters_are_those_of_the_transformers_model(name: str) -> None:
    model = preset(name)
    assert model.vocab_size is not None
    one, two = hugging_face(model, 1), hugging_face(model, 2)
    count = count_parameters(model, model.vocab_size)
    assert count.per_layer == two - one  # all layers are alike, so two of them say it all
    assert count.total == one + (model.num_layers - 1) * (two - one)


FIELDS = {  # ours -> Hugging Face's
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
}
LLAMA_FIELDS = FIELDS | {
    "ffn_hidden_size": "intermediate_size",
    "num_query_groups": "num_key_value_heads",
    "norm_epsilon": "rms_norm_eps",
}


@pytest.mark.parametrize(
    ("name", "family", "fields", "differs"),
    [
        ("gpt2", "GPT2", FIELDS | {"norm_epsilon": "layer_norm_epsilon"}, set()),
        ("llama2-7b", "Llama", LLAMA_FIELDS, {"max_position_embeddings", "norm_epsilon"}),  # their default is Llama 1
        (
            "mistral-7b",
            "Mistral",
            LLAMA_FIELDS | {"window_size": "sliding_window"},
            {"max_position_embeddings", "norm_epsilon"},
        ),
    ],
)
def test_values_are_the_defaults_of_transformers_where_those_are_a_model(
    name: str, family: str, fields: dict[str, str], differs: set[str]
) -> None:
    theirs = getattr(pytest.importorskip("transformers"), family + "Config")()
    model = preset(name)
    assert {ours for ours, name in fields.items() if getattr(model, ours) != getattr(theirs, name)} == differs


def test_rotary_settings_of_the_llamas() -> None:
    assert [preset(name).rotary_base for name in ("llama2-7b", "llama3-8b", "llama3.2-1b")] == [1e4, 5e5, 5e5]
    assert not preset("llama3-8b").use_rope_scaling
    for name, factor in (("llama3.1-8b", 8.0), ("llama3.1-70b", 8.0), ("llama3.1-405b", 8.0), ("llama3.2-1b", 32.0)):
        model = preset(name)
        scaling = (model.rope_scaling_factor, model.rope_low_freq_factor, model.rope_high_freq_factor)
        assert model.use_rope_scaling and scaling == (factor, 1.0, 4.0)
        assert (model.rope_original_max_position, model.max_position_embeddings) == (8192, 131072)


def test_what_sets_the_qwens_apart() -> None:
    epsilon = [preset(f"qwen2.5-{size}b").norm_epsilon for size in ("0.5", "1.5", "3", "7", "14", "32", "72")]
    assert epsilon == [1e-6] * 4 + [1e-5] * 3
    tied = {
        name for name in PRESETS if name.startswith("qwen") and not preset(name).untie_embeddings_and_output_weights
    }
    assert tied == {"qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"}
    model = preset("qwen3-32b")
    assert model.qk_layernorm and not model.add_qkv_bias and model.kv_channels == 128
    assert model.hidden_size == 5120 and model.num_attention_heads == 64  # the heads are wider than the residual stream


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_config_and_dropout_stays_off(name: str) -> None:
    config = load_config(["--model", name, "--dry-run", "--vocab-size", "1000"], PRESETS)
    model = resolve(config, world_size=1).model
    assert model.model == name and model.hidden_dropout == model.attention_dropout == 0.0
    assert name not in OWN or model.disable_bias_linear == model.swiglu == (not name.startswith("gpt"))


def test_debug_takes_the_tokenizers_vocabulary() -> None:
    assert "vocab_size" not in PRESETS["debug"]
    assert count_parameters(preset("debug"), 1).non_embedding < 1e6


def test_presets_and_arithmetic_need_no_torch() -> None:
    modules = "smp.models.presets, smp.models.arithmetic, smp.training.cost.memory"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
