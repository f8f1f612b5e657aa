"""Attention by ``csrc/attention.cpp``, for CPUs with AVX-512: what PyTorch's FlashAttention computes, in fp32 and bf16.

out = softmax(scale q k^T + mask) v and its gradients, as :mod:`smp.kernels.attention_cores.sdpa` has them, with fewer
key/value heads than query heads; products and sums are fp32 inside, and probabilities are rounded to bf16 for the
products with them. PyTorch's kernel is its readable twin.

Why it exists: PyTorch's makes its products by calls of a library for each block, and in fp32 by MKL, which is slow on
processors that are not Intel's (docs/kernels.md has figures).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from smp.kernels.cpp.library import DTYPES, library, pointers, require, rows_of
from smp.kernels.registry import define, first_derivative_only

Tensors = tuple[torch.Tensor, ...]
_LONG = ctypes.c_int64


class _Call(ctypes.Structure):
    """``struct Call`` of the source."""

    _fields_ = (
        *((name, _LONG) for name in ("batch", "heads", "groups", "length", "keys", "dim", "causal", "threads")),
        *((name, _LONG * 3) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")),
        ("mask", _LONG * 2),
        ("scale", ctypes.c_float),
    )


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> Tensors:
    """(out, lse) of q (batch, heads, length, head_dim), k and v (batch, groups, keys, head_dim), all fp32 or bf16; a
    row that sees no key has out 0 and lse -inf.

    Args:
        mask: added to the scores, (batch or 1, 1, length, keys), of the same dtype.
        causal: a query does not see later keys; without a mask, and with as many keys as queries.
    """
    require(mask is None or not mask.requires_grad, "a mask without a gradient")
    return _Attention.apply(q, k, v, mask, causal, scale)


def attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> Tensors:
    """(dq, dk, dv); ``out`` and ``lse`` may be those of more keys, merged."""
    return _backward_op(dout, q, k, v, out, lse, mask, causal, scale)


def scratch_bytes(q: torch.Tensor, k: torch.Tensor, *, backward: bool) -> int:
    """What a call takes while it runs, besides its arguments and results; of tensors without data, too."""
    call, bf16 = ctypes.byref(_call(q, k, None, False, 1.0)), q.dtype == torch.bfloat16
    own: int = library().smp_attention_memory(call, bf16, backward)
    return own + (library().smp_attention_sums(call) if backward else 0)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensors:
        q, k, v, mask, ctx.causal, ctx.scale = arguments
        out, lse = _forward_op(q, k, v, mask, ctx.causal, ctx.scale)
        ctx.save_for_backward(q, k, v, out, lse, mask)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dout: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, mask = ctx.saved_tensors
        return *_backward_op(dout, q, k, v, out, lse, mask, ctx.causal, ctx.scale), None, None, None


def _like(x: torch.Tensor) -> torch.Tensor:
    """(batch, heads, length, head_dim), a view of rows of tokens: heads are joined again without a copy."""
    batch, heads, length, width = x.shape
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


def _require(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> None:
    (batch, heads, length, width), (groups, keys) = q.shape, k.shape[1:3]
    fits = k.shape == v.shape == (batch, groups, keys, width) and groups > 0 and heads % groups == 0
    require(fits, "keys and values of one shape, as wide as queries, and heads that are a multiple of theirs")
    require(not causal or (mask is None and length == keys), "either a mask, or causal with as many keys as queries")
    shapes = (batch, 1, length, keys), (1, 1, length, keys)
    require(mask is None or mask.shape in shapes, "a mask (batch or 1, 1, length, keys)")


def _require_dtype(*tensors: torch.Tensor | None) -> None:
    # C++ reads memory: another dtype would be read as one of these.
    kinds = {tensor.dtype for tensor in tensors if tensor is not None}
    if len(kinds) != 1 or not kinds <= set(DTYPES):
        raise TypeError(f"attention in C++ takes one of fp32 and bf16, not {', '.join(sorted(map(str, kinds)))}")


def _call(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float) -> _Call:
    batch, heads, length, width = q.shape
    call = _Call(batch, heads, k.shape[1], length, k.shape[2], width, int(causal), torch.get_num_threads())
    if mask is not None:
        call.mask = (_LONG * 2)(mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(2))
    call.scale = scale
    return call


def _with_strides(call: _Call, **tensors: torch.Tensor) -> _Call:
    for name, tensor in tensors.items():
        setattr(call, name, (_LONG * 3)(*tensor.stride()[:3]))
    return call


def _scratch(size: int) -> torch.Tensor:
    """From torch's allocator, so that it counts as this process's memory like any tensor."""
    return torch.empty(size, dtype=torch.uint8)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> Tensors:
    _require_dtype(q, k, v, mask)
    _require(q, k, v, mask, causal)
    q, k, v, mask = rows_of(q), rows_of(k), rows_of(v), None if mask is None else rows_of(mask)
    out, lse = _forward_fake(q)
    call = _with_strides(_call(q, k, mask, causal, scale), q=q, k=k, v=v, out=out)
    bf16 = q.dtype == torch.bfloat16
    memory = _scratch(library().smp_attention_memory(ctypes.byref(call), bf16, False))
    library().smp_attention_forward(ctypes.byref(call), bf16, *pointers(q, k, v, mask, out, lse, memory))
    return out, lse


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> Tensors:
    _require_dtype(dout, q, k, v, out, mask)
    _require(q, k, v, mask, causal)
    fits = dout.shape == out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    require(fits, "an output and its gradient of the shape of q, and a log-sum-exp, fp32, for each query")
    dout, q, k, v, out = map(rows_of, (dout, q, k, v, out))
    mask, lse = None if mask is None else rows_of(mask), lse.contiguous()
    dq, dk, dv = map(_like, (q, k, v))
    call = _with_strides(_call(q, k, mask, causal, scale), q=q, k=k, v=v, out=out, dout=dout, dq=dq, dk=dk, dv=dv)
    bf16 = q.dtype == torch.bfloat16
    memory = _scratch(library().smp_attention_memory(ctypes.byref(call), bf16, True))
    sums = _scratch(library().smp_attention_sums(ctypes.byref(call)))
    tensors = pointers(dout, q, k, v, out, lse, mask, dq, dk, dv, memory, sums)
    library().smp_attention_backward(ctypes.byref(call), bf16, *tensors)
    return dq, dk, dv


def _forward_fake(q: torch.Tensor, *_: Any) -> Tensors:
    return _like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


_forward_op = define(
    "cpp_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale) -> (Tensor, Tensor)",
    _forward_fake,
    leaf=True,
    CPU=_forward,
)
_backward_op = define(
    "cpp_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask,"
    " bool causal, float scale) -> (Tensor, Tensor, Tensor)",
    lambda dout, q, k, v, *_: tuple(map(_like, (q, k, v))),
    leaf=True,
    CPU=_backward,
)
