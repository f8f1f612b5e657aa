"""The closed formulas that the headers of the schedules state, for equal stages and free messages.

Sizes are pipeline ranks p, micro-batches m and chunks v; times are those of one micro-batch in one stage. None: outside
of the domain in which a formula is known.
"""

from collections.abc import Sequence

from smp.models.part import ModelPart
from smp.pipeline.schedules.order import groups


def step_time(name: str, p: int, m: int, v: int, forward: float, back_input: float, back_weight: float) -> float | None:
    """Time of a step."""
    whole = forward + back_input + back_weight
    if name in ("gpipe", "1f1b"):
        return (m + p - 1) * whole
    if name == "interleaved" and m >= p:
        return (m * v + p - 1) * whole
    if name == "zb-h1" and m >= p:
        return m * whole + (p - 1) * max(forward + back_input - back_weight, forward, back_input)
    if name == "zb-v" and m >= 2 * p - 1 and max(forward, back_weight) <= back_input:
        return v * m * whole + (p - 1) * max(back_input, 2 * (back_input - back_weight))
    if name in ("interleaved", "zb-h1", "zb-v"):
        return None
    raise KeyError(name)


def peak_activations(name: str, p: int, m: int, v: int) -> tuple[int, ...] | None:
    """Most stage activations on each rank, in micro-batches of one stage."""
    if name == "gpipe":
        return (m,) * p
    if name == "1f1b":
        return tuple(min(p - rank, m) for rank in range(p))
    if name == "interleaved":
        warm_up = (v - 1) * groups(p, m)[0]
        return tuple(min(warm_up + 2 * (p - 1 - rank) + 1, m * v) for rank in range(p))
    if name == "zb-h1":
        return (min(p, m),) * p
    if name == "zb-v":
        return (v * p,) * p if m >= 2 * p - 1 else None
    raise KeyError(name)


def format_layout(placement: Sequence[ModelPart]) -> str:
    """A placement in the notation of ``parse_layout``."""
    layers = ("" if stage.count == 0 else "t" if stage.count == 1 else f"t*{stage.count}" for stage in placement)
    rows = ("E" * stage.embedding + text + "L" * stage.head for stage, text in zip(placement, layers, strict=True))
    return "|".join(rows)
