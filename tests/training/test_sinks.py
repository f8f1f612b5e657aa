"""Where a real run's numbers go: the same to the metrics file, TensorBoard and Weights & Biases, after a resume too."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smp.training.reporting.mlflow_sink import MlflowSink
from tests.training.flag_runs import Run, Runs, run_here

EVERYWHERE = "--tensorboard --wandb-project p --wandb-exp-name n --train-iters 4 --eval-interval 2 --eval-iters 1 "


class FakeConfig(dict[str, Any]):
    """Its settings, which change only when that is allowed."""

    def update(self, given: dict[str, Any], allow_val_change: bool = False) -> None:  # type: ignore[override]
        assert allow_val_change
        super().update(given)


class FakeRun:
    """A run of Weights & Biases, as far as we use one."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.id = options, options["id"] or "made-up"
        self.records: list[dict[str, float]] = []
        self.metrics: list[tuple[str, str]] = []
        self.config = FakeConfig()
        self.finished = False

    def define_metric(self, name: str, step_metric: str) -> None:
        self.metrics.append((name, step_metric))

    def log(self, record: dict[str, float]) -> None:
        assert not self.finished
        self.records.append(dict(record))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    yield Runs(tmp_path)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """Stands for the module; holds the runs that were started."""
    started: list[FakeRun] = []
    module = types.ModuleType("wandb")

    def init(**options: Any) -> FakeRun:
        started.append(FakeRun(options))
        return started[-1]

    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return started


