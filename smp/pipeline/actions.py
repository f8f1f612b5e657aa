"""A pipeline schedule as data: for every rank, the list of actions that it runs in order.

    rank 0   forward(stage 0, micro-batch 0)  send_activation(stage 0, micro-batch 0)  forward(stage 0, ...)  ...
    rank 1   receive_activation(stage 1, micro-batch 0)  forward(stage 1, micro-batch 0)  backward(stage 1, ...)  ...

Everything else reads this one value: ``validate_schedule`` proves it, ``simulate_schedule`` times it, a runner executes
it. The model is cut into ranks x chunks *stages*, numbered along the way of a token; every rank owns ``chunks`` of
them. Which ones is the placement:

                                   rank      0     1     2     3
    loop   round and round         stages   0 4   1 5   2 6   3 7
    v      back and forth          stages   0 7   1 6   2 5   3 4

Nothing here imports torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

Placement = Literal["loop", "v"]


class Op(Enum):
    """Kinds of action. The value is the name in messages and traces."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    SEND_ACTIVATION = "send_activation"
    RECEIVE_ACTIVATION = "receive_activation"
    SEND_GRADIENT = "send_gradient"
    RECEIVE_GRADIENT = "receive_gradient"
    UNSHARD = "unshard"
    RESHARD = "reshard"
    REDUCE = "reduce"


COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
SEND = frozenset({Op.SEND_ACTIVATION, Op.SEND_GRADIENT})
RECEIVE = frozenset({Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT})
PARAMETERS = frozenset({Op.UNSHARD, Op.RESHARD, Op.REDUCE})


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does. Actions on parameters concern all micro-batches and have ``micro_batch`` None."""

    op: Op
    stage: int
    micro_batch: int | None = None

    def __str__(self) -> str:
        micro_batch = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        return f"{self.op.value}(stage {self.stage}{micro_batch})"


@dataclass(frozen=True)
class Schedule:
    """Actions of every rank for one step over ``micro_batches``.

    ``actions[rank]`` runs in order. A schedule function returns only computation (forward and backward);
    ``add_communication`` completes it. ``forward_only`` schedules evaluate: no backward, nothing to reduce.

    A send or a receive hands its buffer over and the rank goes on. The message travels once both sides have posted it;
    only the computation that reads it waits (``isend`` and ``irecv``). Messages from one rank to another never overtake
    each other.
    """

    name: str
    ranks: int
    micro_batches: int
    chunks: int
    actions: tuple[tuple[Action, ...], ...]
    placement: Placement = "loop"
    forward_only: bool = False

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.name, self.micro_batches, self.actions, self.placement, self.forward_only))

    def __hash__(self) -> int:  # kept: a step looks up what depends on its schedule, of thousands of actions
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash: those of strings differ between processes."""
        # Python salts hashes of strings: a process that got another one's would never find a
        # schedule in its caches.
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """Rank that owns a stage."""
        chunk, offset = divmod(stage, self.ranks)
        # In a v every second chunk goes back through the ranks: there the last stage of the chunk is on rank 0.
        return self.ranks - 1 - offset if self.placement == "v" and chunk % 2 else offset

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of a rank, by chunk: the chunk of a stage is stage // ranks."""
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)

    def peer(self, action: Action) -> int:
        """Rank at the other end of a send or a receive."""
        return self.rank_of(counterpart(action).stage)


_OTHER_END = {
    Op.SEND_ACTIVATION: (Op.RECEIVE_ACTIVATION, 1),
    Op.RECEIVE_ACTIVATION: (Op.SEND_ACTIVATION, -1),
    Op.SEND_GRADIENT: (Op.RECEIVE_GRADIENT, -1),
    Op.RECEIVE_GRADIENT: (Op.SEND_GRADIENT, 1),
}


def counterpart(action: Action) -> Action:
    """The receive of a send, the send of a receive: activations go to the next stage, gradients to the previous one."""
    op, step = _OTHER_END[action.op]
    return Action(op, action.stage + step, action.micro_batch)


def completed(action: Action) -> tuple[Action, ...]:
    """The actions that count as done once this one is: a whole backward is its input part and its weight part."""
    if action.op is not Op.BACKWARD:
        return (action,)
    # The input part first: the runner files the result of a whole backward pass under it.
    split = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    return tuple(Action(op, action.stage, action.micro_batch) for op in split)


def needs(schedule: Schedule, action: Action) -> list[Action]:
    """Actions that have to be done earlier on the same rank, in the terms of ``completed``.

    A stage whose neighbour lives on the same rank takes its input from there, any other one from a receive.
    """
    stage, micro_batch = action.stage, action.micro_batch
    match action.op:
        case Op.FORWARD:
            return _input(schedule, action, stage - 1, Op.FORWARD, Op.RECEIVE_ACTIVATION)
        case Op.BACKWARD | Op.BACKWARD_INPUT:
            gradient = _input(schedule, action, stage + 1, Op.BACKWARD_INPUT, Op.RECEIVE_GRADIENT)
            return [Action(Op.FORWARD, stage, micro_batch), *gradient]
        # The gradient of the input may leave before the weights' gradients are computed: zero-bubble
        # schedules rest on that.
        case Op.BACKWARD_WEIGHT | Op.SEND_GRADIENT:
            return [Action(Op.BACKWARD_INPUT, stage, micro_batch)]
        case Op.SEND_ACTIVATION:
            return [Action(Op.FORWARD, stage, micro_batch)]
        # One reduction sums what all micro-batches left: with fewer the data-parallel ranks would never see the rest.
        case Op.REDUCE:
            return [Action(Op.BACKWARD_WEIGHT, stage, index) for index in range(schedule.micro_batches)]
        case _:
            return []


def _input(schedule: Schedule, action: Action, neighbour: int, local: Op, remote: Op) -> list[Action]:
    """The action that produces the tensor that ``action`` reads, as a list; empty at the ends of the model."""
    if not 0 <= neighbour < schedule.stages:
        return []
    if schedule.rank_of(neighbour) == schedule.rank_of(action.stage):
        return [Action(local, neighbour, action.micro_batch)]
    return [Action(remote, action.stage, action.micro_batch)]
