"""Where records go: a JSONL file, TensorBoard, Weights & Biases. Each goes on after a resume as one run."""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from smp.config import ConfigError

Scalars = Mapping[str, float]


class Sink(Protocol):
    """One destination of scalars."""

    def log(self, iteration: int, scalars: Scalars) -> None: ...
    def close(self) -> None: ...


class JsonlSink:
    """One JSON object per line, written at once: ``{"iteration": 10, "lm loss": 4.2, ...}``; NaN and infinity are null.

    Args:
        path: the file, made with its folder if it is not there. One run at a time may use it.
        iteration: where the run starts. Records after it, of a part of a run that was lost or of an earlier run, move
            to ``<stem>.superseded.jsonl``, so that the file reads as one run and nothing is lost.

    Raises:
        ConfigError: another run writes to it.
    """

    def __init__(self, path: Path, iteration: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the file is closed or the process ends
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"--log-dir {path.parent} is in use by another run; give another") from None
        _set_aside(self._file, path.with_suffix(".superseded.jsonl"), iteration)

    def log(self, iteration: int, scalars: Scalars) -> None:
        """Append one record."""
        record = {"iteration": iteration} | {k: v if math.isfinite(v) else None for k, v in scalars.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _set_aside(file: IO[str], beside: Path, iteration: int) -> None:
    """Move what follows the records up to ``iteration``, and a line that a crash cut short, to ``beside``."""
    file.seek(0)
    lines = file.readlines()
    kept = next((i for i, line in enumerate(lines) if _iteration(line) > iteration), len(lines))
    if kept == len(lines):
        return
    with beside.open("a", encoding="utf-8") as moved:
        moved.writelines(line.removesuffix("\n") + "\n" for line in lines[kept:])
    file.truncate(len("".join(lines[:kept]).encode()))


def _iteration(line: str) -> float:
    """The iteration of a record; infinity for a line that is none or has no end."""
    try:
        return float(json.loads(line)["iteration"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


class TensorBoardSink:
    """TensorBoard events; on a resume TensorBoard hides those after ``iteration``.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, folder: Path, iteration: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "--tensorboard needs tensorboard: pip install tensorboard, or give --no-tensorboard"
            ) from None
        self._writer: Any = SummaryWriter(str(folder), purge_step=iteration + 1, flush_secs=30)

    def log(self, iteration: int, scalars: Scalars) -> None:
        """One point per scalar."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        """Write what is buffered and close."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run; a resume continues it, by the id that the first start left in ``folder``.

    Scalars are plotted over the field "iteration", not W&B's own step: that may not go back, but a resume does.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(self, folder: Path, project: str, name: str | None, iteration: int) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(f'--wandb-project {project} needs wandb: pip install "smp[wandb]"') from None
        folder.mkdir(parents=True, exist_ok=True)
        id_file = folder / "wandb_run_id"
        known = id_file.read_text().strip() if iteration > 0 and id_file.exists() else None
        self._run: Any = wandb.init(project=project, name=name, dir=str(folder), id=known, resume="allow")
        id_file.write_text(self._run.id + "\n")
        self._run.define_metric("*", step_metric="iteration")

    def log(self, iteration: int, scalars: Scalars) -> None:
        """One record."""
        self._run.log({"iteration": iteration, **scalars})

    def close(self) -> None:
        """Upload what is left and end the run."""
        self._run.finish()
