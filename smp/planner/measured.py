"""Step time on this machine's CPU, from measured times of the step's calls.

Without a pipeline a step is the sum of its operators and collectives, and of the host's time between them: the host is
the device, and collectives through memory are copies that the ranks make themselves, so nothing is hidden behind
anything. With a pipeline each action's calls are summed, and the schedule is played with these times. More processes
than processors take turns: without a pipeline all of them have the same to do, with one those that wait for a message
leave the processor to the others.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch

from smp.config import Config, Layout
from smp.pipeline.actions import RECEIVE, SEND, Op
from smp.pipeline.stage_plan import Plan, plan_pipeline
from smp.planner.devices import Device, ShareErrors
from smp.planner.machine import MachineTimes, Timed, calibrate, kind_of
from smp.planner.processors import play
from smp.planner.record import Calls, CallSite, Collective, recorded_step
from smp.planner.search import Candidate
from smp.planner.seconds import StepTime

_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "smp.linear.", "smp.grouped_")
_ATTENTION = ("aten._scaled_dot_product_", "smp.cpp_attention")
ERRORS = ShareErrors(product=0.0, attention=0.0, memory=0.0, link=0.0, host=0.0, formula=0.10)
"""Nothing is a share of a data sheet's figure. ``formula``: of the 24 layouts in benchmarks/results/planner_cpu.txt,
root mean square of the logarithms of measured over predicted seconds."""
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
    return Device(1.0, memory, 1.0, 1.0, 1.0, devices_per_node=processes, errors=ERRORS)


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
    kind = kind_of(recorded.layout)
    around = _Around(times.host[kind], times.waits.get(kind, 0.0))
    if recorded.plan is None:
        parts = _parts(recorded.ranks[0], times, around)
        turns = _turns(recorded.layout.world_size, times)
        return _step(Counter({part: turns * seconds for part, seconds in parts.items()}), 0.0)
    return _pipeline(recorded, recorded.plan, times, around)


@dataclass(frozen=True)
class _Around:
    """Seconds of the host at each call, and of waiting at each collective."""

    host: float
    wait: float

    def own(self, call: Timed, times: MachineTimes) -> float:
        """Seconds of a call itself, with the wait for other ranks."""
        return times.of(call) + self.wait * isinstance(call, Collective)


def _turns(processes: float, times: MachineTimes) -> float:
    """How much longer processes take that all compute than one that has a processor for itself."""
    return max(processes / times.cores, 1.0) if times.cores else 1.0


def _parts(calls: Calls, times: MachineTimes, around: _Around) -> Counter[str]:
    """Seconds by the fields of :class:`StepTime`."""
    parts = Counter[str]()
    for (site, call), number in calls.items():
        parts[_part(site, call)] += number * around.own(call, times)  # type: ignore[assignment]
        parts["host"] += number * around.host  # type: ignore[assignment]
    return parts


def _part(site: CallSite, call: Timed) -> str:
    # By the phase, before the kind: clipping sums norms with collectives, too.
    if site.phase in ("clipping", "optimizer"):
        return "optimizer"
    if isinstance(call, Collective):
        return _LINKS.get(call.group, "data")
    if call.name.startswith(_PRODUCTS):
        return "products"
    return "attention" if call.name.startswith(_ATTENTION) else "elementwise"


def _step(parts: Counter[str], bubble: float) -> StepTime:
    return StepTime(**{f.name: float(parts[f.name]) for f in fields(StepTime)} | {"bubble": bubble})


def _pipeline(recorded: Recorded, plan: Plan, times: MachineTimes, around: _Around) -> StepTime:
    """Step time with a pipeline: each action's calls are summed, and playing the schedule adds waits."""
    schedule, replicas = plan.training, recorded.layout.world_size // recorded.layout.pp
    seconds: defaultdict[tuple[Op, int], float] = defaultdict(float)
    inside, outside, link = list[Counter[str]](), list[Counter[str]](), 0.0
    for calls in recorded.ranks:
        own = {key: n for key, n in calls.items() if not _is_message(key[1])}
        # One time for all messages, that of the slowest.
        link = max([link, *(times.of(call) for _, call in calls if _is_message(call))])
        # What runs outside of actions (clipping, update) is added after them.
        for (site, call), number in own.items():
            if site.op is not None and site.stage is not None:
                seconds[site.op, site.stage] += number * (around.own(call, times) + around.host)
        inside.append(_parts({key: n for key, n in own.items() if key[0].op is not None}, times, around))
        outside.append(_parts({key: n for key, n in own.items() if key[0].op is None}, times, around))
    # Both of a message's copies: the one into memory and the one out of it.
    count = Counter((action.op, action.stage) for actions in schedule.actions for action in actions)
    costs = {key: total / count[key] for key, total in seconds.items()}
    costs |= {(op, stage): link / 2 for op in SEND | RECEIVE for stage in range(schedule.stages)}
    end = play(schedule, costs, lambda busy: 1 / _turns(busy * replicas, times))
    rank = max(range(schedule.ranks), key=lambda rank: sum(inside[rank].values()))
    last = max(outside, key=lambda parts: sum(parts.values()))
    after = {part: _turns(recorded.layout.world_size, times) * taken for part, taken in last.items()}
    return _step(inside[rank] + Counter(after), end - sum(inside[rank].values()))


def _is_message(call: Timed) -> bool:
    return isinstance(call, Collective) and call.kind == "send"
