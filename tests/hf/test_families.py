"""Every family is equal to itself before: logits, loss, gradients, training, generation, at TP 1, 2 and 4.

The fast set trains three steps at TP 2 or 4, the slow one ten at all three."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import smp
from tests.distributed import run_distributed
from tests.hf.families import FAMILIES, batch, build, gradients, whole, worst
from tests.hf.table import families_in

pytest.importorskip("transformers")
FAST = {
    4: ["Llama, one key/value head, tied", "Llama, vocabulary of 97", "Gemma 3", "GPT-NeoX"],
    2: ["Qwen3", "OLMo 2", "GPT-2", "OPT"],
}
"""By TP: one of each kind of row, and both ways to share key/value heads."""


def _train(model: torch.nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        loss = model(**batch(100 + step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _observe(model: Any, steps: int) -> dict[str, Any]:
    """What a user sees of a model. It is trained on the way."""
    data = batch(50)
    out = model(**data)
    seen = {"loss": float(out.loss.detach()), "logits": out.logits.detach().clone()}
    seen["gradients"] = gradients(model, 3)
    model.zero_grad()
    with torch.no_grad():
        seen["text"] = model.generate(data["input_ids"][1:], max_new_tokens=6, do_sample=False, eos_token_id=None)
    seen["losses"] = _train(model, steps)
    seen["weights"] = {name: whole(p) for name, p in model.named_parameters()}
    return seen


def _compare(
    rank: int, world_size: int, families: list[str], degrees: tuple[int, ...], steps: int
) -> list[tuple[str, dict[str, float], str]]:
    results = []
    for family in families:
        reference = build(family)
        fresh = copy.deepcopy(reference)
        wanted = _observe(reference, steps)
        for tp in degrees:
            smp.state.reset()
            smp.init({"tensor_parallel_degree": tp})
            model = copy.deepcopy(fresh)
            kind, names = type(model), list(model.state_dict())
            assert smp.transform(model) is model
            assert type(model) is kind and list(model.state_dict()) == names
            found = _observe(model, steps)
            gradient, where = worst(found["gradients"], wanted["gradients"])
            errors = {
                "loss": abs(found["loss"] - wanted["loss"]) / wanted["loss"],
                "logits": float((found["logits"] - wanted["logits"]).norm() / wanted["logits"].norm()),
                "gradients": gradient,
                "losses": max(abs(a - b) for a, b in zip(found["losses"], wanted["losses"], strict=True)),
                "weights": worst(found["weights"], wanted["weights"])[0],
                "text": float((found["text"] != wanted["text"]).sum()),
            }
            results.append((f"{family}, TP {tp}", errors, where))
    return results


def _all_equal(families: list[str], degrees: tuple[int, ...], steps: int) -> None:
    for results in run_distributed(_compare, 4, families, degrees, steps):
        wrong = [(case, errors, where) for case, errors, where in results if not max(errors.values()) <= 1e-5]
        assert not wrong, "\n".join(map(str, wrong))
        assert len(results) == len(degrees) * len(families)


@pytest.mark.parametrize("tp", FAST)
def test_families(tp: int) -> None:
    _all_equal(FAST[tp], degrees=(tp,), steps=3)


@pytest.mark.slow
def test_more_families() -> None:
    _all_equal(list(FAMILIES), degrees=(1, 2, 4), steps=10)


def test_the_page_has_every_family() -> None:
    page = Path(__file__).parents[2] / "docs/measurements/transform.md"
    assert list(families_in(page.read_text(encoding="utf-8"))) == list(FAMILIES), "run: python -m tests.hf.table"
