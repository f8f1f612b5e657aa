"""Draw the timeline of a pipeline schedule, as predicted or as recorded by a run.

    P="--pipeline-model-parallel-size 4 --micro-batches 8"
    python tools/plot_pipeline.py --schedule 1f1b $P
    python tools/plot_pipeline.py --schedule 1f1b zb-h1 zb-v $P --output all.png
    python tools/plot_pipeline.py --schedule zb-v $P --trace measured.json --output both.html

Without --output the picture is printed as text. Otherwise its suffix is the format: png, svg or pdf; html for a page
that shows an action where you point; json for a Chrome trace (ui.perfetto.dev) with messages and collectives. --trace
reads such a trace.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path

from smp.config import ConfigError
from smp.config.command import CommandParser, run_tool
from smp.pipeline.plot import Panel, caption, draw, to_html, to_text
from smp.pipeline.schedules import SCHEDULES, build_schedule
from smp.pipeline.simulate import StageCosts, simulate
from smp.pipeline.timeline import from_trace, to_trace


def predict(args: argparse.Namespace, name: str) -> Panel:
    """The timeline of a schedule whose stages are equal."""
    ranks, micro_batches = args.pipeline_model_parallel_size, args.micro_batches
    schedule = build_schedule(name, ranks, micro_batches, args.chunks, args.prefetch)
    times = [time / schedule.chunks for time in (args.forward, args.backward_input, args.backward_weight)]
    return f"{name}, predicted", simulate(schedule, [StageCosts(*times)] * schedule.stages, args.link)


def read(path: Path) -> Panel:
    """The timeline of a trace file. Raises ValueError if it is not one."""
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
        return trace.get("otherData", {}).get("title", path.stem), from_trace(trace)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a trace of a pipeline: {error}") from None


def write(panels: Sequence[Panel], output: Path) -> None:
    """Write the picture in the format of the suffix."""
    if output.suffix == ".html":
        output.write_text(to_html(panels), encoding="utf-8")
    elif output.suffix == ".json":
        if len(panels) != 1:
            raise ValueError(f"a trace holds one timeline, not {len(panels)}")
        (title, timeline), *_ = panels
        output.write_text(json.dumps(to_trace(timeline, title)), encoding="utf-8")
    else:
        try:
            figure = draw(panels)
        except ImportError:
            raise ConfigError("pictures need matplotlib: pip install matplotlib") from None
        figure.savefig(output, dpi=150)


def plot(args: argparse.Namespace) -> str:
    times = (args.forward, args.backward_input, args.backward_weight, args.link)
    if not (args.forward > 0 and all(0 <= time < inf for time in times)):
        raise ValueError("--forward has to be above 0, the other times at least 0, and none endless")
    if args.schedule and not (args.pipeline_model_parallel_size and args.micro_batches):
        raise ValueError("--schedule needs --pipeline-model-parallel-size and --micro-batches")
    panels = [predict(args, name) for name in args.schedule] + [read(path) for path in args.trace]
    if not panels:
        raise ValueError("nothing to draw: give --schedule or --trace")
    if args.output is None:
        return "\n\n".join(f"{caption(*panel)}\n{to_text(panel[1])}" for panel in panels)
    write(panels, args.output)
    return "\n".join([*(caption(*panel) for panel in panels), f"wrote {args.output}"])


def build_parser() -> CommandParser:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--schedule", nargs="+", default=[], choices=SCHEDULES, help="schedules to predict")
    parser.add_argument("--trace", nargs="+", default=[], type=Path, help="traces to draw below them")
    parser.add_argument("--output", type=Path, help="picture to write (default: text on the terminal)")
    parser.add_argument("--pipeline-model-parallel-size", type=int, help="pipeline ranks")
    parser.add_argument("--micro-batches", type=int, help="micro-batches per step")
    parser.add_argument("--chunks", type=int, help="stages per rank (default: 2 where the schedule has several)")
    parser.add_argument("--prefetch", type=int, default=1, help="computations by which receives are ahead")
    for name, what in (
        ("forward", "a micro-batch in all layers of a rank"),
        ("backward-input", "the gradient of its input"),
        ("backward-weight", "the gradient of the weights"),
    ):
        parser.add_argument(f"--{name}", type=float, default=1.0, help=f"time of {what}")
    parser.add_argument("--link", type=float, default=0.0, help="time of a message")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code, see :mod:`smp.config.command`."""
    return run_tool(lambda: print(plot(build_parser().parse_args(argv))))


if __name__ == "__main__":
    sys.exit(main())
