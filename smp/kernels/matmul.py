"""Products of linear layers in fp32 on a CPU whose MKL is slow: oneDNN makes them.

``F.linear`` and ``torch.mm`` take MKL in fp32, which gives a processor that is not Intel's about half of its speed if
that multiplies 512 bits at a time, and somewhat less than oneDNN if not (docs/kernels.md has the figures); in bf16 they
take oneDNN themselves. torch has no public way to oneDNN in fp32: the settings of ``torch.backends.mkldnn`` that lead
there round to bf16 or TF32, tensors of the mkldnn layout are copies, and a convolution takes oneDNN with several
threads only. ``mkldnn::_linear_pointwise``, to which Inductor fuses linear layers for inference, takes tensors as they
are. It has no gradient formula, so there is one here.

Which of the two runs depends on the processor, the dtype and the sizes alone: a product is made in the same way in each
step, after a resume, and by all processes on processors of one kind. ``torch.backends.mkldnn.enabled = False`` brings
MKL back (not for compiled graphs).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from smp.kernels.registry import define


def _mkl_is_slow() -> bool:
    """Whether torch multiplies by MKL on a processor of AMD's: no other has SSE4a. (MKL looks at the maker, too.)"""
    there = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    there = there and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # a private operator
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.11 may not have it
    return there and bool(capabilities.get("sse4a", False))


def _is_wide_amd() -> bool:
    """Whether it is a Zen 5 (or later), which multiplies 512 bits at a time: no AMD before has these instructions."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return SLOW_MKL and any(capabilities.get(name, False) for name in ("avx512_vp2intersect", "avx_vnni"))


SLOW_MKL = _mkl_is_slow()
COPIES_PAY = _is_wide_amd()
"""Whether oneDNN is so much faster that a product is where operands or results have to be copied for it, too: weight
gradients, and products of experts. On a Zen 4 their copies take longer than oneDNN gains."""
SMALLEST = 1 << 21
"""Multiplications of a product that oneDNN makes: below about so many its calls take longer (15 us, with gradients 45)
than it gains."""
ROWS = 32
"""Fewest rows of x: with fewer oneDNN may take four times MKL's time."""
_COLUMNS = 2048
"""Columns of an output's gradient that are transposed at once, for oneDNN to read: for the copy to be small."""
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear``, also its gradients of any order: (..., in), (out, in) and (out,) -> (..., out)."""
    # Anything unusual goes to F.linear, whose errors and conversions then are PyTorch's own.
    if not linear_by_onednn(x, weight) or not (bias is None or (_taken(bias) and bias.shape == weight.shape[:1])):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias)
    return linear_op(x.contiguous(), weight, bias)


def weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """g^T x, with gradients of any order: (..., out) and (..., in) -> (out, in)."""
    # (n, out) and (n, in)
    grad, x = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (grad, x))
    if not gradient_by_onednn(grad, x):
        return grad.t() @ x
    # For a second derivative: ``linear`` is differentiable, the private operator is not.
    if torch.is_grad_enabled() and (grad.requires_grad or x.requires_grad):
        return linear(grad.t(), x.t())
    if not _is_wide(grad, x) and grad.shape[1] > _COLUMNS:
        total = x.new_empty(grad.shape[1], x.shape[1])
        add_weight_gradient(total, grad, x, first=True)
        return total
    return _gradient(grad, x).contiguous()


def add_weight_gradient(total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, *, first: bool) -> None:
    """``total += g^T x`` by oneDNN, or ``=`` if ``first``: (out, in), (n, out) and (n, in)."""
    # Some columns at a time bound the transposed copy; a wide g is read as it is, and x is transposed.
    columns = grad.shape[1] if _is_wide(grad, x) else _COLUMNS
    for rows, part in zip(total.split(columns), grad.split(columns, 1), strict=True):
        product = _gradient(part, x)
        if first:
            rows.copy_(product)
        else:
            rows.add_(product)


def linear_by_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether oneDNN makes the product of a linear layer with these."""
    if not _taken(x, weight) or x.ndim < 2 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        return False
    rows = math.prod(x.shape[:-1])
    return _surely(rows >= ROWS) and _surely(rows * weight.shape[0] * weight.shape[1] >= SMALLEST)


def gradient_by_onednn(grad: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether oneDNN makes the product (n, out)^T (n, in)."""
    return COPIES_PAY and _taken(grad, x) and _surely(x.shape[0] * x.shape[1] * grad.shape[1] >= SMALLEST)


def scratch_bytes(weight: torch.Tensor) -> int:
    """The most that oneDNN takes during a product with this weight: each thread turns 64 rows of it, of 1,024 columns
    at most (measured, torch 2.13). One that lies transposed is mostly read as it lies."""
    return torch.get_num_threads() * 64 * min(weight.shape[1], 1024) * weight.itemsize


def _surely(condition: bool) -> bool:
    """False where sizes are data (rows of a mask) and not known to a compiler."""
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # brings sympy, a quarter of a second

    return guard_or_false(condition)


def _taken(*tensors: torch.Tensor) -> bool:
    """Whether these are fp32 on such a CPU. Autocast changes what ``F.linear`` computes in; it knows subclasses, other
    layouts, and the transforms of torch.func and forward-mode derivatives."""
    if not SLOW_MKL or torch.is_autocast_enabled("cpu"):
        return False
    for t in tensors:  # no generator: a batch of single tokens has dozens of products that take microseconds
        if t.dtype != torch.float32 or t.device.type != "cpu" or type(t) not in _PLAIN:
            return False
    if torch._C._are_functorch_transforms_active():
        return False
    return torch.compiler.is_compiling() or _eager(*tensors)


def _eager(*tensors: torch.Tensor) -> bool:
    """Conditions that hold in a compiled graph anyway, or that a compiler cannot trace."""
    forward_mode = forward_ad._current_level >= 0
    return bool(torch.backends.mkldnn.enabled) and not forward_mode and all(t.layout == torch.strided for t in tensors)


def _is_wide(grad: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether transposing g takes longer than transposing x and the product, which is less than half of g then."""
    (n, out), width = grad.shape, x.shape[1]
    return _surely(n * out > 2 * (n + out) * width)


def _gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """g^T x, maybe as a transposed view. The left operand has to be copied: of a wide g it is x."""
    if _is_wide(grad, x):
        # (g^T x)^T = x^T g
        return linear_op(x.t().contiguous(), grad.contiguous().t(), None).t()
    return linear_op(grad.t().contiguous(), x.contiguous().t(), None)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # What a frozen weight, or an input without a gradient, does not need is not kept.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        return linear_op(x.contiguous(), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # By the same rule as the forward product, which makes gradients of any order work.
        dx = None if weight is None else linear(grad, weight.t())
        dweight = None if x is None else weight_gradient(grad, x)
        return dx, dweight, grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None


def _onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    bias = None if bias is None else bias.contiguous()  # oneDNN takes its numbers as they lie
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x.flatten(0, -2), _dense(weight), bias, "none", [], "")
    # As F.linear's, its result is nobody's view: FSDP2 warns of modules that return one.
    out: torch.Tensor = torch.ops.aten._unsafe_view(y, [*x.shape[:-1], weight.shape[0]])
    return out


def _dense(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix that lies in one piece, by rows or by columns. oneDNN has fast code for no other: of columns of a wider
    matrix it takes a thousand times as long. Rows that overlap (windows of a signal) it cannot describe."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


linear_op = define(
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]),
    leaf=True,
    CPU=_onednn,
)


@register_flop_formula(linear_op._overloadpacket)
def _flops(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * weight[0]
