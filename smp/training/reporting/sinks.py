"""Sinks of records: a JSONL file, TensorBoard, Weights & Biases, MLflow. After a resume each continues as one run."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from smp.config import Config, ConfigError, LoggingConfig
from smp.config.command_line.commands import pip_install
from smp.config.command_line.credentials import without_credentials
from smp.training.reporting.mlflow_sink import MlflowSink

METRICS = "metrics.jsonl"
"""Name of the file of records in --log-dir."""
COMPLETIONS = "completions.jsonl"
"""Name of the file in --log-dir of rows for people, such as completions with their rewards."""
STARTS = "starts.jsonl"
"""Name of the file in --log-dir to which each start adds its :func:`smp.training.reporting.run_record.start_record`."""

Scalars = Mapping[str, float]
Rows = Sequence[Mapping[str, Any]]
"""Columns by name."""
Curve = tuple[list[int], list[float]]
"""Iterations and values."""


class Sink(Protocol):
    """A destination of metric records."""

    def start(self, record: Mapping[str, Any]) -> None:
        """Write what the run was started with, see :func:`smp.training.reporting.run_record.start_record`."""

    def log(self, iteration: int, scalars: Scalars) -> None:
        """Write one record."""

    def table(self, iteration: int, rows: Rows) -> None:
        """Write rows for people."""

    def close(self, failed: bool = False) -> None:
        """Write what is buffered and close.

        Args:
            failed: the run ended with an error.
        """


def open_sinks(config: LoggingConfig, iteration: int) -> list[Sink]:
    """``metrics.jsonl`` always; TensorBoard unless it is switched off; W&B when a project is named, MLflow when an
    experiment is.

    Args:
        config: what goes where.
        iteration: where the run starts: 0, or the checkpoint's. What an earlier run logged after it is superseded.

    Raises:
        ConfigError: a destination that was asked for is not installed; metrics.jsonl is untouched then.
    """
    folder, sinks = Path(config.log_dir), list[Sink]()
    if config.wandb_project is not None:
        sinks.append(WandbSink(folder, config.wandb_project, config.wandb_exp_name, iteration))
    if config.mlflow_experiment is not None:
        name, uri = config.mlflow_run_name, config.mlflow_tracking_uri
        sinks.append(MlflowSink(folder, config.mlflow_experiment, name, uri, iteration))
    if config.tensorboard:
        sinks.append(TensorBoardSink(folder / "tensorboard", iteration))
    # Last, because it moves records of an earlier run: if another sink is refused nothing has moved.
    return [*sinks, JsonlSink(folder / METRICS, iteration)]


def refuse_log_dir_in_use(config: LoggingConfig) -> None:
    """Check, before anything that takes long, whether another run writes to --log-dir; raises ConfigError if so.
    Nothing is created: the run takes the folder when it begins to write there."""
    path = Path(config.log_dir) / METRICS
    # r+: nothing is made where there is no file.
    with suppress(FileNotFoundError, NotADirectoryError), path.open("r+", encoding="utf-8") as file:
        _lock(file, path)


def _lock(file: IO[str], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the file is closed or the process ends
    except BlockingIOError:
        raise ConfigError(f"--log-dir {path.parent} is in use by another run; give another") from None


def earlier_records(config: Config, iteration: int) -> list[str]:
    """Notes on records in --log-dir that do not belong to the part of this run before ``iteration``: they are moved, or
    this run's are added after them."""
    folder = Path(config.logging.log_dir)
    path, starts = folder / METRICS, folder / STARTS
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    # A line that is no record counts as infinite, and moves as well.
    moved = sum(_iteration(line) > iteration for line in lines)
    notes = []
    if moved:
        whose = "an earlier run, or of a part of this one that was lost" if iteration else "an earlier run"
        notes.append(
            f"note: --log-dir {folder} holds {moved} records of {whose}: they move to {_superseded(path).name}"
        )
    paths = (config.checkpoint.save, config.checkpoint.load)
    own = {os.path.realpath(without_credentials(path)) for path in paths if path}
    other = _last_save(starts)
    if moved < len(lines) and other is not None and os.path.realpath(other) not in own:
        notes.append(
            f"WARNING: --log-dir {folder} holds records of another run, with --save {other}: this run's come after "
            "them; give another --log-dir to keep them apart"
        )
    return notes


def _last_save(starts: Path) -> str | None:
    """--save of the last run that was started with these logs; None: it is not known."""
    try:
        return json.loads(starts.read_text(encoding="utf-8").splitlines()[-1])["settings"]["save"]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None


def _superseded(path: Path) -> Path:
    return path.with_suffix(".superseded.jsonl")


