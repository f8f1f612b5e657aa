"""Attention by FlashAttention's variable-length kernel (``torch.nn.attention.varlen``; Dao 2023, arXiv 2307.08691).

A mask has length x keys numbers for every sequence, and kernels with a mask compute all of these pairs. This kernel
takes the boundaries of documents and the length of the window, and computes only pairs inside of them. It runs on CUDA,
in half precision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from smp.kernels.attention_cores.attention_core import AttentionSpec, pad_rows
from smp.kernels.attention_cores.fused_attention import FusedAttention
from smp.kernels.attention_cores.sinks import attend_with_sinks
from smp.kernels.token_layout import TokenLayout


@dataclass(frozen=True)
class VarlenAttention:
    """Attention of each document by itself, see :mod:`smp.kernels.attention_cores.attention_core`.

    Where sequences are one document each and without a window it is FlashAttention as usual.
    """

    name: str = "flash"

    def __str__(self) -> str:
        return f"{self.name}'s variable-length kernel"

    @property
    def dense(self) -> FusedAttention:
        """The core for calls without a mask."""
        return FusedAttention(self.name)

    def prepare(
        self, layout: TokenLayout, specs: Iterable[AttentionSpec], dtype: torch.dtype, device: torch.device
    ) -> TokenLayout:
        """The layout with cu_seqlens on ``device``, if they are needed.

        Raises:
            ValueError: document ids are not on the host, or one document is not a contiguous range of its sequence.
        """
        # Layers without a mask go to the dense kernel, which needs no list of documents.
        masked = any(layout.needs_mask(spec.pattern(layout)) for spec in specs)
        return layout.with_documents_found(device) if masked else layout

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: TokenLayout,
        spec: AttentionSpec,
        dropout_key: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if sinks is not None:
            return attend_with_sinks(self, q, k, v, layout, spec, dropout_key, sinks)
        # Dropout and changed scores end up in MathAttention, by way of the dense core.
        if dropout_key is not None or spec.changes_scores or not layout.needs_mask(spec.pattern(layout)):
            return self.dense(q, k, v, layout, spec, dropout_key)
        from torch.nn.attention.varlen import AuxRequest, varlen_attn  # which imports triton; most runs need neither

        starts, aux = self._documents(q, layout, spec), AuxRequest(lse=True)
        queries, keys, values = _rows(q, k, v, layout)
        out, lse = varlen_attn(
            queries, keys, values, *starts, return_aux=aux, scale=spec.scale, window_size=_sides(spec)
        )
        lse, padding = lse.detach(), q.shape[0] - out.shape[0]  # the operator would drop a gradient of it
        if not layout.sees_itself:
            lse = lse.masked_fill(lse.isposinf(), -torch.inf)  # what the kernel says of a row that sees no key
        return pad_rows(out, q.shape[0]), F.pad(lse, (0, padding), value=-torch.inf) if padding else lse

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
        if dropout_key is not None or spec.changes_scores or not layout.needs_mask(spec.pattern(layout)):
            return self.dense.backward(dout, q, k, v, out, lse, layout, spec, dropout_key)
        import torch.nn.attention.varlen  # defines the operator

        count, sides = layout.num_queries, _sides(spec)
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which the kernel does not have here
        dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(
            dout[:count].contiguous(),
            *_rows(q, k, v, layout),
            out[:count].contiguous(),
            # A query that sees nothing: p = exp(-inf - 0) is 0, exp(-inf + inf) would be NaN.
            lse.masked_fill(lse.isneginf(), 0.0)[:, :count].contiguous(),
            *self._documents(q, layout, spec),
            # The flag for causal attention without a window.
            sides == (-1, 0),
            state,
            spec.scale,
            list(sides),
        )
        # Heads were repeated for the kernel: each copy has a part of the gradient.
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
        return tuple(pad_rows(dx, x.shape[0]) for dx, x in ((dq, q), (dk, k), (dv, v)))

    def _documents(
        self, q: torch.Tensor, layout: TokenLayout, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """(cu_seqlens of queries, of keys, the longest document in queries, in keys)."""
        if layout.cu_seqlens_q is None:
            layout = self.prepare(layout, [spec], q.dtype, q.device)
        assert layout.cu_seqlens_q is not None and layout.cu_seqlens_k is not None
        return layout.cu_seqlens_q, layout.cu_seqlens_k, layout.max_seqlen_q, layout.max_seqlen_k


def _rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: TokenLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v without padding, and a key/value head for each query head, as torch 2.11 needs them."""
    keys, repeats = layout.batch * layout.keys, q.shape[1] // k.shape[1]
    k, v = (x[:keys].repeat_interleave(repeats, dim=1) for x in (k, v))
    return q[: layout.num_queries], k, v


def _sides(spec: AttentionSpec) -> tuple[int, int]:
    """``window_size`` of the kernel: tokens before and after itself that a token sees; -1: all."""
    return (-1 if spec.window is None else spec.window - 1, 0 if spec.causal else -1)
