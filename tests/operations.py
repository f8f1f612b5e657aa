"""In which order operators run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def order_of(run: Callable[[], Any], rows: int) -> list[str]:
    """Collectives, waits and matrix products in the order in which ``run`` issues them, inside of operators too.

    A product with ``rows`` rows is called dx, another one dw.
    """
    with torch.profiler.profile(record_shapes=True) as profile:
        run()
    out = []
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        room, _, name = event.name.partition("::")
        if room == "_c10d_functional":
            out.append(name)
        elif event.name == "aten::mm":
            out.append("dx" if event.input_shapes[0][0] == rows else "dw")
    return out
