"""--log-straggler: the times of all ranks come to rank 0 every few steps, which names those that are slow."""

from __future__ import annotations

import json
import socket
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from smp.config import Config
from smp.parallel.agree import gather
from smp.parallel.context import ParallelContext
from smp.training.pipelined import Pipelined
from smp.training.reporting.console import Console
from smp.training.reporting.own_time import HostTime, KernelTime
from smp.training.reporting.stragglers import WINDOW, Detector, Finding, Numbers, roles_of

FILE = "stragglers.jsonl"
"""Name of the file in --log-dir to which each finding is added."""
KINDS = ("own computation", "waiting for data", "waiting for a processor")
_HINTS = {KINDS[2]: "; its host has too few of them for all that runs there"}


class SlowRanks:
    """Measures this rank's steps; on rank 0 also compares those of all. Without --log-straggler it does nothing."""

    def __init__(
        self,
        config: Config,
        context: ParallelContext,
        device: torch.device,
        pipeline: Pipelined | None,
        console: Console,
    ) -> None:
        self._logging, self._console = config.logging, console
        self._on = config.logging.log_straggler
        if not self._on:
            return
        self._clock: HostTime | KernelTime
        if device.type == "cuda":
            # Profiling slows a step: one step of two windows.
            self._clock = KernelTime(2 * WINDOW)
        else:
            self._clock = HostTime(context.groups(), pipeline)
        if self._clock.unseen:
            console.say(
                f"WARNING: --log-straggler cannot see how long ranks wait for each other over "
                f"{', '.join(self._clock.unseen)}: the times of own computation include it"
            )
        experts = 0 if context.ep is None else context.ep.get_local_rank()
        self._hosts, stages, experts_of = zip(*gather((socket.gethostname(), context.pp_rank, experts)), strict=True)
        roles = roles_of(stages, experts_of)
        self._detectors = [Detector(roles) for _ in KINDS]
        self._rows: list[tuple[float, float, float]] = []
        self._named: set[tuple[str, int]] = set()
        self._told, self._count = 0, config.logging.straggler_minmax_count

    def close(self) -> None:
        """Close what the clock has open."""
        if self._on:
            self._clock.close()

    def measured(self, iteration: int) -> AbstractContextManager[None]:
        """Context of a step."""
        return self._clock.measured(iteration) if self._on else nullcontext()

    def step(self, iteration: int, waited: float) -> None:
        """Note a step that ``waited`` so many seconds for its data. Every ``WINDOW`` steps all ranks meet here."""
        if not self._on:
            return
        self._rows.append((self._clock.seconds, waited, self._clock.delayed))
        if len(self._rows) < WINDOW:
            return
        own = torch.tensor(self._rows, dtype=torch.float64)
        self._rows = []
        times = gather_on_rank_zero(own)
        if times is not None:
            # (ranks, steps, kinds) -> (kinds, steps, ranks)
            self._compare(iteration, times.numpy().transpose(2, 1, 0))

    def _compare(self, iteration: int, times: Numbers) -> None:
        """Compare the times of a window, seconds (kinds, steps, ranks), and report who is slow."""
        # All kinds are compared with the usual time of a step's computation.
        usual = np.full(times.shape[-1], np.median(times[0]))
        slow: set[tuple[str, int]] = set()
        for kind, detector, numbers in zip(KINDS, self._detectors, times, strict=True):
            for finding in detector.slow(numbers, usual):
                slow.add((kind, finding.rank))
                # Named once, until it keeps up again.
                if (kind, finding.rank) not in self._named:
                    self._name(iteration, kind, finding)
        for kind, rank in sorted(self._named - slow):
            self._console.say(f"rank {rank} on {self._hosts[rank]} keeps up again ({kind})")
        self._named = slow
        self._told += WINDOW
        if self._told >= self._logging.log_interval:
            self._told = 0
            self._tell(iteration, times[0])

    def _name(self, iteration: int, kind: str, finding: Finding) -> None:
        rank, host = finding.rank, self._hosts[finding.rank]
        took, usual = 1000 * finding.seconds, 1000 * finding.usual
        self._console.say(
            f"WARNING: rank {rank} on {host} is slow: {kind} takes {took:.1f} ms of a step, {usual:.1f} ms are usual "
            f"(iterations {iteration - WINDOW + 1} to {iteration}){_HINTS.get(kind, '')}"
        )
        record = {"iteration": iteration, "rank": rank, "host": host, "what": kind}
        record |= {"seconds": finding.seconds, "usual": finding.usual}
        _append(Path(self._logging.log_dir) / FILE, record)

    def _tell(self, iteration: int, own: Numbers) -> None:
        """Log the fastest and the slowest ranks of a window; own: seconds (steps, ranks)."""
        medians = np.median(own, axis=0)
        order, count = np.argsort(medians, kind="stable"), self._count
        fastest, slowest = (self._in_words(medians, ranks) for ranks in (order[:count], order[::-1][:count]))
        middle = float(np.median(medians))
        record = {"own seconds, median rank": middle, "own seconds, slowest rank": float(medians.max())}
        line = f" own computation of a step: fastest {fastest} | median {1000 * middle:.1f} ms | slowest {slowest} |"
        self._console.note(iteration, record | {"slowest rank": float(order[-1])}, line)

    def _in_words(self, medians: Numbers, ranks: npt.NDArray[np.intp]) -> str:
        return ", ".join(f"{1000 * medians[rank]:.1f} ms rank {rank} on {self._hosts[rank]}" for rank in ranks)


def gather_on_rank_zero(own: torch.Tensor) -> torch.Tensor | None:
    """A tensor (...) of every rank -> (ranks, ...) on rank 0, None on the others. CPU tensors."""
    if not dist.is_initialized():
        return own[None]
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = own.new_empty(size, *own.shape) if rank == 0 else None
    dist.gather(own, None if whole is None else list(whole), dst=0)
    return whole


def _append(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
