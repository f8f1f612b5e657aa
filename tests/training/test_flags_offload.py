"""Offload and the settings of it: what goes to the host, that no bit changes, and what a dry run says."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.config import Config, Layout
from smp.kernels.copier import copier_of
from smp.models.presets import PRESETS
from smp.pipeline.stage_plan import Plan, plan_pipeline
from smp.sharding.offload import Offload
from smp.training.cost import describe as describe_module
from smp.training.cost import predict
from smp.training.cost.describe import describe
from smp.training.cost.fake_step import fake_gpu_step
from smp.training.cost.memory import MemoryEstimate
from smp.training.cost.model_share import Tuned
from smp.training.cost.offload import activation_copies, offload_at_work
from smp.training.cost.predict import predicted_memory, tried_memory
from smp.training.cost.suggest import FAR, TOO_HIGH, Suggestion, suggestions
from smp.training.settings import read_settings
from tests.training.flag_runs import Run, Runs, Tensors, Watched, proves, run_here

FULL = "--num-layers 4 --recompute-granularity full"
NONE = "--num-layers 4 --offload-activations"
INPUT = 2 * 17 * 32 * 4
"""Bytes of a block's input: two sequences of 17 tokens, 32 wide, fp32."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("offload"))


def copied(run: Watched) -> tuple[int, int, int]:
    """Bytes to the host and back, and most blocks with something on the device, of a whole run."""
    offload = run.setup.offload
    assert offload is not None
    return offload.copier.bytes_out, offload.copier.bytes_back, offload.most_live


def observed(runs: Runs, flags: str) -> Run:
    run = runs.fresh(flags, probe=copied)
    assert run.code == 0, run.err
    return run


def same(ours: Tensors, theirs: Tensors) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], t) for name, t in theirs.items())


@proves("offload_activations", "activation_loading_horizon")
def test_block_inputs_go_to_the_host_and_come_back(runs: Runs) -> None:
    """Of 4 blocks, in 3 steps of 2 micro-batches; the last ones are there when their backward pass begins."""
    there = runs(FULL)
    for horizon in (1, 2, 3):
        run = observed(runs, f"{FULL} --offload-activations --activation-loading-horizon {horizon}")
        passes = 3 * 2 * INPUT
        assert run.probed == (passes * (4 - horizon + 1), passes * (4 - horizon), horizon)
        assert run.losses == there.losses and same(run.final, there.final)
        assert all(map(same, run.grads, there.grads)) and len(run.grads) == 3
        assert f"but for those of {horizon} at a time" in run.out
        assert "copies are made, but save nothing" in run.out


@proves("min_offloaded_tensor_size")
def test_saved_tensors_from_a_size_on_leave(runs: Runs) -> None:
    there = runs("--num-layers 4")
    bytes_out = []
    for size in (1, 2 * 17 * 64, 2 * 17 * 64 + 1):
        run = observed(runs, f"{NONE} --min-offloaded-tensor-size {size}")
        bytes_out.append(run.probed[0])
        assert run.losses == there.losses and same(run.final, there.final)
    assert bytes_out[0] > bytes_out[1] > bytes_out[2] == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--recompute-granularity selective", "--recompute-granularity selective keeps results where"),
        ("--compile", "--offload-activations and --compile exclude each other"),
        ("--recompute-granularity full --min-offloaded-tensor-size 7", "--min-offloaded-tensor-size 7 has no effect"),
        ("--activation-loading-horizon 4", "--activation-loading-horizon 4 with --num-layers 4 keeps all"),
        ("--no-offload-activations --activation-loading-horizon 3", "has no effect without --offload-activations"),
        ("--optimizer sgd --optimizer-cpu-offload", "--optimizer-cpu-offload has no effect without --optimizer adam"),
        ("--suggest 80", "--suggest 80.0 has no effect without --dry-run"),
    ],
)
def test_what_does_not_go_together_is_one_line(runs: Runs, flags: str, said: str) -> None:
    run = runs.fresh(f"{NONE} {flags}")
    assert run.code == 2
    assert len(run.errors) == 1 and said in run.errors[0]


def equal_runs(ours: Run, theirs: Run) -> bool:
    states = [same(ours.state[key], theirs.state[key]) for key in ("exp_avg", "exp_avg_sq", "step")]
    return ours.losses == theirs.losses and same(ours.final, theirs.final) and all(states)


@proves("optimizer_cpu_offload")
@pytest.mark.parametrize("flags", ["--clip-grad 0.1", "--bf16"])
def test_a_run_has_the_same_bits(runs: Runs, flags: str) -> None:
    ours, theirs = runs(f"{flags} --optimizer-cpu-offload"), runs(flags)
    assert equal_runs(ours, theirs)
    assert "offload: Adam's moments are in the host's memory" in ours.out
    assert "offload:" not in theirs.out


