"""AdamW whose moments and steps are on the host.

Of each parameter, one after the other: its gradient is copied out, the host computes the step on its own copy of the
weight, and the new weight is copied back. While the host computes, the gradients of the next parameters are under way.
The device has no moments: 8 bytes per parameter less. The host has 8 bytes of moments and 4 of weights for each of
them, and the gradients of a few.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from smp.kernels.copier import Copier, Event, HostPool
from smp.parallel.boxes import local_part

AHEAD = 4
"""Gradients that are under way or wait for the host."""


@dataclass
class _Twin:
    """The host's copy of a weight, and the version of the device's that it equals."""

    weight: torch.Tensor
    version: int


@dataclass
class _Arriving:
    """A parameter whose gradient is on its way to the host."""

    group: dict[str, Any]
    parameter: torch.Tensor
    gradient: torch.Tensor
    buffer: torch.Tensor
    events: list[Event]


class HostAdamW(torch.optim.AdamW):
    """Computes what torch's fused AdamW computes. Parameters may be DTensors; each rank steps its part.

    A step waits on the host for gradients, so that a device has nothing to do meanwhile but what was issued before.

    Args:
        groups, options: as of torch's.
        copier: of the parameters' device.
    """

    def __init__(self, groups: list[dict[str, Any]], copier: Copier, **options: Any) -> None:
        super().__init__(groups, fused=True, **options)
        self._step_supports_amp_scaling = False  # the host decides whether there is a step
        self._copier, self._gradients = copier, HostPool(copier)
        self._twins: dict[torch.Tensor, _Twin] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of all parameters that have gradients."""
        coming = self._coming()
        window = deque(islice(coming, AHEAD))
        while window:
            self._finish(window.popleft())
            window.extend(islice(coming, 1))

    def zeros_like(self, parameter: torch.Tensor) -> torch.Tensor:
        """A moment of ``parameter``, placed as it is, on the host."""
        zeros = self._on_host(local_part(parameter.detach()), copied=False).zero_()
        if not isinstance(parameter, DTensor):
            return zeros
        return DTensor(zeros, parameter._spec, requires_grad=False)  # from_local would take it to the mesh's device

    def _on_host(self, like: torch.Tensor, *, copied: bool) -> torch.Tensor:
        return self._copier.host(like.nbytes, copied=copied).view(like.dtype).view(like.shape)

    def _coming(self) -> Iterator[_Arriving]:
        """Parameters whose copies have begun: each when it is asked for."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield self._begin(group, parameter)

    def _begin(self, group: dict[str, Any], parameter: torch.Tensor) -> _Arriving:
        assert parameter.grad is not None
        gradient, weight = local_part(parameter.grad).contiguous(), local_part(parameter.detach())
        buffer, free = self._gradients.take(gradient.nbytes)
        target = buffer[: gradient.nbytes].view(gradient.dtype).view(gradient.shape)
        events = [self._copier.out(gradient, target, free)]
        twin = self._twins.get(parameter)
        if twin is None or twin.version != weight._version:  # the first step, or weights were loaded
            copy = self._on_host(weight, copied=True) if twin is None else twin.weight
            events.append(self._copier.out(weight, copy))
            self._twins[parameter] = _Twin(copy, weight._version)
        return _Arriving(group, parameter, target, buffer, events)

    def _finish(self, arriving: _Arriving) -> None:
        """Compute the step and send the new weight."""
        group, parameter, twin = arriving.group, arriving.parameter, self._twins[arriving.parameter]
        for event in arriving.events:
            self._copier.host_wait(event)
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = self.zeros_like(parameter), self.zeros_like(parameter)
        adamw(
            [twin.weight],
            [arriving.gradient],
            [local_part(state["exp_avg"])],
            [local_part(state["exp_avg_sq"])],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        self._gradients.give(arriving.buffer, None)
        weight = local_part(parameter.detach())
        self._copier.wait(self._copier.back(twin.weight, weight))
        twin.version = weight._version
