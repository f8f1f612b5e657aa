"""Steps of AdamW on transformers' models of newer kinds and on ours, from the same weights: the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from smp.convert.describe import read_architecture
from smp.convert.huggingface.config import resolved
from smp.convert.load import load_hf
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from tests.convert.tiny import DELTA_RULES, HYBRID, SPARSE, STATE_SPACE, VOCAB, save_theirs, their_model
from tests.fake_group import fake_context

pytest.importorskip("transformers")
STEPS, OPTIONS = 6, {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-5}


@pytest.mark.parametrize("kind", [*HYBRID, *STATE_SPACE, *DELTA_RULES, *SPARSE])
def test_losses_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    save_theirs(kind, tmp_path)
    theirs = their_model(kind).train()
    drawn = torch.randint(0, VOCAB, (STEPS, 2, 33), generator=torch.Generator().manual_seed(5))
    with fake_context() as context:
        ours = GPT(resolved(**(read_architecture(str(tmp_path)) or {})), context, device="cpu").train()
        load_hf(ours, tmp_path)
        optimizers = [torch.optim.AdamW(model.parameters(), foreach=False, **OPTIONS) for model in (theirs, ours)]
        losses = []
        for tokens in drawn:
            inputs, labels = tokens[:, :-1], tokens[:, 1:].contiguous()
            logits = theirs(inputs, use_cache=False).logits
            weights = torch.full(labels.shape, 1.0 / labels.numel())
            pair = [
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
                ours(MicroBatch(inputs, labels, weights)).loss,
            ]
            for loss, optimizer in zip(pair, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses.append([loss.item() for loss in pair])
    assert losses[-1][1] != pytest.approx(losses[0][1], rel=1e-3)
    for their_loss, our_loss in losses:
        assert our_loss == pytest.approx(their_loss, rel=1e-5)
