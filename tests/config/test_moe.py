"""What experts ask of other settings, refused in one line that names the flag."""

from __future__ import annotations

import pytest

from smp.config import Config, ConfigError, Layout, load_config, resolve
from smp.config.moe import has_experts
from smp.config.schema import LoraConfig, ObjectiveConfig

RUN = "--mock-data --vocab-size 100 --train-iters 1 --num-experts 8 --num-layers 4 "


def check(flags: str, world_size: int) -> Config:
    return resolve(load_config([*RUN.split(), *flags.split()], {}), world_size)


@pytest.mark.parametrize(
    ("flags", "world_size", "layout"),
    [
        ("--expert-model-parallel-size 4", 4, Layout(dp_shard=4, ep=4)),
        ("--expert-model-parallel-size 2 --hybrid-shard-degree 2", 8, Layout(dp_replicate=4, dp_shard=2, ep=2)),
        ("--expert-model-parallel-size 2 --tensor-model-parallel-size 2", 4, Layout(dp_shard=2, tp=2, ep=2)),
        ("--expert-model-parallel-size 2 --context-parallel-size 2", 2, Layout(cp=2, ep=2)),
    ],
)
def test_layouts(flags: str, world_size: int, layout: Layout) -> None:
    assert Layout.from_config(check(flags, world_size).parallel, world_size) == layout


@pytest.mark.parametrize(
    ("text", "layers"),
    [("1", [0, 1, 2, 3]), ("2", [0, 2]), ("3", [0, 3]), ("[0]*1+[1]*3", [1, 2, 3]), ("[1, 0, 0, 1]", [0, 3])],
)
def test_which_layers_have_experts(text: str, layers: list[int]) -> None:
    config = check(f"--moe-layer-freq {text.replace(' ', '')}", 1)
    assert [i for i in range(4) if has_experts(config.model, i)] == layers


@pytest.mark.parametrize(
    ("flags", "world_size", "message"),
    [
        ("--expert-model-parallel-size 3", 3, "--num-experts 8 is not divisible by --expert-model-parallel-size 3"),
        ("--expert-model-parallel-size 4", 2, "--expert-model-parallel-size 4 has to divide the 2 processes"),
        ("--expert-model-parallel-size 4 --hybrid-shard-degree 2", 8, "--hybrid-shard-degree"),
        ("--num-experts none --expert-model-parallel-size 2", 2, "has no effect without --num-experts"),
        ("--num-experts none --moe-router-topk 4", 1, "has no effect without --num-experts"),
        ("--moe-router-topk 9", 1, "--moe-router-topk 9 is above --num-experts 8"),
        ("--moe-router-topk 1", 1, "the router gets no gradient"),
        ("--moe-ffn-hidden-size 6 --tensor-model-parallel-size 4", 4, "--moe-ffn-hidden-size 6 is not divisible"),
        ("--no-swiglu", 1, "leave out --no-swiglu"),
        ("--no-disable-bias-linear", 1, "leave out --no-disable-bias-linear"),
        ("--compile", 1, "--compile cannot trace a mixture of experts"),
        ("--moe-router-score-function sigmoid --moe-router-pre-softmax", 1, "--moe-router-pre-softmax has no effect"),
        ("--moe-layer-freq often", 1, "--moe-layer-freq often: expected a number, or a list"),
        ("--moe-layer-freq __import__('os')", 1, "expected a number, or a list"),
        ("--moe-layer-freq [1]*9999999999", 1, "expected a number, or a list"),
        ("--moe-layer-freq [1]*3", 1, "names 3 layers of 4"),
        ("--moe-layer-freq [2]*4", 1, "a list is made of 0 and 1"),
        ("--moe-layer-freq [0]*4", 1, "leaves no layer with experts"),
    ],
)
def test_what_cannot_work(flags: str, world_size: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(flags, world_size)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_finetuning_experts_is_refused() -> None:
    config = load_config([*RUN.split()], {})
    config.objective, config.lora = ObjectiveConfig(), LoraConfig()
    with pytest.raises(ConfigError, match="finetune.py does not train mixtures of experts"):
        resolve(config, 1)
