"""Interleaved 1F1B: several chunks of layers per rank, smaller bubbles (Narayanan et al. 2021, arXiv 2104.04473).

    rank 0  F0 F1 f0 f1 F2    b0... F3 b1... f2 B0... f3 B1...    b2...    b3... B2... B3...
    rank 1     F0 F1 f0 b0... f1 b1... F2 B0... F3 B1... f2 b2... f3 b3... B2... B3...

Capitals are a rank's first chunk, small letters its second. Stage s is on rank s mod p, so that a micro-batch goes v
times around the ranks. Micro-batches go in groups: a group passes the first chunk, then the second, ...; only then
comes the next.

Phases: warm-up, 2 (p - 1 - rank) + (v - 1) g forwards, g being the size of the first group; steady state, one forward
and one backward in turn; cool-down, the backwards left.
Bubble: (p - 1)(F + B) / v with F and B of all a rank's layers, for m >= p.
Peak activations: (v - 1) g + 2 (p - 1 - rank) + 1 of 1/v of a rank's layers; on rank 0 p + (p - 1) / v micro-batches if
p divides m.
Messages: a little more than v times those of 1F1B, (p v - 1) / (p - 1).

Any m works. m // p groups are as equal as they can be, the larger ones first: 10 micro-batches on 4 ranks are 5 and 5,
11 are 6 and 5. That costs memory, (v - 1)(g - p) activations, but no time. (Megatron refuses an m that p does not
divide, torch.distributed.pipelining one that does not make equal groups.)
"""

from __future__ import annotations

from smp.pipeline.actions import Op, Schedule
from smp.pipeline.schedules.order import Step, check_sizes, grouped, groups, one_forward_one_backward, ordered

CHUNKS = 2


def schedule(ranks: int, micro_batches: int, chunks: int = CHUNKS) -> Schedule:
    """Computation of interleaved 1F1B. Raises ConfigError unless there are 2 or more ``chunks``."""
    check_sizes("interleaved", ranks, micro_batches, chunks, least_chunks=2)
    forwards = grouped(Op.FORWARD, ranks, micro_batches, range(chunks))
    backwards = grouped(Op.BACKWARD, ranks, micro_batches, reversed(range(chunks)))
    # No backward pass begins before the first group has passed all chunks, so its size sets the
    # warm-up.
    first_group = groups(ranks, micro_batches)[0]

    def order(rank: int) -> list[Step]:
        # Megatron's number of warm-up forwards, with the size of the first group for the number of ranks.
        warm_up = min(2 * (ranks - 1 - rank) + (chunks - 1) * first_group, len(forwards))
        return one_forward_one_backward(forwards, backwards, warm_up)

    return ordered("interleaved", ranks, micro_batches, chunks, order)
