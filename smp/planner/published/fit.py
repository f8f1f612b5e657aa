"""Factors of each trainer and kind of GPU that fit its published runs best. Held-out rows are not used.

    python -m smp.planner.published.fit      # writes smp/planner/published/fit.yaml; about ten minutes

A step is taken apart once at the factors so far; parts then scale with what they are divided by, and one factor after
another is moved to where the mean error is smallest, with a price on its distance from 1, so that few rows move little.
Then the step is taken apart again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import yaml

from smp.planner.devices import DEVICES
from smp.planner.published.runs import FIT, Factors, Run, group_of, runs
from smp.planner.seconds import StepTime
from smp.planner.step_time import StepModel
from smp.planner.uncertainty import DIVIDED_BY

ROUNDS = 4
"""How often steps are taken apart."""
PRICE = 0.4
"""Price of a factor that is off by e, in the unit of the sum of all rows' errors."""
MOVES = (0.8, 0.9, 0.95, 0.98, 0.99, 1.01, 1.02, 1.05, 1.1, 1.25)
_NAMES = {"product": "product_share", "attention": "attention_share", "memory": "memory_share", "link": "link_share"}
"""Factors by the shares of ``uncertainty``."""


def scaled(parts: StepTime, now: Factors, then: Factors, fp8: bool) -> float:
    """Seconds of a step with other factors, to first order: each part scales with the share it is divided by."""

    def slower(name: str) -> float:
        return float(getattr(now, name) / getattr(then, name))

    # Offloading is no part of the work: it scales with it below.
    seconds = {part: getattr(parts, part) for part in DIVIDED_BY if part != "offload"}
    for part, share in DIVIDED_BY.items():
        if part in seconds:
            seconds[part] *= slower(_NAMES[share]) if share in _NAMES else 1.0
    if fp8:
        seconds["products"] = parts.products * slower("fp8_share")
    work = sum(getattr(parts, part) for part in seconds)
    # A bubble and offloading scale with the work that they wait for.
    return sum(seconds.values()) * (1 + (parts.bubble + parts.offload) / work)


def cost(rows: Sequence[tuple[Run, StepTime]], now: Factors, then: Factors) -> float:
    """Sum of absolute logarithmic errors, and the price of the factors."""
    price = PRICE * sum(abs(math.log(value)) for value in vars(then).values())
    for run, parts in rows:
        # TFLOP/s per GPU: FLOPs of a token x tokens of a step / seconds.
        rate = run.flops * run.gbs * run.seq / run.gpus / 1e12 / scaled(parts, now, then, run.precision != "bf16")
        price += abs(math.log(rate / run.measured))
    return price


def fitted(group: Sequence[Run]) -> Factors:
    """Factors fitted on the runs of a group that are not held out."""
    used, now = [run for run in group if not run.held_out], Factors()
    for _ in range(ROUNDS):
        # Rows are predicted anew with the current factors in each round.
        rows = [(run, StepModel(run.config, run.layout, now.of(DEVICES[run.gpu]), run.plan).predict()) for run in used]
        now = _moved(rows, now)
    return now


def _moved(rows: Sequence[tuple[Run, StepTime]], now: Factors) -> Factors:
    """Coordinate descent: one factor after another until none improves. At most a factor of 1.5 per round, as far as
    first order holds."""
    best, least, moved = now, cost(rows, now, now), True
    while moved:
        moved = False
        for name in vars(now):
            for move in MOVES:
                value = getattr(best, name) * move
                # Beyond, what a step hides has changed: it must be taken apart again.
                if not 0.66 < value / getattr(now, name) < 1.5:
                    continue
                tried = replace(best, **{name: value})
                # The margin keeps rounding from moving factors for ever.
                if (price := cost(rows, now, tried)) < least - 1e-9:
                    best, least, moved = tried, price, True
    return best


def main() -> None:
    """Write the factors."""
    groups: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs():
        groups[group_of(run)].append(run)
    found: Mapping[str, dict[str, float]] = {
        name: {key: round(value, 3) for key, value in asdict(fitted(group)).items()} for name, group in groups.items()
    }
    FIT.write_text("# Written by python -m smp.planner.published.fit\n" + yaml.safe_dump(dict(found), sort_keys=False))


if __name__ == "__main__":
    main()
