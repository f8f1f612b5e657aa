"""A pipeline's schedule on processors: when its last rank has finished.

Unlike on GPUs (:mod:`smp.pipeline.simulate_schedule`) a rank does everything itself, one thing after the other: it
computes, copies messages, gathers weights and reduces gradients. Where ranks share processors, those that wait leave
theirs to the others, which are faster meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from smp.pipeline.actions import COMPUTE, RECEIVE, SEND, Action, Op, Schedule, counterpart, needs


def play(schedule: Schedule, costs: Mapping[tuple[Op, int], float], speed: Callable[[int], float]) -> float:
    """Seconds until all ranks of a valid schedule have run their actions.

    Args:
        costs: processor time of an action, by its kind and stage; 0 where there is none.
        speed: of a rank, while so many of them run: processor time for each second.
    """
    programs = [_program(schedule, actions, costs) for actions in schedule.actions]
    position, left = [0] * schedule.ranks, [0.0] * schedule.ranks
    sent, now = set[Action](), 0.0
    started = [False] * schedule.ranks
    while True:
        running = []
        for rank, program in enumerate(programs):
            if not started[rank] and position[rank] < len(program):
                action, time, waits = program[position[rank]]
                if waits <= sent:
                    started[rank], left[rank] = True, time
            if started[rank]:
                running.append(rank)
        if not running:
            assert all(at == len(program) for at, program in zip(position, programs, strict=True)), "a valid schedule"
            return now
        # Until the first of them is done, all are equally fast.
        fast, passed = speed(len(running)), min(left[rank] for rank in running)
        now += passed / fast
        for rank in running:
            left[rank] -= passed
            if left[rank] <= 0:
                action, _, _ = programs[rank][position[rank]]
                sent |= {counterpart(action)} if action.op in SEND else set()
                position[rank] += 1
                started[rank] = False


def _program(
    schedule: Schedule, actions: tuple[Action, ...], costs: Mapping[tuple[Op, int], float]
) -> list[tuple[Action, float, set[Action]]]:
    """What a rank runs: (action, seconds, messages that it waits for). A message is copied out of memory by the
    computation that reads it, so receives are no actions of their own."""
    program = []
    for action in actions:
        if action.op in RECEIVE:
            continue
        waits = {need for need in needs(schedule, action) if need.op in RECEIVE} if action.op in COMPUTE else set()
        time = costs.get((action.op, action.stage), 0.0) + sum(costs.get((m.op, m.stage), 0.0) for m in waits)
        program.append((action, time, waits))
    return program
