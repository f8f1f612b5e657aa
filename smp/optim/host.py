"""AdamW on the host: moments are kept and steps are computed there.

For each parameter the gradient is copied to the host, the host computes the step on its own copy of the weight, and the
new weight is copied back while the host computes the next one. With :meth:`HostAdamW.stream` a gradient leaves as soon
as the step's last backward pass has made it. Whether there is a step, and the factor of clipping, are known only when
all gradients are there: so they leave unscaled, and the host multiplies them where the factor is not 1. Without
``stream`` up to ``AHEAD`` gradients are under way while the host computes.

The device saves 8 bytes of moments per parameter. The host holds 8 bytes of moments and 4 of weights per parameter, and
with ``stream`` 4 of gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from smp.kernels.copier import Copier, Event, HostPool
from smp.parallel.dtensor_region import local_part

AHEAD = 4
"""Gradients that are under way or wait for the host."""


@dataclass
class _Arriving:
    """A gradient on its way to the host.

    Attributes:
        there: ``parameter.grad``, by which a replaced gradient is noticed.
        source: its contiguous local part, kept alive until the copy has ended.
        gradient: where it arrives, in ``buffer`` of the pool.
        events: of the copies of gradient and weight.
    """

    there: torch.Tensor
    source: torch.Tensor
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
        self._twins: dict[torch.Tensor, torch.Tensor] = {}  # the host's copies of weights
        self._streamed: dict[torch.Tensor, _Arriving] = {}
        self._streams, self._later = False, frozenset[torch.Tensor]()
        self._factor: torch.Tensor | None = None
        for group in self.param_groups:
            for parameter in group["params"]:
                # Called by autograd, and by FSDP where it sets the gradient of a sharded parameter.
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    def stream(self, later: Collection[torch.Tensor] = ()) -> None:
        """From now until the step, copy each gradient to the host as soon as it is complete: after that only
        :meth:`scale` may change it. Gradients of ``later`` are copied in the step."""
        self._streams, self._later, self._factor = True, frozenset(later), None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients; after a skipped step also those that were already on their way to the host."""
        self._streams, self._factor = False, None
        for parameter in [*self._streamed]:
            self._forget(parameter)
        super().zero_grad(set_to_none)

    def scale(self, gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiply all gradients by ``factor``, 0-dim, where they arrive, instead of ``torch._foreach_mul_``."""
        self._factor = factor

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of all parameters that have gradients."""
        # Gradients that change from here on are not the step's.
        self._streams = False
        factor, self._factor = self._factor_on_host(), None
        coming = self._coming()
        # A few copies are on their way while the host computes; each finished one makes room for the next.
        window = deque(islice(coming, AHEAD))
        while window:
            self._finish(*window.popleft(), factor)
            window.extend(islice(coming, 1))

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Hook that autograd and FSDP call when they have made or changed a gradient."""
        if self._streams and parameter not in self._later:
            # A gradient that grew once more leaves again: what left before is not all of it.
            self._forget(parameter)
            self._streamed[parameter] = self._begin(parameter)

    def _forget(self, parameter: torch.Tensor) -> None:
        if (arriving := self._streamed.pop(parameter, None)) is not None:
            # The buffer is free when the copy into it has ended; the event says when, and nothing waits here.
            self._gradients.give(arriving.buffer, arriving.events[0])

    def _factor_on_host(self) -> torch.Tensor | None:
        """The factor of :meth:`scale` on the host, which waits for it; None: there is none, or it is 1."""
        if self._factor is None:
            return None
        there = self._on_host(self._factor, copied=True)
        self._copier.host_wait(self._copier.out(self._factor, there))
        # Nearly always 1: a pass over all gradients is spared then, and the bits are those without clipping.
        return None if bool(there == 1) else there

    def zeros_like(self, parameter: torch.Tensor) -> torch.Tensor:
        """A moment of ``parameter``, placed as it is, on the host."""
        zeros = self._on_host(local_part(parameter.detach()), copied=False).zero_()
        if not isinstance(parameter, DTensor):
            return zeros
        return DTensor(zeros, parameter._spec, requires_grad=False)  # from_local would take it to the mesh's device

    def _on_host(self, like: torch.Tensor, *, copied: bool) -> torch.Tensor:
        return self._copier.host(like.nbytes, copied=copied).view(like.dtype).view(like.shape)

    def _coming(self) -> Iterator[tuple[dict[str, Any], torch.Tensor, _Arriving]]:
        """(group, parameter, its arriving gradient), in order. A copy begins when its item is asked for, unless it was
        streamed before."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    arriving = self._streamed.pop(parameter, None)
                    assert arriving is None or arriving.there is parameter.grad, "a gradient that left was replaced"
                    yield group, parameter, arriving or self._begin(parameter)

    def _begin(self, parameter: torch.Tensor) -> _Arriving:
        assert parameter.grad is not None
        # A copy of a view with gaps would be made on the host, element by element.
        gradient, weight = local_part(parameter.grad).contiguous(), local_part(parameter.detach())
        buffer, free = self._gradients.take(gradient.nbytes)
        target = buffer[: gradient.nbytes].view(gradient.dtype).view(gradient.shape)
        # The device's weight counts: a load, a rewind or a repair may have changed it. Version counters do not tell, as
        # the local part of a DTensor that was detached has its own.
        if parameter not in self._twins:
            self._twins[parameter] = self._on_host(weight, copied=True)
        events = [self._copier.out(gradient, target, free), self._copier.out(weight, self._twins[parameter])]
        return _Arriving(parameter.grad, gradient, target, buffer, events)

    def _finish(
        self, group: dict[str, Any], parameter: torch.Tensor, arriving: _Arriving, factor: torch.Tensor | None
    ) -> None:
        """Compute the step and send the new weight."""
        twin = self._twins[parameter]
        for event in arriving.events:
            self._copier.host_wait(event)
        if factor is not None:
            arriving.gradient.mul_(factor)
        state = self.state[parameter]
        # As torch's AdamW makes it, at the first step of a parameter.
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = self.zeros_like(parameter), self.zeros_like(parameter)
        # The function and not the class: its tensors are the host's copies, and DTensors' local
        # parts.
        adamw(
            [twin],
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
        # No event: the host waited for the copy and has read it.
        self._gradients.give(arriving.buffer, None)
        weight = local_part(parameter.detach())
        # The device must not read the weight before it is back.
        self._copier.wait(self._copier.back(twin, weight))
