"""Transformed models of processes that share a card, see ``tests/one_card.py``; without one, on the processor."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch.distributed as dist

import smp
from smp.hf.state import _sends_from_gpus
from tests.distributed import run_distributed
from tests.hf.families import build, gradients, worst
from tests.one_card import device_of

pytest.importorskip("transformers")
SETTINGS: list[dict[str, Any]] = [
    {"tensor_parallel_degree": 2},
    {"tensor_parallel_degree": 2, "sequence_parallel": True},
]


def transformed(rank: int, world_size: int, family: str) -> list[tuple[str, float, str]]:
    """For all settings where the model is, and the largest distance from the model alone."""
    assert _sends_from_gpus()
    device = device_of("one card", rank)
    alone, results = build(family).to(device), []
    for settings in SETTINGS:
        smp.state.reset()
        smp.init(settings)
        model = smp.transform(copy.deepcopy(alone))
        results.append((next(model.parameters()).device.type, *worst(gradients(model, 2), gradients(alone, 2))))
    return results


PLACES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("family", ["Qwen3", "Mixtral"])
@pytest.mark.parametrize("place", PLACES)
def test_a_transformed_model_equals_the_model_alone(family: str, place: str) -> None:
    for results in run_distributed(transformed, 2, family, device="one card"):
        assert len(results) == len(SETTINGS)
        assert all(where == place and error <= 1e-5 for where, error, _ in results), results


@pytest.mark.parametrize(("backend", "on_gpus"), [("gloo", False), ("smp", True), ("cpu:gloo,cuda:smp", True)])
def test_which_groups_send_from_gpus(backend: str, on_gpus: bool) -> None:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert _sends_from_gpus() == on_gpus
    finally:
        dist.destroy_process_group()
