"""SwiGLU (Shazeer 2020): a = SiLU(g) u, where g and u may be the two halves of one fused projection's output.

With s = sigmoid(g): du = da g s and dg = da u s (1 + g (1 - s)).

Bytes per element in bf16: forward 6 (read g and u, write a), backward 10 (read da, g, u, write dg, du). Only g and u
are kept. The matrix product after it needs a for its weight's gradient: the backward kernel writes it again for 2 bytes
per element more, so it need not be kept; see ``smp.layers.mlp``. Arithmetic is fp32 inside
and rounds once. Rows may have any stride, so halves are not copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from smp.kernels.registry import accumulation_dtype, dispatched, first_derivative_only, register


def swiglu(gate: torch.Tensor, up: torch.Tensor, backend: str = "torch") -> torch.Tensor:
    """SiLU(gate) x up, (..., f) each -> (..., f); ``backend`` torch, triton or cpp."""
    if backend == "torch":
        return torch.nn.functional.silu(gate) * up
    return _Swiglu.apply(gate, up, backend)


@dataclass(frozen=True)
class FusedSwiglu:
    """SwiGLU without autograd, for a function that has its own backward pass, as the one of a row-parallel product,
    which makes a again instead of keeping it; see ``smp.layers.linear_functions``."""

    backend: str

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """a = SiLU(gate) up."""
        return _forward_op(_rows(gate), _rows(up), self.backend).view(gate.shape)

    def backward(
        self, da: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *, again: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dgate, dup, a); a, bit for bit that of the forward pass, is empty unless asked for by ``again``."""
        dgate, dup, a = _backward_op(_rows(da), _rows(gate), _rows(up), again, self.backend)
        return dgate.view(gate.shape), dup.view(gate.shape), a.view(gate.shape) if again else a


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, backend: str) -> torch.Tensor:
        # Not the sigmoid nor the product: both are made again in one pass over gate and up.
        ctx.save_for_backward(gate, up)
        ctx.backend = backend
        return FusedSwiglu(backend).forward(gate, up)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, da: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        dgate, dup, _ = FusedSwiglu(ctx.backend).backward(da, gate, up)
        return dgate, dup, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(..., f) -> (n, f) with contiguous elements in each row; halves of a fused projection stay where they are."""
    rows = x.flatten(0, -2) if x.ndim > 1 else x[None]
    # Only where elements of a row do not lie side by side.
    return rows if rows.stride(1) == 1 else rows.contiguous()


def forward_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """a by the formula."""
    g = gate.to(accumulation_dtype(gate.dtype))
    return (g * g.sigmoid() * up).to(gate.dtype)


def backward_reference(da: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, again: bool) -> tuple[torch.Tensor, ...]:
    """(dgate, dup, a or nothing) by the formulas."""
    g, d = (x.to(accumulation_dtype(x.dtype)) for x in (gate, da))  # a product of two bf16 would round too
    s = g.sigmoid()
    dgate, dup = d * up * s * (1 + g * (1 - s)), d * (g * s)
    a = forward_reference(gate, up) if again else gate.new_empty(0)
    return dgate.to(gate.dtype), dup.to(gate.dtype), a


def _forward_fake(gate: torch.Tensor, *_: Any) -> torch.Tensor:
    return gate.new_empty(gate.shape)


def _backward_fake(
    da: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, again: bool, backend: str
) -> tuple[torch.Tensor, ...]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape), gate.new_empty(gate.shape if again else 0)


_forward_op = register(
    "swiglu(Tensor gate, Tensor up, str backend) -> Tensor",
    dispatched("swiglu", "forward", forward_reference),
    _forward_fake,
)
_backward_op = register(
    "swiglu_backward(Tensor da, Tensor gate, Tensor up, bool again, str backend) -> (Tensor, Tensor, Tensor)",
    dispatched("swiglu", "backward", backward_reference),
    _backward_fake,
)
