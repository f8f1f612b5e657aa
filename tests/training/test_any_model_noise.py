"""Experts whose inputs get noise in training, or which are drawn at random: the same in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from smp.hf.run.model import _without_router_losses
from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE
from tests.training.any_model_lab import LR, largest_error, load, train_plainly, tune_types, write_type
from tests.training.tuning_lab import together

pytest.importorskip("transformers")

COMMON = (
    f"--seq-length 48 --micro-batch-size 2 --global-batch-size 8 --lr {LR} --optimizer sgd --weight-decay 0 "
    "--train-iters 3 --packing off --model-implementation transformers"
)
NOISE = {"mixtral": 0.3, "phimoe": 0.5}
"""Of a Mixtral the noise of inputs; PhiMoE draws an expert among those that score nearly as much as the best one."""


def without_noise(kind: str, folder: Path) -> Any:
    """The model by transformers, in training but for its noise."""
    model = load(folder).train()
    for module in model.modules():
        if kind == "phimoe" and hasattr(module, "router_jitter_noise"):
            module.eval()
        if hasattr(module, "jitter_noise"):
            module.jitter_noise = 0.0
    return model


@pytest.mark.parametrize("kind", NOISE)
def test_noise_of_experts_is_off_in_every_layout(kind: str, tmp_path: Path) -> None:
    folder = write_type(tmp_path / kind, kind, router_jitter_noise=NOISE[kind])
    words = f"--load {folder} --data-path {folder}/sft.jsonl --log-dir {folder}/logs {COMMON}"
    ((alone,),) = run_distributed(tune_types, 1, [words])
    shards, cut = zip(*run_distributed(tune_types, 2, [words, f"{words} --tensor-model-parallel-size 2"]), strict=True)
    want = train_plainly(without_noise(kind, folder), alone["batches"], LR)
    for run in (alone, together(list(shards)), together(list(cut))):
        errors = largest_error(run, want)
        assert max(errors.values()) <= TOLERANCE, errors


def test_losses_of_routers_that_config_json_asks_for_are_off_with_a_note() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    with torch.device("meta"):
        model, plain = (
            MixtralForCausalLM(MixtralConfig(**small, vocab_size=64, num_key_value_heads=2, output_router_logits=asked))
            for asked in (True, False)
        )
    [note] = _without_router_losses(model)
    assert "auxiliary losses of routers are not added" in note and not model.config.output_router_logits
    assert _without_router_losses(plain) == []
