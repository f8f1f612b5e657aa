"""What experts ask of other settings, refused in one line that names the flag."""

from __future__ import annotations

import pytest

from smp.config import Config, ConfigError, Layout, load_config, resolve
from smp.config.layers import layer_specs
from smp.config.objectives import ObjectiveConfig
from smp.config.schema import LoraConfig

SLICED = " --tensor-model-parallel-size 2 --sequence-parallel"
_SPREAD_OVER_TP = Layout(dp_shard=2, tp=2, ep=4, etp=1)
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
        ("--expert-model-parallel-size 4 --expert-tensor-parallel-size 1" + SLICED, 4, _SPREAD_OVER_TP),
        ("--expert-tensor-parallel-size 2" + SLICED, 2, Layout(tp=2)),
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
    assert [i for i, spec in enumerate(layer_specs(config.model)) if spec.has_experts] == layers


@pytest.mark.parametrize(
    ("flags", "world_size", "message"),
    [
        ("--expert-model-parallel-size 3", 3, "--num-experts 8 is not divisible by --expert-model-parallel-size 3"),
        ("--expert-model-parallel-size 4", 2, "--expert-model-parallel-size 4 has to divide the 2 processes"),
        ("--expert-model-parallel-size 4 --hybrid-shard-degree 2", 8, "--hybrid-shard-degree"),
        ("--expert-tensor-parallel-size 2", 1, "2 has to divide --tensor-model-parallel-size 1"),
        ("--expert-tensor-parallel-size 1 --tensor-model-parallel-size 2", 2, "needs --sequence-parallel"),
        (
            "--expert-tensor-parallel-size 1 --expert-model-parallel-size 4" + SLICED,
            2,
            "the 1 processes that shard weights x 2 of --expert-tensor-parallel-size 1 = 2",
        ),
        ("--num-experts none --expert-tensor-parallel-size 1", 1, "has no effect without --num-experts"),
        ("--num-experts none --expert-model-parallel-size 2", 2, "has no effect without --num-experts"),
        ("--num-experts none --moe-router-topk 4", 1, "has no effect without --num-experts"),
        ("--moe-router-topk 9", 1, "--moe-router-topk 9 is above --num-experts 8"),
        ("--moe-router-topk 1", 1, "the router gets no gradient"),
        ("--moe-ffn-hidden-size 6 --tensor-model-parallel-size 4", 4, "--moe-ffn-hidden-size 6 is not divisible"),
        ("--moe-router-score-function sigmoid --moe-router-pre-softmax", 1, "--moe-router-pre-softmax has no effect"),
        ("--moe-router-num-groups 3 --moe-router-group-topk 1", 1, "is not divisible by --moe-router-num-groups 3"),
        ("--moe-router-num-groups 4", 1, "give --moe-router-group-topk"),
        ("--moe-router-num-groups 4 --moe-router-group-topk 5", 1, "--moe-router-group-topk 5 is above"),
        ("--moe-router-num-groups 8 --moe-router-group-topk 1", 1, "give at most 1"),
        ("--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 3", 1, "--moe-router-topk 3 is not"),
        ("--moe-router-group-topk 2", 1, "has no effect without --moe-router-num-groups"),
        ("--moe-router-enable-expert-bias", 1, "has no effect without --moe-router-score-function sigmoid"),
        ("--moe-shared-expert-gate", 1, "has no effect without --moe-shared-expert-intermediate-size"),
        ("--moe-router-load-balancing-type seq_aux_loss", 1, "has no effect without --moe-aux-loss-coeff"),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff 1", 1, "--moe-aux-loss-coeff 1.0 has no effect"),
        ("--qk-layernorm-across-heads", 1, "has no effect without --qk-layernorm"),
        (
            "--qk-layernorm --qk-layernorm-across-heads --num-query-groups 1 --tensor-model-parallel-size 2",
            2,
            "--num-query-groups 1 is not divisible by --tensor-model-parallel-size 2",
        ),
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


@pytest.mark.parametrize(
    ("flags", "objective", "lora", "message"),
    [
        ("--moe-expert-capacity-factor 1.5", "sft", None, "padding would use up the capacity"),
        ("--moe-aux-loss-coeff 0.1", "dpo", None, "pairs of answers .--objective dpo. train without balancing"),
        (
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1",
            "sft",
            4,
            "--moe-router-bias-update-rate 0.1 has no effect with adapters",
        ),
    ],
)
def test_what_fine_tuning_does_not_balance(flags: str, objective: str, lora: int | None, message: str) -> None:
    config = load_config([*RUN.split(), *flags.split()], {})
    config.objective, config.lora = ObjectiveConfig(objective=objective), LoraConfig(lora_rank=lora)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        resolve(config, 1)
