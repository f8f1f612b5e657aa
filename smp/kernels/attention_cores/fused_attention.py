"""Attention by the operators of PyTorch, see :mod:`smp.kernels.attention_cores.attention_core`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from smp.kernels.attention_cores.attention_core import (
    AttentionSpec,
    Masked,
    Pair,
    fold,
    fold_lse,
    unfold,
    unfold_keys,
    unfold_lse,
)
from smp.kernels.attention_cores.math_attention import MathAttention
from smp.kernels.attention_cores.sdpa import Scores, operator_for
from smp.kernels.attention_cores.sinks import attend_with_sinks
from smp.kernels.token_layout import TokenLayout


@dataclass(frozen=True)
class FusedAttention(Masked):
    """An operator of PyTorch, see :mod:`smp.kernels.attention_cores.sdpa`. Dropout is left to :class:`MathAttention`.

    Attributes:
        name: flash, efficient or cudnn.
        grouped: the operator gets key/value heads as they are; otherwise each is repeated before, for its query heads.
    """

    name: str = "flash"
    grouped: bool = False

    def __str__(self) -> str:
        return self.name

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: TokenLayout,
        spec: AttentionSpec,
        dropout_key: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Pair:
        if sinks is not None:
            return attend_with_sinks(self, q, k, v, layout, spec, dropout_key, sinks)
        if dropout_key is not None:
            # PyTorch's kernels draw their own dropout, which depends on the layout and on the order of calls.
            return MathAttention()(q, k, v, layout, spec, dropout_key)
        queries, keys, values, scores = self.arguments(q, k, v, layout, spec)
        out, lse = operator_for(self.name, q.device).forward(queries, keys, values, scores)
        if scores.mask is not None and not layout.sees_itself:
            # Backends differ in what they say of a row that sees nothing; all say this here.
            blind = scores.mask.isneginf().all(dim=-1)  # (batch or 1, 1, length)
            out, lse = out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -torch.inf)
        # Without the channels of zeros, and with the padding of the rows again.
        return fold(out[..., : q.shape[2]], q.shape[0]), fold_lse(lse, q.shape[0])

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        layout: TokenLayout,
        spec: AttentionSpec,
        dropout_key: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        if dropout_key is not None:
            return MathAttention().backward(dout, q, k, v, out, lse, layout, spec, dropout_key)
        operator, groups = operator_for(self.name, q.device), k.shape[1]
        # Made again as in the forward pass: what is saved is q, k and v as they came.
        *given, scores = self.arguments(q, k, v, layout, spec)
        # As wide as q, k and v, which the kernel got with channels of zeros.
        dout, out = (unfold(widened(x, operator.multiple), layout.batch, layout.length) for x in (dout, out))
        lse = lse.masked_fill(lse.isneginf(), 0.0)  # nobody is seen: exp(-inf - 0) is 0, exp(-inf + inf) is NaN
        # ``out`` and ``lse`` may be merged over more blocks of keys than these: then the gradients are right too.
        kept = out, unfold_lse(lse, layout)
        dq, dk, dv = operator.backward(dout, *given, *kept, scores=scores)
        # Where heads were repeated for the kernel, each copy has a part of the gradient.
        dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
        return tuple(fold(dx[..., : x.shape[2]], x.shape[0]) for dx, x in ((dq, q), (dk, k), (dv, v)))

    def arguments(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: TokenLayout, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Scores]:
        """Arguments of the operator: q, k and v (batch, heads, length, head_dim), and the options of the scores.

        Raises:
            ValueError: ``spec`` needs something that the operators do not compute.
        """
        if spec.changes_scores:
            raise ValueError(f"{self.name} computes neither soft-capped scores nor ALiBi: take MathAttention")
        mask, multiple = (
            layout.mask(spec.pattern(layout), q.dtype, q.device),
            operator_for(self.name, q.device).multiple,
        )
        # Of the real width: the kernel would take the filled-up one.
        scale = q.shape[2] ** -0.5 if spec.scale is None and q.shape[2] % multiple else spec.scale
        # (batch, heads, length, head_dim)
        heads = k.shape[1] if self.grouped else q.shape[1]
        q, k, v = (widened(x, multiple) for x in (q, k, v))
        keys = unfold_keys(k, v, layout, heads)
        return unfold(q, layout.batch, layout.length), *keys, Scores(spec.causal and mask is None, mask, scale)


@dataclass(frozen=True)
class DefaultAttention(Masked):
    """The core of layers that are given none: FlashAttention; on a GPU with a mask or in fp32 the memory-efficient
    kernel; with soft-capped scores or ALiBi :class:`MathAttention`."""

    name: str = "default"

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: TokenLayout,
        spec: AttentionSpec,
        dropout_key: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Pair:
        return self._chosen(q, layout, spec)(q, k, v, layout, spec, dropout_key, sinks)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        layout: TokenLayout,
        spec: AttentionSpec,
        dropout_key: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        return self._chosen(q, layout, spec).backward(dout, q, k, v, out, lse, layout, spec, dropout_key)

    @staticmethod
    def _chosen(q: torch.Tensor, layout: TokenLayout, spec: AttentionSpec) -> FusedAttention | MathAttention:
        if spec.changes_scores:
            return MathAttention()
        # fp32 has no FlashAttention on a GPU.
        # A mask with FlashAttention exists on a CPU only.
        flash = q.dtype.itemsize == 2 and not layout.needs_mask(spec.pattern(layout))
        return FusedAttention("flash" if flash or not q.is_cuda else "efficient")


DEFAULT_ATTENTION = DefaultAttention()


def widened(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """``x`` padded with channels of zeros to a ``multiple``; they do not change scores."""
    return x if x.shape[-1] % multiple == 0 else F.pad(x, (0, -x.shape[-1] % multiple))