def test_a_run_that_was_saved_goes_on_with_or_without(tmp_path: Path) -> None:
    """The files are those of a run without it."""
    save = "--save ck --save-interval 1 --lr-decay-style constant"
    whole = run_here(tmp_path / "whole", f"{save} --train-iters 3")
    host = run_here(tmp_path / "host", f"{save} --train-iters 2 --optimizer-cpu-offload")
    assert host.code == 0, host.err
    shutil.copytree(tmp_path / "host", tmp_path / "device")
    for name, flag in (("host", "--optimizer-cpu-offload"), ("device", "")):
        resumed = run_here(tmp_path / name, f"{save} --load auto --train-iters 3 {flag}")
        assert resumed.code == 0, resumed.err
        assert "at iteration 2" in resumed.out
        assert resumed.losses[-1:] == whole.losses[-1:]
        assert same(resumed.final, whole.final)
        assert all(same(resumed.state[key], whole.state[key]) for key in ("exp_avg", "exp_avg_sq", "step"))


LLAMA = "--model llama3-8b --vocab-size 128256 --mock-data --seq-length 8192 --global-batch-size 8 --bf16 --dry-run"


def rows(world: int, flags: str = "") -> list[Any]:
    config = read_settings([*LLAMA.split(), *flags.split()], PRESETS, world)
    return suggestions(config, world, Tuned(), lambda tried: predicted_memory(tried, world))


@proves("suggest")
def test_a_dry_run_suggests_flags_that_save_memory(tmp_path: Path) -> None:
    """The cheapest first; those that fit before those that do not."""
    few, many = (run_here(tmp_path, f"--dry-run --suggest {gib}").out for gib in ("0.0001", "80"))
    assert "none of them fits" in few and "  fits  " not in few
    assert "none of them fits" not in many and "too much" not in many and "  fits  " in many
    assert "memory in steps on tensors without data, time by formula" in many
    assert "suggest: null" in many, "the recipe trains"


TINY = "--num-layers 3 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 64 --vocab-size 250 "
TINY += "--mock-data --micro-batch-size 2 --global-batch-size 8 --dry-run "


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("world", "flags", "every"),
    [
        (1, "--bf16", 4),
        pytest.param(1, "--bf16", 1, marks=SLOW),
        pytest.param(2, "--recompute-granularity full --offload-activations", 1, marks=SLOW),
        pytest.param(2, "--tensor-model-parallel-size 2 --sequence-parallel --bf16", 1, marks=SLOW),
        pytest.param(2, "--pipeline-model-parallel-size 2 --bf16", 1, marks=SLOW),
        pytest.param(2, "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2 --bf16", 1, marks=SLOW),
    ],
)
def test_each_suggestion_says_what_a_dry_run_with_its_flags_says(world: int, flags: str, every: int) -> None:
    """To the byte, on the rank that needs most; and no two need the same. Compared is each ``every``-th, from the last
    on."""
    config = read_settings([*TINY.split(), *flags.split()], PRESETS, world)
    found = suggestions(
        config, world, Tuned(), lambda tried: predicted_memory(tried, world), lambda tried: tried_memory(tried, world)
    )
    plain = flags.replace("--recompute-granularity full --offload-activations", "")
    layout = Layout.from_config(config.parallel, world)
    for row in found[::-every][::-1]:
        given = "" if row.flags == "none of them" else row.flags
        with_them = read_settings([*TINY.split(), *plain.split(), *given.split()], PRESETS, world)
        plan = plan_pipeline(with_them, layout) if layout.pp > 1 else None
        steps = [fake_gpu_step(with_them, layout, plan, rank) for rank in range(layout.pp)]
        assert row.is_tried and row.device == max(step.peak for step in steps), row.flags
    assert f"  total             {row.device / 2**30:10.3f} GiB" in describe(with_them, world), "the last one"
    assert len(found) >= 8 and len({row.device for row in found}) > len(found) / 2


