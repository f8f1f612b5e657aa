"""Gated linear units of QuickGELU, with both sides clamped (GPT-OSS): a = g sigmoid(1.702 g) (u + offset), where

    g = min(gate, clamp)        u = min(max(up, -clamp), clamp)

With s = sigmoid(1.702 g): du = da g s and dg = da (u + offset) s (1 + 1.702 g (1 - s)), both 0 where clamped. Only gate
and up are kept. Arithmetic is fp32 inside and rounds once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from smp.kernels.registry import accumulation_dtype
from smp.kernels.returned import returned

ALPHA = 1.702


@dataclass(frozen=True)
class QuickGeglu:
    """The activation; called with gate and up, (..., f) each, it gives (..., f).

    Attributes:
        clamp: the gate is at most this, the up projection within +- this; None: they are as they are.
        offset: added to the up projection.
    """

    clamp: float | None = None
    offset: float = 0.0

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return _QuickGeglu.apply(gate, up, self.clamp, self.offset)


class _QuickGeglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, clamp: float | None, offset: float) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.clamp, ctx.offset = clamp, offset
        g, u = _clamped(gate, up, clamp)
        return returned(g * (ALPHA * g).sigmoid() * (u + offset), gate.dtype)

    @staticmethod
    def backward(ctx: Any, da: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        g, u = _clamped(gate, up, ctx.clamp)
        d = da.to(g.dtype)
        s = (ALPHA * g).sigmoid()
        dgate, dup = d * (u + ctx.offset) * s * (1 + ALPHA * g * (1 - s)), d * g * s
        if ctx.clamp is not None:
            # Beyond the bound the activation does not depend on what was clamped.
            dgate, dup = dgate.masked_fill(gate > ctx.clamp, 0), dup.masked_fill(up.abs() > ctx.clamp, 0)
        return dgate.to(gate.dtype), dup.to(up.dtype), None, None


def _clamped(gate: torch.Tensor, up: torch.Tensor, clamp: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    wide = accumulation_dtype(gate.dtype)
    g, u = gate.to(wide), up.to(wide)
    return (g, u) if clamp is None else (g.clamp(max=clamp), u.clamp(-clamp, clamp))
