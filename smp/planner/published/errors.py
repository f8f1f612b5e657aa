"""Writes docs/planning-errors.md: every published run, its prediction, and the error.

    python -m smp.planner.published.errors       # a minute; after a change of the formula, of a device or of runs.yaml

Factors are those of ``fit.yaml``; ``python -m smp.planner.published.fit`` writes that.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from smp.planner.devices import DEVICES
from smp.planner.published.runs import FIT, Factors, Run, group_of, runs, sources
from smp.planner.uncertainty import relative_error

PAGE = Path("docs/planning-errors.md")
HEAD = """# Predictions and published runs

Written by `python -m smp.planner.published.errors`; do not edit. The rows are `smp/planner/published/runs.yaml`, each
with its source, as published. Tokens are per second and GPU. Each has two predictions:

- **formula**: what `tools/plan.py` says of the same layout in smp, with shares of `smp/planner/devices.py` that were
  not fitted to these rows (but for the power of B300 and GB300, which comes of three rows that are not held out). Other
  trainers have other kernels and hide other things, so this is also the difference between trainers.
- **fitted**: the same formula with factors for the trainer on that generation of GPUs, from the rows that are not held
  out (`smp/planner/published/fit.py`, `fit.yaml`). A third of the rows, chosen by a hash of what was run, is **held
  out** and never used: its errors are those of a formula that was calibrated with other runs on such GPUs. A held-out
  row may differ from one that was used in nothing but its number of GPUs or its length. How rows are grouped, by
  trainer, generation, experts and async TP, was decided with all errors in sight.

Rows in MXFP8 are predicted as FP8 with one scale per tensor (`tensorwise`): smp has no MXFP8 on tensor cores. Its
scales of 32 numbers each, and the kernels that make them, are not in the formula.

What the sources leave open is taken as the list of sources says; recompute that nobody mentions is none. Rows that smp
refuses, NVFP4, LoRA and SFT are left out, and so is what was found without its layout (MegaScale, DeepSeek's own runs,
MiCS, SMP's tables).
"""


@dataclass(frozen=True)
class Row:
    """Tokens per second and GPU, published and predicted; ``interval``: the relative ± that ``tools/plan.py``
    prints."""

    run: Run
    published: float
    formula: float
    fitted: float
    interval: float

    @property
    def inside(self) -> bool:
        """Whether the published step is within the interval."""
        return abs(self.errors[0]) <= self.interval

    @property
    def errors(self) -> tuple[float, float]:
        """Relative errors of the formula and of the fitted formula."""
        return self.formula / self.published - 1, self.fitted / self.published - 1

    def line(self) -> str:
        """A row of the page's table."""
        said = (f"{tokens:,.0f}" for tokens in (self.published, self.formula, self.fitted))
        errors = (f"{100 * error:+.0f} %" for error in self.errors)
        published, formula, fitted = said
        off, fit_off = errors
        return (
            f"| {sources()[self.run.source].title} | {self.run.model}, {self.run.precision}, "
            f"{self.run.layout_in_words} | {self.run.gpus:,} {self.run.gpu} | {published} | {formula} | {off} | "
            f"{fitted} | {fit_off} | {'held out' if self.run.held_out else ''} |"
        )


@cache
def factors() -> Mapping[str, Factors]:
    """Fitted factors by group of runs."""
    return {name: Factors(**found) for name, found in yaml.safe_load(FIT.read_text(encoding="utf-8")).items()}


def row_of(run: Run) -> Row:
    """A run with both predictions."""
    unit = 1e12 / run.flops
    step = run.step(Factors())
    # A rate is inverse to a step's time, so factors go through the whole formula.
    formula, fitted = run.rate(step), run.rate(run.step(factors()[group_of(run)]))
    # Of the unfitted step: what the planner prints.
    interval = relative_error(step, DEVICES[run.gpu].errors)
    return Row(run, run.measured * unit, formula * unit, fitted * unit, interval)


def spread(errors: Sequence[float]) -> str:
    """Median and 90th percentile of absolute errors in percent, as cells of a table."""
    found = sorted(abs(error) for error in errors)
    return f"{100 * statistics.median(found):.1f} | {100 * percentile(found, 0.9):.1f}"


def percentile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that a ``share`` of the values does not exceed."""
    return ascending[max(0, math.ceil(len(ascending) * share) - 1)]


def summary(rows: Sequence[Row]) -> list[str]:
    """Lines of a table: all runs, then each group."""
    groups: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[group_of(row.run)].append(row)
    lines = [
        "| Trainer, GPUs | rows | formula: median % | 90th % | held out | fitted, held out: median % | 90th % |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, group in [("all", list(rows)), *sorted(groups.items())]:
        held = [row.errors[1] for row in group if row.run.held_out]
        of_held = spread(held) if held else " | "
        lines.append(f"| {name} | {len(group)} | {spread([r.errors[0] for r in group])} | {len(held)} | {of_held} |")
    return lines


def coverage(rows: Sequence[Row]) -> str:
    """A sentence on how many rows the predicted interval holds."""
    outside = [row for row in rows if not row.inside]
    slower = sum(row.errors[0] > 0 for row in outside)
    fast = sum(row.errors[0] > 0 for row in rows)
    return (
        f"The interval `±` that `tools/plan.py` prints holds the published step of {len(rows) - len(outside)} of "
        f"{len(rows)} rows ({100 * (1 - len(outside) / len(rows)):.0f} %); of the {len(outside)} others {slower} took "
        f"longer. The formula predicts {100 * fast / len(rows):.0f} % of the rows too fast. The errors of shares that "
        "the interval is made of come from the factors that were fitted to two thirds of these rows."
    )


def page(rows: Sequence[Row]) -> str:
    """The text of the page."""
    listed = [f"- {one.title}: {one.address}. {one.about}".rstrip() for one in sources().values()]
    head = "| Measured by | Run | GPUs | published | formula | error | fitted | error | |"
    table = [head, "|---|---|---|--:|--:|--:|--:|--:|---|", *(row.line() for row in rows)]
    parts = [
        HEAD,
        "## How far off",
        "\n".join(summary(rows)),
        coverage(rows),
        "## Sources",
        "\n".join(listed),
        "## Runs",
    ]
    return "\n\n".join([part.strip() for part in parts] + ["\n".join(table)]) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page([row_of(run) for run in runs()]), encoding="utf-8")


if __name__ == "__main__":
    main()
