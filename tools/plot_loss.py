"""Plot the loss curves of a run, or the rewards of one that learns by them.

    python tools/plot_loss.py --metrics runs/pretrain/metrics.jsonl --output loss.png
    python tools/plot_loss.py --metrics metrics.jsonl --output loss.png --baseline 3.2 --baseline-label bigram

Reads the "lm loss" and "validation loss" of the records, or "reward" and "validation reward" where there are any. Of a
mixture of experts also the "expert load max/mean", which is drawn below them. The suffix of --output is the format:
png, svg or pdf.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smp.config import ConfigError
from smp.config.command_line.command import CommandParser, run_tool
from smp.config.command_line.commands import pip_install
from smp.training.reporting.sinks import Curve, read_curve

EXPERT_LOAD = "expert load max/mean"
TRAINING, VALIDATION, BASELINE, TEXT = "#4477aa", "#cc3311", "#777777", "#333333"


def draw(
    training: Curve,
    validation: Curve,
    baseline: float | None,
    baseline_label: str,
    load: Curve | None = None,
    unit: str = "loss (nats per token)",
) -> Any:
    """A matplotlib figure of the curves, in ``unit``; ``load`` is that of the most loaded expert."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"plots need matplotlib, of the extra plot: {pip_install('matplotlib')}") from None

    figure = Figure(figsize=(8, 4.5 if load is None else 6.5), layout="constrained")
    axes = figure.subplots() if load is None else _with_loads(figure, load)
    _curve(axes, training, "training", color=TRAINING, linewidth=1.2)
    _curve(axes, validation, "validation", color=VALIDATION, linewidth=1.8, marker="o", markersize=4)
    if baseline is not None:
        label = f"{baseline_label} {baseline:.3f}"
        axes.axhline(baseline, color=BASELINE, linestyle="--", linewidth=1.2, label=label)
    _dress(axes, unit)
    return figure


def _with_loads(figure: Any, load: Curve) -> Any:
    """Draw the loads; returns the axes above them."""
    axes, below = figure.subplots(2, height_ratios=[3, 1.3], sharex=True)
    _curve(below, load, "most loaded expert", color=TRAINING, linewidth=1.2)
    below.axhline(1.0, color=BASELINE, linestyle="--", linewidth=1.2, label="even load 1.000")
    below.set_ylim(bottom=0)
    _dress(below, "tokens / mean")
    return axes


def _dress(axes: Any, label: str) -> None:
    """Labels, grid and legend."""
    axes.set_xlabel("iteration", color=TEXT)
    axes.set_ylabel(label, color=TEXT)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=TEXT)
    axes.margins(x=0.02)
    axes.legend(frameon=False, labelcolor=TEXT)


def _curve(axes: Any, curve: Curve, label: str, **style: Any) -> None:
    """One line, its last value in the legend."""
    iterations, values = curve
    if values:
        axes.plot(iterations, values, label=f"{label} {values[-1]:.3f}", **style)


def build_parser() -> CommandParser:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--metrics", required=True, type=Path, help="metrics.jsonl of a run")
    parser.add_argument("--output", required=True, type=Path, help="picture to write")
    parser.add_argument("--baseline", type=float, help="loss to draw as a horizontal line")
    parser.add_argument("--baseline-label", default="baseline", help="its name")
    return parser


def plot(args: argparse.Namespace) -> str:
    by_reward = bool(read_curve(args.metrics, "reward")[0])
    names = ("reward", "validation reward") if by_reward else ("lm loss", "validation loss")
    training, validation = (read_curve(args.metrics, name) for name in names)
    if not training[0] and not validation[0]:
        raise ValueError(f'{args.metrics} has no record with an "lm loss" or a "validation loss"')
    load = read_curve(args.metrics, EXPERT_LOAD)
    unit = "mean reward" if by_reward else "loss (nats per token)"
    figure = draw(training, validation, args.baseline, args.baseline_label, load if load[0] else None, unit)
    figure.savefig(args.output, dpi=150)
    return f"wrote {args.output}: {len(training[0])} training and {len(validation[0])} validation records"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code, see :mod:`smp.config.command_line.command`."""
    return run_tool(lambda: print(plot(build_parser().parse_args(argv))))


if __name__ == "__main__":
    sys.exit(main())
