"""ZB-V: layers placed in a V, no bubble but the way in (Qi et al. 2023, arXiv 2401.10241; 2024, arXiv 2405.15362).

    rank 0  F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 w2 I0 W0 f3 i3 w3 I1 W1 f4 i4 w4 I2 W2 I3 W3 I4 W4
    rank 1     F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 F4 I0 W0 f3 i2 w2 I1 W1 f4 i3 w3 I2 i4 I3 W2 I4 W3 w4 W4
    rank 2        F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 f3 i1 w1 F4 I1 W1 f4 i2 w2 I2 i3 I3 i4 I4 W2 w3 w4 W3 W4

Capitals are a rank's first chunk, small letters its second. Rank r owns stages r and 2p - 1 - r: a micro-batch goes
down the ranks and comes back up, so that the first rank also has the loss and the backward begins where the forward
ended.

Phases:
    2 (p - r) - 1 times F                 until the first micro-batch comes back
    r times f F                           way to the loss, on rank 0
    p - r times f i w                     way back
    m - 2p + 1 + r times F I W f i w      steady state
    p - 1 - r times I W f i w             no forward of the first chunk is left
    r times I i, then p - r times I W     weight parts wait ...
    r times w, then r times W             ... and fill the end
Bubble: (p - 1) max(I, 2 (I - W)) / 2 for m >= 2p - 1, F <= I and W <= I. If F = I = W that is (p - 1) F / 2, a sixth of
1F1B's: the way of the first forward to the last rank. It vanishes if the ranks need not begin and end a step together.
Peak activations: 2p of half a rank's layers on every rank: what 1F1B has on rank 0, p micro-batches.
Messages: twice those of 1F1B, none at the turn.
"""

from __future__ import annotations

from dataclasses import replace

from smp.pipeline.actions import Op, Schedule
from smp.pipeline.schedules.order import Step, check_sizes, ordered

CHUNKS = 2

F, I, W = (Op.FORWARD, 0), (Op.BACKWARD_INPUT, 0), (Op.BACKWARD_WEIGHT, 0)  # noqa: E741
f, i, w = (Op.FORWARD, 1), (Op.BACKWARD_INPUT, 1), (Op.BACKWARD_WEIGHT, 1)


def schedule(ranks: int, micro_batches: int, chunks: int = CHUNKS) -> Schedule:
    """Computation of ZB-V. Raises ConfigError unless ``chunks`` is 2.

    2p - 1 micro-batches fill the pipeline. Fewer run as the first ones of a full one.
    """
    check_sizes("zb-v", ranks, micro_batches, chunks, least_chunks=2, most_chunks=2)
    # The pattern below holds for a full pipeline only. Leaving later micro-batches out of it keeps the order of the
    # first ones, and no rank then waits for a message that is not there yet.
    full = max(micro_batches, 2 * ranks - 1)
    filled = ordered("zb-v", ranks, full, chunks, lambda rank: _order(ranks, rank, full), "v")
    wanted = range(micro_batches)
    first = tuple(tuple(action for action in rank if action.micro_batch in wanted) for rank in filled.actions)
    return replace(filled, micro_batches=micro_batches, actions=first)


def _order(ranks: int, rank: int, micro_batches: int) -> list[Step]:
    below = ranks - rank  # ranks from here to the turn
    # The rows of the module's table, in its order.
    warm_up = [F] * (2 * below - 1) + [f, F] * rank + [f, i, w] * below
    steady = [F, I, W, f, i, w] * (micro_batches - 2 * below + 1 - rank) + [I, W, f, i, w] * (below - 1)
    cool_down = [I, i] * rank + [I, W] * below + [w] * rank + [W] * rank
    return warm_up + steady + cool_down
