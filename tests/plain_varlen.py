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
        starts, _, longest, _, causal, scale, window = rest[:7]
        calls.append(len(starts) - 1)
        scores = _scores(q, k, starts, longest, causal, scale, window)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v).contiguous()
        return out, scores.logsumexp(dim=-1), torch.zeros(2, dtype=torch.uint64)

    def backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Tensors:
        out, log_sums, starts, _, longest, _, causal, _, scale, window = rest[:10]
        scores = _scores(q, k, starts, longest, causal, scale, window)
        p = (scores - log_sums[..., None]).exp()
        dp = torch.einsum("qhd,khd->hqk", dout, v) - torch.einsum("qhd,qhd->hq", dout, out)[..., None]
        ds = p * dp * q.shape[-1] ** -0.5
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


def _scores(
    q: torch.Tensor, k: torch.Tensor, starts: torch.Tensor, longest: int, causal: bool, scale: Any, window: Any
) -> torch.Tensor:
    """(heads, tokens, tokens), minus infinity where a token is not seen."""
    assert scale is None and starts[0] == 0 and starts[-1] == len(q) == len(k)
    assert starts.dtype == torch.int32 and int(starts.diff().max()) <= longest
    left, right = (-1, 0) if causal else window
    place = torch.arange(len(q))
    document, before = torch.bucketize(place, starts[1:], right=True), place[:, None] - place
    seen = (document[:, None] == document) & (before >= -right) & ((left < 0) | (before <= left))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return scores.masked_fill(~seen, -torch.inf)
