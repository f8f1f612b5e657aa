"""1F1B: each backward as early as possible, to free its activations (Narayanan et al. 2021, arXiv 2104.04473).

    rank 0  F0 F1 F2             B0... F3 B1...    B2...    B3...
    rank 1     F0 F1       B0... F2 B1... F3 B2...    B3...
    rank 2        F0 B0... F1 B1... F2 B2... F3 B3...

Phases: warm-up, p - 1 - rank forwards; steady state, one forward and one backward in turn; cool-down, the backwards
left.
Bubble: (p - 1)(F + B), as GPipe; as a share of the step (p - 1) / (m + p - 1).
Peak activations: p - rank micro-batches.
"""

from __future__ import annotations

from smp.pipeline.actions import Op, Schedule
from smp.pipeline.schedules.order import check_sizes, one_forward_one_backward, ordered

CHUNKS = 1

F, B = (Op.FORWARD, 0), (Op.BACKWARD, 0)


def schedule(ranks: int, micro_batches: int, chunks: int = CHUNKS) -> Schedule:
    """Computation of 1F1B; fewer micro-batches than ranks work too. Raises ConfigError unless ``chunks`` is 1."""
    check_sizes("1f1b", ranks, micro_batches, chunks, most_chunks=1)

    def order(rank: int) -> list[tuple[Op, int]]:
        warm_up = min(ranks - 1 - rank, micro_batches)
        return one_forward_one_backward([F] * micro_batches, [B] * micro_batches, warm_up)

    return ordered("1f1b", ranks, micro_batches, chunks, order)
