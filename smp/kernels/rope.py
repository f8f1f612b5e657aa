"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) of queries and keys in one launch.

In the half-rotation order of Hugging Face and Megatron, with the first ``r`` channels of a head as (a, b), r / 2 each:
(a, b) -> (a cos - b sin, b cos + a sin); the others pass. The adjoint is the rotation by the negative angle.

Bytes per element of q and k in bf16: 4 each way, read and write; the table is read once per token for all heads. In
place it costs no memory: unrotated queries and keys are not needed again, because a linear layer's backward pass does
not read its output. Selective recompute keeps exactly that output, so in place is not for it, nor for a compiler, which
moves memory about on its own.
"""

from __future__ import annotations

from typing import Any

import torch

from smp.kernels.registry import accumulation_dtype, dispatched, first_derivative_only, register

Pair = tuple[torch.Tensor, torch.Tensor]


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    head_dim: int,
    backend: str = "torch",
    *,
    in_place: bool = False,
) -> Pair:
    """Rotate q (tokens, heads x head_dim) and k, whose number of heads may differ -> (tokens, heads, head_dim) each.

    Args:
        q, k: also with heads and head_dim as dimensions of their own. In place they may not be views, and a function
            that saved them for its backward pass gets an error there.
        cos, sin: fp32 (tokens, 1, r), equal in both halves of the last dimension, r <= head_dim.
        head_dim: width of a head.
        backend: torch, triton or cpp.
        in_place: with triton and cpp, write over q and k.
    """
    if backend == "torch":
        q, k = _heads(q, head_dim), _heads(k, head_dim)
        return rotate(q, cos, sin), rotate(k, cos, sin)
    q, k = _Rope.apply(q, k, cos, sin, head_dim, in_place, backend)
    return _heads(q, head_dim), _heads(k, head_dim)


def _heads(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    return x.reshape(x.shape[0], x.shape[1:].numel() // head_dim, head_dim)  # (tokens, heads, head_dim)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first ``r`` channels of x (tokens, heads, head_dim); fp32 inside, dtype kept."""
    r = cos.shape[-1]
    rotated, passed = x[..., :r].to(accumulation_dtype(x.dtype)), x[..., r:]
    # (a, b) -> (-b, a), the half-rotation of Hugging Face's ``rotate_half``.
    first, second = rotated.chunk(2, dim=-1)
    out = (rotated * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
    # Partial rotary: channels from r on carry no position.
    return out if passed.shape[-1] == 0 else torch.cat((out, passed), dim=-1)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        head_dim: int,
        in_place: bool,
        backend: str,
    ) -> Pair:
        ctx.save_for_backward(cos, sin)
        ctx.head_dim, ctx.backend = head_dim, backend
        if in_place:
            heads_q, heads_k = (x.view(x.shape[0], x.shape[1:].numel() // head_dim, head_dim) for x in (q, k))
            _rope_in_place_op(heads_q, heads_k, cos, sin, False, backend)
            # Raises the version counters: a function that saved the unrotated tensors gets an
            # error, and not wrong gradients.
            ctx.mark_dirty(q, k)
            return q, k
        # The kernel walks over whole tokens.
        heads_q, heads_k = (_heads(x.contiguous(), head_dim) for x in (q, k))
        out_q, out_k = _rope_op(heads_q, heads_k, cos, sin, False, backend)
        return out_q.view(q.shape), out_k.view(k.shape)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Into new memory: gradients that arrive may belong to others too. The bytes are the same."""
        # The adjoint of a rotation is the rotation back, so nothing but the table is saved.
        heads_q, heads_k = (_heads(d.contiguous(), ctx.head_dim) for d in (dq, dk))
        out_q, out_k = _rope_op(heads_q, heads_k, *ctx.saved_tensors, True, ctx.backend)
        return out_q.view(dq.shape), out_k.view(dk.shape), None, None, None, None, None


def _reference(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> Pair:
    # Rotation by the negative angle.
    sin = -sin if inverse else sin
    return rotate(q, cos, sin), rotate(k, cos, sin)


def _reference_in_place(q: torch.Tensor, k: torch.Tensor, *table: Any) -> None:
    for x, out in zip((q, k), _reference(q, k, *table), strict=True):
        x.copy_(out)


def _rope_fake(q: torch.Tensor, k: torch.Tensor, *_: Any) -> Pair:
    return q.new_empty(q.shape), k.new_empty(k.shape)


_rope_op = register(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool inverse, str backend) -> (Tensor, Tensor)",
    dispatched("rope", "rotate", _reference),
    _rope_fake,
)
_rope_in_place_op = register(
    "rope_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, bool inverse, str backend) -> ()",
    dispatched("rope", "rotate_in_place", _reference_in_place),
    lambda *_: None,
)
