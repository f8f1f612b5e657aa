"""Kinds of runs, such as pretraining and fine-tuning: what differs between them. ``smp.training.run`` has the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from smp.checkpoint import CheckpointError
from smp.config import Config
from smp.data.build import Datasets
from smp.data.loader import BatchLoader, RankBatch, ReadBatch, Unreadable
from smp.kernels import Kernels
from smp.models.protocol import Model
from smp.parallel.agree import on_rank_zero
from smp.parallel.context import ParallelContext
from smp.training.build import RunSetup
from smp.training.checkpoints.persistence import Kept
from smp.training.forward_backward import ForwardBackward
from smp.training.objectives.contract import Objective
from smp.training.trainer import StepResult, Trainer
from smp.training.tuning.adapter_files import leave_companions

Say = Callable[[str], None]

StepCallback = Callable[[StepResult, Model], None]
"""Called after each optimizer step, on every rank and in the same order, with what the step measured and this rank's
part of the model, whose weights are those after the step. What it measures is the same on every rank, so all ranks may
enter a collective (``full_tensor()`` of a sharded weight) where they decide by it."""


class BatchSource(Protocol):
    """Where the batches of a run come from: files, or the model itself."""

    def next_or_reason(self) -> RankBatch | Unreadable:
        """The next step's batch, or why this rank has none."""

    def state(self) -> dict[str, torch.Tensor]:
        """Tensors that a checkpoint needs in addition to the number of consumed samples: the same on all ranks, which
        call it together. Names begin with ``smp.training.checkpoints.persistence.CARRIED``."""

    def close(self) -> None:
        """Stop background work. Safe to call twice."""


class Trainable(NamedTuple):
    """A model as it is before a checkpoint is loaded, how micro-batches go through it, and what is minimised."""

    model: Model
    forward_backward: ForwardBackward
    objective: Objective


class Instead(NamedTuple):
    """The result of work instead of training.

    Attributes:
        said: what to report of it.
        interrupted: it ended before it was done; the same command continues.
    """

    said: str
    interrupted: bool = False


class RunKind(ABC):
    """One kind of run, such as pretraining. A run calls these methods in the order in which they stand here.

    Args:
        config: resolved settings.

    Attributes:
        work: FLOPs of a step, relative to pretraining on as many tokens.
        evaluate_first: also before the first step.
        ends: ids that end a text of the training data.
        callbacks: called after each step, in order.
    """

    work: float = 1.0
    evaluate_first: bool = False
    callbacks: Sequence[StepCallback] = ()
    ends: frozenset[int] = frozenset()

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def datasets(self) -> Datasets:
        """Read what to train and evaluate on. Called once the folder of checkpoints is locked by this run."""

    @abstractmethod
    def kernels(self, context: ParallelContext, device: torch.device) -> tuple[Kernels, list[str]]:
        """(kernels of the run, notes for the user on that choice)."""

    @abstractmethod
    def trainable(self, setup: RunSetup, say: Say, progress: Callable[[], None]) -> Trainable:
        """What is trained. ``say`` tells the user a line; ``progress`` is called when something that takes long has
        come further."""

    def kept(self) -> Kept:
        """Tensors that a checkpoint of this run has in addition to model and optimizer, once those are built."""
        return Kept()

    def batches(
        self, setup: RunSetup, dataset: Any, consumed: int, carried: Mapping[str, torch.Tensor], say: Say
    ) -> BatchSource | None:
        """The batches of the training data from a sample on, where they are not read from it; None: the loader reads
        them. ``carried`` is what a checkpoint has of the ``state()`` of this source."""
        return None

    def evaluate(
        self, trainer: Trainer, dataset: Any, read: Callable[[Any], BatchLoader], stopped: Callable[[], bool]
    ) -> float | None:
        """What an evaluation measures, the lower the better: the mean loss, unless ``evaluates`` in
        ``smp.config.objectives`` says otherwise. ``read`` gives the batches of a data set, ``stopped`` says whether a
        signal came. None: one ended it."""
        batches = read(dataset)
        try:
            return trainer.evaluate(batches, self.config.training.eval_iters, stopped)
        finally:
            # Also when a signal or an error ends it: the reader's threads would go on.
            batches.close()

    def read(self, dataset: Any) -> ReadBatch | None:
        """What makes a batch of numbered samples of one of the data sets; None: the loader stacks them."""
        return None

    def before(self) -> None:
        """Called before the first step."""
        on_rank_zero(lambda: leave_companions(self.config, self.ends), CheckpointError)

    def instead(self, progress: Callable[[], None], reason: Callable[[int], str | None]) -> Instead | None:
        """Work that a run of this kind does instead of training. None: it trains. ``progress`` is called as it comes
        further; ``reason`` is asked by all ranks together after each of its steps, by number: why to end there."""
        return None

    def close(self) -> None:  # noqa: B027 (most kinds have nothing to close)
        """Called at the end of a run, whatever became of it."""

    def after(self, iteration: int) -> list[str]:
        """Called when the run is done and saved, at its last iteration: what to tell the user."""
        return []
