"""Where measurements go: a log line that scripts can parse, and records for JSONL, TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from smp.config import Config, ConfigError, LoggingConfig


def log_line(config: Config, iteration: int, record: Mapping[str, float]) -> str:
    """The line of an iteration in Megatron's format, which people's scripts parse; what is ours follows at the end."""
    line = (
        f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {iteration:8d}/{config.training.train_iters:8d} |"
        f" consumed samples: {record['consumed samples']:12d} |"
        f" elapsed time per iteration (ms): {1000 * record['seconds per iteration']:.1f} |"
        f" throughput per GPU (TFLOP/s/GPU): {record['TFLOP/s per process']:.1f} |"
        f" learning rate: {record['learning rate']:.6E} |"
        f" global batch size: {config.data.global_batch_size:5d} |"
        f" lm loss: {record['lm loss']:.6E} |"
        f" loss scale: {1.0:.1f} |"
        f" grad norm: {record['grad norm']:.3f} |"
        f" number of skipped iterations: {record['skipped iterations']:3d} |"
        f" number of nan iterations: {record['nan iterations']:3d} |"
        f" tokens/s: {record['tokens/s']:.0f} |"
        f" peak memory (GB): {record['peak memory (GB)']:.2f} |"
    )
    return line + (f" MFU: {record['MFU']:.3f} |" if "MFU" in record else "")


class MetricsLog:
    """Sends records to every sink that the settings ask for. One process of a run has one.

    ``metrics.jsonl`` is always written, one JSON object per line with its ``iteration``. A resumed run drops the records
    after its starting point first: they belong to a part of the run that was lost, and the file reads as one run.

    Args:
        log_dir: folder of the files, created when missing.
        config: which sinks.
        iteration: where the run starts.

    Raises:
        ConfigError: W&B is asked for and not installed.
    """

    def __init__(self, log_dir: Path, config: LoggingConfig, iteration: int) -> None:
        wandb = _import_wandb() if config.wandb_project else None
        log_dir.mkdir(parents=True, exist_ok=True)
        path = log_dir / "metrics.jsonl"
        _drop_after(path, iteration)
        self._jsonl = path.open("a")
        self._board: Any = None
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(log_dir / "tensorboard"), purge_step=iteration + 1)
        self._wandb: Any = None
        if wandb is not None:
            self._wandb = wandb.init(project=config.wandb_project, name=config.wandb_exp_name, dir=str(log_dir))

    def log(self, iteration: int, record: Mapping[str, float]) -> None:
        """Write one record; NaN and infinity become null in JSON, which has no word for them."""
        clean = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in record.items()}
        self._jsonl.write(json.dumps({"iteration": iteration, **clean}) + "\n")
        self._jsonl.flush()
        if self._board is not None:
            for name, value in record.items():
                self._board.add_scalar(name, value, iteration)
        if self._wandb is not None:
            self._wandb.log(dict(record), step=iteration)

    def close(self) -> None:
        """Flush and close everything."""
        self._jsonl.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def _drop_after(path: Path, iteration: int) -> None:
    """Remove records past ``iteration``, and a last line that a crash cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            keep = line.endswith("\n") and json.loads(line)["iteration"] <= iteration
        except (ValueError, KeyError):
            keep = False
        kept += [line] if keep else []
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError:
        raise ConfigError('--wandb-project needs wandb, which is not installed: pip install "smp[wandb]"') from None
    return wandb
