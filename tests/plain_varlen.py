"""torch's variable-length attention on a CPU: the operator is torch's own, with its schema, gradient and fake version;
only the two kernels, which need a GPU, are plain here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]


@contextmanager
def plain_varlen() -> Iterator[list[int]]:
    """While it lasts; gives the numbers of documents of the forward passes."""
    calls: list[int] = []

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Tensors:
        *starts, causal, scale, window = rest[:7]
        calls.append(len(starts[0]) - 1)
        scores = _scores(q, k, starts, causal, scale, window)
        log_sums = scores.logsumexp(dim=-1)
        blind = log_sums.isneginf()
        p = scores.masked_fill(blind[..., None], 0.0).softmax(dim=-1).masked_fill(blind[..., None], 0.0)
        out = torch.einsum("hqk,khd->qhd", p, v).contiguous()
        return out, log_sums.masked_fill(blind, torch.inf), torch.zeros(2, dtype=torch.uint64)

    def backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Tensors:
        out, log_sums, *starts, causal, _, scale, window = rest[:10]
        scores = _scores(q, k, starts, causal, scale, window)
        p = (scores - log_sums[..., None]).exp()
        dp = torch.einsum("qhd,khd->hqk", dout, v) - torch.einsum("qhd,qhd->hq", dout, out)[..., None]
        ds = p * dp * _scale(q, scale)
        return (
            torch.einsum("hqk,khd->qhd", ds, k).contiguous(),
            torch.einsum("hqk,qhd->khd", ds, q).contiguous(),
            torch.einsum("hqk,qhd->khd", p, dout).contiguous(),
        )

    import torch.nn.attention.varlen  # defines the operators, and imports triton

    with torch.library._scoped_library("torch_attn", "IMPL") as library:
        library.impl("_varlen_attn", forward, "CPU")
        library.impl("_varlen_attn_backward", backward, "CPU")
        yield calls


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _scores(q: torch.Tensor, k: torch.Tensor, starts: Any, causal: bool, scale: Any, window: Any) -> torch.Tensor:
    """(heads, queries, keys), minus infinity where a key is not seen. A document's last query stands at its last
    key."""
    *starts, longest_q, longest_k = starts
    for x, cu, longest in ((q, starts[0], longest_q), (k, starts[1], longest_k)):
        assert cu.dtype == torch.int32 and cu[0] == 0 and cu[-1] == len(x) and cu.diff().min() >= 0
        assert int(cu.diff().max()) <= longest
    assert q.shape[1] == k.shape[1], "torch 2.11 takes no fewer key/value heads"
    left, right = (-1, 0) if causal else window
    documents = [
        torch.bucketize(torch.arange(len(x)), cu[1:], right=True) for x, cu in zip((q, k), starts, strict=True)
    ]
    places = [torch.arange(len(x)) - cu[1:][d] for x, cu, d in zip((q, k), starts, documents, strict=True)]
    before = places[0][:, None] - places[1]
    seen = (documents[0][:, None] == documents[1]) & ((right < 0) | (before >= -right))
    scores = torch.einsum("qhd,khd->hqk", q, k) * _scale(q, scale)
    return scores.masked_fill(~(seen & ((left < 0) | (before <= left))), -torch.inf)
