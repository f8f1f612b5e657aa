"""Reinforcement learning of experts, windows, capped scores, compiled code: each layout like one rank; ten steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE, tensor_errors
from tests.training.rl_lab import flags, write_inputs
from tests.training.tuning_lab import together, tune_all

pytest.importorskip("transformers")

TWICE = "--objective grpo --num-iterations 2"
CASES = {
    "experts": ("qwen2-moe", TWICE, 2, "--expert-model-parallel-size 2"),
    "experts x tp": (
        "qwen2-moe",
        TWICE,
        4,
        "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "experts in a pipeline": ("qwen2-moe", "--objective gspo", 2, "--pipeline-model-parallel-size 2"),
    "windows": ("gemma2", f"{TWICE} --beta 0.1", 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "windows, cut": ("gemma2", "--objective grpo", 2, "--context-parallel-size 2 --cp-comm-type all_gather"),
    "compiled": ("llama", f"{TWICE} --train-iters 2", 2, "--compile"),
}
LONG = (
    (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    (2, "--pipeline-model-parallel-size 2"),
    (4, "--tensor-model-parallel-size 2"),
)


def both(folder: Path, method: str, world: int, layout: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(a run of one process, the same in a layout)."""
    (alone,) = run_distributed(tune_all, 1, [flags(folder, method)])
    ranks = run_distributed(tune_all, world, [flags(folder, method, layout)])
    return alone[0], together([rank[0] for rank in ranks])


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-5, abs=1e-6)
    for step, metrics in enumerate(want["more"]):
        for name in ("reward", "completion length", "truncated", "entropy"):
            assert got["more"][step][name] == pytest.approx(metrics[name], rel=1e-5), (step, name)
        first_of_two = step % 2 == 0
        assert not first_of_two or metrics["sampling difference"] < 1e-5
        assert got["more"][step]["sampling difference"] == pytest.approx(metrics["sampling difference"], abs=1e-5)
    assert max(tensor_errors(got["final"], want["final"], want["final"]).values()) <= TOLERANCE


@pytest.mark.parametrize("case", [c if c == "experts" else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_layout_equals_one_rank(case: str, tmp_path: Path) -> None:
    kind, method, world, layout = CASES[case]
    write_inputs(tmp_path, kind)
    alone, cut = both(tmp_path, method, world, layout)
    assert_same(cut, alone)


@pytest.mark.slow
def test_ten_steps(tmp_path: Path) -> None:
    """Rewards and weights of ten steps in four layouts."""
    write_inputs(tmp_path)
    method = "--objective grpo --beta 0.05 --train-iters 10"
    (alone,) = run_distributed(tune_all, 1, [flags(tmp_path, method)])
    for world, layout in LONG:
        ranks = run_distributed(tune_all, world, [flags(tmp_path, method, layout)])
        cut = together([rank[0] for rank in ranks])
        assert len(cut["more"]) == 10
        assert_same(cut, alone[0])
