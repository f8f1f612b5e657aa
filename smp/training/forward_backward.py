"""One step's forward and backward passes over the micro-batches of this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from smp.layers.heads.head import ModelOutput
from smp.optim.host import HostAdamW
from smp.sharding.parallelize import Strategy, last_micro_batch
from smp.training.micro_batches import MicroBatches


class ForwardBackward(Protocol):
    """How micro-batches go through the model. Losses are this rank's part of the mean over the global batch: the sum
    over all ranks that compute different parts is the loss."""

    before_last: Callable[[], None] | None
    """Called before the last backward pass of a step makes gradients final, except for those of ``copies``."""

    @property
    def copies(self) -> dict[torch.Tensor, int]:
        """Parameters that several ranks hold for different stages, and how many do; they count once in the norm."""

    def train(self, micro_batches: MicroBatches) -> list[ModelOutput]:
        """Leave the gradients of the sum of all losses in the parameters. Returns what the model, or each stage of this
        rank, made of each micro-batch, without graphs."""

    def forward(self, micro_batches: MicroBatches) -> list[ModelOutput]:
        """Outputs of the micro-batches, in their order, without gradients."""


class Accumulation:
    """The whole model on every rank: forward and backward of one micro-batch after the other.

    Args:
        strategy: --data-parallel-sharding-strategy, as ``parallelize`` got it.
    """

    def __init__(self, model: nn.Module, strategy: Strategy = "optim_grads_params") -> None:
        self.model, self.strategy = model, strategy
        self.before_last: Callable[[], None] | None = None

    @property
    def copies(self) -> dict[torch.Tensor, int]:
        return {}

    def train(self, micro_batches: MicroBatches) -> list[ModelOutput]:
        outputs = []
        for i, micro_batch in enumerate(micro_batches):
            # Before each forward pass: FSDP's hooks of this micro-batch read whether it is the
            # last.
            is_last = i == len(micro_batches) - 1
            last_micro_batch(self.model, is_last, self.strategy)
            if is_last and self.before_last is not None:
                self.before_last()
            output: ModelOutput = self.model(micro_batch)
            # The loss with the auxiliary ones.
            loss = output.total
            assert loss is not None, "a whole model has one"
            loss.backward()
            # Without its graph, which is free from here on.
            outputs.append(detached(output))
        return outputs

    @torch.no_grad()
    def forward(self, micro_batches: MicroBatches) -> list[ModelOutput]:
        return [self.model(micro_batch) for micro_batch in micro_batches]


def stream_gradients(forward_backward: ForwardBackward, optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer on the host take gradients while the last backward pass of each step runs."""
    if isinstance(optimizer, HostAdamW):
        forward_backward.before_last = lambda: optimizer.stream(forward_backward.copies)


def detached(output: ModelOutput) -> ModelOutput:
    """The output without its autograd graph: losses, values of tokens and metrics."""
    loss = None if output.loss is None else output.loss.detach()
    aux_losses = {name: value.detach() for name, value in output.aux_losses.items()}
    return ModelOutput(loss=loss, values=output.values, aux_losses=aux_losses, metrics=output.metrics)


def model_loss(outputs: Sequence[ModelOutput], device: torch.device) -> torch.Tensor:
    """Sum of the losses without auxiliary ones, 0-dim fp32."""
    losses = [output.loss for output in outputs if output.loss is not None]
    # Summed on the device in the order of the micro-batches: nothing waits, and the order is fixed.
    return sum(losses, torch.zeros((), device=device))


def total_auxiliary(outputs: Sequence[ModelOutput], names: Sequence[str], device: torch.device) -> torch.Tensor:
    """Sums over micro-batches of auxiliary losses, and of metrics that are parts of a mean already, fp64 (names,)."""
    total = torch.zeros(len(names), dtype=torch.float64, device=device)
    for output in outputs:
        found = output.metrics | output.aux_losses
        if found:  # a stage may have no layer that measures any, or some of them
            absent = torch.zeros((), dtype=torch.float64, device=device)
            total += torch.stack([found.get(name, absent).double() for name in names])
    return total


def total_metrics(outputs: Sequence[ModelOutput], names: Sequence[str], device: torch.device) -> torch.Tensor:
    """Sums over micro-batches of the metrics, fp64 (names,)."""
    # fp64: metrics are sums over the whole batch, of which small ones would be lost next to large ones.
    total = torch.zeros(len(names), dtype=torch.float64, device=device)
    for output in outputs:
        if output.metrics:
            total += torch.stack([output.metrics[name] for name in names])
    return total
