"""Forward only: evaluation, with the stages where training has put them.

    rank 0  F0 F1 F2 F3
    rank 1     F0 F1 F2 F3
    rank 2        F0 F1 F2 F3

Loop placement: groups of micro-batches as in interleaved 1F1B; the bubble is the way in, (p - 1) F of a chunk,
for m >= p. V placement: the two stages of a rank are an odd number of stages apart, so that each takes every second
slot and they never meet; the bubble is the way in and out, 2 (p - 1) F of a chunk. Activations are not kept.
"""

from __future__ import annotations

from smp.pipeline.actions import Op, Schedule
from smp.pipeline.schedules.order import Step, grouped, ordered


def forward_only(training: Schedule) -> Schedule:
    """Forwards of as many micro-batches as ``training`` has, computation only."""
    ranks, micro_batches, chunks = training.ranks, training.micro_batches, training.chunks

    def order(rank: int) -> list[Step]:
        if training.placement == "loop":
            return grouped(Op.FORWARD, ranks, micro_batches, range(chunks))
        # A forward that takes one slot runs in slot stage + 2 x micro-batch.
        slots = (
            (stage + 2 * index, chunk)
            for chunk, stage in enumerate(training.stages_of(rank))
            for index in range(micro_batches)
        )
        # By slot. No two computations of a rank share one: its two stages are an odd number of slots apart.
        return [(Op.FORWARD, chunk) for _, chunk in sorted(slots)]

    return ordered("forward-only", ranks, micro_batches, chunks, order, training.placement, forward_only=True)
