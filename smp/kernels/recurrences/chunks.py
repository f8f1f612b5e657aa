"""Shared parts of recurrences that are computed in chunks of tokens: the layout by chunks, and the decay of a state
within and across chunks, forward and backward.

A state is multiplied by exp(g) at each token, and a token that begins a document forgets all. With G the sum of g in
the chunk up to each token, what token j wrote is worth exp(G_i - G_j) at token i, the state before the chunk exp(G_i),
and at the chunk's end exp(G_C - G_j) and exp(G_C).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from smp.kernels.registry import accumulation_dtype

CHUNK = 64
"""Tokens that are computed at once."""

Pair = tuple[torch.Tensor, torch.Tensor]


class Inputs(NamedTuple):
    """Inputs of a recurrence, for each token.

    Attributes:
        q, k: (rows, length, key heads, key_dim); each of the key heads is that of heads / key heads neighbours.
        v: (rows, length, heads, value_dim).
        g, rate: (rows, length, heads): log of the decay, at most 0, and how much is written. Of the delta rule g may be
            (rows, length, heads, key_dim).
        begins: bool (rows, length), tokens that begin a document; None: none does but the first.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    rate: torch.Tensor
    begins: torch.Tensor | None = None

    def empty_state(self) -> torch.Tensor:
        """The state before the first token: zeros (rows, heads, key_dim, value_dim) in the precision of sums."""
        rows, _, heads, value_dim = self.v.shape
        return self.v.new_zeros(rows, heads, self.k.shape[3], value_dim, dtype=accumulation_dtype(self.v.dtype))


