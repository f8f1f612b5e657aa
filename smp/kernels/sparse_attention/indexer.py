"""The lightning indexer: a score for each query and key, the keys with the largest, and the loss that trains the score.

With q_h a query of few narrow heads, k the one key that they share, and w_h a number for each head, made of the query's
token,

    I_ts = sum over h of w_th relu(q_th . k_s)              1 / sqrt(head_dim) and 1 / sqrt(heads) are in w
    chosen_t = the topk keys with the largest I_ts among those that t sees; of equal ones the nearest
    loss_t = KL(p_t || softmax of I_t over the same keys)   p_t: mean over heads of attention's probabilities

Ties are not rare: where no head's product is positive, I is 0. ``torch.topk`` leaves open which of equal values it
takes; that depends on the device and on the number of keys. The rule above makes the choice equal in all layouts.

The loss is over the chosen keys (sparse stage) or over all visible keys (dense warm-up). Its gradient depends on the
backward pass only by a factor, so it is computed in the forward pass. Sums are in fp32 at least.

FLOPs for each pair of a query and a key that it sees: 2 heads head_dim + 2 heads; over the chosen ones three times as
many again for the loss and its gradient. Kept: topk numbers of 4 bytes for each query.
"""

from __future__ import annotations

import torch

from smp.kernels.registry import accumulation_dtype, define
from smp.kernels.sparse_attention.blocks import Pairs, rows_at_once, within

Loss = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The loss, 0-dim, and its gradients by q, k and w."""


def scores_of(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(I, relu(q . k)) of q (queries, heads, head_dim), w (queries, heads), and k (keys, head_dim) or those of each
    query, (queries, keys, head_dim): (queries, keys) and (queries, heads, keys)."""
    wide = accumulation_dtype(q.dtype)
    # (queries, heads, keys)
    products = (q.to(wide) @ k.to(wide).transpose(-1, -2)).relu_()
    return (w.to(wide)[:, None] @ products)[:, 0], products


def best(scores: torch.Tensor, seen: torch.Tensor, topk: int) -> torch.Tensor:
    """bool like ``scores`` (queries, keys): True at the ``topk`` largest of the ``seen`` scores, or at all of them if
    there are fewer. Of equal scores the last keys are taken."""
    if scores.shape[1] <= topk:
        return seen
    scores = scores.masked_fill(~seen, -torch.inf)
    # The smallest of the topk largest: all above it are in, and of the equal ones the nearest that fit.
    least = scores.topk(topk).values[:, -1:]
    above, equal = scores > least, (scores == least) & seen
    missing = topk - above.sum(1, keepdim=True)
    return above | (equal & (equal.flip(1).cumsum(1).flip(1) <= missing))


def _chosen(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    topk: int,
    batch: int,
    length: int,
    keys: int,
    start: int,
    aligned: bool,
) -> list[torch.Tensor]:
    rows, pairs = q.shape[0], Pairs(batch, length, keys, start, aligned)
    # Zeros: places that do not count have to be numbers of rows of the table.
    indices = torch.zeros(rows, topk, dtype=torch.int32, device=q.device)
    counts = torch.zeros(rows, dtype=torch.int32, device=q.device)
    for some, span in pairs.blocks(rows, q.shape[1] * accumulation_dtype(q.dtype).itemsize):
        # (queries, keys of the block)
        scores, _ = scores_of(q[some], k[span], w[some])
        kept = best(scores, within(first, last, some, span), topk)
        # In the order of the keys, one after the other; what is not kept goes to one place after all.
        column = torch.where(kept, kept.cumsum(1) - 1, topk)
        number = torch.arange(span.start, span.stop, device=q.device, dtype=torch.int32).expand_as(column)
        indices[some] = indices.new_zeros(len(column), topk + 1).scatter_(1, column, number)[:, :topk]
        counts[some] = kept.sum(1, dtype=torch.int32)
    return [indices, counts]


def _chosen_shapes(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, *rest: object) -> list[torch.Tensor]:
    topk = rest[2]
    assert isinstance(topk, int)
    indices = torch.empty(q.shape[0], topk, dtype=torch.int32, device=q.device)
    return [indices, torch.empty(q.shape[0], dtype=torch.int32, device=q.device)]


_PAIRS = "int batch, int length, int keys, int start, bool aligned"
choose_op = define(
    f"choose_keys(Tensor q, Tensor k, Tensor w, Tensor first, Tensor last, int topk, {_PAIRS}) -> Tensor[]",
    _chosen_shapes,
    CPU=_chosen,
    CUDA=_chosen,
)


