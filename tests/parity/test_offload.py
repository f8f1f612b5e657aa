"""Offloaded activations change no bit, whatever the layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity import offload_cases as cases
from tests.parity.cases import Case
from tests.parity.lab import Lab

FAST = cases.fast_cases()
MORE = cases.more_cases()


def lab_of(offloaded: list[Case], folder: Path, device: str = "cpu") -> Lab:
    return Lab([case for one in offloaded for case in (one, cases.without_offload(one))], folder, device)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return lab_of(FAST, tmp_path_factory.mktemp("offload"))


@pytest.fixture(scope="module")
def slow_lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return lab_of(MORE, tmp_path_factory.mktemp("more"))


def differing(lab: Lab, case: Case) -> list[str]:
    """What has other bits than without offload: losses, norms, gradients, weights."""
    got, wanted = lab.result(case), lab.result(cases.without_offload(case))
    found = [name for name in ("losses", "norms") if getattr(got, name) != getattr(wanted, name)]
    tensors = [(got.final, wanted.final), *((got.gradients[step], wanted.gradients[step]) for step in wanted.gradients)]
    for ours, theirs in tensors:
        assert ours.keys() == theirs.keys()
        found += [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]
    return found


@pytest.mark.parametrize("case", FAST, ids=str)
def test_offload_changes_no_bit(lab: Lab, case: Case) -> None:
    """The ranks also look that copies were made, and count what was on the device."""
    assert differing(lab, case) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=str)
def test_offload_changes_no_bit_of_more_layouts(slow_lab: Lab, case: Case) -> None:
    assert differing(slow_lab, case) == []


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*FAST, *MORE], ids=str)
def test_offload_changes_no_bit_on_gpus(tmp_path_factory: pytest.TempPathFactory, case: Case) -> None:
    needed, there = case.spread.world_size, torch.cuda.device_count()
    if needed > there:
        pytest.skip(f"needs {needed} GPUs, this machine has {there}")
    assert differing(lab_of([case], tmp_path_factory.mktemp("offload"), "cuda"), case) == []
