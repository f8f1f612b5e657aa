"""Pipelines whose stages sleep: the runner beside the simulator, and beside torch.distributed.pipelining.

Four processes on one machine, eight micro-batches. A stage is one module, the same for both: its forward sleeps, and so
do the input part and the weight part of its backward pass. Sleeping needs no core, so two are enough for four ranks;
what is measured is order, messages and overhead. Rounds of all entries take turns; a time is the slowest rank's, and
the table has medians.

    python benchmarks/pipeline.py                          # the table
    python benchmarks/pipeline.py --trace zb-v trace.json  # one step, for tools/plot_pipeline.py --trace
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining as torch_pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage

from smp.parallel.links import Links
from smp.pipeline.actions import Schedule
from smp.pipeline.recorder import Recorder
from smp.pipeline.run import Runner
from smp.pipeline.schedules import SCHEDULES, build_schedule
from smp.pipeline.simulate_schedule import StageCosts, simulate
from smp.pipeline.timeline import to_trace
from tests.distributed import run_distributed

RANKS, MICRO_BATCHES, ROUNDS = 4, 8, 7
UNIT = 0.020  # seconds that a rank's layers take for one micro-batch: forward, input part and weight part alike
SHAPE = (64, 256)
TORCH = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}


class _SleepInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return grad.contiguous(), None  # torch sends what comes in, and refuses an expanded tensor


class SleepingStage(nn.Module):
    """x + weight; every part of the work takes ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return _SleepInput.apply(x, self.seconds) + _SleepInput.apply(self.weight, self.seconds)


class Sleepers:
    """This rank's stages for our runner."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.last = schedule.stages - 1
        self.modules = {s: SleepingStage(UNIT / schedule.chunks) for s in schedule.stages_of(rank)}
        self.kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.gradients: dict[tuple[int, int], torch.Tensor] = {}

    def forward(self, stage: int, micro_batch: int, hidden: torch.Tensor | None) -> torch.Tensor | None:
        x = torch.ones(SHAPE) if hidden is None else hidden
        output = self.modules[stage](x.requires_grad_())
        self.kept[stage, micro_batch] = x, output.sum() if stage == self.last else output
        return None if stage == self.last else output.detach()

    def backward_input(self, stage: int, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        x, output = self.kept[stage, micro_batch]
        self.gradients[stage, micro_batch] = torch.ones(()) if gradient is None else gradient
        (result,) = torch.autograd.grad(output, x, gradient, retain_graph=True)
        return None if stage == 0 else result

    def backward_weight(self, stage: int, micro_batch: int) -> None:
        _, output = self.kept.pop((stage, micro_batch))
        gradient = self.gradients.pop((stage, micro_batch))
        torch.autograd.grad(output, self.modules[stage].weight, gradient)

    def backward(self, stage: int, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        result = self.backward_input(stage, micro_batch, gradient)
        self.backward_weight(stage, micro_batch)
        return result

    def nothing(self, stage: int) -> None:
        """There are no shards."""

    unshard = reshard = reduce = nothing


def torch_step(name: str, rank: int) -> Any:
    """A function that runs one step of torch's schedule."""
    chunks = SCHEDULES[name].CHUNKS
    schedule = build_schedule(name, RANKS, MICRO_BATCHES)
    stages = [
        PipelineStage(SleepingStage(UNIT / chunks), s, RANKS * chunks, torch.device("cpu"))
        for s in schedule.stages_of(rank)
    ]
    kind = getattr(torch_pipelining, f"Schedule{TORCH[name]}")
    loss = lambda output, target: output.sum()  # noqa: E731
    runs = kind(stages if chunks > 1 else stages[0], MICRO_BATCHES, loss_fn=loss)
    whole = torch.ones(MICRO_BATCHES * SHAPE[0], SHAPE[1], requires_grad=True)
    first, last = schedule.rank_of(0) == rank, schedule.rank_of(schedule.stages - 1) == rank
    target = {"target": torch.zeros(MICRO_BATCHES * SHAPE[0])} if last else {}
    return lambda: runs.step(*([whole] if first else []), **target)


