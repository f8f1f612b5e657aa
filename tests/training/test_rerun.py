"""A step that is doubted is computed again: a fault that comes once changes nothing, one that stays ends the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.config import Config, ConfigError, TrainingConfig
from smp.training.faults.rerun import Rerun
from smp.training.reporting.goodput import FILE
from tests.training.flag_runs import Run, Watched, proves, run_here
from tests.training.test_replicas import flip


def faulty(iteration: int, fault: Any, times: int = 1) -> Any:
    """``fault(tensor)`` in the gradient of a weight in the first ``times`` micro-batches of an iteration."""

    def hook(run: Watched) -> None:
        if "left" in run.__dict__:
            return
        run.left = times
        parameter = run.trainer.model.get_parameter("layers.1.mlp.down.weight")

        def change(gradient: torch.Tensor) -> torch.Tensor:
            if run.trainer.progress.iteration + 1 != iteration or not run.left:
                return gradient
            run.left -= 1
            changed = gradient.clone()
            fault(changed)
            return changed

        parameter.register_hook(change)

    return hook


def bit(gradient: torch.Tensor) -> None:
    flip(gradient, 5, 12)


def same(one: Run, other: Run) -> bool:
    return one.losses == other.losses and all(torch.equal(p, other.final[name]) for name, p in one.final.items())


@proves("rerun_mode")
def test_a_flipped_bit_of_a_gradient_is_found_where_a_step_is_repeated(tmp_path: Path) -> None:
    """Without replicas, and with a loss that shows nothing."""
    clean = run_here(tmp_path / "clean", "--train-iters 6")
    flags = "--train-iters 6 --check-replicas-interval 4 --rerun-mode "
    run = run_here(tmp_path / "a", flags + "validate_results", each_step=faulty(4, bit))
    assert run.code == 0 and same(run, clean)
    (said,) = [line for line in run.out.splitlines() if line.startswith("ERROR: ")]
    assert "iteration 4: silent corruption: from the same batch and weights another result on rank 0 on " in said
    assert "(layers.1.mlp.down.weight); two of three passes agree" in said
    silent = run_here(tmp_path / "b", flags + "disabled", each_step=faulty(4, bit))
    assert silent.code == 0 and not same(silent, clean) and "silent corruption" not in silent.out
    assert not [
        line for line in run_here(tmp_path / "c", flags + "validate_results").out.splitlines() if "ERROR" in line
    ]


def test_a_number_that_is_not_finite_once_skips_nothing(tmp_path: Path) -> None:
    clean = run_here(tmp_path / "clean", "--train-iters 4")
    flags = "--train-iters 4 --rerun-mode validate_results"
    run = run_here(tmp_path / "a", flags, each_step=faulty(3, lambda gradient: gradient.fill_(float("nan"))))
    assert same(run, clean) and run.records("skipped iterations")[-1] == 0
    assert "silent corruption: from the same batch" in run.out
    spent, without = (json.loads((one.folder / "logs" / FILE).read_text())["seconds"] for one in (run, clean))
    assert spent["rerun"] > 0 == without["rerun"], "repeated passes are not productive"
    always = faulty(3, lambda gradient: gradient.fill_(float("nan")), times=99)
    run = run_here(tmp_path / "b", flags, each_step=always)
    assert run.records("skipped iterations")[-1] == 1 and "silent corruption" not in run.out


def test_a_spike_that_is_only_warned_of_is_doubted(tmp_path: Path) -> None:
    flags = "--lr-decay-style constant --spike-window 8 --spike-policy warn --train-iters 11 --rerun-mode "
    clean = run_here(tmp_path / "clean", flags + "disabled")
    run = run_here(
        tmp_path / "a", flags + "validate_results", each_step=faulty(10, lambda gradient: gradient.mul_(1e4))
    )
    assert same(run, clean) and "iteration 10: silent corruption: " in run.out and "spike" not in run.out


def test_three_results_end_the_run(tmp_path: Path) -> None:
    def other(gradient: torch.Tensor) -> None:
        gradient += torch.rand(())

    flags = "--train-iters 6 --check-replicas-interval 4 --rerun-mode validate_results"
    run = run_here(tmp_path, flags, each_step=faulty(4, other, times=99))
    assert run.code == 1 and "no two of three passes agree" in run.status["reason"]
    assert "rank 0 on " in run.status["reason"]


def test_kernels_that_are_not_deterministic_are_refused() -> None:
    config = Config(training=TrainingConfig(rerun_mode="validate_results"))
    with pytest.raises(ConfigError, match="give --deterministic-mode"):
        Rerun.wanted(config, on_cuda=True)
    assert Rerun.wanted(config, on_cuda=False) is not None
    assert Rerun.wanted(Config(), on_cuda=True) is None
