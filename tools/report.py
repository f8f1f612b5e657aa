"""One HTML page about a run: loss, gradient norm, learning rate, throughput, memory, goodput, pipeline, data, settings.

    python tools/report.py runs/pretrain
    python tools/report.py runs/pretrain --output report.html

Reads what a run writes into --log-dir: metrics.jsonl, starts.jsonl, status.json, goodput.json, stragglers.jsonl, and
the Chrome trace of --trace-pipeline where there is one. The page is one file: pictures are inside, nothing is loaded
from elsewhere.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from smp.config import ConfigError
from smp.config.blend import parse_blend
from smp.config.command_line.command import CommandParser, run_tool
from smp.config.command_line.commands import pip_install
from smp.config.command_line.entry_points import FINETUNE, PRETRAIN
from smp.config.command_line.fields import as_text, settings
from smp.config.objectives import OBJECTIVES
from smp.training.reporting.goodput import FILE, Account, describe, read_account
from smp.training.reporting.sinks import COMPLETIONS, METRICS, Curve, read_curves
from smp.training.reporting.slow_ranks import FILE as STRAGGLERS

CHARTS = (
    ("Loss", "nats per token", ("lm loss", "validation loss", "test loss")),
    ("Reward", "", ("reward", "validation reward")),
    ("Length of completions", "tokens", ("completion length",)),
    ("Completions that the length ended, prompts without spread", "fraction", ("truncated", "groups without spread")),
    ("Entropy of the policy", "nats", ("entropy",)),
    ("Gradient norm, before clipping", "", ("grad norm",)),
    ("Learning rate", "", ("learning rate",)),
    ("Throughput", "tokens per second", ("tokens/s",)),
    ("Rate of computation", "TFLOP/s per process", ("TFLOP/s per process",)),
    ("Time of an iteration", "seconds", ("seconds per iteration", "seconds waiting for data")),
    ("Own computation of a step", "seconds", ("own seconds, median rank", "own seconds, slowest rank")),
    ("Peak memory of a process", "GB", ("peak memory (GB)",)),
    ("Model FLOP utilisation", "fraction of the device's peak", ("MFU",)),
    ("Goodput", "fraction of all time since the first start", ("goodput",)),
)
"""Title, unit, names of records. A chart without values is left out."""

COLORS, TEXT = ("#4477aa", "#cc3311", "#228833"), "#333333"

PAGE = Path(__file__).with_name("report.html.jinja")


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Records of ``starts.jsonl``, oldest first.

    Raises:
        ValueError: there is none, or a line is none.
    """
    path = folder / "starts.jsonl"
    if not path.exists():
        raise ValueError(f"{folder} is no --log-dir of a run: it has no {path.name}")
    starts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            starts.append(json.loads(line))
        except ValueError:
            raise ValueError(f"{path}:{number} is not a record: {line[:60]!r}") from None
    return starts


