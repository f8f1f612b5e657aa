"""The state of a run in host memory, to go back to: weights, moments and step counts of this rank's shards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from smp import checkpoint
from smp.layers.fp8.apply import fp8_history
from smp.parallel.dtensor_region import local_part
from smp.training.faults.spikes import Kept


@dataclass(frozen=True, eq=False)
class Snapshot:
    """This rank's part of the state after an iteration.

    Attributes:
        tensors: by the names of a checkpoint, on the host.
        steps: step counts by the parameter's name.
        spikes: the window of :class:`smp.training.faults.spikes.Spikes`.
    """

    iteration: int
    tensors: dict[str, torch.Tensor]
    steps: dict[str, float]
    spikes: Kept


def live_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """(tensors of this rank that a checkpoint of the run would have, by name, without frozen ones; step counts)."""
    tensors, steps = checkpoint.training_state(model, optimizer, frozen=False)
    tensors |= {f"model.{name}": buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    if (history := fp8_history(model)) is not None:
        tensors |= history.state()
    return {name: local_part(tensor.detach()) for name, tensor in tensors.items()}, steps


def take(model: nn.Module, optimizer: torch.optim.Optimizer, iteration: int, spikes: Kept) -> Snapshot:
    """A copy of the state as it is; waits for the device."""
    tensors, steps = live_state(model, optimizer)
    # ``copy``: on a CPU ``to`` would return the tensor itself, which training changes.
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    return Snapshot(iteration, copies, steps, spikes)


@torch.no_grad()
def restore(snapshot: Snapshot, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore the state of the snapshot, bit for bit."""
    tensors, _ = live_state(model, optimizer)
    for name, tensor in tensors.items():
        tensor.copy_(snapshot.tensors[name])
    checkpoint.restore_optimizer_scalars(model, optimizer, snapshot.steps)
    if (history := fp8_history(model)) is not None:
        history.restored()
