"""Attention of a rank's queries to blocks of keys, one block after the other, merged, and its gradients.

Each call gives (out, lse) for its keys. Sums of exponentials add, so out = sum_i out_i exp(lse_i - lse) with
lse = log sum_i exp(lse_i), kept in fp32 at least. Gradients of a call need out and lse of all keys: probabilities are
exp(s - lse), and D = rowsum(dout * out) is over all keys (see :mod:`smp.kernels.attention_cores.sdpa`). Autograd
through each call's own out and lse would be wrong: kernels give no gradient for lse.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from smp.kernels.attention_cores.attention_core import AttentionSpec, BlockCore, Pair, merge, pad_rows
from smp.kernels.attention_cores.sinks import with_sinks
from smp.kernels.returned import returned
from smp.layers.context_parallel.blocks import Call

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Layer:
    """Computes the calls of one layer.

    Attributes:
        core: computes each call.
        spec: of the layer.
        dropout_key: of the layer's probabilities, or None.
    """

    core: BlockCore
    spec: AttentionSpec
    dropout_key: torch.Tensor | None = None

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, calls: Iterable[Call], sums: Pair | None = None
    ) -> Pair | None:
        """(out, lse) of the keys so far, in fp32 at least, with these.

        Args:
            q: (queries, heads, head_dim), without padding.
            k, v: (keys, groups, head_dim).
            calls: over rows of these.
            sums: of earlier keys.
        """
        for call in calls:
            # A copy of the rows that the call needs; none where they are all rows in order.
            queries, keys, values = _taken(q, call.queries), _taken(k, call.keys), _taken(v, call.keys)
            part = self.core(queries, keys, values, call.layout, call.spec(self.spec), self.dropout_key)
            if sums is None and call.queries is None:
                # copies, for they are written to: selective recompute keeps what the kernel gave
                sums = part[0].to(part[1].dtype, copy=True), part[1].clone()
                continue
            sums = _nothing(q, part[1].dtype) if sums is None else sums
            if call.queries is None:
                sums = merge(*sums, *part)
                continue
            out, lse = merge(sums[0][call.queries], sums[1][:, call.queries], *part)
            # In place: no two blocks of a call share a query.
            sums = sums[0].index_copy_(0, call.queries, out), sums[1].index_copy_(1, call.queries, lse)
        return sums

    def backward(
        self, given: Tensors, k: torch.Tensor, v: torch.Tensor, calls: Iterable[Call], sums: Tensors
    ) -> Tensors:
        """``sums`` of gradients of q, k and v, fp32, with those by these keys.

        Args:
            given: dout, q, out and lse of all keys, without padding.
            k, v: as in :meth:`attend`.
            calls: likewise.
            sums: (queries, heads, head_dim) and twice (keys, groups, head_dim).
        """
        dout, q, out, lse = given
        for call in calls:
            rows, columns = call.queries, call.keys
            # Gradients of the call's own queries and keys; each adds its part to the rows that it read.
            parts = self.core.backward(
                _taken(dout, rows),
                _taken(q, rows),
                _taken(k, columns),
                _taken(v, columns),
                _taken(out, rows),
                # Of all keys, not of this call's: p = exp(s - lse) are the shares of the whole.
                lse if rows is None else lse[:, rows],
                call.layout,
                call.spec(self.spec),
                self.dropout_key,
            )
            sums = tuple(_added(x, i, part) for x, i, part in zip(sums, (rows, columns, columns), parts, strict=True))
        return sums


def finished(sums: Pair | None, q: torch.Tensor, rows: int, sinks: torch.Tensor | None = None) -> Pair:
    """(out, lse) in the dtype of ``q`` and with ``rows`` rows; rows of padding have out 0 and lse -inf. ``sinks`` are
    those of the heads in ``q``, if there are any."""
    # None: this rank's queries see no key at all, such as padding alone.
    out, lse = _nothing(q, torch.promote_types(q.dtype, torch.float32)) if sums is None else sums
    out, lse = (out, lse) if sinks is None else with_sinks(out, lse, sinks)
    padding = rows - out.shape[0]
    lse = torch.nn.functional.pad(lse, (0, padding), value=-torch.inf) if padding else lse
    return pad_rows(returned(out, q.dtype), rows), lse


def _nothing(q: torch.Tensor, dtype: torch.dtype) -> Pair:
    """(out, lse) of queries that see no key: zeros and minus infinity."""
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=dtype)
    return torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format), lse


def _taken(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return x if rows is None else x[rows]


def _added(x: torch.Tensor, rows: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
    """``x``, in place, with ``part`` in its rows."""
    return x.add_(part) if rows is None else x.index_add_(0, rows, part.to(x.dtype))
