"""Loss spikes: found by their score, dropped or taken back, never without a word; a resumed run decides the same."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.config import TrainingConfig
from smp.training.faults.spikes import Spikes
from tests.training.flag_runs import Run, Watched, proves, run_here

SETTINGS = "--lr-decay-style constant --spike-window 8 --spike-threshold 4 "


def spikes(**settings: Any) -> Spikes:
    return Spikes(TrainingConfig(spike_policy="skip", **settings), torch.device("cpu"))


def feed(window: Spikes, pairs: list[tuple[float, float]]) -> list[bool]:
    """Whether each pair is a spike; spikes do not enter the window."""
    found = []
    for loss, norm in pairs:
        values = torch.tensor(loss), torch.tensor(norm)
        accepted = window.accepts(window.scores(*values))
        window.note(*values, accepted)
        found.append(not bool(accepted))
    return found


def test_a_spike_is_far_above_the_last_steps_in_loss_or_norm() -> None:
    draw = random.Random(3)
    quiet = [(draw.gauss(3, 0.1), draw.gauss(1, 0.05)) for _ in range(1000)]
    assert feed(spikes(), quiet) == [False] * 1000
    for bad in ((4.0, 1.0), (3.0, 1.6)):
        assert feed(spikes(), [*quiet, bad, *quiet]) == [False] * 1000 + [True] + [False] * 1000
    assert not any(feed(spikes(), [*quiet, (2.0, 0.2)])), "better than before is no spike"
    assert feed(spikes(spike_window=8), [(1.0, 1.0)] * 3 + [(9.0, 9.0)]) == [False] * 4, "too few to compare with"
    assert feed(spikes(spike_window=8), [(1.0, 1.0)] * 4 + [(9.0, 9.0)])[-1]


def test_the_window_goes_on_from_what_a_checkpoint_has() -> None:
    draw = random.Random(4)
    pairs = [(draw.gauss(3, 0.1), draw.gauss(1, 0.05)) for _ in range(300)]
    whole = spikes(spike_window=64, spike_threshold=2.0)
    first = spikes(spike_window=64, spike_threshold=2.0)
    expected = feed(whole, pairs)
    begun = feed(first, pairs[:150])
    second = spikes(spike_window=64, spike_threshold=2.0)
    second.restore(json.loads(json.dumps(first.state())))
    assert begun + feed(second, pairs[150:]) == expected and any(expected[150:])
    assert second.state() == whole.state()
    shorter = spikes(spike_window=16)
    shorter.restore(whole.state())
    assert shorter.state() == [one[-16:] for one in whole.state()]


def spoil(*iterations: int) -> Callable[[Watched], None]:
    """What these iterations measure as a loss is ten times as high."""

    def hook(run: Watched) -> None:
        trainer = run.trainer
        if trainer.progress.iteration in run.__dict__.setdefault("patched", []) or run.patched:
            return
        run.patched.append(True)
        inner = trainer._forward_backward

        def spoiled(*arguments: Any, **more: Any) -> Any:
            passed = inner(*arguments, **more)
            if trainer.progress.iteration + 1 in iterations:
                return dataclasses.replace(passed, loss=passed.loss * 10)
            return passed

        trainer._forward_backward = spoiled  # type: ignore[method-assign]

    return hook


def without(*steps: int) -> Callable[[Watched], None]:
    """The batches of these steps are never seen."""

    def hook(run: Watched) -> None:
        if "taken" in run.__dict__:
            return
        take, run.taken = run.batches.next_or_reason, 1

        def next_or_reason() -> Any:
            run.taken += 1
            while run.taken in steps:
                take()
                run.taken += 1
            return take()

        run.batches.next_or_reason = next_or_reason  # type: ignore[method-assign]

    return hook


def same_weights(one: Run, other: Run) -> bool:
    return all(torch.equal(p, other.final[name]) for name, p in one.final.items()) and all(
        torch.equal(p, other.state[key][name]) for key, part in one.state.items() for name, p in part.items()
    )


@proves("spike_policy", "spike_window", "spike_threshold")
def test_a_dropped_spike_leaves_what_a_run_without_its_batch_has(tmp_path: Path) -> None:
    flags = f"{SETTINGS}--spike-policy skip --train-iters 16"
    run = run_here(tmp_path / "a", flags, each_step=spoil(10))
    assert run.code == 0, run.err
    never = run_here(tmp_path / "b", "--lr-decay-style constant --train-iters 15", each_step=without(10))
    assert run.losses[:9] + run.losses[10:] == never.losses and same_weights(run, never)
    (said,) = [line for line in run.out.splitlines() if "WARNING: iteration 10: spike: " in line]
    assert said.endswith("standard deviations above the last 8 steps; its update is dropped")
    assert run.records("spike")[0] > 4 and run.records("skipped iterations")[-1] == 1
    assert (
        run_here(tmp_path / "c", flags.replace("threshold 4", "threshold 1e9"), each_step=spoil(10)).records("spike")
        == []
    )


def test_a_warning_changes_nothing(tmp_path: Path) -> None:
    warned = run_here(tmp_path / "a", f"{SETTINGS}--spike-policy warn --train-iters 12", each_step=spoil(10))
    plain = run_here(tmp_path / "b", "--lr-decay-style constant --train-iters 12", each_step=spoil(10))
    assert warned.losses == plain.losses and same_weights(warned, plain)
    assert "; trained on" in warned.out and "spike" not in plain.out


STATES = {
    "adam": "",
    "on the host": "--optimizer-cpu-offload",
    "in 8 bits": "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp8",
    "muon, expert bias": "--optimizer muon --num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1",
    "fp8 history": "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-emulate --fp8-amax-history-len 4",
}


@proves("spike_rewind_steps")
@pytest.mark.parametrize("state", STATES)
def test_a_rewind_leaves_what_a_run_without_the_batches_since_the_snapshot_has(tmp_path: Path, state: str) -> None:
    """Snapshots are of iterations 6 and 12; the spike is in the tenth step, so steps 7 to 10 are taken back."""
    flags = f"{SETTINGS}--spike-policy rewind --spike-rewind-steps 6 --train-iters 18 {STATES[state]}"
    run = run_here(tmp_path / "a", flags, each_step=spoil(10))
    assert run.code == 0, run.err
    plain = f"--lr-decay-style constant --train-iters 14 {STATES[state]}"
    never = run_here(tmp_path / "b", plain, each_step=without(7, 8, 9, 10))
    assert run.losses[:6] + run.losses[10:] == never.losses and same_weights(run, never)
    assert "; back to the weights of iteration 6, without the data since then" in run.out
    assert run.records("skipped iterations")[-1] == 4
    spent = json.loads((run.folder / "logs/goodput.json").read_text())
    assert spent["seconds"]["rerun"] > 0 and spent["iteration"] == 18


@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_a_resumed_run_decides_the_same(tmp_path: Path, policy: str) -> None:
    """The window comes from the checkpoint, and a rewind goes back to it: in both runs that is the newest snapshot."""
    flags = f"{SETTINGS}--spike-policy {policy} --train-iters 16 --save ck --save-interval 8 "
    whole = run_here(tmp_path / "a", flags, each_step=spoil(10))
    first = run_here(tmp_path / "b", flags + "--exit-interval 8", each_step=spoil(10))
    assert first.status["status"] == "requeue"
    second = run_here(tmp_path / "b", flags + "--load auto", each_step=spoil(10))
    assert second.losses == whole.losses and same_weights(second, whole) and len(second.records("spike")) == 1
    off = run_here(tmp_path / "b", "--train-iters 17 --load ck --lr-decay-style constant")
    assert off.code == 0, "without the policy its window is of no use"


def test_too_many_spikes_end_the_run(tmp_path: Path) -> None:
    flags = f"{SETTINGS}--spike-policy skip --train-iters 30 --max-skipped-steps 3"
    run = run_here(tmp_path, flags, each_step=spoil(*range(10, 30)))
    assert run.code == 1 and run.status["iteration"] == 12
    assert run.status["reason"].startswith("3 steps in a row had a NaN or infinite loss or gradient norm, or a spike")
