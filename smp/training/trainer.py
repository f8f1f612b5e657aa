"""The optimizer step. ``Trainer.start_step`` is the way from a batch to new weights, on one screen."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from smp.config import Config
from smp.data.blend import Manifest
from smp.data.loader import BatchLoader, RankBatch, Unreadable
from smp.layers.fp8.apply import fp8_history
from smp.models.arithmetic import visible_pairs_of_layers
from smp.models.auxiliary import auxiliary_names
from smp.models.protocol import Model
from smp.optim.lr_scheduler import decoupled_learning_rate, learning_rate
from smp.optim.optimizer import clip_gradients, scaling_of, set_learning_rate, step_if
from smp.parallel.agree import any_rank, gather, sum_over_ranks
from smp.parallel.context import ParallelContext
from smp.training.errors import TrainingError
from smp.training.faults.rerun import Pass, Rerun
from smp.training.faults.spikes import Kept, Spikes
from smp.training.forward_backward import (
    ForwardBackward,
    model_loss,
    stream_gradients,
    total_auxiliary,
    total_metrics,
)
from smp.training.objectives.contract import Objective

SATURATED = "fp8 saturated tensors"
"""Delayed scaling: tensors of a step (an input, a weight or a gradient of a layer) whose largest number was too large
for the scale of the steps before, and became the largest that fits."""


@dataclass
class Progress:
    """Counters that a resumed run continues from. ``data`` is the manifest of the blend, see ``smp.data.blend``;
    ``spikes`` is the window of losses and norms of --spike-policy."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    data: Manifest | None = None
    spikes: Kept | None = None


@dataclass(frozen=True)
class StepResult:
    """Measurements of one step; the same on every rank.

    Attributes:
        iteration: its number, from 1.
        loss: mean loss per valid token (or pair) of the global batch, in nats, without auxiliary losses.
        grad_norm: global L2 norm before clipping.
        learning_rate: the rate of this step.
        num_samples: consumed by all ranks.
        consumed_samples: up to its end, since the first step of all.
        num_tokens: of the global batch, without padding.
        visible_pairs: of a token and a token that it sees, in the global batch, of all layers.
        skipped: loss or norm was not finite, or a spike that --spike-policy drops: the weights were left alone.
        spike: how many standard deviations the loss or the norm was above the last ones; 0: it was no spike.
        finite: loss and norm are numbers, on all ranks.
        skipped_in_a_row: up to this step.
        seconds: wall time from its start, or the end of the step before, to its end.
        waited: wall time before it in which its data were not there yet and the device had nothing to do.
        metrics: what else the batch, the objective and the model say, by name; auxiliary losses among them.
        table: rows for people, see ``RankBatch``.
    """

    iteration: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_samples: int
    consumed_samples: int
    num_tokens: int
    visible_pairs: int
    skipped: bool
    seconds: float
    waited: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    table: Sequence[Mapping[str, Any]] = ()
    spike: float = 0.0
    finite: bool = True
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class Step:
    """A step that was issued. What it measures is on its way to the host, which nothing has waited for yet.

    Attributes:
        iteration, num_samples, consumed_samples, num_tokens, visible_pairs, learning_rate: as in :class:`StepResult`.
        started: ``time.perf_counter()`` then; ``waited`` seconds before that were spent on data.
        measured: loss, gradient norm and metrics.
        known, table: metrics and table of the batch.
        batch: itself, for what has to be looked at again; its loss is averaged over ``num_valid``.
    """

    iteration: int
    num_samples: int
    consumed_samples: int
    num_tokens: int
    visible_pairs: int
    learning_rate: float
    started: float
    waited: float
    measured: HostCopy
    known: Mapping[str, float] = field(default_factory=dict)
    table: Sequence[Mapping[str, Any]] = ()
    batch: RankBatch | None = None
    num_valid: int = 0


class HostCopy:
    """An asynchronous copy of a tensor to the host; on a CPU the tensor itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.is_cuda:
            # Only a copy into page-locked memory continues without the host.
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor = pinned.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> list[float]:
        """The numbers, when they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor.tolist()


