"""A run's copies in memory (--peer-snapshot-interval), see ``smp.checkpoint.peers``."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import nn

from smp.checkpoint import CheckpointError
from smp.checkpoint.format.entries import Manifest
from smp.checkpoint.peer_cleanup import remove_with_launcher
from smp.checkpoint.peer_files import Location, PeerFolder
from smp.checkpoint.peers import PeerCopies
from smp.config import Config, ConfigError
from smp.training.checkpoints.persistence import run_state
from smp.training.faults.members import nodes_of_spares
from smp.training.kind import BatchSource
from smp.training.process import Process
from smp.training.stopping import due
from smp.training.trainer import Progress


class EndedError(Exception):
    """The run has ended before, after ``iteration``: torchrun has started its workers once more."""

    def __init__(self, iteration: int) -> None:
        super().__init__(f"nothing left to train: this job has ended at iteration {iteration}")
        self.iteration = iteration


class RunCopies:
    """Makes copies of the run's state in the memory of the nodes while it trains, and finds those of an earlier start.
    Every rank has one and calls the same methods. Without --peer-snapshot-interval it does nothing.

    Raises:
        EndedError: an earlier start of the workers has trained all there is to train.
        ConfigError: no launcher is there that could start the workers again, or the folder cannot be made.
    """

    def __init__(self, config: Config, process: Process, say: Callable[[str], None]) -> None:
        self.config, self.interval = config, config.checkpoint.peer_snapshot_interval
        self.done: int | None = None
        """The last iteration, once there is nothing left to train."""
        self._copies: PeerCopies | None = None
        self.found: tuple[PeerFolder, Manifest] | None = None
        if self.interval is None:
            return
        # Set by torchrun: in other launchers nothing keeps the copies' memory between two starts.
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            raise ConfigError(
                "--peer-snapshot-interval needs torchrun, whose workers the copies outlive: use torchrun --max-restarts"
            )
        # GROUP_RANK is torchrun's number of the node.
        location = Location(int(os.environ.get("GROUP_RANK", "0")), process.local_rank)
        try:
            timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
            spare = nodes_of_spares(process, timeout)
            self._copies = PeerCopies(config.checkpoint.peer_snapshot_dir, location, say, timeout, spare)
            if process.local_rank == 0:
                remove_with_launcher(self._copies.root)
        except CheckpointError as error:
            raise ConfigError(f"--peer-snapshot-dir {error}") from error
        # torchrun restarts all workers of a node, also after the last step.
        if (iteration := self._copies.ended()) is not None:
            raise EndedError(iteration)
        self.found = self._copies.find()

    def find_again(self) -> tuple[PeerFolder, Manifest] | None:
        """The newest copy without files that turn out to be damaged; None: no file is, or no copy is left."""
        if self._copies is None or self.found is None or not self._copies.drop_damaged(*self.found):
            return None
        self.found = self._copies.find()
        return self.found

    def due(self, iteration: int) -> bool:
        """Whether it is time for one, the same on all ranks."""
        return due(iteration, self.interval)

    @property
    def kept(self) -> bool:
        """Whether the nodes have a copy that a new start continues from."""
        return self._copies is not None and self._copies.newest is not None

    def make(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, batches: BatchSource
    ) -> None:
        """Begin a copy of the state as it is."""
        if self._copies is None:
            return
        state = run_state(self.config, model, optimizer, progress, None)
        self._copies.begin(state["state"] | batches.state(), state["extra"], state["logical_rows"])

    def finish(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, batches: BatchSource
    ) -> None:
        """Return when the nodes have a copy of the last step, from which another start continues: this one stops."""
        if self._copies is None:
            return
        self._copies.wait()
        if self._copies.newest != progress.iteration:
            self.make(model, optimizer, progress, batches)
            self._copies.wait()

    def poll(self) -> None:
        """After each step: commit a copy that has become complete."""
        if self._copies is not None:
            self._copies.poll()

    def close(self) -> None:
        """Free the memory, and that of the copies too where the run is done."""
        if self._copies is not None:
            self._copies.close(self.done)
