"""Which operators run, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def recorded(profile: torch.profiler.profile) -> list[Any]:
    """The events of a profile as the profiler has them. ``profile.events()`` makes a tree of them, for seconds."""
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    return list(profile.profiler.kineto_results.events())


def order_of(run: Callable[[], Any], rows: int) -> list[str]:
    """Collectives, waits and matrix products in the order in which ``run`` issues them, inside of operators too.

    A product with ``rows`` rows is called dx, another one dw.
    """
    with torch.profiler.profile(record_shapes=True) as profile:
        run()
    out = []
    for event in sorted(recorded(profile), key=lambda event: event.start_ns()):
        room, _, name = event.name().partition("::")
        if room == "_c10d_functional":
            out.append(name)
        elif event.name() == "aten::mm":
            out.append("dx" if event.shapes()[0][0] == rows else "dw")
    return out
