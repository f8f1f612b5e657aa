"""Times of single operators and collectives on this machine's CPU, as a training step calls them.

Each distinct call is timed once, in as many processes as will train: two processes that compute at the same time share
memory and caches. Arguments are as near to the processor as in a step (:mod:`smp.planner.operands`). Times are of the
processor, not of the clock: what else a machine does is no part of a call.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import shlex
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from smp.config import Config, Layout
from smp.models.presets import PRESETS
from smp.parallel.node_group import NAME
from smp.planner.exchange_times import Exchanges
from smp.planner.operands import FarMemory, Operands, fill_again, kept_results
from smp.planner.record import Calls, Collective, Operator, recorded_step
from smp.training.cost.meter import FREE
from smp.training.host_memory import keep_freed_memory
from smp.training.pretraining import Pretraining
from smp.training.process import Process
from smp.training.run import Run
from smp.training.runtime import StopSignal
from smp.training.settings import read_settings

Timed = Operator | Collective
PATIENCE = 0.02
"""Seconds for which an operator is called, 3 to 100 times."""
SMALL = (
    "--num-layers 4 --hidden-size {size} --ffn-hidden-size {size} --num-attention-heads {heads} --seq-length 128 "
    "--vocab-size 512 --mock-data --train-iters 99 --no-tensorboard --no-progress-bar "
)
"""A model whose step is mostly the host's time: Python, autograd and FSDP between operators. Its tensors exceed a
core's own cache, since operators on cached tensors are issued twice as fast as those of a real model."""


@dataclass(frozen=True)
class MachineTimes:
    """Measured times on this machine, in seconds.

    Attributes:
        calls: processor time of each operator and collective, the latter without a group.
        host: processor time between two operators, by :func:`kind_of` the layout.
        cores: that processes have between them; 0: one for each of their threads.
        waits: for other ranks, in which a rank sleeps, on average at a collective, by the kind of layout; none of more
            processes than processors.
    """

    calls: Mapping[Timed, float]
    host: Mapping[str, float]
    cores: float = 0
    waits: Mapping[str, float] = field(default_factory=dict)

    def of(self, call: Timed) -> float:
        """Seconds of a call; 0 for calls that launch nothing, whose time is the host's."""
        return 0.0 if is_free(call) else self.calls[alike(call)]

    def product_rate(self) -> float:
        """FLOP/s of the fastest matrix product among the calls."""
        # mm has (inner, columns), smp.linear weights (columns, inner).
        columns = {"aten.mm.default": 1, "smp.linear.default": 0}  # where the second operand has them
        products = [c for c in self.calls if isinstance(c, Operator) and c.name in columns]
        rates = [
            2 * math.prod(c.arguments[0].shape) * c.arguments[1].shape[columns[c.name]] / max(self.calls[c], 1e-9)
            for c in products
        ]
        return max(rates, default=1.0)


def alike(call: Timed) -> Timed:
    """The call without its group: all groups of this machine's processes are equally fast."""
    return replace(call, group="") if isinstance(call, Collective) else call


def is_free(call: Timed) -> bool:
    """Whether a call launches nothing, such as a view."""
    return isinstance(call, Operator) and call.name.split(".")[1] in FREE


def kind_of(layout: Layout) -> str:
    """The path that the host takes in a step: FSDP's hooks, tensor-parallel operators, or neither."""
    if layout.has_fsdp:
        return "sharded"
    return "tensor" if layout.tp > 1 else "alone"


def small_settings(kind: str, processes: int) -> Config:
    """Settings of the model whose step is mostly the host's time."""
    flags = f"--tensor-model-parallel-size {processes} --sequence-parallel" if kind == "tensor" else ""
    sizes = SMALL.format(size=128 * processes, heads=2 * processes)
    return read_settings(shlex.split(f"{sizes} {flags}"), PRESETS, processes)


