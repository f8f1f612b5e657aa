"""Draw the timeline of a pipeline schedule, as predicted or as recorded by a run.

    P="--pipeline-model-parallel-size 4 --micro-batches 8"
    python tools/plot_pipeline.py --schedule 1f1b $P
    python tools/plot_pipeline.py --schedule 1f1b zb-h1 zb-v $P --output all.png
    python tools/plot_pipeline.py --schedule zb-v $P --trace measured.json --output both.png

Without --output the picture is printed as text. Otherwise its suffix is the format: png, svg or pdf; json for a Chrome
trace (ui.perfetto.dev), which also has messages and collectives, and shows an action where you point. --trace reads
such a trace. A picture has a row per rank and a bar per computation with its micro-batch; several timelines share one
time axis, so that they compare by eye.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

from smp.config import ConfigError
from smp.config.command_line.command import CommandParser, run_tool
from smp.config.command_line.commands import pip_install
from smp.pipeline.actions import COMPUTE, Action, Op
from smp.pipeline.schedules import SCHEDULES, build_schedule
from smp.pipeline.simulate_schedule import StageCosts, simulate
from smp.pipeline.timeline import MICROSECONDS, Span, Timeline, label, to_trace

Panel = tuple[str, Timeline]

COLORS = {
    Op.FORWARD: (0x6B, 0x9B, 0xD1),
    Op.BACKWARD: (0x5F, 0xAE, 0x7A),
    Op.BACKWARD_INPUT: (0x5F, 0xAE, 0x7A),
    Op.BACKWARD_WEIGHT: (0xE3, 0xA8, 0x57),
}
LEGEND = "blue forward, green backward (where split: of the input), orange backward of the weights; paler: later chunks"
MOST_LABELS = 1000  # bars in a picture beyond which labels would be unreadable


def computations(timeline: Timeline) -> list[Span]:
    """The bars of a picture."""
    return [span for span in timeline.spans if span.action.op in COMPUTE]


def caption(title: str, timeline: Timeline) -> str:
    """Title, step time and bubble."""
    return f"{title}: step {float(timeline.step_time):g}, bubble {float(timeline.bubble_fraction):.1%}"


def color(op: Op, chunk: int) -> str:
    """Color of a bar: later chunks of a rank are paler."""
    paler = min(chunk, 3) * 0.22
    return "#" + "".join(f"{round(level + (255 - level) * paler):02x}" for level in COLORS[op])


def draw(panels: Sequence[Panel]) -> Any:
    """A matplotlib figure with the panels below each other."""
    from matplotlib.figure import Figure

    heights = [timeline.ranks for _, timeline in panels]
    figure = Figure(figsize=(14, 0.32 * sum(heights) + 0.6 * len(panels) + 0.4), layout="constrained")
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, timeline) in zip(all_axes, panels, strict=True):
        _draw_panel(axes, title, timeline)
    all_axes[-1].set_xlabel(f"time, in seconds of a run or units of --forward ({LEGEND})", fontsize=8)
    return figure


def _draw_panel(axes: Any, title: str, timeline: Timeline) -> None:
    begin, bars = timeline.begin, computations(timeline)
    drawn = axes.barh(
        [span.rank for span in bars],
        [float(span.end - span.start) for span in bars],
        left=[float(span.start - begin) for span in bars],
        height=0.92,
        color=[color(span.action.op, span.action.stage // timeline.ranks) for span in bars],
        edgecolor="white",
        linewidth=0.5,
    )
    if len(bars) <= MOST_LABELS:
        axes.bar_label(drawn, [str(span.action.micro_batch) for span in bars], label_type="center", fontsize=6)
    axes.set_title(caption(title, timeline), loc="left", fontsize=9)
    axes.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False, labelsize=8)
    axes.margins(x=0.005)


def to_text(timeline: Timeline) -> str:
    """Rows of characters: F3 is the forward of micro-batch 3, f3 that of a later chunk, dots what lasts longer than the
    shortest computation."""
    bars = computations(timeline)
    width = 1 + max(len(label(span.action)) for span in bars)
    per_time = width / min((span.end - span.start for span in bars if span.end > span.start), default=1)
    rows = [f"rank {rank}  " for rank in range(timeline.ranks)]
    margin = len(max(rows, key=len))
    rows = [row.ljust(margin) for row in rows]
    for span in sorted(bars, key=lambda span: span.start):
        name = label(span.action) if span.action.stage < timeline.ranks else label(span.action).lower()
        start, end = (round((time - timeline.begin) * per_time) for time in (span.start, span.end))
        rows[span.rank] = rows[span.rank].ljust(margin + start) + name.ljust(end - start - 1, ".") + " "
    return "\n".join(row.rstrip() for row in rows)


def from_trace(trace: dict[str, Any]) -> Timeline:
    """The timeline of a Chrome trace, see ``smp.pipeline.timeline``. Events of other kinds, such as a profiler's, are
    left out.

    Raises:
        ValueError: the trace is not one, or no event of it is an action of a pipeline.
    """
    ops = {op.value for op in Op}
    try:
        events = [event for event in trace["traceEvents"] if event["ph"] == "X" and event.get("cat") in ops]
        spans = tuple(_span(event) for event in events)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a trace of a pipeline: {error!r}") from None
    if not any(span.action.op in COMPUTE for span in spans):
        raise ValueError("not a trace of a pipeline: no forward or backward in it")
    if not all(0 <= span.end - span.start < inf for span in spans) or all(span.end == span.start for span in spans):
        raise ValueError("not a trace of a pipeline: durations are numbers, at least 0 and not all of them 0")
    return Timeline(ranks=max(span.rank for span in spans) + 1, spans=spans)


def _span(event: dict[str, Any]) -> Span:
    arguments = event["args"]
    action = Action(Op(event["cat"]), int(arguments["stage"]), arguments["micro_batch"])
    start = event["ts"] / MICROSECONDS
    return Span(int(event["pid"]), action, start, start + event["dur"] / MICROSECONDS)


def predict(args: argparse.Namespace, name: str) -> Panel:
    """The timeline of a schedule whose stages are equal."""
    ranks, micro_batches = args.pipeline_model_parallel_size, args.micro_batches
    schedule = build_schedule(name, ranks, micro_batches, args.chunks, prefetch=args.prefetch)
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
    if output.suffix == ".json":
        if len(panels) != 1:
            raise ValueError(f"a trace holds one timeline, not {len(panels)}")
        (title, timeline), *_ = panels
        output.write_text(json.dumps(to_trace(timeline, title)), encoding="utf-8")
    else:
        try:
            figure = draw(panels)
        except ImportError:
            raise ConfigError(f"pictures need matplotlib, of the extra plot: {pip_install('matplotlib')}") from None
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
    parser.add_argument("--prefetch", type=int, default=1, help="how many computations ahead receives are posted")
    for name, what in (
        ("forward", "a micro-batch in all layers of a rank"),
        ("backward-input", "the gradient of its input"),
        ("backward-weight", "the gradient of the weights"),
    ):
        parser.add_argument(f"--{name}", type=float, default=1.0, help=f"time of {what}")
    parser.add_argument("--link", type=float, default=0.0, help="time of a message")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code, see :mod:`smp.config.command_line.command`."""
    return run_tool(lambda: print(plot(build_parser().parse_args(argv))))


if __name__ == "__main__":
    sys.exit(main())
