"""Settings resolve to one list of layer specs, which says of each layer what it is."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from smp.config import Config, ConfigError, Layout, ModelConfig, load_config, resolve
from smp.config.layer_specs import DeltaNetMixer, ExpertsSpec, KimiDeltaMixer, LatentMixer, MambaMixer, MLPSpec
from smp.config.layers import effective, in_runs, layer_specs
from smp.config.resolve import resolve_model
from smp.config.rules.finetune import LoraConfig
from smp.config.rules.qlora import check_qlora
from smp.models.presets import PRESETS
from smp.training.settings import read_settings


def named(name: str, **more: object) -> ModelConfig:
    return resolve_model(ModelConfig(**{**PRESETS[name], "vocab_size": 1000, **more}))  # type: ignore[arg-type]


def test_layer_7_of_gpt_oss() -> None:
    specs = layer_specs(named("gpt-oss-20b"))
    assert len(specs) == 24 and specs[7].mixer.window is None and specs[6].mixer.window == 128
    assert isinstance(specs[7].feed_forward, ExpertsSpec) and specs[7].feed_forward.count == 32
    lines = in_runs(specs)
    assert [line.partition(":")[0] for line in lines] == [
        f"layers {', '.join(map(str, range(first, 24, 2)))}" for first in (0, 1)
    ]
    assert "window 128" in lines[0] and "4 of 32 experts of 2880" in lines[0] and "yarn x32" in lines[0]
    assert "window" not in lines[1]


def test_layers_of_other_families() -> None:
    assert [line.partition(":")[0] for line in in_runs(layer_specs(named("deepseek-v3")))] == [
        "layers 0-2",
        "layers 3-60",
    ]
    dense, sparse = layer_specs(named("deepseek-v3"))[2:4]
    assert isinstance(dense.mixer, LatentMixer) and isinstance(dense.feed_forward, MLPSpec) and sparse.has_experts
    local = [spec.mixer.rope.local for spec in layer_specs(named("gemma-3-1b"))]
    assert local[:6] == [True] * 5 + [False]
    scout = layer_specs(named("llama4-scout"))
    assert [s.mixer.chunk for s in scout[:4]] == [8192] * 3 + [None] and scout[3].mixer.temperature is not None


def test_layers_of_multi_token_prediction_are_as_the_last() -> None:
    specs = layer_specs(named("debug", mtp_num_layers=2))
    assert len(specs) == named("debug").num_layers + 2 and specs[-1] == specs[-2] == specs[-3]


def test_layer_types_repeat() -> None:
    model = named("debug", num_layers=4)
    assert layer_specs(replace(model, layer_types="attention attention")) == layer_specs(model)
    with pytest.raises(ConfigError, match="'mamba' is no kind of layer"):
        layer_specs(replace(model, layer_types="mamba"))


def test_a_recurrence_is_in_the_layers_that_the_pattern_names() -> None:
    specs = layer_specs(named("qwen3-next-80b-a3b"))
    assert [isinstance(spec.mixer, DeltaNetMixer) for spec in specs] == [True, True, True, False] * 12
    assert specs[3].mixer.gate and specs[3].mixer.norm_one_plus and specs[0].has_experts
    assert in_runs(specs)[1].startswith("layers 3, 7, ") and "32 states of 128 x 128" in in_runs(specs)[0]
    listed = named("qwen3-next-80b-a3b", num_layers=4, linear_attention_freq="[1,1,1,0]")
    assert layer_specs(listed) == specs[:4]
    alone = named("debug", linear_attention_type="gated_delta_net", num_query_groups=None)
    assert all(isinstance(spec.mixer, DeltaNetMixer) for spec in layer_specs(alone))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"linear_num_key_heads": 3}, "--linear-num-value-heads 32 is not divisible by --linear-num-key-heads 3"),
        ({"layer_types": "attention"}, "--layer-types attention and --linear-attention-type gated_delta_net both say"),
        ({"linear_attention_freq": "1"}, "--linear-attention-freq 1 leaves no layer with it"),
        ({"linear_attention_freq": "[1,0]"}, "--linear-attention-freq [1,0] names 2 layers of 48"),
    ],
)
def test_a_recurrence_that_cannot_be_is_one_line(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        layer_specs(named("qwen3-next-80b-a3b", **settings))


FEW = {"linear_attention_freq": None, "moe_layer_freq": "[0,1]"}


def test_olmo_hybrid_has_norms_of_its_own_around_the_recurrence() -> None:
    recurs, attends = layer_specs(named("olmo-hybrid-7b"))[2:4]
    assert recurs.norm_before and not recurs.norm_after and attends.norm_after and not attends.norm_before
    assert recurs.mixer.negative and recurs.mixer.norm_eps == 1e-5 and attends.mixer.norm_eps == 1e-6
    assert attends.mixer.rope is None and attends.mixer.norm == "all heads"


def test_falcon_h1_has_two_mixers_in_a_layer() -> None:
    model = named("falcon-h1-0.5b")
    first, *others = layer_specs(model)
    assert {first} == set(others) and "next to Mamba-2, 24 states of 128 x 64" in str(first)
    attention, recurrence = first.mixer.branches
    assert (attention.name, recurrence.name) == ("attention", "recurrence")
    assert (attention.multiplier, recurrence.multiplier) == (0.9375, 0.23570226039551587)
    assert attention.mixer.scale == 0.125 * 0.39062499999999994 and not recurrence.mixer.norm
    assert recurrence.mixer.multipliers[1] == 1.25 * 0.25
    assert (first.feed_forward.gate_multiplier, first.feed_forward.multiplier) == (0.8838834764831844, 0.5859375)
    some = layer_specs(named("debug", linear_attention_type="gated_delta_net", linear_attention_freq="2"))
    both = layer_specs(
        named(
            "debug", linear_attention_type="gated_delta_net", linear_attention_freq="2", linear_attention_parallel=True
        )
    )
    assert [len(spec.mixers) for spec in both] == [2, 1] * (len(both) // 2) and both[1] == some[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm_multipliers": "1 2"}, "--ssm-multipliers 1 2: expected 5 numbers, not 2"),
        ({"mlp_multipliers": "1 x"}, "--mlp-multipliers 1 x: expected 2 numbers"),
        ({"mlp_multipliers": "1 0"}, "--mlp-multipliers 1 0: expected numbers above 0"),
        ({"num_experts": 4}, "--num-experts exclude each other: experts have none"),
    ],
)
def test_what_two_mixers_in_a_layer_have_not_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layer_specs(named("falcon-h1-0.5b", **changes))
    latent = {
        "linear_attention_type": "mamba2",
        "mamba_head_dim": 16,
        "multi_latent_attention": True,
        "num_query_groups": 4,
    }
    with pytest.raises(
        ConfigError, match="--linear-attention-parallel and --multi-latent-attention exclude each other"
    ):
        named("debug", linear_attention_parallel=True, **latent)


def test_kimi_linear_has_delta_attention_and_latents_without_rope() -> None:
    specs = layer_specs(named("kimi-linear-48b-a3b"))
    assert [number for number, spec in enumerate(specs, 1) if isinstance(spec.mixer, LatentMixer)] == [
        *(4, 8, 12, 16, 20, 24, 27)
    ]
    assert isinstance(specs[0].mixer, KimiDeltaMixer) and not specs[0].has_experts and specs[1].has_experts
    assert specs[3].mixer.rope is None and specs[3].mixer.norm_eps == 1e-6 and specs[0].mixer.norm_eps == 1e-5
    assert str(specs[0]).startswith("Kimi delta attention, 32 states of 128 x 128")
    # of so few layers none has attention, and what its latents are has no effect
    few = resolve_model(effective(ModelConfig(**PRESETS["kimi-linear-48b-a3b"] | {"num_layers": 2} | FEW)))
    assert not few.multi_latent_attention and few.kv_lora_rank == ModelConfig.kv_lora_rank
    with pytest.raises(ConfigError, match="--linear-num-key-heads 16 and --linear-num-value-heads 32 must be the same"):
        layer_specs(named("kimi-linear-48b-a3b", linear_num_key_heads=16))
    with pytest.raises(ConfigError, match="--linear-key-head-dim 64 and --linear-value-head-dim 128 must be the same"):
        layer_specs(named("kimi-linear-48b-a3b", linear_key_head_dim=64))
    with pytest.raises(ConfigError, match="--latent-norm-epsilon 1e-06: latent vectors have norms with --qk-layernorm"):
        layer_specs(named("kimi-linear-48b-a3b", qk_layernorm=False))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensor-model-parallel-size 8", "--linear-num-key-heads 4 is not divisible by --tensor-model-parallel-size"),
        ("--fp8-format e4m3 --fp8-emulate", "--fp8-format e4m3 and --linear-attention-type gated_delta_net exclude"),
        ("--multi-latent-attention --attention-output-gate", "--attention-output-gate does not exist with --multi-lat"),
    ],
)
def test_what_a_recurrence_has_not_is_refused(flags: str, message: str) -> None:
    words = "--mock-data --vocab-size 100 --train-iters 1 --hidden-size 64 --num-attention-heads 8 "
    words += "--linear-attention-type gated_delta_net --linear-num-key-heads 4 --linear-num-value-heads 8 "
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(load_config([*words.split(), *flags.split()], {}), 8)


@pytest.mark.parametrize(
    "flags",
    [
        *("--attention-output-gate", "--qk-layernorm", "--softmax-scale 0.2", "--softmax-type learnable"),
        *("--window-size 8", "--attention-dropout 0.1", "--attn-logit-softcapping 5.0", "--rotary-base 500.0"),
        *("--add-qkv-bias", "--num-query-groups 2", "--kv-channels 8", "--position-embedding-type alibi"),
    ],
)
def test_without_attention_what_only_attention_has_is_refused(flags: str) -> None:
    words = ["--mock-data", "--vocab-size", "100", "--train-iters", "1", "--linear-attention-type", "gated_delta_net"]
    with pytest.raises(ConfigError, match=f"^{flags}: all layers have --linear-attention-type gated_delta_net, none "):
        resolve(load_config([*words, *flags.split()], {}), 1)
    resolve(load_config([*words, *flags.split(), "--linear-attention-freq", "2"], {}), 1)


def test_rows_of_a_recurrence_are_whole_blocks_of_4_bits() -> None:
    model = named("qwen3-next-80b-a3b", linear_value_head_dim=5)
    config = Config(model=model, lora=LoraConfig(lora_rank=4, load_in_4bit=True))
    with pytest.raises(ConfigError, match=r"rows of width 160 \(recurrence\) are not made of them"):
        check_qlora(config, Layout())


def test_a_named_size_with_so_few_layers_that_none_has_attention() -> None:
    """What the size says of attention goes; what the command line says is refused."""
    words = "--model qwen3-next-80b-a3b --num-layers 2 --mock-data --seq-length 64 --train-iters 1"
    model = read_settings(words.split(), PRESETS, 1).model
    assert model.linear_attention_type and not model.attention_output_gate and not model.qk_layernorm
    with pytest.raises(ConfigError, match="--window-size 8: all layers have"):
        read_settings([*words.split(), "--window-size", "8"], PRESETS, 1)


def pattern(letters: str, **changes: object) -> ModelConfig:
    return named("debug", hybrid_layer_pattern=letters, num_layers=len(letters), mamba_head_dim=16, **changes)


def test_a_layer_is_one_part_where_a_pattern_says_so() -> None:
    specs = layer_specs(pattern("M-*E", num_experts=4))
    assert [spec.mixer is None for spec in specs] == [False, True, False, True]
    assert [spec.feed_forward is None for spec in specs] == [True, False, True, False]
    assert isinstance(specs[0].mixer, MambaMixer) and specs[3].has_experts and not specs[1].has_experts
    assert specs[0].mixer.value_heads == 2 * 128 // 16 and str(specs[1]).startswith("MLP")
    behind = named("debug", linear_attention_type="mamba2", linear_attention_freq="2", mamba_head_dim=16)
    assert [isinstance(spec.mixer, MambaMixer) for spec in layer_specs(behind)] == [True, False] * 2
    assert all(spec.feed_forward is not None for spec in layer_specs(behind))


@pytest.mark.parametrize(
    ("letters", "settings", "message"),
    [
        ("M|*-", {}, "'|' is no kind of layer; M is Mamba-2, * attention, - an MLP, E experts"),
        ("M*-", {"num_layers": 4}, "names 3 layers of 4; give --num-layers 3"),
        ("M*-", {"num_experts": 4}, "leaves no layer with experts (E); leave out --num-experts"),
        ("M*E", {}, "has layers with experts: give --num-experts"),
        ("*-", {"mamba_state_dim": 16}, "--mamba-head-dim 16: --hybrid-layer-pattern *- has no layer with Mamba-2"),
        ("MM", {"ffn_hidden_size": 64, "num_query_groups": None}, "has no layer with an MLP (-) or experts (E)"),
        ("M-", {"qk_layernorm": True, "num_query_groups": None}, "--qk-layernorm: --hybrid-layer-pattern M- has no"),
        ("M*-", {"parallel_residual": True}, "--parallel-residual and --hybrid-layer-pattern M*- exclude each other"),
        ("M*-", {"linear_attention_type": "mamba2"}, "both say what layers are"),
        ("M*-", {"mamba_num_groups": 3}, "--mamba-num-heads 16 is not divisible by --mamba-num-groups 3"),
        ("M*-", {"mamba_dt_min": 0.2, "mamba_dt_max": 0.1}, "--mamba-dt-max 0.1 is not above --mamba-dt-min 0.2"),
        ("M*-", {"mamba_head_dim": 24}, "2 x --hidden-size 128 is not divisible by --mamba-head-dim 24"),
    ],
)
def test_a_pattern_that_cannot_be_is_one_line(letters: str, settings: dict[str, object], message: str) -> None:
    changes = {"num_layers": len(letters), "mamba_head_dim": 16} | settings
    with pytest.raises(ConfigError, match=re.escape(message)):
        layer_specs(named("debug", hybrid_layer_pattern=letters, **changes))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--tensor-model-parallel-size 4 --mamba-num-heads 4 --mamba-num-groups 2",
            "--mamba-num-groups 2 is neither 1 nor divisible by",
        ),
        ("--tensor-model-parallel-size 8 --mamba-num-heads 4 --mamba-num-groups 1", "--mamba-num-heads 4 is not divis"),
        (
            "--fp8-format e4m3 --fp8-emulate --mamba-num-groups 1",
            "--fp8-format e4m3 and --hybrid-layer-pattern MM exclude each other",
        ),
        ("--context-parallel-size 2 --cp-comm-type a2a --mamba-num-groups 1", "not --mamba-num-groups 1 / --tensor"),
    ],
)
def test_what_mamba_has_not_is_refused(flags: str, message: str) -> None:
    words = "--mock-data --vocab-size 100 --train-iters 1 --hidden-size 64 --num-layers 2 --hybrid-layer-pattern MM "
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(load_config([*words.split(), *flags.split()], {}), 8)
