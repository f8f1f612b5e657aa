"""Running a schedule on paper: the order in which its ranks can get through their actions.

Ranks are independent programs that meet in messages. ``execution_order`` interleaves them so that an action is yielded
only when nothing holds it up; both the validator and the simulator walk along it. If the ranks can come to a point
where each waits for another one, they do here: with messages that never overtake, what can run does not depend on which
rank goes first.
"""

from __future__ import annotations

from collections.abc import Iterator

from smp.pipeline.actions import COMPUTE, RECEIVE, SEND, Action, Schedule, Sends, counterpart, needs


class ScheduleError(ValueError):
    """A schedule that is wrong or cannot run. The message names rank, position and action."""


def at(schedule: Schedule, rank: int, position: int) -> str:
    """Where an action stands, for messages."""
    actions = schedule.actions[rank]
    return f"rank {rank}, position {position}, {actions[position] if position < len(actions) else 'end of the step'}"


def execution_order(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """(rank, position) of every action, each after all that it waits for.

    A paired send is followed at once by its receive.

    Raises:
        ScheduleError: deadlock; the message says where every unfinished rank stands.
    """
    position = [0] * schedule.ranks
    sent: set[Action] = set()  # the receives of the messages that are under way
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while position[rank] < len(actions) and _can_run(schedule, actions[position[rank]], position, sent):
                action = actions[position[rank]]
                if action.op in SEND:
                    sent.add(counterpart(action))
                yield rank, position[rank]
                position[rank] += 1
                moved = True
                if action.op in SEND and schedule.sends is Sends.PAIRED:
                    receiver = schedule.peer(action)
                    yield receiver, position[receiver]
                    position[receiver] += 1
    stuck = [rank for rank in range(schedule.ranks) if position[rank] < len(schedule.actions[rank])]
    if stuck:
        positions = "; ".join(at(schedule, rank, position[rank]) for rank in stuck)
        raise ScheduleError(f"{schedule.name}: deadlock with {schedule.sends.value} sends: {positions}")


def _can_run(schedule: Schedule, action: Action, position: list[int], sent: set[Action]) -> bool:
    """Whether the action in front of a rank can run, given where the others stand."""
    if schedule.sends is Sends.PAIRED:
        return action.op not in RECEIVE and (action.op not in SEND or _meets(schedule, action, position))
    return action.op not in COMPUTE or all(need in sent for need in needs(schedule, action) if need.op in RECEIVE)


def _meets(schedule: Schedule, send: Action, position: list[int]) -> bool:
    """Whether the receiver stands at the receive of a paired send."""
    peer = schedule.peer(send)
    actions = schedule.actions[peer]
    return position[peer] < len(actions) and actions[position[peer]] == counterpart(send)
