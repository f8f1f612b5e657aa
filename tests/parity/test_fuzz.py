"""The harness of random layouts: one seed of it, what it draws, and that it sees what it is there for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity import fuzz
from tests.parity.fuzz import Report, compare, is_rounding, run_seeds, without_change
from tests.parity.fuzz_cases import KINDS, draw, write_inputs

pytest.importorskip("transformers")

SEEDS = (0, 4)
"""Of the fast suite."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def test_a_seed_says_all_and_the_first_ones_draw_every_kind(inputs: Path) -> None:
    problems = [draw(seed, inputs) for seed in range(25)]
    assert [draw(seed, inputs) for seed in (3, 4)] == problems[3:5]
    assert {problem.kind for problem in problems} == set(KINDS)
    chains = [chain for problem in problems for chain in problem.chains]
    flags = " ".join(layout.flags for chain in chains for layout in chain)
    for word in ("tensor", "pipeline", "sequence-parallel", "zb-", "hybrid-shard-degree 1", "granularity full"):
        assert word in flags
    assert {len(chain) for chain in chains} == {1, 2, 3}
    assert {layout.world for chain in chains for layout in chain} == {1, 2, 4}


def test_random_layouts_equal_one_rank(inputs: Path) -> None:
    """Pretraining and DPO with adapters, in a layout each and in a chain of resumes."""
    report = Report()
    run_seeds(SEEDS, inputs, report, worlds=(2,), chains=2)
    assert report.failures == []
    assert report.kinds == {"pretrain": 2, "dpo lora": 2} and report.resumed == 2
    assert "differences without a reason" in report.table()


def found(**changes: Any) -> dict[str, Any]:
    tensors = {"layers.0.w": torch.ones(2, 2), "layers.0.b": torch.ones(2)}
    run = {
        "losses": [2.0, 1.0],
        "norms": [1.0, 1.0],
        "gradients": [tensors, tensors],
        "initial": tensors,
        "final": {name: 2 * x for name, x in tensors.items()},
        "moved": [set(tensors), set(tensors)],
        "more": [{"router entropy": 1.2, "expert load max/mean": 2.0}],
        "validation": (2, 1.5),
    }
    return run | changes


def test_a_difference_is_measured() -> None:
    assert set(compare(found(), found()).values()) == {0.0}
    other = {"layers.0.w": torch.ones(2, 2), "layers.0.b": torch.full((2,), 1.5)}
    for name, changed in {
        "loss": {"losses": [2.0, 1.1]},
        "gradient norm": {"norms": [1.0, 2.0]},
        "gradient": {"gradients": [found()["initial"], other]},
        "weight": {"final": other},
        "initial weights": {"initial": other},
        "validation loss": {"validation": (2, 1.6)},
        "log": {"more": [{"router entropy": 1.3, "expert load max/mean": 3.0}]},
    }.items():
        errors = compare(found(**changed), found())
        assert {measure for measure, error in errors.items() if error > 1e-2} == {name}
    loaded = found(more=[{"router entropy": 1.2, "expert load max/mean": 3.0}])
    assert compare(loaded, found())["log"] == 0.0 and compare(loaded, found(), same_micro_batches=True)["log"] == 0.5


def run_of(steps: list[float], final: float = 0.0) -> dict[str, Any]:
    """A run whose gradients are off by these factors, and its last weights by ``final``."""
    tensors = found()["initial"]
    gradients = [{name: x * (1 + e) for name, x in tensors.items()} for e in steps]
    return found(gradients=gradients, final={name: x * (2 + final) for name, x in tensors.items()})


def test_rounding_is_as_far_from_one_rank_as_that_is_from_fp64_in_every_step() -> None:
    want, exact = run_of([0.0, 0.0]), run_of([1e-6, 3e-4], final=6e-5)
    assert compare(run_of([1e-6, 4e-4], 8e-5), want)["gradient"] > 1e-5
    assert is_rounding(run_of([1e-6, 4e-4], 8e-5), want, exact)
    assert not is_rounding(run_of([1e-6, 2e-3], 8e-5), want, exact), "more than rounding"
    assert not is_rounding(run_of([2e-5, 4e-4], 8e-5), want, exact), "wrong before rounding is amplified"
    assert not is_rounding(run_of([1e-6, 4e-4], 1e-3), want, exact), "wrong weights"
    assert not is_rounding(run_of([1e-6, float("nan")]), want, exact)
    assert not is_rounding(run_of([1e-6, 4e-4]) | {"losses": [2.0, 1.001]}, want, exact)
    other = {"layers.0.w": torch.ones(2, 2), "layers.0.b": torch.full((2,), 1.5)}
    assert not is_rounding(run_of([1e-6, 4e-4]) | {"initial": other}, want, exact)


@pytest.mark.slow
def test_a_problem_that_amplifies_rounding_is_told_by_fp64(inputs: Path) -> None:
    """One rank's own error in the fourth step is 30 times the bound."""
    report = Report()
    run_seeds([90873], inputs, report, worlds=(2,), chains=2)
    assert report.failures == [] and len(report.rounding) >= 1
    assert all("gradient" in text and "90873" in text for text in report.rounding)
    assert report.worst.get("gradient", (0.0, ""))[0] <= 1e-5


def test_a_parameter_that_a_step_leaves_alone_is_named() -> None:
    everything = set(found()["initial"])
    assert without_change(found(), found()) == ""
    assert without_change(found(moved=[everything, {"layers.0.b"}]), found()) == "layers.0.w at step 2"
    assert without_change(found(moved=[{"layers.0.b"}, everything]), found(), first=1) == ""
    rounding = found()["initial"] | {"layers.0.w": torch.full((2, 2), 1e-9)}
    small = found(gradients=[found()["initial"], rounding])
    assert without_change(found(moved=[everything, {"layers.0.b"}]), small) == ""


def test_a_run_that_fails_is_a_difference(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report()
    monkeypatch.setattr(fuzz, "run_tasks", lambda tasks, folder, wide=False: ((task, "it broke") for task in tasks))
    run_seeds([0], inputs, report, worlds=(2,), chains=1)
    assert len(report.failures) == 1 and "it broke" in report.failures[0]
