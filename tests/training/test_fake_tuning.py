"""A step on tensors without data of experts that are split over ranks, and of fine-tuning: what is known by hand."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.config import Config, Layout
from smp.config.command_line.cli import build_tree
from smp.config.command_line.entry_points import FINETUNE
from smp.config.objectives import ObjectiveConfig
from smp.config.rules.finetune import fill_in
from smp.convert.huggingface.config import resolved
from smp.kernels import TORCH
from smp.kernels.precision import nf4
from smp.models.arithmetic import count_parameters
from smp.models.presets import PRESETS
from smp.training.cost.fake_step import StepMeasures, even_counts, fake_step
from smp.training.cost.predict import adapter_elements
from smp.training.settings import read_settings

MODEL = resolved(num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=256)
TOKENS, HIDDEN, K = 2 * 32, 32, 2
EXPERTS = (
    f"--num-layers 2 --hidden-size {HIDDEN} --ffn-hidden-size 48 --num-attention-heads 4 --seq-length 32 "
    f"--vocab-size 60 --mock-data --micro-batch-size 2 --num-experts 4 --moe-router-topk {K} --moe-ffn-hidden-size 24 "
    "--train-iters 1 "
)


def spread(flags: str, world: int) -> StepMeasures:
    config = read_settings(shlex.split(EXPERTS + flags), PRESETS, world)
    return fake_step(config, Layout.from_config(config.parallel, world), TORCH, "cpu")


def tuning(tmp_path: Path, objective: ObjectiveConfig | None = None, **lora: object) -> Config:
    config = build_tree(FINETUNE, {"load": str(tmp_path), "dry_run": True, **lora})
    config = replace(config, model=MODEL, objective=objective or config.objective)
    config.data.seq_length, config.data.global_batch_size = 32, 2
    return fill_in(config)


def tried(config: Config, layout: Layout | None = None) -> StepMeasures:
    return fake_step(config, layout or Layout(), TORCH, "cpu")


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_of_all_ranks_get_as_many_rows_and_send_what_the_formula_says(ranks: int) -> None:
    """4 T k h (p - 1) / p elements for each layer and micro-batch, and two times as many counts and int64."""
    alone, parts = spread("", 1), spread(f"--expert-model-parallel-size {ranks}", ranks)
    assert parts.counts.flops == alone.counts.flops  # each rank has as many tokens, and as many rows of other ranks'
    sent = parts.counts.traffic["ep", "all-to-all"].sent
    rows = 4 * TOKENS * K * HIDDEN * 4 * (ranks - 1) / ranks
    counts = 8 * 4 * (ranks - 1) / ranks
    assert sent == 2 * (rows + counts)
    assert parts.parameters < alone.parameters / ranks * 1.2


def test_loads_are_even() -> None:
    assert even_counts(torch.zeros(4, dtype=torch.int64), 10) == [3, 3, 2, 2]
    assert even_counts(torch.zeros(2, 2, 2, dtype=torch.int64), 10) == [[[3, 3], [2, 2]]] * 2


def test_a_capacity_is_tried_too() -> None:
    flags = "--expert-model-parallel-size 2 --moe-expert-capacity-factor 1.0"
    assert spread(flags, 2).counts.flops == spread("", 1).counts.flops


def test_adapters_are_what_is_trained(tmp_path: Path) -> None:
    config = tuning(tmp_path, lora_rank=4, bf16=True)
    full, step = tried(tuning(tmp_path, bf16=True)), tried(config)
    trained, base = adapter_elements(config, Layout()), count_parameters(MODEL, 256).total
    assert full.parameters == 4 * base and step.parameters == 2 * base + 4 * trained
    assert step.gradients == 4 * trained and step.optimizer == pytest.approx(8 * trained, rel=0.05)
    assert 0.6 < step.counts.flops / full.counts.flops < 0.85  # no gradients of frozen weights
    assert step.peak < full.peak


def test_weights_in_4_bits_rest_in_4_bits(tmp_path: Path) -> None:
    """Half a byte and a scale of 4 bytes for each 64."""
    sizes: dict[str, Any] = {"lora_rank": 4, "bf16": True}
    plain = tried(tuning(tmp_path, **sizes)).parameters
    packed = tried(tuning(tmp_path, **sizes, load_in_4bit=True, bnb_4bit_use_double_quant=False)).parameters
    linear = count_parameters(MODEL, 256).per_layer - 2 * MODEL.hidden_size
    assert plain - packed == pytest.approx(2 * linear * (2 - 0.5 - 4 / 64), rel=0.01)


def test_a_table_of_4_bits_is_of_numbers_after_a_dry_run(tmp_path: Path) -> None:
    """With double quantization, the default, whose codes are computed when they are first needed."""
    nf4._dynamic_codes.cache_clear()
    nf4._table.cache_clear()
    step = tried(tuning(tmp_path, lora_rank=4, bf16=True, load_in_4bit=True))
    single = tried(tuning(tmp_path, lora_rank=4, bf16=True, load_in_4bit=True, bnb_4bit_use_double_quant=False))
    assert step.parameters > 0 and step.peak != single.peak
    table = nf4._table(nf4._dynamic_codes(), torch.device("cpu"))
    assert len(table) == 256 and table.tolist() == sorted(table.tolist())


def test_a_reference_is_run_where_there_is_one(tmp_path: Path) -> None:
    """Log-probabilities take the head's product once more than a loss of tokens; a copy has weights, too."""

    def of(kind: str, **lora: object) -> StepMeasures:
        given = {} if kind == "orpo" else {"dpo_reference": kind}
        return tried(tuning(tmp_path, ObjectiveConfig(objective="orpo" if kind == "orpo" else "dpo", **given), **lora))  # type: ignore[arg-type]

    table, copy = of("precomputed"), of("copy")
    assert copy.parameters == 2 * table.parameters and copy.gradients == table.gradients
    assert "reference" in copy.peaks and "reference" not in table.peaks
    head = 2 * 2 * 2 * 32 * MODEL.hidden_size * 256  # a forward product of two pairs of answers
    sft = tried(tuning(tmp_path))
    assert table.counts.flops == 2 * sft.counts.flops + head
    assert copy.counts.flops - table.counts.flops == pytest.approx(2 * sft.counts.flops / 3, rel=0.03)
    assert of("orpo").counts.flops == table.counts.flops
    with_adapters = of("adapters-off", lora_rank=4)
    without = of("precomputed", lora_rank=4)
    assert with_adapters.parameters == without.parameters
    assert with_adapters.counts.flops - without.counts.flops == copy.counts.flops - table.counts.flops


def test_fine_tuning_is_tried_in_layouts(tmp_path: Path) -> None:
    """FSDP, tensor parallelism and both parts of a pipeline, with adapters and a copy."""
    lora = tuning(tmp_path, lora_rank=4, bf16=True)
    sharded = tried(replace(lora, data=replace(lora.data, global_batch_size=4)), Layout(dp_shard=2))
    assert sharded.counts.traffic["dp_shard", "all-gather"].sent > 0
    pairs = tuning(tmp_path, ObjectiveConfig(objective="dpo", dpo_reference="copy"), tensor_model_parallel_size=2)
    step = tried(pairs, Layout(tp=2))
    assert step.parameters == pytest.approx(
        tried(replace(pairs, parallel=type(pairs.parallel)())).parameters / 2, rel=0.05
    )
    assert math.isfinite(step.peak)
