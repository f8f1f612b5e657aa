import json
import math
import re
import sys
import types
from datetime import datetime
from pathlib import Path

import pytest

from smp.config import Config, ConfigError, DataConfig, LoggingConfig, TrainingConfig
from smp.training.reporting.console import log_line
from smp.training.reporting.sinks import Sink, open_sinks

CONFIG = Config(data=DataConfig(global_batch_size=256), training=TrainingConfig(train_iters=5000))
RECORD: dict[str, float] = {
    "lm loss": 3.25,
    "learning rate": 3e-4,
    "grad norm": 0.87654,
    "consumed samples": 30720,
    "global batch size": 256,
    "skipped iterations": 1,
    "nan iterations": 0,
    "seconds per iteration": 0.5,
    "tokens/s": 2e6,
    "TFLOP/s per process": 400.04,
    "peak memory (GB)": 1.5,
    "MFU": 0.4046,
}


def line(**changes: float) -> str:
    return log_line(CONFIG, 120, RECORD | changes)


def test_the_line_is_megatrons_and_then_ours() -> None:
    stamp, rest = re.fullmatch(r" \[(.*?)\](.*)", line()).groups()  # type: ignore[union-attr]
    assert abs((datetime.now() - datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S.%f")).total_seconds()) < 3600
    assert rest == (
        " iteration      120/    5000 | consumed samples:        30720 |"
        " elapsed time per iteration (ms): 500.0 | throughput per GPU (TFLOP/s/GPU): 400.0 |"
        " learning rate: 3.000000E-04 | global batch size:   256 | lm loss: 3.250000E+00 | loss scale: 1.0 |"
        " grad norm: 0.877 | number of skipped iterations:   1 | number of nan iterations:   0 |"
        " tokens/s: 2000000 | peak memory (GB): 1.50 | MFU: 0.405 |"
    )


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"iteration\s+(\d+)/\s*(\d+)", (120, 5000)),
        (r"consumed samples:\s+(\d+)", (30720,)),
        (r"elapsed time per iteration \(ms\): (\d+\.\d+)", (500,)),
        (r"throughput per GPU \(TFLOP/s/GPU\): (\d+\.\d+)", (400,)),
        (r"learning rate: (\d+\.\d+E[+-]\d+)", (3e-4,)),
        (r"global batch size:\s+(\d+)", (256,)),
        (r"lm loss: ([\d.E+-]+)", (3.25,)),
        (r"loss scale: ([\d.]+)", (1,)),
        (r"grad norm: (\d+\.\d+)", (0.877,)),
        (r"number of skipped iterations:\s+(\d+)", (1,)),
        (r"number of nan iterations:\s+(\d+) \|", (0,)),
    ],
)
def test_regexes_that_people_use_match(pattern: str, expected: tuple[float, ...]) -> None:
    match = re.search(pattern, line())
    assert match is not None
    assert tuple(float(group) for group in match.groups()) == expected


def test_the_line_splits_at_its_bars() -> None:
    fields = [field.strip() for field in line().split("|")]
    pairs = dict(field.split(": ", 1) for field in fields[1:-1])
    assert fields[-1] == "" and float(pairs["lm loss"]) == 3.25 and float(pairs["tokens/s"]) == 2e6


def test_an_unknown_mfu_is_left_out_and_a_nan_is_shown() -> None:
    unknown = {name: value for name, value in RECORD.items() if name != "MFU"}
    assert log_line(CONFIG, 120, unknown).endswith("| peak memory (GB): 1.50 |")
    assert "lm loss: NAN |" in line(**{"lm loss": math.nan})


def records(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


class Log:
    """All the places that records go to."""

    def __init__(self, sinks: list[Sink]) -> None:
        self.sinks = sinks

    def log(self, iteration: int, record: dict[str, float]) -> None:
        for sink in self.sinks:
            sink.log(iteration, record)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def open_log(folder: Path, start: int = 0, **settings: object) -> Log:
    config = LoggingConfig(**{"tensorboard": False, **settings}, log_dir=str(folder))  # type: ignore[arg-type]
    return Log(open_sinks(config, start))


def run(folder: Path, iterations: range, start: int = 0, **settings: object) -> None:
    log = open_log(folder, start, **settings)
    for i in iterations:
        log.log(i, {"lm loss": float(i)})
    log.close()


def test_a_record_is_one_line_on_disk_at_once(tmp_path: Path) -> None:
    log = open_log(tmp_path / "new" / "run")
    log.log(10, RECORD)
    log.log(10, {"validation loss": 2.0})
    first, second = records(tmp_path / "new" / "run")  # nothing was closed
    assert (first["iteration"], first["lm loss"], first["learning rate"]) == (10, 3.25, 3e-4)
    assert (first["tokens/s"], first["grad norm"], second["validation loss"]) == (2e6, 0.87654, 2.0)
    log.close()


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.log(1, {"lm loss": math.nan, "grad norm": math.inf})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"iteration": 1, "lm loss": null, "grad norm": null}\n'


