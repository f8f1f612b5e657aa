"""Pictures of timelines, predicted or measured: for matplotlib, as a page without scripts, as text.

A row per rank, a bar per computation, the micro-batch on it; later chunks of a rank are paler. Several timelines share
one time axis, so that they compare by eye. Messages and collectives are in the trace file only (``timeline.to_trace``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from smp.pipeline.actions import COMPUTE, Op
from smp.pipeline.timeline import Span, Timeline, label

Panel = tuple[str, Timeline]

COLORS = {
    Op.FORWARD: (0x6B, 0x9B, 0xD1),
    Op.BACKWARD: (0x5F, 0xAE, 0x7A),
    Op.BACKWARD_INPUT: (0x5F, 0xAE, 0x7A),
    Op.BACKWARD_WEIGHT: (0xE3, 0xA8, 0x57),
}
LEGEND = "blue forward, green backward (where split: of the input), orange backward of the weights; paler: later chunks"
MOST_LABELS = 1000  # bars in a picture beyond which labels would be unreadable
WIDTH, ROW, LEFT = 1400, 26, 60  # of the page's drawings, in pixels
_PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>Pipeline timelines</title>
<style>
  body {{ font: 13px sans-serif; margin: 20px; }}
  rect {{ stroke: #fff; }}
  .label {{ text-anchor: middle; pointer-events: none; }}
</style>
<body>
{body}
<p>{legend}</p>
</body></html>
"""


@dataclass(frozen=True)
class Bar:
    """A computation in a picture; ``start`` counts from the beginning of the step."""

    rank: int
    start: float
    length: float
    label: str
    color: str
    text: str


def bars(timeline: Timeline) -> list[Bar]:
    """The computations of a timeline."""
    begin = min(span.start for span in timeline.spans)
    return [_bar(span, begin, span.action.stage // timeline.ranks) for span in _computations(timeline)]


def _computations(timeline: Timeline) -> Iterator[Span]:
    return (span for span in timeline.spans if span.action.op in COMPUTE)


def _bar(span: Span, begin: float, chunk: int) -> Bar:
    paler = min(chunk, 3) * 0.22
    color = "#" + "".join(f"{round(part + (255 - part) * paler):02x}" for part in COLORS[span.action.op])
    start, length = float(span.start - begin), float(span.end - span.start)
    text = f"{span.action}: {start:g} to {start + length:g}"
    return Bar(span.rank, start, length, str(span.action.micro_batch), color, text)


def caption(title: str, timeline: Timeline) -> str:
    """Title, step time and bubble."""
    return f"{title}: step {float(timeline.step_time):g}, bubble {float(timeline.bubble_fraction):.1%}"


def draw(panels: Sequence[Panel]) -> Any:
    """A matplotlib figure with the panels below each other."""
    from matplotlib.figure import Figure

    rows = sum(timeline.ranks for _, timeline in panels)
    figure = Figure(figsize=(14, 0.32 * rows + 0.6 * len(panels) + 0.4), layout="constrained")
    heights = [timeline.ranks for _, timeline in panels]
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, timeline) in zip(all_axes, panels, strict=True):
        _draw_panel(axes, title, timeline)
    all_axes[-1].set_xlabel(f"time ({LEGEND})", fontsize=8)
    return figure


def _draw_panel(axes: Any, title: str, timeline: Timeline) -> None:
    shown = bars(timeline)
    y, left = [bar.rank for bar in shown], [bar.start for bar in shown]
    colors, lengths = [bar.color for bar in shown], [bar.length for bar in shown]
    drawn = axes.barh(y, lengths, left=left, height=0.92, color=colors, edgecolor="white", linewidth=0.5)
    if len(shown) <= MOST_LABELS:
        axes.bar_label(drawn, [bar.label for bar in shown], label_type="center", fontsize=6)
    axes.set_title(caption(title, timeline), loc="left", fontsize=9)
    axes.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False, labelsize=8)
    axes.margins(x=0.005)


def to_html(panels: Sequence[Panel]) -> str:
    """A page that needs nothing else; pointing at a bar shows its action and times."""
    longest = float(max(timeline.step_time for _, timeline in panels))
    body = "\n".join(_panel_to_svg(title, timeline, (WIDTH - LEFT) / longest) for title, timeline in panels)
    return _PAGE.format(body=body, legend=escape(LEGEND))


def _panel_to_svg(title: str, timeline: Timeline, scale: float) -> str:
    shown = bars(timeline)
    names = [f'<text x="0" y="{rank * ROW + 17}">rank {rank}</text>' for rank in range(timeline.ranks)]
    rows = [_bar_to_svg(bar, scale, labelled=len(shown) <= MOST_LABELS) for bar in shown]
    svg = f'<svg width="{WIDTH}" height="{timeline.ranks * ROW}">'
    return "\n".join([f"<h3>{escape(caption(title, timeline))}</h3>", svg, *names, *rows, "</svg>"])


def _bar_to_svg(bar: Bar, scale: float, labelled: bool) -> str:
    x, y, width = LEFT + bar.start * scale, bar.rank * ROW, bar.length * scale
    tooltip = f"<title>{escape(bar.text)}</title>"
    rect = f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 2}" fill="{bar.color}">{tooltip}</rect>'
    name = f'<text class="label" x="{x + width / 2:.2f}" y="{y + 16}">{escape(bar.label)}</text>'
    return rect + name if labelled else rect


def to_text(timeline: Timeline) -> str:
    """Rows of characters: F3 is the forward of micro-batch 3, f3 that of a later chunk, dots what lasts longer than the
    shortest computation."""
    computations = list(_computations(timeline))
    width = 1 + max(len(label(span.action)) for span in computations)
    per_time = width / min((span.end - span.start for span in computations if span.end > span.start), default=1)
    begin = min(span.start for span in timeline.spans)
    rows = [f"rank {rank}  " for rank in range(timeline.ranks)]
    margin = len(max(rows, key=len))
    rows = [row.ljust(margin) for row in rows]
    for span in sorted(computations, key=lambda span: span.start):
        name = label(span.action) if span.action.stage < timeline.ranks else label(span.action).lower()
        start, end = (round((time - begin) * per_time) for time in (span.start, span.end))
        rows[span.rank] = rows[span.rank].ljust(margin + start) + name.ljust(end - start - 1, ".") + " "
    return "\n".join(row.rstrip() for row in rows)