class JsonlSink:
    """One JSON object per line, written at once: ``{"iteration": 10, "lm loss": 4.2, ...}``; NaN and infinity are null.
    What the run was started with goes to ``starts.jsonl`` next to it, a line per start.

    Args:
        path: the file, made with its folder if it does not exist. One run at a time may use it.
        iteration: where the run starts. Records after it, of a part of a run that was lost or of an earlier run, move
            to ``<stem>.superseded.jsonl``, so that the file reads as one run and nothing is lost.

    Raises:
        ConfigError: another run writes to it.
    """

    def __init__(self, path: Path, iteration: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Appending, so that two writers never write over each other, whatever their positions are.
        self._file = path.open("a+", encoding="utf-8")
        try:
            _lock(self._file, path)
        except ConfigError:
            self._file.close()
            raise
        _set_aside(self._file, _superseded(path), iteration)
        self._starts, self._rows = path.parent / STARTS, path.parent / COMPLETIONS
        if self._rows.is_file():
            with self._rows.open("a+", encoding="utf-8") as rows:
                _set_aside(rows, _superseded(self._rows), iteration)

    def start(self, record: Mapping[str, Any]) -> None:
        with self._starts.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def log(self, iteration: int, scalars: Scalars) -> None:
        # NaN is no JSON: other programs could not read the file.
        record = {"iteration": iteration} | {k: v if math.isfinite(v) else None for k, v in scalars.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def table(self, iteration: int, rows: Rows) -> None:
        with self._rows.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({"iteration": iteration, **row}, ensure_ascii=False) + "\n")

    def close(self, failed: bool = False) -> None:
        self._file.close()


def read_curve(path: Path, name: str) -> Curve:
    """Iterations and values of the records of a ``metrics.jsonl`` that have a finite ``name``.

    Raises:
        ValueError: a line is not a record.
    """
    return read_curves(path).get(name, ([], []))


def read_curves(path: Path) -> dict[str, Curve]:
    """All curves of a ``metrics.jsonl`` by name, read once; errors as in :func:`read_curve`."""
    curves: dict[str, Curve] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            iteration = int(record["iteration"])
            values = {name: math.nan if value is None else float(value) for name, value in record.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path}:{number} is not a record with an iteration: {line[:60]!r}") from None
        for name, value in values.items():
            if math.isfinite(value):
                iterations, found = curves.setdefault(name, ([], []))
                iterations.append(iteration)
                found.append(value)
    return curves


def _set_aside(file: IO[str], aside: Path, iteration: int) -> None:
    """Move what follows the records up to ``iteration``, and a line that a crash cut short, to ``aside``."""
    file.seek(0)
    lines = file.readlines()
    # All after the first record beyond: a file goes forward until a restart.
    kept = next((i for i, line in enumerate(lines) if _iteration(line) > iteration), len(lines))
    if kept == len(lines):
        return
    # First written there, then cut off here: after a crash in between records are there twice,
    # never lost.
    with aside.open("a", encoding="utf-8") as moved:
        moved.writelines(line.removesuffix("\n") + "\n" for line in lines[kept:])
    # In bytes: names may have other characters than ASCII.
    file.truncate(len("".join(lines[:kept]).encode()))


def _iteration(line: str) -> float:
    """The iteration of a record; infinity for a line that is not a record, or that has no end."""
    try:
        return float(json.loads(line)["iteration"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _cell(value: Any) -> str:
    """A cell of a Markdown table: the value as it is, on one line."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("|", "\\|").replace("\r", "").replace("\n", "<br>")


class TensorBoardSink:
    """TensorBoard events; on a resume TensorBoard hides those after ``iteration``."""

    def __init__(self, folder: Path, iteration: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                f"--tensorboard needs tensorboard: {pip_install('tensorboard')}, or give --no-tensorboard"
            ) from None
        # TensorBoard hides events from purge_step on.
        self._writer: Any = SummaryWriter(str(folder), purge_step=iteration + 1, flush_secs=30)
        self._iteration = iteration

    def start(self, record: Mapping[str, Any]) -> None:
        text = "\n".join(
            f"    {line}" for line in json.dumps(record, indent=2).splitlines()
        )  # four spaces: a code block in Markdown
        self._writer.add_text("start", text, self._iteration)

    def log(self, iteration: int, scalars: Scalars) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, iteration)

    def table(self, iteration: int, rows: Rows) -> None:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        # A row may lack columns that others have.
        lines = [columns, ["---"] * len(columns), *([_cell(row.get(name)) for name in columns] for row in rows)]
        self._writer.add_text("completions", "\n".join(f"| {' | '.join(line)} |" for line in lines), iteration)

    def close(self, failed: bool = False) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run; a resume continues it, by the id that the first start left in ``folder``.

    Scalars are plotted over the field "iteration", not W&B's own step: that may not go back, but a resume does.
    """

    def __init__(self, folder: Path, project: str, name: str | None, iteration: int) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(f"--wandb-project {project} needs wandb: {pip_install('wandb')}") from None
        folder.mkdir(parents=True, exist_ok=True)
        id_file = folder / "wandb_run_id"
        # A run from the start is a new one, whatever lies in the folder.
        known = id_file.read_text().strip() if iteration > 0 and id_file.exists() else None
        # resume="allow": continues the run with this id, or begins it.
        self._run: Any = wandb.init(project=project, name=name, dir=str(folder), id=known, resume="allow")
        id_file.write_text(self._run.id + "\n")
        self._run.define_metric("*", step_metric="iteration")

    def start(self, record: Mapping[str, Any]) -> None:
        self._run.config.update(dict(record), allow_val_change=True)  # a resume may change settings

    def log(self, iteration: int, scalars: Scalars) -> None:
        self._run.log({"iteration": iteration, **scalars})

    def table(self, iteration: int, rows: Rows) -> None:
        import wandb

        columns = list(dict.fromkeys(name for row in rows for name in row))
        data = [[row.get(name) for name in columns] for row in rows]
        self._run.log({"iteration": iteration, "completions": wandb.Table(columns=columns, data=data)})

    def close(self, failed: bool = False) -> None:
        self._run.finish()
