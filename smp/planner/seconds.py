"""Seconds of a step, and of a pass through a part of it, by what they are spent on."""

from __future__ import annotations

from dataclasses import dataclass

from smp.planner.devices import Device


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step; the parts add up to ``total``.

    Attributes:
        products, attention, elementwise: of the device, with what is computed again.
        tensor: exposed collectives of tensor parallelism.
        context: exposed transfers of context parallelism.
        experts: rows on their way to experts of other ranks and back; loads are taken to be even.
        data: exposed gathers of weights and reductions of gradients.
        bubble: waiting of a pipeline's slowest rank, messages included.
        optimizer: clipping and update.
        host: what the device waits for the host.
        offload: what it waits for activations on their way to the host's memory and back.
    """

    products: float
    attention: float
    elementwise: float
    tensor: float
    context: float
    experts: float
    data: float
    bubble: float
    optimizer: float
    host: float
    offload: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Pass:
    """Seconds of one forward or backward pass through a part of the model."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0
    host: float = 0.0
    offload: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(*(x + y for x, y in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, times: float) -> Pass:
        return Pass(*(x * times for x in vars(self).values()))

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    def issued(self, operations: int, device: Device) -> Pass:
        """The pass with the time for which the device waits for the host to issue operations."""
        # Device and host work in parallel: only the difference is waited for.
        late = max(0.0, operations * device.launch - self.total)
        return self + Pass(host=late)

    def copying(self, seconds: float) -> Pass:
        """The pass with the time by which copies that run meanwhile exceed it."""
        return self + Pass(offload=max(0.0, seconds - self.total))
