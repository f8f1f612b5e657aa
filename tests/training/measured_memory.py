"""Most memory of real steps on a CPU, as torch's allocator was asked for it, beside a step on fake tensors."""

from __future__ import annotations

import os
import shlex
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from smp.config import Config, Layout
from smp.kernels.copier import HostCopier
from smp.models.presets import PRESETS
from smp.optim import optimizer as optimizer_module
from smp.parallel import collectives
from smp.pipeline.stage_plan import plan_pipeline
from smp.training import run as run_module
from smp.training.build import choose_backends
from smp.training.cost.fake_step import StepMeasures, fake_step
from smp.training.kind import RunKind
from smp.training.pretraining import Pretraining
from smp.training.process import Process
from smp.training.run import Run
from smp.training.runtime import StopSignal
from smp.training.settings import read_settings
from smp.training.tuning.finetuning import Finetuning
from smp.training.tuning.settings import read_finetune_settings
from tests.distributed import run_distributed
from tests.operations import recorded

SMALL = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 256 --vocab-size 250 "
    "--mock-data --micro-batch-size 2 --train-iters 9 --no-tensorboard --no-progress-bar "
)
TUNED = "--bf16 --seq-length 256 --micro-batch-size 2 --train-iters 9 --no-tensorboard --no-progress-bar "


UNCUT: Any = SimpleNamespace(cp_exchange=None)
"""Stands for the context of a run whose sequences are whole: there is no process group."""


def settings(flags: str, world: int) -> Config:
    """Of ``SMALL`` with these flags; with --load, of fine-tuning on sequences as long."""
    return parts_of(flags, world).config


def parts_of(flags: str, world: int) -> RunKind:
    if "--load" not in flags:
        return Pretraining(read_settings([*SMALL.split(), *shlex.split(flags)], PRESETS, world))
    config, data = read_finetune_settings([*TUNED.split(), *shlex.split(flags)], world)
    assert data is not None
    return Finetuning(config, data)


def fake(config: Config, world: int, rank: int = 0) -> StepMeasures:
    """What rank ``rank`` of a pipeline does on a CPU."""
    layout = Layout.from_config(config.parallel, world)
    kernels, _ = choose_backends(config, UNCUT, torch.device("cpu"), documents=False)
    plan = plan_pipeline(config, layout) if layout.pp > 1 else None
    return fake_step(config, layout, kernels, "cpu", plan, rank)


class BesideCopier(HostCopier):
    """Its memory of the host is none of torch's allocator, which here is the device's."""

    def host(self, nbytes: int, *, copied: bool = True) -> torch.Tensor:
        return torch.from_numpy(np.empty(nbytes, dtype=np.uint8))


FUNCTIONAL = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


@contextmanager
def finished_collectives() -> Iterator[None]:
    """Buffers of a collective are let go of when it ends, as those of NCCL on a stream are. A thread of gloo holds them
    some time longer, which is not memory of the step, and differs from run to run."""

    def waiting(call: Any) -> Any:
        def wait(*args: Any, **kwargs: Any) -> Any:
            work = call(*args, **kwargs)
            work.wait()
            time.sleep(0.01)
            return work

        return wait

    def wait_tensor(x: torch.Tensor) -> torch.Tensor:
        x = functional.wait_tensor(x)
        time.sleep(0.01)
        return x

    functional = collectives._ops
    patched = SimpleNamespace(**{name: getattr(functional, name) for name in FUNCTIONAL}, wait_tensor=wait_tensor)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_allgather_base", "_reduce_scatter_base", "allreduce", "allgather", "reduce_scatter"):
            patch.setattr(dist.ProcessGroup, name, waiting(getattr(dist.ProcessGroup, name)))
        patch.setattr(collectives, "_ops", patched)
        yield


def measure(rank: int, world: int, folder: str, flag_lines: list[str], steps: int) -> list[int]:
    """Most bytes at once in a step of each layout."""
    os.chdir(folder)
    return [_peak(parts_of(f"{flags} --log-dir {i}", world), rank, world, steps) for i, flags in enumerate(flag_lines)]


def _peak(parts: RunKind, rank: int, world: int, steps: int) -> int:
    """What is there between steps, and the largest sum of what the allocator of torch was asked for since. The least of
    some steps, because gloo lets go of a tensor some time after it was sent; one process sends none, and takes one."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (run_module, optimizer_module):
            patch.setattr(module, "copier_of", lambda device: BesideCopier())
        run = Run(parts, Process(rank, world, rank), torch.device("cpu"), StopSignal())
    run.trainer.train_step(next(run.batches))
    states = [t for state in run.trainer.optimizer.state.values() for t in state.values()]
    states = [] if parts.config.optim.optimizer_cpu_offload else states
    model = run.trainer.model
    resting = chain(model.parameters(), model.buffers(), states)
    local = [t.to_local() if hasattr(t, "to_local") else t for t in resting]
    held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())
    peaks = [_peak_of_a_step(run) for _ in range(steps)]
    run.close()
    return held + min(peaks)


def _peak_of_a_step(run: Run) -> int:
    batch = next(run.batches)
    cpu = torch.profiler.ProfilerActivity.CPU
    with finished_collectives(), torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        run.trainer.train_step(batch)
    events = [event for event in recorded(profile) if event.name() == "[memory]"]
    ordered = sorted(events, key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in ordered))


def compare(layouts: dict[int, list[str]], folder: Path, steps: int, timeout: float = 270.0) -> list[float]:
    """Relative errors against the allocations of real steps, for every rank of a pipeline. Prints a table.

    ``timeout``: seconds for all layouts of one number of processes.
    """
    rows, errors = [], []
    for world, flag_lines in layouts.items():
        words = str(folder), flag_lines, steps if world > 1 else 1
        measured = run_distributed(measure, world, *words, timeout=timeout)
        for number, flags in enumerate(flag_lines):
            config = settings(flags, world)
            pp = config.parallel.pipeline_model_parallel_size
            for rank in range(pp):
                predicted, truth = fake(config, world, rank).peak, measured[rank * world // pp][number]
                errors.append(predicted / truth - 1)
                sizes = f"{predicted / 2**20:.2f} MiB predicted, {truth / 2**20:.2f} measured"
                rows.append(f"{100 * errors[-1]:+6.2f} % {sizes}: rank {rank} of {world}, {flags}")
    report = "\n".join(rows)
    print(report)
    assert min(errors) > -0.02, report
    assert statistics.median(map(abs, errors)) <= 0.05, report
    return errors
