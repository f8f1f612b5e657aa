"""What a change does to a step, and why: the parts that change, largest first."""

from __future__ import annotations

from collections.abc import Mapping

from smp.planner.devices import GIB
from smp.planner.search import Candidate

LEAST = 0.002
"""Parts that change by less than this share of the step are not named."""


def difference(before: Candidate, after: Candidate, words: Mapping[str, str]) -> list[str]:
    """Lines: step and memory before and after, then the parts of the step that change.

    Args:
        words: of parts, as a user reads them.
    """
    if after.time is None:
        return [f"does not fit: {after.memory.total / GIB:.1f} GiB, {before.memory.total / GIB:.1f} before"]
    assert before.time is not None
    was, now = before.time.total, after.time.total
    rates = before.tokens_per_second(), after.tokens_per_second()
    lines = [
        f"step {was:.3f} -> {now:.3f} s, tokens/s/GPU {rates[0]:,.0f} -> {rates[1]:,.0f} "
        f"({100 * (rates[1] / rates[0] - 1):+.1f} %), memory {before.memory.total / GIB:.1f} -> "
        f"{after.memory.total / GIB:.1f} GiB"
    ]
    # Per token: a larger batch is not a slower step.
    scale = rates[0] / rates[1] * was / now
    changes = {part: getattr(after.time, part) * scale - seconds for part, seconds in vars(before.time).items()}
    for part, seconds in sorted(changes.items(), key=lambda change: -abs(change[1])):
        if abs(seconds) > LEAST * was:
            lines.append(f"  {words[part]}: {100 * seconds / was:+.1f} % of the step")
    return lines if len(lines) > 1 else [*lines, "  no part of the step changes"]