def calibrate(processes: int, steps: Iterable[Calls], kinds: Iterable[str], *, threads: int) -> MachineTimes:
    """Measure the times of all calls in ``steps``.

    Args:
        processes: that train at the same time.
        steps: recorded, of any layouts of so many processes.
        kinds: of these layouts.
        threads: of each process.
    """
    kinds = sorted(set(kinds))
    small = {kind: _small_calls(kind, processes) for kind in kinds}
    wanted = timed_calls([*steps, *small.values()])
    found = run_processes(_calibrate, processes, threads, wanted, kinds)
    calls, seconds = slowest([calls for calls, _ in found]), found[0][1]
    return machine_times(processes, threads, calls, {kind: (small[kind], seconds[kind]) for kind in kinds})


def slowest(ranks: Sequence[Mapping[Timed, float]]) -> dict[Timed, float]:
    """Seconds of each call on its slowest rank: the others wait for it at the next collective."""
    return {call: max(times[call] for times in ranks) for call in ranks[0]}


def machine_times(
    processes: int, threads: int, calls: Mapping[Timed, float], small: Mapping[str, tuple[Calls, StepSeconds]]
) -> MachineTimes:
    """Times that were measured in so many processes.

    Args:
        calls: seconds of each.
        small: by kind, calls and seconds of a step of the small model.
    """
    cores = len(os.sched_getaffinity(0)) / threads  # processes that run at the same time
    host = {kind: host_time(step, calls, seconds.processor) for kind, (step, seconds) in small.items()}
    waits = {}
    if processes <= cores:  # where there are more, one that sleeps leaves its processor to the others
        waits = {kind: wait_time(step, took.clock - took.processor) for kind, (step, took) in small.items()}
    return MachineTimes(calls, host, cores, waits)


def _small_calls(kind: str, processes: int) -> Calls:
    config = small_settings(kind, processes)
    return recorded_step(config, Layout.from_config(config.parallel, processes))[0]


def timed_calls(steps: Iterable[Calls]) -> list[Timed]:
    """Every distinct call that takes time, in an order on which all processes agree."""
    return list(dict.fromkeys(alike(call) for step in steps for _, call in step if not is_free(call)))


def host_time(step: Calls, calls: Mapping[Timed, float], seconds: float) -> float:
    """The host's seconds per call, from a step that took ``seconds`` of the processor in total."""
    # Free calls are the host's as well: they count in the divisor only.
    known = sum(times * calls[alike(call)] for (_, call), times in step.items() if not is_free(call))
    # What the operators do not explain is the host's, shared equally: it is what every call costs.
    return max(seconds - known, 0.0) / sum(step.values())


def wait_time(step: Calls, seconds: float) -> float:
    """Seconds per collective, from a step in which a rank slept for ``seconds`` in total."""
    collectives = sum(times for (_, call), times in step.items() if isinstance(call, Collective))
    return max(seconds, 0.0) / collectives if collectives else 0.0


def run_processes(fn: Callable[..., Any], processes: int, threads: int, *arguments: Any) -> list[Any]:
    """Call ``fn(rank, processes, *arguments)`` in new processes with a common group; returns the results by rank.

    Raises:
        RuntimeError: one of them ended without a result.
    """
    # Fresh processes: a fork would share threads' locks and random states of this one.
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [spawn.Pipe(duplex=False) for _ in range(processes)]
        workers = [
            spawn.Process(target=_work, args=(rank, processes, threads, folder, pipe[1], fn, arguments), daemon=True)
            for rank, pipe in enumerate(pipes)
        ]
        for worker, (_, sender) in zip(workers, pipes, strict=True):
            worker.start()
            # Here the other end must be closed, or a worker that dies leaves this process waiting.
            sender.close()
        try:
            return [receiver.recv() for receiver, _ in pipes]
        except EOFError:
            raise RuntimeError("a process that measures this machine failed; its message is above") from None
        finally:
            for worker in workers:
                # kill after join: a worker that hangs must not outlive the measurement.
                worker.join(timeout=10)
                worker.kill()