class Trainer:
    """Runs optimizer steps and evaluations of a parallelized model; continues from ``progress``."""

    def __init__(
        self,
        config: Config,
        model: Model,
        forward_backward: ForwardBackward,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        context: ParallelContext,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self.config, self.model, self.optimizer = config, model, optimizer
        self.forward_backward, self.objective = forward_backward, objective
        self.context, self.device, self.progress = context, device, progress
        names = auxiliary_names(config.model, adapters=config.has_adapters)
        # Losses of answers have no auxiliary losses.
        self.auxiliary = () if config.objective_facts.of_answers else names
        self.history = fp8_history(model)
        self.quantization = context.collectives.quantization if context.collectives else None
        policy = config.training.spike_policy
        self.spikes = None if policy is None else Spikes(config.training, device, progress.spikes)
        self._may_disagree = config.training.check_replicas_interval is not None and dist.is_initialized()
        self.rerun = Rerun.wanted(config, device.type == "cuda")
        stream_gradients(forward_backward, optimizer)
        self.skipped_in_a_row = 0
        self._last_finished = 0.0

    def train_step(self, batch: RankBatch | Unreadable) -> StepResult:
        """:meth:`start_step`, and wait for its end."""
        return self.finish(self.start_step(batch))

    def start_step(self, batch: RankBatch | Unreadable, waited: float = 0.0) -> Step:
        """Issue one optimizer step on the global batch of which ``batch`` is this rank's share; ``waited`` is how long
        that took to come, in seconds.

        Nothing in it waits for the device: whether loss and norm are finite is decided there. :meth:`finish` waits.

        Raises:
            TrainingError: on all ranks, when one of them could not read its share.
        """
        started = time.perf_counter()
        num_valid, num_tokens, visible_pairs, num_samples = self._counts(batch)
        assert isinstance(batch, RankBatch)
        # A function of what is behind alone, so a resumed run has nothing to restore.
        progress = self.config.optim, self.progress.iteration + 1, self.progress.consumed_samples
        lr = learning_rate(*progress)
        set_learning_rate(self.optimizer, lr, decoupled_learning_rate(*progress))
        # Weights of the losses contain the division by the global batch, so all that follows are plain sums.
        passed = self._forward_backward(batch, num_valid)
        if self.rerun is not None:
            passed = self.rerun.confirmed(
                self.progress.iteration + 1,
                passed,
                lambda: self._forward_backward(batch, num_valid, again=True),
                lambda: not bool(self._decided(passed)[1][2:].all()),  # also a spike that is trained on
            )
        # Loss and norm are the same on all ranks, so all skip the step or none does. The decision stays on the device.
        applied, decided = self._decided(passed)
        step_if(applied, self.optimizer)
        # Before the next forward pass; tensors are freed, not set to zero.
        self.optimizer.zero_grad()
        self.model.end_step(applied)
        # After the update: what is measured does not delay it.
        measured = self._measured(passed, num_valid, decided)
        if self.spikes is not None:
            self.spikes.note(passed.loss, passed.norm, applied)
        if self.history is not None:
            # Scales of the next step follow from this one's maxima, unless it was skipped.
            self.history.advance(applied)  # after it was asked what saturated in this step
        self.progress.iteration += 1
        self.progress.consumed_samples += num_samples
        return Step(
            iteration=self.progress.iteration,
            num_samples=num_samples,
            consumed_samples=self.progress.consumed_samples,
            num_tokens=num_tokens,
            visible_pairs=visible_pairs,
            learning_rate=lr,
            started=started,
            waited=waited,
            measured=HostCopy(measured),
            known=batch.metrics,
            table=batch.table,
            batch=batch,
            num_valid=num_valid,
        )

    def _forward_backward(self, batch: RankBatch, num_valid: int, again: bool = False) -> Pass:
        """Leave the clipped gradients of a batch in the parameters; ``again``: instead of those that are there."""
        if again:
            self.optimizer.zero_grad()
            self.model.end_step(torch.zeros((), dtype=torch.bool, device=self.device))  # it counts what it sees
        with nullcontext() if self.rerun is None else self.rerun.listening(self.model):
            outputs = self.forward_backward.train(self.objective.micro_batches(batch, num_valid))
        # This rank's part of the loss, 0 on pipeline ranks without the head.
        own = model_loss(outputs, self.device)
        digest = None if self.rerun is None else self.rerun.digest(own, self.model)
        loss = self.context.sum_loss(own)
        norm = clip_gradients(
            self.model.parameters(),
            self.config.optim.clip_grad,
            copies=self.forward_backward.copies,
            device=self.device,
            scale=scaling_of(self.optimizer),
        )
        # With FP8 the norm is NaN if a maximum is not finite, and the step is skipped.
        return Pass(outputs, loss, norm if self.history is None else self.history.checked(norm), digest)

    def _decided(self, passed: Pass) -> tuple[torch.Tensor, torch.Tensor]:
        """(whether the update is applied, bool 0-dim; scores of loss and norm, whether both are finite, whether they
        are no spike, fp64 (4,))."""
        finite = torch.stack((passed.loss, passed.norm)).isfinite().all()
        scores, accepted = torch.zeros(2, dtype=torch.float64, device=self.device), torch.ones_like(finite)
        if self.spikes is not None:
            scores = self.spikes.scores(passed.loss, passed.norm)
            accepted = self.spikes.accepts(scores)
        verdict = torch.stack((finite, accepted)).int()
        if self._may_disagree:
            # A flipped bit may be in the numbers of one replica only: the strictest decision counts
            # everywhere.
            dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        finite, accepted = verdict.bool()
        dropped = ~accepted if self.spikes is not None and self.spikes.drops else torch.zeros_like(accepted)
        return finite & ~dropped, torch.cat((scores, verdict.double()))

    def _measured(self, passed: Pass, num_valid: int, decided: torch.Tensor) -> torch.Tensor:
        """Loss, gradient norm and the values that ``_metrics`` names, on the device, so that one copy brings all to the
        host. Every rank has the same names, as their sums over the ranks are collective. The decision comes last."""
        outputs = passed.outputs
        parts = [torch.stack((passed.loss, passed.norm))]
        if names := self.objective.metrics:
            sums = self.context.sum_loss(total_metrics(outputs, names, self.device))
            # Means over the same number as the loss.
            parts.append(sums / max(num_valid, 1))
        if self.auxiliary:
            # Rounded once, after the sum over all stages and ranks.
            parts.append(self.context.sum_loss(total_auxiliary(outputs, self.auxiliary, self.device)).float())
        if self.quantization is not None:
            parts.append(self.quantization.relative(self.context.sum_loss(self.quantization.taken())))
        if self.history is not None:
            parts.append(self.history.saturated().view(1))
        return torch.cat([*parts, decided])

    def finish(self, step: Step) -> StepResult:
        """Wait for a step's measurements, and count it if it was skipped. Steps are finished in order."""
        loss, norm, *metrics, of_loss, of_norm, finite, accepted = step.measured.wait()
        finished = time.perf_counter()
        waited = min(
            step.waited, max(0.0, step.started - self._last_finished)
        )  # only the part in which the device was idle
        # Steps overlap: this one began when it was issued or when the one before ended, whichever is later.
        seconds, self._last_finished = finished - max(step.started, self._last_finished), finished
        # A step that is not finite is no spike: it has another cause and another message.
        spike = max(of_loss, of_norm) if finite and not accepted else 0.0
        skipped = not finite or (not accepted and self.spikes is not None and self.spikes.drops)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self.progress.skipped_iterations += skipped
        self.progress.nan_iterations += math.isnan(loss) or math.isnan(norm)
        return StepResult(
            iteration=step.iteration,
            loss=loss,
            grad_norm=norm,
            learning_rate=step.learning_rate,
            num_samples=step.num_samples,
            consumed_samples=step.consumed_samples,
            num_tokens=step.num_tokens,
            visible_pairs=step.visible_pairs,
            skipped=skipped,
            seconds=seconds,
            waited=waited,
            metrics={**step.known, **dict(zip(self._metrics, metrics, strict=True))},
            table=step.table,
            spike=spike,
            finite=bool(finite),
            skipped_in_a_row=self.skipped_in_a_row,
        )

    @property
    def _metrics(self) -> tuple[str, ...]:
        """Names of a step's measurements after loss and norm, in order."""
        rounded = () if self.quantization is None else self.quantization.names
        saturated = () if self.history is None else (SATURATED,)
        return (*self.objective.metrics, *self.auxiliary, *rounded, *saturated)

    def _counts(self, batch: RankBatch | Unreadable) -> tuple[int, int, int, int]:
        """(what the loss is averaged over: tokens with a label, or pairs of answers; all tokens but padding; pairs of
        tokens that attention computes; samples), of the global batch. If a rank could not read its data, all ranks
        raise TrainingError."""
        reason, own = "", (0, 0, 0, 0)
        if isinstance(batch, Unreadable):
            reason = batch.reason
        # Ranks that read the same samples count them once.
        elif self.context.counts_tokens:
            own = batch.num_valid(), batch.num_tokens, self._visible_pairs_of(batch), batch.num_samples
        # The counts and the bad news in one message: a rank that raised alone would leave the others waiting.
        *counts, unreadable = sum_over_ranks(*own, bool(reason))
        if unreadable:
            rank, reason = next((rank, reason) for rank, reason in enumerate(gather(reason)) if reason)
            raise TrainingError(f"rank {rank} could not read its data: {reason}")
        num_valid, num_tokens, visible_pairs, num_samples = counts
        return num_valid, num_tokens, visible_pairs, num_samples

    def _visible_pairs_of(self, batch: RankBatch) -> int:
        """Visible pairs of this rank's tokens, over all layers."""
        lengths = batch.attended_lengths
        if lengths is None:
            # One document per row: each row is as long as the sequence.
            lengths = np.full(batch.labels[..., 0].numel(), batch.labels.shape[-1])
        return visible_pairs_of_layers(lengths, self.config.model)

    def check_skipped(self, result: StepResult) -> None:
        """Raise TrainingError when too many steps in a row were skipped, ``result`` the last of them."""
        limit = self.config.training.max_skipped_steps
        if result.skipped_in_a_row >= limit:
            spikes = "" if self.spikes is None else ", or a spike of them"
            raise TrainingError(
                f"{limit} steps in a row had a NaN or infinite loss or gradient norm{spikes}, the last at iteration "
                f"{result.iteration}: lower --lr, or look at the data (--max-skipped-steps {limit})"
            )

    def evaluate(self, batches: BatchLoader, iterations: int, stopped: Callable[[], bool]) -> float | None:
        """Mean loss per valid token over ``iterations`` global batches, in nats; the same on every rank.

        None when ``stopped`` says on any rank that there is no time left: asked before each batch.
        """
        self.model.eval()
        total, counted = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for _ in range(iterations):
            # All ranks stop before the same batch: signals do not come to all of them at once.
            if any_rank(stopped()):
                self.model.train()
                return None
            batch = batches.next_or_reason()
            num_valid = self._counts(batch)[0]
            assert isinstance(batch, RankBatch)
            if num_valid == 0:  # on no rank: after the last sample of fine-tuning's validation data
                continue
            outputs = self.forward_backward.forward(self.objective.micro_batches(batch, num_valid))
            # Losses are means over the tokens of their batch; fp64, because thousands of batches are added up.
            total += self.context.sum_loss(model_loss(outputs, self.device)).double() * num_valid
            counted += num_valid
        self.model.train()
        # One wait for the device.
        return total.item() / max(counted, 1)
