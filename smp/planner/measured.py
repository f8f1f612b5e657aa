"""Step time on this machine's CPU, from measured times of the step's calls.

Without a pipeline a step is the sum of its operators and collectives, and of the host's time between them: the host is
the device, and gloo's collectives need the same cores that compute, so nothing is hidden behind anything. With a
pipeline each action's calls are summed, and the simulator plays the schedule with these times.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch

from smp.config import Config, Layout
from smp.pipeline.actions import COMPUTE, Op
from smp.pipeline.simulate_schedule import StageCosts, simulate
from smp.pipeline.stage_plan import Plan, plan_pipeline
from smp.planner.devices import Device
from smp.planner.machine import MachineTimes, Timed, calibrate, kind_of
from smp.planner.record import Calls, Collective, Place, recorded_step
from smp.planner.search import Candidate
from smp.planner.seconds import StepTime

_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten._grouped_mm.", "smp.linear.")
_LINKS = {"tp": "tensor", "cp": "context", "ep": "experts"}


@dataclass(frozen=True)
class Recorded:
    """A layout with the calls of its steps, by pipeline rank."""

    config: Config
    layout: Layout
    plan: Plan | None
    ranks: Sequence[Calls]

    @staticmethod
    def of(config: Config, layout: Layout) -> Recorded:
        """The recorded step of resolved settings."""
        plan = plan_pipeline(config, layout) if layout.pp > 1 else None
        return Recorded(config, layout, plan, recorded_step(config, layout, plan))


def this_machine(processes: int) -> Device:
    """This machine as the search for layouts needs it: memory, and all processes on one node. The rates are dummies, as
    :func:`timed` measures."""
    # Every process has its share of the machine's memory.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes
    return Device(1.0, memory, 1.0, 1.0, 1.0, devices_per_node=processes)


def threads_of(processes: int) -> int:
    """Threads per process when they share this process's."""
    return max(torch.get_num_threads() // processes, 1)


def timed(
    found: Sequence[Candidate], processes: int, tell: Callable[[str], None]
) -> tuple[list[Candidate], MachineTimes]:
    """The candidates with step times measured on this machine, and the measured times."""
    recorded = []
    for number, one in enumerate(found, 1):
        tell(f"trying layout {number} of {len(found)} on tensors without data")
        recorded.append(Recorded.of(one.config, one.layout))
    tell("measuring this machine")
    steps = [rank for one in recorded for rank in one.ranks]
    # All layouts' calls at once: each distinct one is timed once.
    times = calibrate(processes, steps, [kind_of(one.layout) for one in recorded], threads=threads_of(processes))
    return [replace(c, time=step_time(r, times)) for c, r in zip(found, recorded, strict=True)], times


def step_time(recorded: Recorded, times: MachineTimes) -> StepTime:
    """Step time of the slowest rank."""
    host = times.host[kind_of(recorded.layout)]
    if recorded.plan is None:
        return _step(_parts(recorded.ranks[0], times, host), 0.0)
    return _pipeline(recorded, recorded.plan, times, host)


def _parts(calls: Calls, times: MachineTimes, host: float) -> Counter[str]:
    """Seconds by the fields of :class:`StepTime`."""
    parts = Counter[str]()
    for (place, call), number in calls.items():
        parts[_part(place, call)] += number * times.of(call)  # type: ignore[assignment]
        parts["host"] += number * host  # type: ignore[assignment]
    return parts


def _part(place: Place, call: Timed) -> str:
    # By the phase, before the kind: clipping sums norms with collectives, too.
    if place.phase in ("clipping", "optimizer"):
        return "optimizer"
    if isinstance(call, Collective):
        return _LINKS.get(call.group, "data")
    if call.name.startswith(_PRODUCTS):
        return "products"
    return "attention" if "scaled_dot_product" in call.name else "elementwise"


def _step(parts: Counter[str], bubble: float) -> StepTime:
    return StepTime(**{f.name: float(parts[f.name]) for f in fields(StepTime)} | {"bubble": bubble})


def _pipeline(recorded: Recorded, plan: Plan, times: MachineTimes, host: float) -> StepTime:
    """Step time with a pipeline: each action's calls are summed, and the simulator adds waits and messages."""
    seconds: defaultdict[tuple[Op, int], float] = defaultdict(float)
    inside, outside, link = list[Counter[str]](), list[Counter[str]](), 0.0
    for calls in recorded.ranks:
        own = {key: n for key, n in calls.items() if not _is_message(key[1])}
        # One time for all messages, that of the slowest: the simulator knows no other.
        link = max([link, *(times.of(call) for _, call in calls if _is_message(call))])
        # The simulator works with actions: what runs outside of them (clipping, update) is added
        # after it.
        for (place, call), number in own.items():
            if place.op is not None and place.stage is not None:
                seconds[place.op, place.stage] += number * (times.of(call) + host)
        inside.append(_parts({key: n for key, n in own.items() if key[0].op in COMPUTE}, times, host))
        outside.append(_parts({key: n for key, n in own.items() if key[0].op is None}, times, host))
    schedule = plan.training
    costs = [_costs(seconds, stage, schedule.micro_batches) for stage in range(schedule.stages)]
    # What waits for what is known by the schedule; the sums above know only how long each thing takes.
    timeline = simulate(schedule, costs, link)
    busiest = max(range(schedule.ranks), key=lambda rank: timeline.work[rank])
    return _step(inside[busiest] + outside[busiest], timeline.step_time - timeline.work[busiest])


def _is_message(call: Timed) -> bool:
    return isinstance(call, Collective) and call.kind == "send"


def _costs(seconds: defaultdict[tuple[Op, int], float], stage: int, micro_batches: int) -> StageCosts:
    """Costs of a stage per micro-batch, from the seconds of all its actions."""
    whole = seconds[Op.BACKWARD, stage] / 2  # a schedule may split some backward passes; the sum of both ways counts
    return StageCosts(
        seconds[Op.FORWARD, stage] / micro_batches,
        (seconds[Op.BACKWARD_INPUT, stage] + whole) / micro_batches,
        (seconds[Op.BACKWARD_WEIGHT, stage] + whole) / micro_batches,
        seconds[Op.UNSHARD, stage],
        seconds[Op.REDUCE, stage],
    )
