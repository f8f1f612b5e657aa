"""Start and end of every action of a step, predicted by ``simulate_schedule`` or measured by a runner, and as a file.

The file is Chrome's trace event format (chrome://tracing, ui.perfetto.dev), one complete event per action:

    {"ph": "X", "name": "F3", "cat": "forward", "pid": RANK, "tid": ENGINE, "ts": START, "dur": DURATION,
     "args": {"stage": 1, "micro_batch": 3}}

``cat`` is the value of the ``Op``; times are microseconds. ``micro_batch`` is null for actions on parameters. ``tid``
only separates what overlaps on a rank and is not read back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from smp.pipeline.actions import COMPUTE, Action, Op

MICROSECONDS = 1_000_000
_LETTERS = {Op.FORWARD: "F", Op.BACKWARD: "B", Op.BACKWARD_INPUT: "I", Op.BACKWARD_WEIGHT: "W"}
_ENGINES = ("compute", *(op.value for op in Op if op not in COMPUTE))


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one rank, in seconds (or the unit of the costs). A message spans its way over the link."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """All spans of one step."""

    ranks: int
    spans: tuple[Span, ...]

    @cached_property
    def begin(self) -> float:
        """The first start."""
        return min(span.start for span in self.spans)

    @cached_property
    def step_time(self) -> float:
        """Time from the first start to the last end."""
        return max(span.end for span in self.spans) - self.begin

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        totals: list[float] = [0] * self.ranks
        for span in self.spans:
            # A rank's computations never overlap, so their times add up.
            if span.action.op in COMPUTE:
                totals[span.rank] += span.end - span.start
        return tuple(totals)

    @property
    def bubble(self) -> tuple[float, ...]:
        """Time that each rank does not compute: step time minus work."""
        return tuple(self.step_time - work for work in self.work)

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time that is bubble."""
        return sum(self.bubble) / (self.ranks * self.step_time)


def label(action: Action) -> str:
    """Short name for pictures: F3 is the forward of micro-batch 3."""
    suffix = "" if action.micro_batch is None else str(action.micro_batch)
    return f"{_LETTERS[action.op]}{suffix}" if action.op in COMPUTE else f"{action.op.value} {suffix}".rstrip()


def to_trace(timeline: Timeline, title: str) -> dict[str, Any]:
    """The timeline as a Chrome trace, ready for ``json.dump``."""
    # A trace names its rows by events of their own.
    names = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        for rank in range(timeline.ranks)
    ]
    threads = [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": engine}}
        for rank in range(timeline.ranks)
        for tid, engine in enumerate(_ENGINES)
    ]
    events = names + threads + [_event(span) for span in timeline.spans]
    return {"displayTimeUnit": "ms", "otherData": {"title": title}, "traceEvents": events}


def _event(span: Span) -> dict[str, Any]:
    op = span.action.op
    return {
        "ph": "X",
        "name": label(span.action),
        "cat": op.value,
        "pid": span.rank,
        # One row of the picture for all computations, and one for each other kind of action,
        # which may overlap with them.
        "tid": 0 if op in COMPUTE else _ENGINES.index(op.value),
        "ts": float(span.start * MICROSECONDS),
        "dur": float((span.end - span.start) * MICROSECONDS),
        "args": {"stage": span.action.stage, "micro_batch": span.action.micro_batch},
    }
