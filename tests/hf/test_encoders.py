"""Encoder and vision models by rows of this project: outputs and all gradients equal those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import smp
from smp.config import ConfigError
from tests.distributed import run_distributed
from tests.hf.families import whole, worst

transformers = pytest.importorskip("transformers")
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {"vocab_size": 96, "max_position_embeddings": 32, **_SIZES, **_NO_DROPOUT}
VIT = {"image_size": 16, "patch_size": 8, "num_labels": 5, **_SIZES, **_NO_DROPOUT}


def _bert(kind: str, **values: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    ids = torch.randint(3, 96, (2, 10), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(10) < torch.tensor([[10], [7]])).long()
    labels = torch.tensor([1, 0]) if "Sequence" in kind else ids.masked_fill(mask == 0, -100)
    model = getattr(transformers, kind)(transformers.BertConfig(**BERT, **values))
    return model, {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _vit() -> tuple[Any, dict[str, torch.Tensor]]:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT))
    return model, {"pixel_values": pixels, "labels": torch.tensor([1, 4])}


def _observe(model: Any, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = model.train()(**data)
    out.loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"the loss": out.loss.detach().view(1), "the logits": out.logits.detach(), **gradients}


def _compare(rank: int, world_size: int) -> list[tuple[str, int, float, str]]:
    makers = {
        "BERT, masked": lambda: _bert("BertForMaskedLM"),
        "BERT, classes": lambda: _bert("BertForSequenceClassification"),
        "ViT": _vit,
    }
    results = []
    for name, make in makers.items():
        torch.manual_seed(2)
        reference, data = make()
        fresh = copy.deepcopy(reference)
        wanted = _observe(reference, data)
        for tp in (2, 4):
            smp.state.reset()
            smp.init({"tensor_parallel_degree": tp})
            model = smp.transform(copy.deepcopy(fresh))
            assert any(done.style == "colwise" for done in model.smp_report)
            results.append((name, tp, *worst(_observe(model, data), wanted)))
    with pytest.raises(ConfigError, match="the loss of BertForMaskedLM is ForMaskedLMLoss"):
        smp.transform(_bert("BertForMaskedLM", tie_word_embeddings=False)[0], loss="vocab_parallel")
    return results


def test_encoders_equal_one_process() -> None:
    for results in run_distributed(_compare, 4):
        assert len(results) == 6 and all(error <= 1e-5 for *_, error, _ in results), results