@torch.no_grad()
def choose_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    topk: int,
    pairs: Pairs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys that each query sees, by their numbers in the table.

    Args:
        q: (queries, heads, head_dim).
        k: (keys, head_dim), the table of all sequences.
        w: (queries, heads).
        first, last: int64 (queries,), the keys from which to which a query sees; none where last < first.
        topk: largest number of keys per query.
        pairs: where queries and keys lie.

    Returns:
        int32 (queries, topk), ascending key numbers, and int32 (queries,), how many of them are valid; the rest are 0.
    """
    where = pairs.batch, pairs.length, pairs.keys, pairs.start, pairs.aligned
    indices, counts = choose_op(q, k, w, first, last, topk, *where)
    return indices, counts


def _kl(scores: torch.Tensor, seen: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(target || softmax of ``scores`` where ``seen``), (queries,), and its derivative by the scores."""
    # Not -inf: a query that sees nothing would be NaN; its weight is 0.
    log_p = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).log_softmax(-1)
    # xlogy: 0 log 0 is 0.
    kl = (torch.xlogy(target, target) - target * log_p).masked_fill(~seen, 0.0).sum(-1)
    return kl, (log_p.exp() * target.sum(-1, keepdim=True) - target).masked_fill(~seen, 0.0)


def _chosen_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    target: torch.Tensor,
    weights: torch.Tensor,
) -> list[torch.Tensor]:
    wide = accumulation_dtype(q.dtype)
    total, dq, dk, dw = _empty(q, k, w)
    column = torch.arange(indices.shape[1], device=q.device)
    bytes_of_row = indices.shape[1] * max(q.shape[1], q.shape[2]) * wide.itemsize
    for some in rows_at_once(q.shape[0], bytes_of_row):
        index = indices[some].long()
        # (queries, topk, head_dim): each query's own keys
        own = k[index]
        scores, products = scores_of(q[some], own, w[some])
        kl, ds = _kl(scores, column < counts[some, None], target[some].to(wide))
        total += (kl * weights[some]).sum()
        # The gradient of the weighted sum of losses, made with the loss: the backward pass only scales it.
        ds = ds * weights[some, None].to(wide)
        dq[some], dw[some], dproducts = _by_query(ds, products, own, w[some])
        # Keys are shared by queries. Places that do not count have ds 0, and add it to key 0.
        dk.index_add_(0, index.flatten(), (dproducts.transpose(1, 2) @ q[some].to(wide)).flatten(0, 1))
    return [total, dq, dk.to(k.dtype), dw]


def _dense_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    target: torch.Tensor,
    weights: torch.Tensor,
    batch: int,
    length: int,
    keys: int,
    start: int,
    aligned: bool,
) -> list[torch.Tensor]:
    wide, pairs = accumulation_dtype(q.dtype), Pairs(batch, length, keys, start, aligned)
    total, dq, dk, dw = _empty(q, k, w)
    for some, span in pairs.blocks(q.shape[0], q.shape[1] * wide.itemsize):
        scores, products = scores_of(q[some], k[span], w[some])
        seen = within(first, last, some, span)
        kl, ds = _kl(scores, seen, target[some, : span.stop - span.start].to(wide))
        total += (kl * weights[some]).sum()
        ds = ds * weights[some, None].to(wide)
        dq[some], dw[some], dproducts = _by_query(ds, products, k[span], w[some])
        dk[span] += dproducts.flatten(0, 1).t() @ q[some].to(wide).flatten(0, 1)
    return [total, dq, dk.to(k.dtype), dw]


def _empty(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> Loss:
    wide = accumulation_dtype(q.dtype)
    total = torch.zeros((), dtype=wide, device=q.device)
    return total, torch.zeros_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(w)


def _by_query(ds: torch.Tensor, products: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Derivatives by q, w and q . k from the derivative by the scores, (queries, keys)."""
    wide = ds.dtype
    # (queries, heads)
    dw = (products @ ds[:, :, None])[..., 0]
    # ReLU passes a gradient where its result is positive.
    dproducts = w.to(wide)[:, :, None] * ds[:, None] * (products > 0)
    return dproducts @ k.to(wide), dw, dproducts


def _loss_shapes(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, *rest: object) -> list[torch.Tensor]:
    total = torch.empty((), dtype=accumulation_dtype(q.dtype), device=q.device)
    return [total, torch.empty_like(q), torch.empty_like(k), torch.empty_like(w)]


_INDEX = "Tensor q, Tensor k, Tensor w"
chosen_loss_op = define(
    f"indexer_loss({_INDEX}, Tensor indices, Tensor counts, Tensor target, Tensor weights) -> Tensor[]",
    _loss_shapes,
    CPU=_chosen_loss,
    CUDA=_chosen_loss,
)
"""The loss over the keys of :func:`choose_keys`, with a target (queries, topk) for them and weights (queries,); returns
:data:`Loss`."""
dense_loss_op = define(
    f"dense_indexer_loss({_INDEX}, Tensor first, Tensor last, Tensor target, Tensor weights, {_PAIRS}) -> Tensor[]",
    _loss_shapes,
    CPU=_dense_loss,
    CUDA=_dense_loss,
)
"""The loss over all keys that a query sees; the target is (queries, keys of a sequence)."""