def _element(svg: str, prefix: str) -> str:
    """A picture's file as an element of the page; ``prefix`` keeps its ids apart from those of others."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)  # names addresses of vocabularies


def _chart(title: str, unit: str, curves: Mapping[str, Curve]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.0), layout="constrained")
    axes = figure.subplots()
    for (name, (iterations, values)), color in zip(curves.items(), COLORS, strict=False):
        marker = "o" if len(values) < 30 else None
        axes.plot(iterations, values, label=name, color=color, linewidth=1.3, marker=marker, markersize=3)
    axes.set_title(title, loc="left", fontsize=10, color=TEXT)
    axes.set_xlabel("iteration", fontsize=8, color=TEXT)
    axes.set_ylabel(unit, fontsize=8, color=TEXT)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=TEXT, labelsize=8)
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=TEXT)
    return figure


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue()


def pipeline_picture(trace: Path) -> str:
    """What tools/plot_pipeline.py draws of a trace. Raises ValueError when it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        output, tool = Path(folder, "pipeline.svg"), Path(__file__).with_name("plot_pipeline.py")
        command = [sys.executable, str(tool), "--trace", str(trace), "--output", str(output)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(done.stderr.strip().removeprefix("error: "))
        return _element(output.read_text(encoding="utf-8"), "pipeline")


def charts(metrics: Mapping[str, Curve], objective: str) -> list[str]:
    """One picture per entry of :data:`CHARTS` that has values; ``objective`` says what the loss is one of."""
    pictures: list[str] = []
    for title, unit, names in CHARTS:
        curves = {name: metrics[name] for name in names if name in metrics}
        unit = OBJECTIVES[objective].unit if unit == "nats per token" and objective in OBJECTIVES else unit
        if curves:
            pictures.append(_element(_svg(_chart(title, unit, curves)), f"chart{len(pictures)}"))
    return pictures


def tiles(metrics: Mapping[str, Curve]) -> list[tuple[str, str]]:
    """The figures that are looked at first."""
    nothing: Curve = ([], [])
    iterations, losses = metrics.get("lm loss", nothing)
    found = [("iterations", f"{iterations[-1]:,}"), ("last loss", f"{losses[-1]:.4f}")] if losses else []
    _, validation = metrics.get("validation loss", nothing)
    found += [("best validation loss", f"{min(validation):.4f}")] if validation else []
    for title, name, form in (("tokens/s, median", "tokens/s", ",.0f"), ("peak memory, GB", "peak memory (GB)", ".2f")):
        _, values = metrics.get(name, nothing)
        if values:
            value = statistics.median(values) if "median" in title else max(values)
            found.append((title, format(value, form)))
    return found


def records_of(path: Path) -> list[dict[str, Any]]:
    """Lines of JSON; none without the file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def completions(folder: Path, most: int = 8) -> list[dict[str, Any]]:
    """What the model wrote in the first generation and in the last one, so many of each at most."""
    rows = records_of(folder / COMPLETIONS)
    iterations = sorted({row["iteration"] for row in rows})
    shown = iterations[:1] + iterations[1:][-1:]
    return [row for i in shown for row in [row for row in rows if row["iteration"] == i][:most]]


def time_shares(account: Account) -> list[tuple[str, float, float]]:
    """Cause, seconds and their share of all, the largest first; without those that took no time."""
    total = sum(account.seconds.values()) or 1.0
    spent = sorted(account.seconds.items(), key=lambda cause: -cause[1])
    return [(name, seconds, seconds / total) for name, seconds in spent if seconds]


def data_shares(given: str | None) -> list[tuple[str, float | None]]:
    """Data sets of --data-path and the share of samples of each; None: its size decides."""
    parts = parse_blend("--data-path", given) if given else []
    total = sum(part.weight for part in parts if part.weight is not None)
    return [(part.path, None if part.weight is None else float(part.weight / total)) for part in parts]


def settings_table(values: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Flag, value and default of every setting that the run had."""
    known = settings(FINETUNE if any(name.startswith("lora_") for name in values) else PRETRAIN)
    return [
        (
            known[name].flag if name in known else name,
            as_text(value),
            as_text(known[name].default) if name in known else "",
        )
        for name, value in values.items()
    ]


def page(folder: Path) -> str:
    """The HTML text.

    Raises:
        ValueError: the folder is no --log-dir of a run, or a file in it is damaged.
        ConfigError: matplotlib is not installed.
    """
    starts, metrics = read_starts(folder), read_curves(folder / METRICS)
    status_file, trace = folder / "status.json", folder / "pipeline_trace.json"
    status = json.loads(status_file.read_text(encoding="utf-8")) if status_file.exists() else {}
    values, account = starts[-1]["settings"], read_account(folder / FILE)
    try:
        pictures = charts(metrics, values.get("objective", "sft"))
    except ImportError:
        raise ConfigError(f"pictures need matplotlib, of the extra plot: {pip_install('matplotlib')}") from None
    environment = Environment(autoescape=True)
    return environment.from_string(PAGE.read_text(encoding="utf-8")).render(
        title=f"Run {folder.resolve().name}",
        status=": ".join(str(status[name]) for name in ("status", "reason") if status.get(name)),
        tiles=tiles(metrics),
        charts=pictures,
        pipeline=pipeline_picture(trace) if trace.exists() else None,
        goodput=None if account is None else describe(account),
        spent=[] if account is None else time_shares(account),
        slow=records_of(folder / STRAGGLERS),
        completions=completions(folder),
        data=data_shares(values.get("data_path")),
        share_text=lambda share: "by its size" if share is None else f"{100 * share:.1f} %",
        starts=starts,
        settings=settings_table(values),
    )


def build_parser() -> CommandParser:
    parser = CommandParser(description=__doc__)
    parser.add_argument("run", type=Path, help="--log-dir of the run")
    parser.add_argument("--output", type=Path, help="page to write (default: report.html in the run's folder)")
    return parser


def write(args: argparse.Namespace) -> str:
    output = args.output or args.run / "report.html"
    output.write_text(page(args.run), encoding="utf-8")
    return f"wrote {output}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code, see :mod:`smp.config.command_line.command`."""
    return run_tool(lambda: print(write(build_parser().parse_args(argv))))


if __name__ == "__main__":
    sys.exit(main())
