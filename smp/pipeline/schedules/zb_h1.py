"""ZB-H1: weight gradients fill the bubble, in 1F1B's memory (Qi et al. 2023, arXiv 2401.10241).

    rank 0  F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1     F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

The backward is split: I, the gradient of the input, is what the previous stage waits for; W, the gradient of the
weights, can wait. Rank r lags r weight parts behind and spends them at the end, while the last gradients travel to the
first rank.

Phases: as 1F1B with I for B; a W follows each I, r micro-batches late; the last r W.
Bubble: (p - 1)(F + I - W), a third of 1F1B's if F = I = W; (p - 1) max(F, I) where W is longer than F or I.
Peak activations: p micro-batches on every rank, what 1F1B has on rank 0, if an activation is kept until its W.
"""

from __future__ import annotations

from smp.pipeline.actions import Op, Schedule
from smp.pipeline.schedules.order import Step, check_sizes, ordered

CHUNKS = 1

F, I, W = (Op.FORWARD, 0), (Op.BACKWARD_INPUT, 0), (Op.BACKWARD_WEIGHT, 0)  # noqa: E741


def schedule(ranks: int, micro_batches: int, chunks: int = CHUNKS) -> Schedule:
    """Computation of ZB-H1. Raises ConfigError unless ``chunks`` is 1."""
    check_sizes("zb-h1", ranks, micro_batches, chunks, most_chunks=1)

    def order(rank: int) -> list[Step]:
        warm_up, late = min(ranks - 1 - rank, micro_batches), min(rank, micro_batches)
        steps = [F] * warm_up
        for index in range(micro_batches):
            # The forwards end ``warm_up`` rounds before the last, and weight parts begin
            # ``late`` rounds after the first.
            steps += [F] * (warm_up + index < micro_batches) + [I] + [W] * (index >= late)
        return steps + [W] * late

    return ordered("zb-h1", ranks, micro_batches, chunks, order)