def metrics(run: Run) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run.folder / "logs/metrics.jsonl").read_text().splitlines()]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's points by name, as its own reader shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "logs/tensorboard"))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def started_with(folder: Path) -> str:
    """TensorBoard's text about the start."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "logs/tensorboard"))
    events.Reload()
    (event,) = events.Tensors("start/text_summary")
    return event.tensor_proto.string_val[0].decode()


def test_three_sinks_get_the_same(runs: Runs, wandb: list[FakeRun]) -> None:
    run = runs(EVERYWHERE)
    rows = metrics(run)
    assert [row["iteration"] for row in rows if "lm loss" in row] == [1, 2, 3, 4]
    assert [row["iteration"] for row in rows if "validation loss" in row] == [2, 4]
    for row in rows:
        if "validation loss" in row:
            assert row["validation perplexity"] == pytest.approx(math.exp(row["validation loss"]), rel=1e-5)
    (theirs,) = wandb
    assert theirs.records == rows
    assert theirs.metrics == [("*", "iteration")] and theirs.finished
    (start,) = map(json.loads, (run.folder / "logs/starts.jsonl").read_text().splitlines())
    assert theirs.config == start and start["settings"]["eval_interval"] == 2
    assert json.loads(started_with(run.folder)) == start
    points = scalars(run.folder)
    assert set(points) == {name for row in rows for name in row} - {"iteration"}
    for name, values in points.items():
        expected = [(row["iteration"], row[name]) for row in rows if name in row]
        assert [step for step, _ in values] == [step for step, _ in expected]
        assert [value for _, value in values] == pytest.approx([value for _, value in expected], rel=1e-6)


def test_a_resume_continues_all_of_them(runs: Runs, wandb: list[FakeRun], tmp_path: Path) -> None:
    """Saved at 2, lost after 3: iteration 3 is made again, and nowhere is it there twice."""
    whole = runs(EVERYWHERE)
    folder = tmp_path / "resumed"
    run_here(folder, EVERYWHERE + "--save ck --exit-interval 2")
    run_here(folder, EVERYWHERE + "--load ck --save lost --exit-interval 3")
    # TensorBoard reads files in the order of their names: the second, then a counter of the process as text
    time.sleep(1)
    last = run_here(folder, EVERYWHERE + "--load ck")
    assert last.losses == whole.losses
    assert [step for step, _ in scalars(folder)["lm loss"]] == [1, 2, 3, 4]
    lost = [
        json.loads(line)["iteration"] for line in (folder / "logs/metrics.superseded.jsonl").read_text().splitlines()
    ]
    assert lost == [3]
    starts = [json.loads(line) for line in (folder / "logs/starts.jsonl").read_text().splitlines()]
    assert [start["iteration"] for start in starts] == [0, 2, 2]
    assert [theirs.options["id"] for theirs in wandb] == [None, None, "made-up", "made-up"]
    assert all(theirs.finished for theirs in wandb)


def test_wandb_is_finished_when_the_run_fails(runs: Runs, wandb: list[FakeRun]) -> None:
    run = runs.fresh("--wandb-project p --lr 1e30 --max-skipped-steps 2 --train-iters 9")
    assert run.code == 1 and wandb[0].finished
    assert [record["iteration"] for record in wandb[0].records] == run.records("iteration") != []


def test_a_missing_wandb_is_one_line_and_nothing_is_written(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = runs.fresh("--wandb-project p")
    assert run.code == 2 and not run.files
    assert run.errors == ["error: --wandb-project p needs wandb: pip install wandb"]


def test_a_missing_tensorboard_is_one_line_and_nothing_is_written(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    run = runs.fresh("--tensorboard")
    assert run.code == 2 and not run.files
    assert len(run.errors) == 1 and "--no-tensorboard" in run.errors[0]


def test_mlflow_itself_holds_a_run_and_its_resume(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a later version wants to be asked for one
    flags = f"--mlflow-experiment e --mlflow-run-name n --mlflow-tracking-uri file:{tmp_path}/store --train-iters 4 "
    folder = tmp_path / "resumed"
    run_here(folder, flags + "--save ck --exit-interval 2")
    last = run_here(folder, flags + "--load ck --eval-interval 2 --eval-iters 1")
    client = mlflow.MlflowClient(tracking_uri=f"file:{tmp_path}/store")
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert (run.info.run_name, run.info.status) == ("n", "FINISHED")
    losses = client.get_metric_history(run.info.run_id, "lm loss")
    assert [(point.step, point.value) for point in losses] == list(zip([1, 2, 3, 4], last.losses, strict=True))
    assert "peak memory GB" in run.data.metrics and run.data.params["num_layers"] == "2"
    assert run.data.params["eval_interval"] == "none" and run.data.tags["changed.eval_interval"] == "2"
    assert run.data.tags["smp.iteration"] == "2"


def test_mlflow_that_stops_answering_is_said_and_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no route\nto host")

    asked = []

    def log_batch(*_: Any, **__: Any) -> None:
        asked.append(dict(os.environ))
        refuse()

    for variable in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "7")
    module = types.ModuleType("mlflow")
    info = types.SimpleNamespace(info=types.SimpleNamespace(run_id="x"))
    client = types.SimpleNamespace(
        get_experiment_by_name=lambda name: None,
        create_experiment=lambda name: "1",
        create_run=lambda number, run_name: info,
        log_batch=log_batch,
        set_terminated=refuse,
    )
    module.MlflowClient = lambda **options: client  # type: ignore[attr-defined]
    module.entities = types.SimpleNamespace(Metric=lambda *values: values)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    sink = MlflowSink(tmp_path, "e", None, None, 0)
    sink.log(1, {"lm loss": 1.0})
    sink.log(2, {"lm loss": 1.0})
    sink.close()
    assert len(asked) == 1  # all processes would wait for each further answer
    assert asked[0]["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "1" and asked[0]["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "7"
    assert capsys.readouterr().err.splitlines() == [
        "WARNING: MLflow lacks iteration 1 and what follows: no route to host",
        "WARNING: MLflow lacks 2 records, which metrics.jsonl has",
        "WARNING: MLflow was not told of the end of the run: no route to host",
    ]


def test_mlflow_hears_of_a_failure_and_a_resume_of_another_name_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file:{tmp_path}/store"
    MlflowSink(tmp_path, "e", "n", uri, 0).close(failed=True)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert run.info.status == "FAILED"
    MlflowSink(tmp_path, "e", None, uri, 2).close()
    assert "note:" not in capsys.readouterr().err
    MlflowSink(tmp_path, "e", "other", uri, 2).close()
    assert "note: --mlflow-experiment: the run continues as n of e\n" in capsys.readouterr().err
    assert client.get_run(run.info.run_id).info.status == "FINISHED"


def test_a_missing_mlflow_is_one_line_and_nothing_is_written(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    run = runs.fresh("--mlflow-experiment e")
    assert run.code == 2 and not run.files
    assert run.errors == ["error: --mlflow-experiment e needs MLflow: pip install mlflow-skinny"]