def measure(rank: int, ranks: int) -> tuple[float, dict[str, list[float]]]:
    """Seconds of a message, and of steps by entry."""
    mesh = init_device_mesh("cpu", (ranks,))
    ring = [(r, (r + step) % ranks) for r in range(ranks) for step in (1, -1)]
    runner = Runner(Links(mesh, ring, timedelta(seconds=60)), SHAPE, torch.float32, torch.device("cpu"))
    steps: dict[str, Any] = {}
    for name in SCHEDULES:
        schedule = build_schedule(name, ranks, MICRO_BATCHES)
        stages = Sleepers(schedule, rank)
        steps[name] = lambda schedule=schedule, stages=stages: runner.run(schedule, stages)
        if name in TORCH:
            steps[f"torch {name}"] = torch_step(name, rank)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(ROUNDS + 1):
        for name, step in steps.items():
            seconds = _timed(step)
            if round_number > 0:  # the first makes connections
                times[name].append(seconds)
    return _message_time(runner, rank), times


def record(rank: int, ranks: int, name: str) -> dict[str, Any] | None:
    """A Chrome trace of the second step of one schedule, from rank 0."""
    mesh = init_device_mesh("cpu", (ranks,))
    ring = [(r, (r + step) % ranks) for r in range(ranks) for step in (1, -1)]
    runner = Runner(Links(mesh, ring, timedelta(seconds=60)), SHAPE, torch.float32, torch.device("cpu"))
    schedule = build_schedule(name, ranks, MICRO_BATCHES)
    stages = Sleepers(schedule, rank)
    runner.run(schedule, stages)
    recorder = Recorder(mesh.get_group(), torch.device("cpu"))
    runner.run(schedule, stages, recorder)
    timeline = recorder.timeline()
    return None if timeline is None else to_trace(timeline, f"{name}, measured")


def _timed(step: Any) -> float:
    dist.barrier()
    started = time.perf_counter()
    step()
    slowest = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def _message_time(runner: Runner, rank: int) -> float:
    """Half of the way to a neighbour and back."""
    samples, tensor = [], torch.ones(SHAPE)
    for _ in range(50):
        dist.barrier()
        started = time.perf_counter()
        if rank == 0:
            runner.links.send(tensor, 1).wait()
            runner.links.receive(tensor, 1).wait()
        elif rank == 1:
            runner.links.receive(tensor, 0).wait()
            runner.links.send(tensor, 0).wait()
        samples.append((time.perf_counter() - started) / 2)
    return statistics.median(samples)


def main() -> None:
    """Print the table, or write a trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", nargs=2, metavar=("SCHEDULE", "FILE"), help="record one step of a schedule")
    args = parser.parse_args()
    if args.trace is None:
        print(table())
    else:
        name, path = args.trace
        Path(path).write_text(json.dumps(run_distributed(record, RANKS, name)[0]))


def table() -> str:
    """Measured, simulated and torch's."""
    measured = run_distributed(measure, RANKS)
    link, times = measured[0]
    lines = [
        f"pipeline of {RANKS} sleeping ranks, {MICRO_BATCHES} micro-batches, forward = input part = weight part = "
        f"{1000 * UNIT:.0f} ms per rank, messages of {1000 * link:.2f} ms; median of {ROUNDS}",
        "  schedule       step (ms)  simulated  measured / simulated  torch (ms)  torch / ours",
    ]
    for name in SCHEDULES:
        schedule = build_schedule(name, RANKS, MICRO_BATCHES)
        cost = StageCosts(*[UNIT / schedule.chunks] * 3)
        predicted, found = simulate(schedule, [cost] * schedule.stages, link).step_time, statistics.median(times[name])
        row = f"  {name:12s} {1000 * found:11.1f} {1000 * predicted:10.1f} {found / predicted:21.3f}"
        if name in TORCH:
            theirs = statistics.median(times[f"torch {name}"])
            row += f" {1000 * theirs:11.1f} {theirs / found:13.3f}"
        lines.append(row)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