def test_a_resume_reads_as_one_run_and_loses_nothing(tmp_path: Path) -> None:
    run(tmp_path, range(1, 8))
    run(tmp_path, range(5, 10), start=4)
    assert [record["iteration"] for record in records(tmp_path)] == list(range(1, 10))
    assert [record["iteration"] for record in records(tmp_path, "metrics.superseded.jsonl")] == [5, 6, 7]
    run(tmp_path, range(3, 4), start=2)
    assert [record["iteration"] for record in records(tmp_path)] == [1, 2, 3]
    assert len(records(tmp_path, "metrics.superseded.jsonl")) == 3 + 7


def test_a_resume_where_the_run_ended_supersedes_nothing(tmp_path: Path) -> None:
    run(tmp_path, range(1, 5))
    run(tmp_path, range(5, 7), start=4)
    assert [record["iteration"] for record in records(tmp_path)] == list(range(1, 7))
    assert not (tmp_path / "metrics.superseded.jsonl").exists()


def test_a_line_that_a_crash_cut_short_is_set_aside(tmp_path: Path) -> None:
    run(tmp_path, range(1, 4))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "lm l')
    run(tmp_path, range(4, 6), start=4)
    assert [record["iteration"] for record in records(tmp_path)] == [1, 2, 3, 4, 5]
    assert (tmp_path / "metrics.superseded.jsonl").read_text() == '{"iteration": 4, "lm l\n'


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(tmp_path, range(1, 8), tensorboard=True)
    run(tmp_path, range(5, 10), start=4, tensorboard=True)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("lm loss")]
    assert points == [(i, float(i)) for i in range(1, 10)]


class FakeRun:
    """What ``wandb.init`` returns, as far as we use it."""

    def __init__(self, options: dict[str, object]) -> None:
        self.options, self.id = options, options["id"] or "fresh"
        self.records: list[dict[str, float]] = []
        self.step_metric, self.finished = "", False

    def define_metric(self, name: str, step_metric: str) -> None:
        assert name == "*"
        self.step_metric = step_metric

    def log(self, record: dict[str, float]) -> None:
        self.records.append(record)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """A stand-in for wandb; the runs it was asked for."""
    runs: list[FakeRun] = []
    module = types.ModuleType("wandb")

    def init(**options: object) -> FakeRun:
        runs.append(FakeRun(options))
        return runs[-1]

    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


def test_wandb_logs_over_our_iteration_and_a_resume_continues_its_run(
    tmp_path: Path, wandb_runs: list[FakeRun]
) -> None:
    settings = {"wandb_project": "p", "wandb_exp_name": "n"}
    run(tmp_path, range(1, 3), **settings)
    run(tmp_path, range(2, 3), start=1, **settings)
    run(tmp_path, range(1, 2), **settings)
    first, resumed, fresh = wandb_runs
    assert first.options == {"project": "p", "name": "n", "dir": str(tmp_path), "id": None, "resume": "allow"}
    assert first.records == [{"iteration": 1, "lm loss": 1.0}, {"iteration": 2, "lm loss": 2.0}]
    assert first.step_metric == "iteration" and first.finished
    assert (resumed.options["id"], fresh.options["id"]) == ("fresh", None)


def test_wandb_is_not_touched_unless_asked_for(tmp_path: Path, wandb_runs: list[FakeRun]) -> None:
    run(tmp_path, range(1, 3))
    assert wandb_runs == []


def test_a_missing_wandb_says_how_to_get_it_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, range(1, 3))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"--wandb-project p needs wandb: pip install wandb"):
        open_log(tmp_path, wandb_project="p")
    assert len(records(tmp_path)) == 2


def test_a_missing_tensorboard_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="--no-tensorboard"):
        open_log(tmp_path, tensorboard=True)
