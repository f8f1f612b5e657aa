"""Scaling curves: the best layout on fewer and more devices, with the same batch (strong) or one that grows (weak)."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TextIO

from smp.config import Config, ConfigError
from smp.planner.devices import Device
from smp.planner.search import Candidate, candidates, ranked

Kind = Literal["weak", "strong"]
HEADER = ("scaling", "gpus", "global_batch_size", "step_seconds", "tokens_per_second_per_gpu", "efficiency", "flags")


@dataclass(frozen=True)
class Point:
    """The best layout on this many devices with this batch; best None: none fits or works."""

    kind: Kind
    gpus: int
    batch: int
    best: Candidate | None

    @property
    def rate(self) -> float:
        """Tokens per second and device."""
        return self.best.tokens_per_second() if self.best else 0.0


def sizes(gpus: int, each: int) -> list[int]:
    """Numbers of devices: a node, then four times as many up to ``gpus``, which is the last."""
    # At most a node for the first: links within it.
    found, size = list[int](), min(each, gpus)
    while size < gpus:
        found.append(size)
        size *= 4
    return [*found, gpus]


def curve(
    kind: Kind, asked: Config, gpus: int, device: Device, decided: Collection[str], tell: Callable[[str], None]
) -> list[Point]:
    """Points from one node to ``gpus`` devices; ``asked`` has the batch of the last. A weak curve leaves out sizes
    whose batch is no whole number of samples.

    Raises:
        ConfigError: all except the last are left out.
    """
    batch, points = asked.data.global_batch_size, list[Point]()
    if batch is None:
        raise ConfigError("--scaling needs one batch: give --global-batch-size, not --step-batch-size-schedule")
    all_sizes = sizes(gpus, device.devices_per_node)
    whole = [size for size in all_sizes if kind == "strong" or batch * size % gpus == 0]
    if len(whole) == 1 < len(all_sizes):
        raise ConfigError(
            f"--scaling weak: of --global-batch-size {batch} on {gpus} GPUs no smaller size has a whole number of "
            f"samples; give a multiple of {gpus // math.gcd(*all_sizes)}"
        )
    if left_out := set(all_sizes) - set(whole):
        tell(f"{kind} scaling: no whole number of samples on {', '.join(map(str, sorted(left_out)))} devices")
    for size in whole:
        tell(f"{kind} scaling: {size:,} devices")
        # Weak: samples per device stay.
        share = batch * size // gpus if kind == "weak" else batch
        config = replace(asked, data=replace(asked.data, global_batch_size=share))
        best = ranked(list(candidates(config, size, device, decided)))
        points.append(Point(kind, size, share, best[0] if best else None))
    return points


def efficiency(points: Sequence[Point], point: Point) -> float:
    """Tokens per second and device relative to the smallest size that works."""
    # The first that works: below it no layout fits.
    first = next((one for one in points if one.best), None)
    return point.rate / first.rate if first else 0.0


def write_csv(curves: Sequence[Sequence[Point]], file: TextIO) -> None:
    """A line per point; the numbers are empty where no layout works."""
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(HEADER)
    for points in curves:
        for point in points:
            numbers: list[object] = ["", "", "", "no layout"]
            if (best := point.best) is not None:
                assert best.time is not None
                numbers = [
                    f"{best.time.total:.6g}",
                    f"{point.rate:.6g}",
                    f"{efficiency(points, point):.4f}",
                    best.flags,
                ]
            lines.writerow([point.kind, point.gpus, point.batch, *numbers])


def draw(curves: Sequence[Sequence[Point]], path: Path) -> None:
    """A plot of tokens per second, with dotted lines of linear scaling from the smallest size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for points in curves:
        shown = [point for point in points if point.best]
        if not shown:
            continue
        gpus = [point.gpus for point in shown]
        axes.loglog(gpus, [point.gpus * point.rate for point in shown], marker="o", label=f"{shown[0].kind} scaling")
        # Linear scaling from the first point.
        axes.loglog(gpus, [n * shown[0].rate for n in gpus], linestyle=":", color="gray")
    axes.set_xlabel("GPUs")
    axes.set_ylabel("tokens per second, predicted")
    axes.legend()
    figure.savefig(path, dpi=150)