def test_what_is_far_from_the_end_of_the_device_is_not_tried() -> None:
    """But the first that fits is, and so is what the formula calls near; each row is tried once at most."""
    config, tried = read_settings([*TINY.split(), "--bf16"], PRESETS, 1), list[Config]()

    def measure(one: Config) -> int:
        tried.append(one)
        return predicted_memory(one, 1).total + 1

    def found(limit: float | None) -> list[Suggestion]:
        tried.clear()
        return suggestions(config, 1, Tuned(), lambda one: predicted_memory(one, 1), measure, limit)

    rows = found(None)
    assert all(row.is_tried for row in rows) and len(tried) == len(rows)
    roomy = found(10 * max(row.device for row in rows))
    assert [row.is_tried for row in roomy] == [True] + [False] * (len(rows) - 1), "the first one fits"
    assert not any(row.is_tried for row in found(min(row.device for row in rows) / 2)), "none is near"
    limit = sorted(row.device for row in rows)[len(rows) // 2]
    fits = next(row for row in found(limit) if row.device <= limit)
    near = {row.flags for row in rows if abs((row.device - 1) / limit - 1) < FAR}
    cheaper = {row.flags for row in rows if row.order < fits.order and (row.device - 1) / limit < 1 + TOO_HIGH}
    assert near | cheaper | {fits.flags} == {row.flags for row in found(limit) if row.is_tried}


def test_a_cheaper_row_that_the_formula_calls_a_fifth_too_large_is_tried() -> None:
    config = read_settings([*TINY.split(), "--bf16"], PRESETS, 1)

    def too_high(one: Config) -> MemoryEstimate:
        estimate = predicted_memory(one, 1)
        return replace(estimate, most=estimate.most + estimate.total // 5)

    rows = suggestions(config, 1, Tuned(), lambda one: predicted_memory(one, 1))
    limit = next(row.device for row in rows if row.flags == "--recompute-granularity selective")
    found = suggestions(config, 1, Tuned(), too_high, lambda one: predicted_memory(one, 1).total, limit)
    first = next(row for row in found if row.device <= limit)
    assert first.is_tried and first.flags == next(row.flags for row in rows if row.device <= limit)


def test_a_dry_run_tries_its_own_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[Config]()

    def count(config: Config, layout: Layout, plan: Plan | None) -> Any:
        tried.append(replace(config, training=replace(config.training, suggest=None)))
        return real(config, layout, plan)

    real = predict.tried_steps
    for module in (predict, describe_module):
        monkeypatch.setattr(module, "tried_steps", count)
    describe(read_settings([*TINY.split(), "--suggest", "1"], PRESETS, 1), 1)
    assert len(tried) == 1, "the first that fits is the run itself"


def test_suggestions_are_ranked_by_what_they_cost() -> None:
    found = rows(8)
    assert [row.seconds for row in found] == sorted(row.seconds for row in found)
    assert found[0].flags == "none of them" and found[0].seconds == 0.0
    by_flags = {row.flags: row for row in found}
    full = by_flags["--recompute-granularity full"]
    both = by_flags["--recompute-granularity full --offload-activations"]
    assert both.seconds == full.seconds, "block inputs hide behind computation"
    assert both.device <= full.device
    host = by_flags["--recompute-granularity full --optimizer-cpu-offload"]
    assert host.device == pytest.approx(full.device - 8 * 8.03e9 / 8, rel=0.001)
    assert not any("selective --offload" in flags for flags in by_flags)


def test_the_formula_keeps_the_horizon() -> None:
    """2 of 32 inputs of 8 sequences, bf16, stay on the device."""
    flags = [*LLAMA.split(), "--micro-batch-size", "8", "--global-batch-size", "64", "--recompute-granularity", "full"]
    there, away = (
        predicted_memory(read_settings([*flags, *more], PRESETS, 8), 8) for more in ((), ("--offload-activations",))
    )
    assert there.activations - away.activations == 30 * 8 * 8192 * 4096 * 2
    assert there.total > away.total


def test_bytes_and_seconds_by_hand() -> None:
    config = read_settings([*LLAMA.split(), "--recompute-granularity", "full", "--offload-activations"], PRESETS, 8)
    copies = activation_copies(config, Layout(dp_shard=8), Tuned())
    assert copies.block == 8192 * 4096 * 2
    assert (copies.layers, copies.away) == (32, 30)
    assert copies.seconds == pytest.approx(67.1e6 / 55e9, rel=0.001)
    further = read_settings([*LLAMA.split(), "--offload-activations", "--mtp-num-layers", "1"], PRESETS, 8)
    assert activation_copies(further, Layout(dp_shard=8), Tuned()).layers == 33
    assert copies.exposed(450e12, recompute=True) == 0.0
    assert copies.exposed(450e15, recompute=True) == pytest.approx(64 * copies.seconds, rel=0.02)


def test_a_horizon_that_keeps_all_blocks_of_a_pipeline_is_told() -> None:
    """What has left nothing to copy is then not the size of tensors."""
    offload = Offload(copier_of(torch.device("cpu")), horizon=9)
    offload.most_live = 8
    (line,) = offload_at_work(offload)
    assert "at most 8 blocks" in line and "--activation-loading-horizon 9 keeps them all" in line
    offload.most_live = 9
    (line,) = offload_at_work(offload)
    assert "give a smaller one" in line
