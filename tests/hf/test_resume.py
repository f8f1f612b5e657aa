"""Checkpoints of a transformed model in training: the same run goes on with the same bits, another layout with the same
numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import smp
from smp.checkpoint import load, restore_optimizer_scalars, save, training_state
from tests.distributed import run_distributed
from tests.hf.families import VOCAB, build, whole

pytest.importorskip("transformers")
STEPS, SAVED = 6, 3


def _start(tp: int) -> tuple[Any, torch.optim.Optimizer]:
    smp.state.reset()
    smp.init({"tensor_parallel_degree": tp})
    model = smp.transform(build("Qwen3"), loss="vocab_parallel")
    fully_shard(model, mesh=smp.state.data_mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def _steps(model: Any, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        ids = torch.randint(3, VOCAB, (4, 10), generator=torch.Generator().manual_seed(step))
        ids = ids.chunk(smp.state.dp_size)[smp.state.dp_rank]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        smp.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(smp.state.mean_over_data(loss.detach())))
    return losses


def _runs(rank: int, world_size: int, folder: str) -> list[tuple[int, float]]:
    model, optimizer = _start(2)
    _steps(model, optimizer, 0, SAVED)
    tensors, scalars = training_state(model, optimizer)
    save(tensors, folder, extra={"step": scalars})
    losses = _steps(model, optimizer, SAVED, STEPS)
    wanted = {name: whole(p) for name, p in model.named_parameters()}
    results = []
    for tp in (2, 1, 4):
        model, optimizer = _start(tp)
        tensors, _ = training_state(model, optimizer)
        extra = load(tensors, folder)
        restore_optimizer_scalars(model, optimizer, extra["step"])
        again = _steps(model, optimizer, SAVED, STEPS)
        found = {name: whole(p) for name, p in model.named_parameters()}
        if tp == 2:
            assert again == losses and all(torch.equal(found[name], wanted[name]) for name in wanted)
        errors = [float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted]
        results.append((tp, max(*errors, *(abs(a - b) for a, b in zip(again, losses, strict=True)))))
    return results


def test_resume_in_the_same_and_in_other_layouts(tmp_path: Path) -> None:
    for results in run_distributed(_runs, 4, str(tmp_path)):
        assert len(results) == 3 and all(error <= 1e-5 for _, error in results), results
