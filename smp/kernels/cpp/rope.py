"""See :mod:`smp.kernels.rope`."""

from __future__ import annotations

import torch

from smp.kernels import rope
from smp.kernels.cpp.library import computes, library, pointers, require

Pair = tuple[torch.Tensor, torch.Tensor]


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> Pair:
    """Rotate q and k, (tokens, heads, head_dim) and contiguous, into new tensors; see
    :func:`smp.kernels.rope.rope`."""
    out = q.new_empty(q.shape), k.new_empty(k.shape)
    for x, rotated in zip((q, k), out, strict=True):
        _rotate(x, rotated, cos, sin, inverse)
    return out


def rotate_in_place(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> None:
    """Rotate q and k in place, otherwise as :func:`rotate`."""
    for x in (q, k):
        _rotate(x, x, cos, sin, inverse)


def _rotate(x: torch.Tensor, out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> None:
    if not computes(x) or cos.dtype != torch.float32 or sin.dtype != torch.float32:
        out.copy_(rope.rotate(x, cos, -sin if inverse else sin))
        return
    (tokens, _, dim), rotated = x.shape, cos.shape[-1]
    fits = cos.shape == sin.shape == (tokens, 1, rotated) and rotated <= dim and rotated % 2 == 0
    require(fits, "a row of cosines and sines for each token, of no more channels than a head has")
    require(x.is_contiguous() and out.is_contiguous(), "whole tokens")
    cos, sin = cos.contiguous(), sin.contiguous()
    sizes = *x.shape, cos.shape[-1] // 2, -1.0 if inverse else 1.0, torch.get_num_threads()
    library().smp_rotate(x.dtype == torch.bfloat16, *pointers(x, out, cos, sin), *sizes)