@dataclass
class Decays:
    """How a state fades within and across n chunks of C tokens, for B = rows x heads; 0 where a document's border lies
    between.

    Attributes:
        within: from token j to token i of the chunk, (n, B, C, C), 0 where j comes after i.
        before: from before the chunk to each token, (n, B, C, 1).
        to_end: from each token to the end of the chunk, likewise.
        whole: from before the chunk to its end, (n, B, 1, 1).
    """

    within: torch.Tensor
    before: torch.Tensor
    to_end: torch.Tensor
    whole: torch.Tensor

    @staticmethod
    def of(g: torch.Tensor, begins: torch.Tensor | None, dtype: torch.dtype) -> Decays:
        """The decays by g (rows, length, heads) and ``begins`` bool (rows, length), in ``dtype``."""
        # In fp64: after strong forgetting a sum is large, and fp32 would lose what differences say of mild decays.
        total = by_chunk(g[..., None], torch.float64).cumsum(2)  # (n, B, C, 1)
        last = total[:, :, -1:]
        differences = total - total.transpose(2, 3), total, last - total, last
        within, before, to_end, whole = (x.to(dtype, copy=True) for x in differences)
        future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
        # Masked before exp: the differences above the diagonal may be too large for it.
        within.masked_fill_(future, -torch.inf)
        if begins is not None:
            number, known = documents_of(begins, g.shape[2])
            within.masked_fill_(number != number.transpose(2, 3), -torch.inf)
            before.masked_fill_(number != known, -torch.inf)
            to_end.masked_fill_(number != number[:, :, -1:], -torch.inf)
            whole.masked_fill_(number[:, :, -1:] != known, -torch.inf)
        return Decays(within.exp_(), before.exp_(), to_end.exp_(), whole.exp_())

    def products(self, q: torch.Tensor, k: torch.Tensor) -> Pair:
        """(q k^T) within and (k k^T) within, of (n, B, C, channels)."""
        return (q @ k.transpose(2, 3)).mul_(self.within), (k @ k.transpose(2, 3)).mul_(self.within)

    def products_backward(
        self,
        dscores: torch.Tensor,
        dkeys: torch.Tensor,
        scores: torch.Tensor,
        keys: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of q, of k and of the logarithm of ``within``, of those of :meth:`products`, which are
        multiplied in place."""
        # d log(within) = within x d within = (gradient of a product) x (the product): no division by a decay.
        of_pairs = (dkeys * keys).addcmul_(dscores, scores)
        dscores.mul_(self.within)
        dkeys.mul_(self.within)
        dk = dscores.transpose(2, 3) @ q + (dkeys + dkeys.transpose(2, 3)) @ k
        return dscores @ k, dk, of_pairs

    def of_numbers(self, x: torch.Tensor) -> torch.Tensor:
        """The gradient of what all channels were multiplied by, of products of both."""
        return x.sum(3, keepdim=True)

    def of_states(self, x: torch.Tensor) -> torch.Tensor:
        """The gradient by the logarithm of ``whole`` of products with states, (n, B, key channels, value channels)."""
        return x.sum((2, 3), keepdim=True) * self.whole

    def gradient(
        self, of_pairs: torch.Tensor, before: torch.Tensor, to_end: torch.Tensor, whole: torch.Tensor
    ) -> torch.Tensor:
        """Gradient of g, see :func:`decay_gradient`."""
        return decay_gradient(of_pairs, before, to_end, whole)


def decay_gradient(
    within: torch.Tensor, before: torch.Tensor, to_end: torch.Tensor, whole: torch.Tensor
) -> torch.Tensor:
    """The gradient of g, (n, B, C, 1), from gradients of the logarithms of :class:`Decays`, which have its shapes.

    The decay of token t is in what passes it: pairs of a token from t on and one before, what comes from before the
    chunk to tokens from t on, what goes from tokens before t after the chunk, and what passes the chunk. Sums of
    these, and not of differences, which would round more.
    """
    # Row t of the product sums the pairs of tokens i >= t; tril(-1) keeps those with j < t.
    here_on = torch.ones(CHUNK, CHUNK, dtype=within.dtype, device=within.device).triu()
    dg = (here_on @ within).tril_(-1).sum(-1, keepdim=True)
    return dg.add_(passing_gradient(before, to_end, whole))


def passing_gradient(before: torch.Tensor, to_end: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The part of :func:`decay_gradient` that comes from states, not from pairs of a chunk; for any number of
    channels."""
    # to_end: tokens before t, without t itself, whose writes its decay does not touch.
    return from_here_on(before).add_(to_end.cumsum(-2) - to_end + whole)


def from_here_on(x: torch.Tensor) -> torch.Tensor:
    """Reversed cumulative sum over a chunk, (..., C, channels) -> the same: each token and all later ones."""
    # Not total - cumsum + x: differences of sums would round more.
    return x.flip(-2).cumsum(-2).flip(-2)


def by_chunk(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """(rows, length, heads, channels) -> (n, rows x heads, C, channels), zeros after the last token. In ``dtype``, by
    default that of sums."""
    rows, length, heads, channels = x.shape
    count, dtype = -(-length // CHUNK), dtype or accumulation_dtype(x.dtype)
    out = torch.empty((count, rows, heads, CHUNK, channels), dtype=dtype, device=x.device)
    into = out.permute(1, 0, 3, 2, 4)  # (rows, n, C, heads, channels)
    # Copied straight to where it belongs: padding first would copy all of it twice.
    whole = length // CHUNK
    into[:, :whole].copy_(x[:, : whole * CHUNK].unflatten(1, (whole, CHUNK)))
    if whole < count:
        rest = length - whole * CHUNK
        into[:, -1, :rest].copy_(x[:, whole * CHUNK :])
        into[:, -1, rest:].zero_()
    return out.flatten(1, 2)


def as_tokens(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`by_chunk`, in the shape and dtype of ``like``."""
    rows, length, heads = like.shape[:3]
    # (rows, n x C, heads, channels), without the padding of the last chunk
    by_row = x.unflatten(1, (rows, heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
    return by_row.to(like.dtype).contiguous()


def documents_of(begins: torch.Tensor, heads: int) -> Pair:
    """Number of each token's document in its row, and of the one that the chunk before ended in, both int64 (n, B, C or
    1, 1)."""
    rows, length = begins.shape
    # 0 before the first beginning: what came in with the first state is of that document.
    number = begins.long().cumsum(1)
    count = -(-length // CHUNK)
    # Padding after the last token counts to its document, so that no state is forgotten at the end.
    number = torch.cat((number, number[:, -1:].expand(rows, count * CHUNK - length)), 1).unflatten(1, (count, CHUNK))
    known = torch.cat((torch.zeros_like(number[:, :1, -1:]), number[:, :-1, -1:]), 1)  # (rows, n, 1)
    number, known = (x.transpose(0, 1).repeat_interleave(heads, 1)[..., None] for x in (number, known))
    return number, known


def gradients_fake(dout: torch.Tensor, dlast: torch.Tensor, *saved: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of :class:`Inputs` but ``begins`` and of the first state, as to shapes."""
    return *(x.new_empty(x.shape) for x in saved[:5]), dlast.new_empty(dlast.shape)
