"""Heads that classify, on a decoder: losses and gradients equal one process; their loss is Hugging Face's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import smp
from smp.config import ConfigError
from tests.distributed import run_distributed
from tests.hf.families import FAMILIES, batch, whole, worst

transformers = pytest.importorskip("transformers")
KINDS: dict[str, dict[str, torch.Tensor]] = {
    "SequenceClassification": {"labels": torch.tensor([0, 2])},
    "TokenClassification": {"labels": torch.arange(20).view(2, 10) % 3},
    "QuestionAnswering": {"start_positions": torch.tensor([4, 2]), "end_positions": torch.tensor([6, 9])},
}
CASES = [("Llama", False), ("Qwen3", True), ("Mistral, sliding window", True), ("GPT-2", False), ("Mixtral", False)]
"""Families, and whether with sequence parallelism."""


def _build(family: str, kind: str) -> Any:
    config, values = FAMILIES[family]
    values = {"pad_token_id": 0, **values, "num_labels": 3, "classifier_dropout": 0.0}
    torch.manual_seed(5)
    auto = getattr(transformers, f"AutoModelFor{kind}")
    return auto.from_config(getattr(transformers, config)(**values)).train()


def _gradients(model: Any, targets: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    data = {name: batch(1)[name] for name in ("input_ids", "attention_mask")}
    out = model(**data, **targets)
    out.loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return gradients | {"the loss": out.loss.detach().view(1)}


def _compare(rank: int, world_size: int) -> list[tuple[str, str, float, str]]:
    results = []
    for family, sequence in CASES:
        for kind, targets in KINDS.items():
            smp.state.reset()
            smp.init({"tensor_parallel_degree": 2, "sequence_parallel": sequence})
            alone = _build(family, kind)
            model = smp.transform(copy.deepcopy(alone))
            results.append((family, kind, *worst(_gradients(model, targets), _gradients(alone, targets))))
    with pytest.raises(ConfigError, match="the head of LlamaForSequenceClassification is NoneType, not nn.Linear"):
        smp.transform(_build("Llama", "SequenceClassification"), loss="chunked")
    return results


def test_classifiers_equal_one_process() -> None:
    for results in run_distributed(_compare, 2):
        assert len(results) == 15 and all(error <= 1e-5 for *_, error, _ in results), results
