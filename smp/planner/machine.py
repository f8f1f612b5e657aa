"""Times of single operators and collectives on this machine's CPU, as a training step calls them.

Each distinct call is timed once, in as many processes as will train: two processes that compute at the same time share
memory and caches, and their collectives are gloo's. Inputs rotate over copies that a core's own cache does not hold,
as in a step, where other operators come in between.
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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from smp.config import Config, Layout
from smp.models.presets import PRESETS
from smp.parallel.node_group import NAME
from smp.planner.record import Calls, Collective, Items, NotANumber, Operator, TensorLike, recorded_step
from smp.training.cost.meter import FREE
from smp.training.host_memory import keep_freed_memory
from smp.training.pretraining import Pretraining
from smp.training.process import Process
from smp.training.run import Run
from smp.training.runtime import StopSignal
from smp.training.settings import read_settings

Timed = Operator | Collective
ROTATED = 8 << 20
"""Total bytes of the copies of inputs; at most ``COPIES`` of them."""
COPIES = 8
REPEATS = 7
"""Measured calls of a collective. An operator is called for ``PATIENCE`` seconds, 3 to 100 times."""
PATIENCE = 0.02
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
        calls: of each operator and collective, the latter without a group.
        host: between two operators, by :func:`kind_of` the layout.
    """

    calls: Mapping[Timed, float]
    host: Mapping[str, float]

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
    return Collective("", call.kind, call.ranks, call.size) if isinstance(call, Collective) else call


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
    # Rank 0's times: all processes run the same calls at the same time.
    calls, seconds = run_processes(_calibrate, processes, threads, wanted, kinds)[0]
    return MachineTimes(calls, {kind: host_time(small[kind], calls, seconds[kind]) for kind in kinds})


def _small_calls(kind: str, processes: int) -> Calls:
    config = small_settings(kind, processes)
    return recorded_step(config, Layout.from_config(config.parallel, processes))[0]


def timed_calls(steps: Iterable[Calls]) -> list[Timed]:
    """Every distinct call that takes time, in an order on which all processes agree."""
    return list(dict.fromkeys(alike(call) for step in steps for _, call in step if not is_free(call)))


def host_time(step: Calls, calls: Mapping[Timed, float], seconds: float) -> float:
    """The host's seconds per call, from a step that took ``seconds`` in total."""
    # Free calls are the host's as well: they count in the divisor only.
    known = sum(times * calls[alike(call)] for (_, call), times in step.items() if not is_free(call))
    # What the operators do not explain is the host's, shared equally: it is what every call costs.
    return max(seconds - known, 0.0) / sum(step.values())


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
) -> tuple[dict[Timed, float], dict[str, float]]:
    calls = time_calls(wanted)
    small = {kind: TrainingRun(small_settings(kind, processes), rank, processes, kind) for kind in kinds}
    # A step with an interruption says nothing; there are few of them.
    return calls, {kind: statistics.median(run.step() for _ in range(5)) for kind, run in small.items()}


class TrainingRun:
    """A training run whose steps are timed. Its first step has been made; logs go to the folder ``name``."""

    def __init__(self, config: Config, rank: int, processes: int, name: str) -> None:
        config.logging.log_dir = name
        self._run = Run(Pretraining(config), Process(rank, processes, rank), torch.device("cpu"), StopSignal())
        # The first step allocates memory.
        self.step()

    def step(self) -> float:
        """Seconds of one more step, without waiting for data."""
        batch = self._run.batches.next_or_reason()
        dist.barrier()
        started = time.perf_counter()
        self._run.trainer.train_step(batch)
        return time.perf_counter() - started

    def close(self) -> None:
        """End the run."""
        self._run.close()


def time_calls(wanted: Sequence[Timed]) -> dict[Timed, float]:
    """Seconds of each call. All processes of the group call it with the same list."""
    # Products of ones in place run into denormal numbers after a while, which are slow.
    torch.set_flush_denormal(True)
    # Every process times the calls in the same order, since collectives need all of them.
    return {call: _time_collective(call) if isinstance(call, Collective) else _time(call) for call in wanted}


@torch.no_grad()
def _time(call: Operator) -> float:
    namespace, name, overload = call.name.split(".")
    run = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    copies = [_inputs(call)]
    # By storages: views of one tensor are one.
    size = sum(tensor.untyped_storage().nbytes() for tensor in tree_leaves(copies) if isinstance(tensor, torch.Tensor))
    # As many copies as make ROTATED bytes: a small operand would stay in the core's cache.
    copies += [_inputs(call) for _ in range(min(COPIES, ROTATED // max(size, 1)) - 1)]
    times, begin = list[float](), time.perf_counter()
    in_place = call.name.split(".")[1].endswith("_")
    results = [None] * len(copies)  # kept for a while: the next result is written to other memory, as in a step
    # At least 4: the first call is left out of the mean.
    while len(times) < 4 or (len(times) < 100 and time.perf_counter() - begin < PATIENCE):
        turn = len(times) % len(copies)
        arguments, keywords = copies[turn]
        results[turn] = None
        started = time.perf_counter()
        result = run(*arguments, **keywords)
        times.append(time.perf_counter() - started)
        results[turn] = result
        if in_place:
            _fill_again(arguments)
    return statistics.fmean(times[1:])  # mean, not median: a step is the sum of many calls, interrupted ones too


def _fill_again(arguments: Any) -> None:
    """Fill floating-point inputs with 1 again: repeated exponentials soon give infinities, which are slow."""
    for tensor in tree_leaves(arguments):
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.fill_(1)


def _inputs(call: Operator) -> tuple[list[Any], dict[str, Any]]:
    arguments, keywords = [_made(value) for value in call.arguments], {name: _made(v) for name, v in call.keywords}
    if call.name == "aten.repeat_interleave.Tensor" and keywords.get("output_size"):
        arguments[0][0] = keywords["output_size"]  # counts, whose sum it checks
    return arguments, keywords


def _made(value: Any) -> Any:
    """An argument from its description. Floats are 1, which products keep; integers 0, a valid index of everything."""
    if isinstance(value, Items):
        return [_made(item) for item in value.items]
    if isinstance(value, NotANumber):
        return math.nan
    if not isinstance(value, TensorLike):
        return value
    # The recorded strides: a transposed operand takes another kernel.
    tensor = torch.empty_strided(value.shape, value.stride, dtype=value.dtype)
    storage = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    storage.fill_(1 if value.dtype.is_floating_point or value.dtype == torch.bool else 0)
    return tensor


def _time_collective(call: Collective) -> float:
    run = _collective(call)
    # The first call makes connections.
    run()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    # Median: another process may have delayed one.
    return statistics.median(times)


def _collective(call: Collective) -> Callable[[], Any]:
    """A function that runs the collective over all processes, on floats of as many bytes. A smaller group is assumed to
    be as slow."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    # Rounded up to whole floats per rank.
    part = torch.ones(-(-call.size // (4 * ranks)))
    whole = torch.ones(part.numel() * ranks)
    if call.kind == "all-gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if call.kind == "reduce-scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole)
    if call.kind == "all-to-all":
        other = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(other, whole)
    if call.kind == "all-reduce":
        return lambda: dist.all_reduce(whole)
    assert call.kind == "send", f"{call.kind} is no collective that a step has"

    def message() -> None:
        """Even ranks send to odd ones."""
        if rank % 2 == 0 and rank + 1 < ranks:
            dist.send(whole, rank + 1)
        elif rank % 2:
            dist.recv(whole, rank - 1)

    return message
