"""The training loop. ``Trainer.start_step`` is the way from a batch to new weights, on one screen."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.config import Config
from smp.data.blend import Manifest
from smp.data.loader import BatchLoader, GlobalBatch, Unreadable
from smp.optim.optimizer import clip_gradients, set_learning_rate, step_if
from smp.optim.schedule import learning_rate
from smp.parallel.agree import gather
from smp.parallel.mesh import sum_over_parts
from smp.training.passes import Passes


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why in one line."""


@dataclass
class Progress:
    """What a resumed run continues from. ``data`` is the manifest of the blend, see ``smp.data.blend``."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    data: Manifest | None = None


@dataclass(frozen=True)
class StepResult:
    """What one step measured; the same on every rank.

    Attributes:
        iteration: its number, from 1.
        loss: mean loss per valid token of the global batch, in nats.
        grad_norm: global L2 norm before clipping.
        learning_rate: the rate of this step.
        samples: consumed by all ranks.
        consumed_samples: up to its end, since the first step of all.
        skipped: loss or norm was not finite, so the weights were left alone.
        seconds: wall time from its start, or the end of the step before, to its end.
        tokens: of the global batch, without padding.
        waited: wall time before it in which its data were not there yet and the device had nothing to do.
    """

    iteration: int
    loss: float
    grad_norm: float
    learning_rate: float
    samples: int
    consumed_samples: int
    skipped: bool
    seconds: float
    tokens: int
    waited: float = 0.0


class Step:
    """A step that was issued. Its numbers are on their way to the host, which nothing has waited for yet.

    Args:
        iteration, samples, consumed_samples, learning_rate, tokens: as in :class:`StepResult`.
        started: ``time.perf_counter()`` then; ``waited`` seconds before that were spent on data.
        numbers: fp32 (2,) on the training device: loss and gradient norm.
    """

    def __init__(
        self,
        iteration: int,
        samples: int,
        consumed_samples: int,
        learning_rate: float,
        tokens: int,
        started: float,
        waited: float,
        numbers: torch.Tensor,
    ) -> None:
        self.iteration, self.samples, self.consumed_samples = iteration, samples, consumed_samples
        self.learning_rate, self.tokens, self.started, self.waited = learning_rate, tokens, started, waited
        self._event: torch.cuda.Event | None = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, pin_memory=True).copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def finished(self) -> bool:
        """Whether the numbers have arrived; on a CPU they always have."""
        return self._event is None or self._event.query()

    def numbers(self) -> tuple[float, float]:
        """Loss and gradient norm; waits for them."""
        if self._event is not None:
            self._event.synchronize()
        loss, norm = self._numbers.tolist()
        return loss, norm


class Trainer:
    """Runs optimizer steps and evaluations of a parallelized model.

    Args:
        config: resolved settings.
        model: after ``parallelize``, weights initialized.
        passes: how its micro-batches are run.
        optimizer: over the model's parameters.
        mesh: the run's mesh.
        device: where batches go.
        progress: where to start.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        passes: Passes,
        optimizer: torch.optim.Optimizer,
        mesh: DeviceMesh,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self.config, self.model, self.passes, self.optimizer = config, model, passes, optimizer
        self.mesh, self.device, self.progress = mesh, device, progress
        self.skipped_in_a_row = 0
        self._last_finished = 0.0
        self._data_ranks = math.prod(mesh[name].size() for name in ("dp_replicate", "dp_shard"))
        self._counts_tokens = mesh.get_local_rank("tp") == mesh.get_local_rank("pp") == 0  # each token by one rank

    def train_step(self, batch: GlobalBatch | Unreadable) -> StepResult:
        """:meth:`start_step`, and wait for its end."""
        return self.settle(self.start_step(batch))

    def start_step(self, batch: GlobalBatch | Unreadable, waited: float = 0.0) -> Step:
        """Issue one optimizer step on the global batch of which ``batch`` is this rank's share; ``waited`` is how long
        that took to come, in seconds.

        Nothing in it waits for the device: whether loss and norm are finite is decided there. :meth:`settle` waits.

        Raises:
            TrainingError: on all ranks, when one of them could not read its share.
        """
        started = time.perf_counter()
        counted, held = self._counts(batch)
        assert isinstance(batch, GlobalBatch)
        samples = batch.samples * self._data_ranks
        lr = learning_rate(self.config.optim, self.progress.iteration + 1)
        set_learning_rate(self.optimizer, lr)
        loss = sum_over_parts(self.passes.train(batch, counted), self.mesh)
        limit, copies = self.config.optim.clip_grad, self.passes.copies
        norm = clip_gradients(self.model.parameters(), limit, copies=copies, device=self.device)
        numbers = torch.stack((loss, norm))
        step_if(numbers.isfinite().all(), self.optimizer)
        self.optimizer.zero_grad()
        self.progress.iteration += 1
        self.progress.consumed_samples += samples
        consumed = self.progress.consumed_samples
        return Step(self.progress.iteration, samples, consumed, lr, held, started, waited, numbers)

    def settle(self, step: Step) -> StepResult:
        """Wait for a step's numbers and count it if it was skipped. Steps are settled in their order."""
        loss, norm = step.numbers()
        finished = time.perf_counter()
        waited = min(step.waited, max(0.0, step.started - self._last_finished))  # the device may have been busy then
        seconds, self._last_finished = finished - max(step.started, self._last_finished), finished
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self.progress.skipped_iterations += skipped
        self.progress.nan_iterations += math.isnan(loss) or math.isnan(norm)
        rate, samples, consumed = step.learning_rate, step.samples, step.consumed_samples
        return StepResult(step.iteration, loss, norm, rate, samples, consumed, skipped, seconds, step.tokens, waited)

    def _counts(self, batch: GlobalBatch | Unreadable) -> tuple[int, int]:
        """What the loss is averaged over (tokens that count, or pairs) and all tokens but padding, of the global batch,
        over all ranks; a host-side message, which also says whether a rank has nothing to train on: all of them end
        then, and none waits for it."""
        reason = batch.reason if isinstance(batch, Unreadable) else ""
        own = [0, 0]
        if isinstance(batch, GlobalBatch) and self._counts_tokens:
            own = [batch.count(), batch.held_tokens()]
        counts = torch.tensor([*own, bool(reason)], dtype=torch.int64)
        dist.all_reduce(counts)
        if counts[2]:
            reasons = gather(reason)
            rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
            raise TrainingError(f"rank {rank} could not read its data: {reason}")
        return int(counts[0]), int(counts[1])

    def _anywhere(self, flag: bool) -> bool:
        flags = torch.tensor(flag, dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags)

    def check_skipped(self, result: StepResult) -> None:
        """Raise TrainingError when too many steps in a row were skipped, ``result`` the last of them."""
        limit = self.config.training.max_skipped_steps
        if self.skipped_in_a_row >= limit:
            raise TrainingError(
                f"{limit} steps in a row had a NaN or infinite loss or gradient norm, the last at iteration "
                f"{result.iteration}: lower --lr, or look at the data (--max-skipped-steps {limit})"
            )

    @torch.no_grad()
    def evaluate(self, batches: BatchLoader, iterations: int, stopped: Callable[[], bool]) -> float | None:
        """Mean loss per valid token over ``iterations`` global batches, in nats; the same on every rank.

        None when ``stopped`` says on any rank that there is no time left: asked before each batch.
        """
        self.model.eval()
        total, tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for _ in range(iterations):
            if self._anywhere(stopped()):
                self.model.train()
                return None
            batch = batches.next_or_reason()
            valid, _ = self._counts(batch)
            assert isinstance(batch, GlobalBatch)
            if valid == 0:  # on no rank: behind the last sample of fine-tuning's validation data
                continue
            total += sum_over_parts(self.passes.evaluate(batch, valid), self.mesh).double() * valid
            tokens += valid
        self.model.train()
        return total.item() / max(tokens, 1)
