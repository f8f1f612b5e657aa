"""How sure a predicted step time is, and whether two layouts can be told apart.

A share of a device that is off by a relative error moves the parts that are divided by it, in all layouts alike: the
difference of two layouts feels only what one has more of than the other. What is left of the formula's error when its
shares fit is each layout's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from smp.planner.devices import ShareErrors
from smp.planner.search import Candidate
from smp.planner.seconds import StepTime

SURE = 1.645
"""Standard deviations on either side, which would hold 90 % of normal errors. docs/planning-errors.md counts how many
published runs they hold."""
DIVIDED_BY = {
    "products": "product",
    "attention": "attention",
    "elementwise": "memory",
    "optimizer": "memory",
    "tensor": "link",
    "context": "link",
    "experts": "link",
    "data": "link",
    "offload": "link",
    "host": "host",
}
"""The share by which a part's seconds are divided. A bubble scales with what is waited for."""


def weights(time: StepTime) -> Mapping[str, float]:
    """How a step depends on each share: the relative increase of its time when the share is lower."""
    found = dict.fromkeys(DIVIDED_BY.values(), 0.0)
    for part, share in DIVIDED_BY.items():
        found[share] += getattr(time, part)
    working = sum(found.values()) or 1.0
    return {share: seconds / working for share, seconds in found.items()}


def relative_error(time: StepTime, errors: ShareErrors) -> float:
    """Half of the interval around the step time, relative to it: ``SURE`` standard deviations."""
    variance = sum((weight * getattr(errors, share)) ** 2 for share, weight in weights(time).items())
    return SURE * math.sqrt(errors.formula**2 + variance)


def told_apart(one: StepTime, other: StepTime, errors: ShareErrors) -> bool:
    """Whether two layouts on a device differ by more than ``SURE`` standard deviations of their difference."""
    # An error of a share moves both layouts: only the difference of their weights counts.
    a, b = weights(one), weights(other)
    shared = sum(((a[share] - b[share]) * getattr(errors, share)) ** 2 for share in a)
    return abs(math.log(one.total / other.total)) > SURE * math.sqrt(shared + 2 * errors.formula**2)


def as_good_as_the_first(best: Sequence[Candidate], errors: ShareErrors) -> int:
    """How many of the layouts, fastest first, cannot be told from the first, which counts itself."""
    times = [found.time for found in best if found.time is not None]
    return sum(not told_apart(times[0], time, errors) for time in times)
