"""Attention of each query to the keys that were chosen for it, in the latent space that all heads share.

A row of the table is a latent and the rotated part of the key, (kv_lora_rank + rope_dim) numbers, and is key and value
of every head (DeepSeek-V2, 2.1.2): with q (heads, kv_lora_rank + rope_dim) of a query,

    p = softmax over the chosen s of scale q . row_s,    out = sum of p_s x the latent of row_s

:func:`masked` has a score for every pair and head, and is the oracle. :func:`selected` gathers the chosen rows of some
queries at a time. FLOPs for each query, chosen key and head: 4 kv_lora_rank + 2 rope_dim, where keys and values of
every head would take 2 (qk_head_dim + rope_dim + v_head_dim), of which nothing could be shared; backward two and a half
times as many. Kept: q, out, the log-sum-exp, the table. Sums are in fp32 at least.
"""

from __future__ import annotations

import torch

from smp.kernels.registry import accumulation_dtype, define
from smp.kernels.sparse_attention.blocks import Pairs, rows_at_once, within


def masked(
    q: torch.Tensor, table: torch.Tensor, indices: torch.Tensor, counts: torch.Tensor, scale: float, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with a mask over all pairs of tokens. Arguments and results as of :func:`selected`; differentiable by
    autograd."""
    counts_here = torch.arange(indices.shape[1], device=q.device) < counts[:, None]
    chosen = torch.zeros(q.shape[0], table.shape[0] + 1, dtype=torch.bool, device=q.device)
    chosen = chosen.scatter_(1, torch.where(counts_here, indices.long(), table.shape[0]), True)[:, :-1]
    scores = torch.einsum("thd,sd->ths", q, table) * scale
    probabilities = scores.masked_fill(~chosen[:, None], -torch.inf).softmax(-1)
    out = torch.einsum("ths,sd->thd", probabilities, table[:, :rank])
    return out, probabilities.sum(1).gather(1, indices.long()) * counts_here


def _forward(
    q: torch.Tensor,
    table: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    rank: int,
) -> list[torch.Tensor]:
    wide, (rows, heads, _) = accumulation_dtype(q.dtype), q.shape
    out, lse = q.new_zeros(rows, heads, rank), torch.zeros(rows, heads, dtype=wide, device=q.device)
    sums = torch.zeros(indices.shape, dtype=wide, device=q.device)
    for some in rows_at_once(rows, _bytes(q, indices)):
        # (queries, topk, kv_lora_rank + rope_dim)
        chosen = table[indices[some].long()].to(wide)
        scores = _scores(q[some].to(wide), chosen, counts[some], scale)
        # (queries, heads)
        lse[some] = scores.logsumexp(-1)
        p = _probabilities(scores, lse[some])
        out[some], sums[some] = (p @ chosen[..., :rank]).to(q.dtype), p.sum(1)
    return [out, lse, sums]


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    table: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> list[torch.Tensor]:
    wide, rank = accumulation_dtype(q.dtype), out.shape[-1]
    dq, dtable = torch.empty_like(q), torch.zeros_like(table, dtype=wide)
    for some in rows_at_once(q.shape[0], _bytes(q, indices)):
        index = indices[some].long()
        chosen, q_, dout_ = table[index].to(wide), q[some].to(wide), dout[some].to(wide)
        # Made again from the log-sum-exp: probabilities of all queries, heads and keys are not saved.
        p = _probabilities(_scores(q_, chosen, counts[some], scale), lse[some])
        dp = dout_ @ chosen[..., :rank].transpose(1, 2)
        # As in FlashAttention: D = rowsum(dout * out).
        ds = p * (dp - (dout_ * out[some].to(wide)).sum(-1, keepdim=True)) * scale
        dq[some] = (ds @ chosen).to(q.dtype)
        # A row is key (all channels) and value (the latent part): both gradients go into it.
        dchosen = ds.transpose(1, 2) @ q_
        dchosen[..., :rank] += p.transpose(1, 2) @ dout_
        # In fp32: a row is chosen by many queries. On a GPU the order of these sums is not fixed.
        dtable.index_add_(0, index.flatten(), dchosen.flatten(0, 1))
    return [dq, dtable.to(table.dtype)]


def _bytes(q: torch.Tensor, indices: torch.Tensor) -> int:
    """Bytes per query of the largest tensor: its chosen rows, or the scores of its heads."""
    return indices.shape[1] * max(q.shape[1], q.shape[2]) * accumulation_dtype(q.dtype).itemsize


def _scores(q: torch.Tensor, chosen: torch.Tensor, counts: torch.Tensor, scale: float) -> torch.Tensor:
    """(queries, heads, chosen), -inf where there is no key."""
    none = torch.arange(chosen.shape[1], device=q.device) >= counts[:, None]
    return (q @ chosen.transpose(1, 2) * scale).masked_fill_(none[:, None], -torch.inf)


def _probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    # A query that sees nothing, padding: -inf - -inf would be NaN.
    return (scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()


def _shapes(
    q: torch.Tensor, table: torch.Tensor, indices: torch.Tensor, counts: torch.Tensor, scale: float, rank: int
) -> list[torch.Tensor]:
    wide = accumulation_dtype(q.dtype)
    lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
    return [q.new_empty(*q.shape[:2], rank), lse, torch.empty(indices.shape, dtype=wide, device=q.device)]


_CHOSEN = "Tensor q, Tensor table, Tensor indices, Tensor counts"
selected_op = define(
    f"selected_attention({_CHOSEN}, float scale, int rank) -> Tensor[]", _shapes, CPU=_forward, CUDA=_forward
)
selected_backward_op = define(
    f"selected_attention_backward(Tensor dout, {_CHOSEN}, Tensor out, Tensor lse, float scale) -> Tensor[]",
    lambda dout, q, table, *rest: [torch.empty_like(q), torch.empty_like(table)],
    CPU=_backward,
    CUDA=_backward,
)


def _head_sums(
    plain: torch.Tensor,
    rotated: torch.Tensor,
    matrix: torch.Tensor,
    table: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    scale: float,
    batch: int,
    length: int,
    keys: int,
    start: int,
    aligned: bool,
) -> torch.Tensor:
    wide, pairs = accumulation_dtype(plain.dtype), Pairs(batch, length, keys, start, aligned)
    sums = torch.zeros(plain.shape[0], keys, dtype=wide, device=plain.device)
    for some, span in pairs.blocks(plain.shape[0], plain.shape[1] * wide.itemsize):
        # Queries in the space of the table, made for a block at a time: (queries, heads, kv_lora_rank + rope_dim)
        q = torch.cat((torch.einsum("thd,rhd->thr", plain[some], matrix), rotated[some]), dim=-1)
        scores = q.to(wide) @ table[span].to(wide).t() * scale  # (queries, heads, keys)
        seen = within(first, last, some, span)[:, None]
        sums[some, : span.stop - span.start] = scores.masked_fill_(~seen, -torch.inf).softmax(-1).sum(1)
    return sums


head_sums_op = define(
    "dense_head_sums(Tensor plain, Tensor rotated, Tensor matrix, Tensor table, Tensor first, Tensor last, "
    "float scale, int batch, int length, int keys, int start, bool aligned) -> Tensor",
    lambda plain, rotated, matrix, table, first, last, scale, batch, length, keys, start, aligned: torch.empty(
        plain.shape[0], keys, dtype=accumulation_dtype(plain.dtype), device=plain.device
    ),
    CPU=_head_sums,
    CUDA=_head_sums,
)
"""Probabilities of attention to all keys that are seen, summed over heads, (queries, keys of a sequence). Queries are
``plain`` (queries, heads, qk_head_dim), which ``matrix`` (kv_lora_rank, heads, qk_head_dim) takes to the latents'
space, and ``rotated``."""
