"""Every setting of the pipeline, by what ranks hold, say to each other and leave behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.models.presets import PRESETS
from smp.pipeline.actions import COMPUTE, Op
from smp.pipeline.timeline import Timeline
from smp.training.pretraining import Pretraining
from smp.training.process import Process
from smp.training.run import Run
from smp.training.runtime import StopSignal
from smp.training.settings import read_settings
from tests.distributed import run_distributed
from tests.operations import recorded
from tests.training.flag_runs import TINY, Runs, proves
from tools.plot_pipeline import from_trace
from tools.plot_pipeline import main as plot

PIPE = "--num-layers 4 --global-batch-size 8 --micro-batch-size 2 "
TWO = PIPE + "--pipeline-model-parallel-size 2 --trace-pipeline --profile-step-start 2 "
LAYOUTS = {
    "default": TWO,
    "gpipe": TWO + "--pipeline-schedule gpipe",
    "chunks": TWO + "--num-virtual-stages-per-pipeline-rank 2",
    "zb-v": TWO + "--pipeline-schedule zb-v",
    "by hand": TWO + "--pipeline-model-parallel-layout Ettt|tL",
    "not traced": PIPE + "--pipeline-model-parallel-size 2",
}
KEPT = PIPE + "--pipeline-model-parallel-size 2 --global-batch-size 16"


def start(flags: str, rank: int, world: int) -> Run:
    config = read_settings([*TINY.split(), *flags.split()], PRESETS, world)
    return Run(Pretraining(config), Process(rank, world, rank), torch.device("cpu"), StopSignal())


def train(name: str, flags: str, rank: int, world: int) -> dict[str, Any]:
    """A whole run in a folder of its own."""
    run = start(f"{flags} --log-dir {name.replace(' ', '-')} --eval-interval 3 --eval-iters 1", rank, world)
    outcome = run.run()
    run.close()
    return {"parameters": {n for n, _ in run.trainer.model.named_parameters()}, "outcome": outcome.status}


def train_all(rank: int, world: int, folder: str) -> dict[str, dict[str, Any]]:
    os.chdir(folder)
    return {name: train(name, flags, rank, world) for name, flags in LAYOUTS.items()}


def count_gathers(rank: int, world: int, folder: str) -> list[tuple[int, int]]:
    """(all-gathers, reduce-scatters) of one step, without and with --pipeline-reshard."""
    os.chdir(folder)
    counts = []
    for flags in ("", " --pipeline-reshard"):
        run = start(f"{KEPT}{flags} --cpu-collectives gloo", rank, world)  # whose operators can be counted
        run.trainer.train_step(next(run.batches))
        with torch.profiler.profile() as profile:
            run.trainer.train_step(next(run.batches))
        names = [event.name() for event in recorded(profile)]
        counts.append((names.count("c10d::_allgather_base_"), names.count("c10d::_reduce_scatter_base_")))
        run.close()
    return counts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelines")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, dict[str, Any]]]:
    """What each of two ranks says of its runs."""
    return run_distributed(train_all, 2, str(folder))


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def timeline(folder: Path, name: str) -> Timeline:
    return from_trace(json.loads((folder / name / "pipeline_trace.json").read_text()))


def layers(parameters: set[str]) -> set[int]:
    return {int(name.split(".")[1]) for name in parameters if name.startswith("layers.")}


def test_pipelines_train_and_evaluate_like_one_process(
    two: list[Any], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    alone = Runs(tmp_path_factory.mktemp("alone"))(f"{PIPE} --eval-interval 3 --eval-iters 1")
    for name in LAYOUTS:
        assert all(rank[name]["outcome"] == "done" for rank in two)
        found = records(folder, name.replace(" ", "-"))
        assert [r["lm loss"] for r in found if "lm loss" in r] == pytest.approx(alone.losses, rel=1e-5), name
        (validation,) = (r["validation loss"] for r in found if "validation loss" in r)
        assert validation == pytest.approx(alone.records("validation loss")[0], rel=1e-5), name


@proves("pipeline_model_parallel_size")
def test_each_rank_holds_its_layers(two: list[Any]) -> None:
    first, last = (rank["default"]["parameters"] for rank in two)
    assert (layers(first), layers(last)) == ({0, 1}, {2, 3})
    assert "embedding.weight" in first and "head.weight" in last and not first & last


@proves("pipeline_schedule")
def test_schedules_run_in_their_own_order(two: list[Any], folder: Path) -> None:
    """GPipe: all forwards first. ZB-V: stages back and forth, the backward pass in two parts."""

    def order(name: str) -> list[tuple[Op, int]]:
        spans = sorted(timeline(folder, name).spans, key=lambda span: span.start)
        return [(s.action.op, s.action.stage) for s in spans if s.rank == 0 and s.action.op in COMPUTE]

    forward, backward = [(Op.FORWARD, 0)], [(Op.BACKWARD, 0)]
    assert order("gpipe") == 4 * forward + 4 * backward
    assert order("default")[:4] == [*forward, *forward, *backward, *forward]
    assert {op for op, _ in order("zb-v")} == {Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT}
    assert {stage for _, stage in order("zb-v")} == {0, 3}


@proves("num_virtual_stages_per_pipeline_rank")
def test_several_stages_per_rank_interleave(two: list[Any], folder: Path) -> None:
    first, last = (layers(rank["chunks"]["parameters"]) for rank in two)
    assert (first, last) == ({0, 2}, {1, 3})
    assert {s.action.stage for s in timeline(folder, "chunks").spans if s.rank == 1} == {1, 3}


@proves("pipeline_model_parallel_layout")
def test_a_layout_places_layers_by_hand(two: list[Any]) -> None:
    first, last = (layers(rank["by hand"]["parameters"]) for rank in two)
    assert (first, last) == ({0, 1, 2}, {3})


@proves("pipeline_reshard")
def test_weights_stay_gathered_for_a_step_or_for_a_use(folder: Path) -> None:
    """Each rank has two blocks and an end, so three units. A step of four micro-batches gathers each once, or for every
    use: on the last rank, where forward and backward follow each other, that is four times. Gradients are reduced once.
    """
    counts = run_distributed(count_gathers, 4, str(folder))
    assert counts[:2] == [[(3, 3), (3 * 8, 3)]] * 2
    assert counts[2:] == [[(3, 3), (3 * 4, 3)]] * 2


@proves("trace_pipeline")
def test_a_trace_is_written_of_one_iteration_and_can_be_drawn(
    two: list[Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not (folder / "not-traced" / "pipeline_trace.json").exists()
    measured = timeline(folder, "default")
    computed = [span for span in measured.spans if span.action.op in COMPUTE]
    assert len(computed) == 2 * 2 * 4 and all(span.end > span.start for span in computed)
    trace = folder / "default" / "pipeline_trace.json"
    assert json.loads(trace.read_text())["otherData"]["title"] == "1f1b, iteration 2"
    plot(["--schedule", "1f1b", "--pipeline-model-parallel-size", "2", "--micro-batches", "4", "--trace", str(trace)])
    assert "1f1b, iteration 2: step" in capsys.readouterr().out


def test_a_dry_run_shows_the_plan(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    from smp.training.cost.describe import describe

    flags = [*TINY.split(), *TWO.split(), "--dry-run"]
    text = describe(read_settings(flags, PRESETS, 2), 2)
    assert "pipeline: 1f1b, 2 ranks x 1 stages, 4 micro-batches; predicted bubble" in text
    assert "embedding, layers 0-1" in text and "layers 2-3, head" in text
    assert "mesh: pp 2 = 2 processes\n" in text and "memory of pipeline rank" in text


SINGLE = "--mock-data --vocab-size 97 --seq-length 17 --train-iters 1 "
TWO_RANKS = "--pipeline-model-parallel-size 2 "
BAD = {
    "no pipeline": ("--pipeline-schedule zb-h1 --trace-pipeline", 1, "there is no pipeline"),
    "product": (
        "--pipeline-model-parallel-size 3",
        4,
        "4 processes are not divisible by --pipeline-model-parallel-size 3; change",
    ),
    "compile": (TWO_RANKS + "--pipeline-schedule zb-v --compile", 2, "exclude each other"),
    "layers": (TWO_RANKS + "--pipeline-model-parallel-layout Et|ttL", 2, "names 3 layers of 4"),
    "stages": (TWO_RANKS + "--pipeline-model-parallel-layout Ett|t|tL", 2, "names 3 stages"),
    "chunks": (
        TWO_RANKS + "--pipeline-schedule zb-v --num-virtual-stages-per-pipeline-rank 3",
        2,
        "",
    ),
    "trace": (TWO_RANKS + "--trace-pipeline", 2, "after the last one, 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_work_is_refused_with_the_flag(name: str) -> None:
    flags, world, message = BAD[name]
    with pytest.raises(ValueError, match="--") as caught:
        read_settings([*SINGLE.split(), *flags.split()], PRESETS, world)
    assert message in str(caught.value) and "\n" not in str(caught.value)
