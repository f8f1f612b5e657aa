"""What a run reports: a log line that scripts can parse, and records for JSONL, TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from smp.config import Config, LoggingConfig
from smp.training.sinks import JsonlSink, Sink, TensorBoardSink, WandbSink


def log_line(config: Config, iteration: int, record: Mapping[str, float]) -> str:
    """The line of an iteration: Megatron's up to the nan iterations, for the scripts that parse it, then ours.

    There is no fp16, so the loss scale is always 1.

    Args:
        config: resolved settings.
        iteration: the one the line is about.
        record: what was measured, by the names of ``metrics.jsonl``; "MFU", in [0, 1], only where the device's peak
            is known.
    """
    speed = record["TFLOP/s per process"]
    parts = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {iteration:8d}/{config.training.train_iters:8d}",
        f"consumed samples: {record['consumed samples']:12d}",
        f"elapsed time per iteration (ms): {1000 * record['seconds per iteration']:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {speed:.{1 if speed >= 1 else 4}f}",
        f"learning rate: {record['learning rate']:.6E}",
        f"global batch size: {record['global batch size']:5d}",
        f"lm loss: {record['lm loss']:.6E}",
        f"loss scale: {1.0:.1f}",
        f"grad norm: {record['grad norm']:.3f}",
        f"number of skipped iterations: {record['skipped iterations']:3d}",
        f"number of nan iterations: {record['nan iterations']:3d}",
        f"tokens/s: {record['tokens/s']:.0f}",
        f"peak memory (GB): {record['peak memory (GB)']:.2f}",
    ]
    parts += [f"MFU: {record['MFU']:.3f}"] if "MFU" in record else []
    return " | ".join(parts) + " |"


class MetricsLog:
    """All the places that records go to, each fed the same. One process of a run has one.

    ``metrics.jsonl`` always; TensorBoard unless it is switched off; W&B when a project is named.

    Args:
        log_dir: folder of the files, created when missing.
        config: what goes where.
        iteration: where the run starts: 0, or the checkpoint's. What an earlier run logged after it is superseded.

    Raises:
        ConfigError: a destination that was asked for is not installed; metrics.jsonl is untouched then.
    """

    def __init__(self, log_dir: Path, config: LoggingConfig, iteration: int) -> None:
        self._sinks: list[Sink] = []
        if config.wandb_project is not None:
            self._sinks.append(WandbSink(log_dir, config.wandb_project, config.wandb_exp_name, iteration))
        if config.tensorboard:
            self._sinks.append(TensorBoardSink(log_dir / "tensorboard", iteration))
        self._sinks.append(JsonlSink(log_dir / "metrics.jsonl", iteration))

    def log(self, iteration: int, record: Mapping[str, float]) -> None:
        """Write one record of scalars."""
        for sink in self._sinks:
            sink.log(iteration, record)

    def close(self) -> None:
        """Write what is buffered and close everything."""
        for sink in self._sinks:
            sink.close()
