"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).

    rank 0  F0 F1 F2 F3                   B0... B1... B2... B3...
    rank 1     F0 F1 F2 F3          B0... B1... B2... B3...
    rank 2        F0 F1 F2 F3 B0... B1... B2... B3...

Phases: m forwards; m backwards.
Bubble: (p - 1)(F + B), at the turn, where the first rank waits for the last one.
Peak activations: all m micro-batches on every rank. The last rank also keeps m gradients of the output matrix, because
    the loss computes its gradients in its forward pass. Prefer 1f1b: the same bubble, at most p and one of these.
"""

from __future__ import annotations

from smp.pipeline.actions import Op, Schedule
from smp.pipeline.schedules.order import check_sizes, ordered

CHUNKS = 1

F, B = (Op.FORWARD, 0), (Op.BACKWARD, 0)


def schedule(ranks: int, micro_batches: int, chunks: int = CHUNKS) -> Schedule:
    """Computation of GPipe. Raises ConfigError unless ``chunks`` is 1."""
    check_sizes("gpipe", ranks, micro_batches, chunks, most_chunks=1)
    return ordered("gpipe", ranks, micro_batches, chunks, lambda rank: [F] * micro_batches + [B] * micro_batches)
