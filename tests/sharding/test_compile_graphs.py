"""However deep a model is, its blocks are one compiled graph.

torch gives up on code that it had to compile more than ``recompile_limit`` times. So what differs from block to block,
a number in a module, say, ends a deep model's run, and that of a shallow one never shows it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from smp.config import ParallelConfig
from smp.layers import init_weights
from smp.layers.adapters.lora import add_adapters
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from smp.sharding.parallelize import parallelize
from tests.fake_group import fake_context
from tests.sharding.model import BATCH, LENGTH, MODEL

DEPTH = torch._dynamo.config.recompile_limit + 3
CASES: dict[str, tuple[dict[str, Any], float | None, str]] = {
    "hidden dropout": ({"hidden_dropout": 0.1}, None, "none"),
    "attention dropout": ({"attention_dropout": 0.1}, None, "none"),
    "window": ({"window_size": 5}, None, "none"),
    "documents": ({}, None, "none"),
    "LoRA": ({}, 0.0, "none"),
    "LoRA with dropout": ({}, 0.25, "none"),
    "LoRA with dropout, documents, GPT-NeoX": (
        {"parallel_residual": True, "swiglu": False, "disable_bias_linear": False},
        0.25,
        "none",
    ),
    "LoRA with dropout, hidden dropout, selective recompute": ({"hidden_dropout": 0.1}, 0.25, "selective"),
    "LoRA with dropout, hidden dropout, full recompute": ({"hidden_dropout": 0.1}, 0.25, "full"),
    "LoRA with dropout on some layers": ({}, 0.25, "none"),
}
"""Settings of the model, dropout of adapters if there are any, and recompute."""
FAST = (
    "attention dropout",
    "window",
    "LoRA with dropout, documents, GPT-NeoX",
    "LoRA with dropout on some layers",
)


@pytest.fixture(autouse=True)
def graphs_without_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traced, but no code is generated."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    """How many were compiled so far."""
    return counters["stats"]["unique_graphs"]


def micro_batch(step: int, documents: bool = False) -> MicroBatch:
    ids = (torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * (step + 3)) % 64
    places = torch.arange(LENGTH).expand(BATCH, LENGTH)
    return MicroBatch(
        ids,
        ids.flip(1),
        torch.full((BATCH, LENGTH), 1.0 / ids.numel()),
        document_ids=(places >= 4 + step).long() if documents else None,
        position_ids=torch.where(places >= 4 + step, places - 4 - step, places) if documents else None,
        token_index=ids.numel() * step + torch.arange(ids.numel()).view(BATCH, LENGTH),
    )


@pytest.mark.parametrize(
    "case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case not in FAST)]
)
def test_blocks_are_one_graph(case: str) -> None:
    changes, dropout, recompute = CASES[case]
    with fake_context() as context:
        model = GPT(replace(MODEL, num_layers=DEPTH, **changes), context, seed=1, device="cpu")
        if dropout is not None:
            targets = ["layers.[01].*.value", "down"] if "some layers" in case else ["*"]
            add_adapters(model, targets, 2, 4.0, dropout=dropout, seed=1)
        parallelize(model, context, ParallelConfig(compile=True, recompute_granularity=recompute))  # type: ignore[arg-type]
        init_weights(model, seed=0)
        for step in range(3):
            model(micro_batch(step, "documents" in case)).loss.backward()
        kinds = 2 if "some layers" in case else 1  # of blocks, which differ in what they compute
        first = int(dropout is not None)  # behind a frozen embedding the first block has no gradient to hand on
        assert graphs() == kinds + first
        model.eval()
        with torch.no_grad():
            model(micro_batch(3, "documents" in case))
        assert graphs() == 2 * kinds + first, "evaluation has a graph of its own, without dropout and gradients"