def _work(
    rank: int, processes: int, threads: int, folder: str, answer: Connection, fn: Callable[..., Any], rest: Any
) -> None:
    torch.set_num_threads(threads)
    # As torchrun does: whether a rank that waits looks or sleeps depends on how many the machine has.
    os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "WORLD_SIZE": str(processes)}
    # The allocator keeps memory, or page faults would be measured in every call.
    keep_freed_memory()  # as a run does
    os.chdir(folder)
    # In a folder of its own: no port that somebody else may have taken.
    store = dist.FileStore(f"{folder}/store", processes)
    # As a run on this machine: its groups inherit the backend.
    dist.init_process_group(NAME if processes > 1 else "gloo", store=store, rank=rank, world_size=processes)
    answer.send(fn(rank, processes, *rest))
    # All ranks must have answered before the group goes away.
    dist.barrier()
    dist.destroy_process_group()


def _calibrate(
    rank: int, processes: int, wanted: Sequence[Timed], kinds: Sequence[str]
) -> tuple[dict[Timed, float], dict[str, StepSeconds]]:
    calls = time_calls(wanted)
    small = {kind: TrainingRun(small_settings(kind, processes), rank, processes, kind) for kind in kinds}
    return calls, {kind: typical([run.step() for _ in range(5)]) for kind, run in small.items()}


@dataclass(frozen=True)
class StepSeconds:
    """Wall time of a step, and the processor time of its thread."""

    clock: float
    processor: float


def typical(steps: Sequence[StepSeconds]) -> StepSeconds:
    """The medians: a step with an interruption says nothing, and there are few of them."""
    return StepSeconds(
        statistics.median(step.clock for step in steps), statistics.median(step.processor for step in steps)
    )


class TrainingRun:
    """A training run whose steps are timed. Its first step has been made; logs go to the folder ``name``."""

    def __init__(self, config: Config, rank: int, processes: int, name: str) -> None:
        config.logging.log_dir = name
        self._run = Run(Pretraining(config), Process(rank, processes, rank), torch.device("cpu"), StopSignal())
        # The first step allocates memory.
        self.step()

    def step(self) -> StepSeconds:
        """One more step, without waiting for data."""
        batch = self._run.batches.next_or_reason()
        dist.barrier()
        started, began = time.perf_counter(), time.thread_time()
        self._run.trainer.train_step(batch)
        return StepSeconds(time.perf_counter() - started, time.thread_time() - began)

    def close(self) -> None:
        """End the run."""
        self._run.close()


def time_calls(wanted: Sequence[Timed]) -> dict[Timed, float]:
    """Seconds of each call. All processes of the group call it with the same list."""
    # Products of ones in place run into denormal numbers after a while, which are slow.
    torch.set_flush_denormal(True)
    far = FarMemory()
    exchanges = Exchanges(far)
    # Every process times the calls in the same order, since collectives need all of them.
    return {call: exchanges.time(call) if isinstance(call, Collective) else _time(call, far) for call in wanted}


@torch.no_grad()
def _time(call: Operator, far: FarMemory) -> float:
    namespace, name, overload = call.name.split(".")
    run = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    operands = Operands(call, far)
    times, begin = list[float](), time.perf_counter()
    # Kept for a while: the next result is written to other memory, as in a step. In place there is none.
    results = [None] if run._schema.is_mutable else kept_results(run, operands, far=call.writes_far)
    # At least 4: the first call is left out of the mean.
    while len(times) < 4 or (len(times) < 100 and time.perf_counter() - begin < PATIENCE):
        turn = len(times) % operands.turns
        arguments, keywords = operands.of(turn)
        place = len(times) % len(results)
        results[place] = None
        # Of this thread, which takes part in all that the operator's threads do.
        started = time.thread_time()
        result = run(*arguments, **keywords)
        times.append(time.thread_time() - started)
        results[place] = result
        if run._schema.is_mutable:
            fill_again((arguments, keywords))
    return statistics.fmean(times[1:])  # mean, not median: a step is the sum of many calls, slow ones too
