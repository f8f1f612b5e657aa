"""Per-channel decays of a recurrence's state (Kimi delta attention), computed in chunks of tokens.

With G the sum of g in the chunk up to each token, of each channel c, a product of two tokens of one document is

    P_ij = sum over c of l_ic r_jc exp(G_ic - G_jc)      for i >= j

With one decay per head this is a matrix product times a matrix of decays; with one per channel it is not, and exp(G_i)
and exp(-G_j) as separate factors would overflow. So pairs are computed by halves: in each group of 2 s neighbouring
tokens the second half with the first, for s = 1, 2, 4, ..., C / 2. With m the last token of the first half both
exp(G_i - G_m) and exp(G_m - G_j) are at most 1. That takes log2(C) matrix products, with C K exponentials for each; on
the diagonal, i = j, the decay is 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from smp.kernels.recurrences.chunks import CHUNK, by_chunk, documents_of, from_here_on, passing_gradient


@dataclass
class ChannelDecays:
    """As :class:`~smp.kernels.recurrences.chunks.Decays`, of n chunks of C tokens, B = rows x heads and K channels.

    Attributes:
        total: G, fp64 (n, B, C, K).
        same_document: bool (n, B, C, C), pairs of tokens of one document; None: all are.
        before: from before the chunk to each token, (n, B, C, K), 0 where a document's border lies between.
        to_end: from each token to the end of the chunk, likewise.
        whole: from before the chunk to its end, (n, B, K, 1), for the rows of a state.
    """

    total: torch.Tensor
    same_document: torch.Tensor | None
    before: torch.Tensor
    to_end: torch.Tensor
    whole: torch.Tensor

    @staticmethod
    def of(g: torch.Tensor, begins: torch.Tensor | None, dtype: torch.dtype) -> ChannelDecays:
        """The decays by g (rows, length, heads, K) and ``begins`` bool (rows, length), in ``dtype``."""
        total = by_chunk(g, torch.float64).cumsum(2)
        last, same_document = total[:, :, -1:], None
        before, to_end, whole = (x.to(dtype, copy=True).exp_() for x in (total, last - total, last.transpose(2, 3)))
        if begins is not None:
            number, known = documents_of(begins, g.shape[2])
            same_document = number == number.transpose(2, 3)
            # After exp, and not -inf before it as in ``Decays``: here all exponents are at most 0.
            before.masked_fill_(number != known, 0.0)
            to_end.masked_fill_(number != number[:, :, -1:], 0.0)
            whole.masked_fill_(number[:, :, -1:] != known, 0.0)
        return ChannelDecays(total, same_document, before, to_end, whole)

    def products(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """P of q and k, and of k and k, (n, B, C, C), 0 above the diagonal."""
        scores, keys = (q.new_zeros(*q.shape[:3], CHUNK) for _ in range(2))
        for at, later, earlier in self._halves(q.dtype):
            # (n, B, C / 2s, K, s)
            right = (_half(k, at, 0) * earlier).transpose(3, 4)
            for left, into in ((q, scores), (k, keys)):
                _block(into, at).copy_((_half(left, at, 1) * later) @ right)
        for left, into in ((q, scores), (k, keys)):
            # A token with itself, which no pair of halves covers; exp(G_i - G_i) is 1.
            into.diagonal(dim1=2, dim2=3).copy_((left * k).sum(3))
            self._within_documents(into)
        return scores, keys

    def products_backward(
        self,
        dscores: torch.Tensor,
        dkeys: torch.Tensor,
        scores: torch.Tensor,
        keys: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of q, of k, and of G as far as these products go, (n, B, C, K). ``dkeys`` has nothing on the
        diagonal; what stands above it, or between documents, in both is not read."""
        for x in (dscores, dkeys):
            self._within_documents(x)
        # (n, B, C, 1): of tokens with themselves
        alone = dscores.diagonal(dim1=2, dim2=3)[..., None]
        dq, dleft, dright = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(k)
        for at, later, earlier in self._halves(q.dtype):
            right, of_scores, of_keys = _half(k, at, 0) * earlier, _block(dscores, at), _block(dkeys, at)
            _half(dq, at, 1).addcmul_(of_scores @ right, later)
            _half(dleft, at, 1).addcmul_(of_keys @ right, later)
            summed = of_scores.transpose(3, 4) @ (_half(q, at, 1) * later)
            summed += of_keys.transpose(3, 4) @ (_half(k, at, 1) * later)
            # A product has two factors: second halves get a gradient as the left one, first halves as the right one.
            _half(dright, at, 0).addcmul_(summed, earlier)
        dtotal = (q * dq).addcmul_(k, dleft).addcmul_(k, dright, value=-1)  # of a token with itself nothing fades
        return dq.addcmul_(alone, k), dleft.add_(dright).addcmul_(alone, q), dtotal

    def of_numbers(self, x: torch.Tensor) -> torch.Tensor:
        """The gradient of what channels were multiplied by, of products of both."""
        return x

    def of_states(self, x: torch.Tensor) -> torch.Tensor:
        """The gradient by the logarithm of ``whole``, in the shape of G's last token, of products with states (n, B, K,
        value channels)."""
        return (x.sum(3, keepdim=True) * self.whole).transpose(2, 3)

    def gradient(
        self, of_pairs: torch.Tensor, before: torch.Tensor, to_end: torch.Tensor, whole: torch.Tensor
    ) -> torch.Tensor:
        """Gradient of g, (n, B, C, K), from the gradients of G and of the logarithms of ``before``, ``to_end`` and
        ``whole``."""
        # G is a cumulative sum of g, so the gradient of g is a reversed cumulative sum of G's.
        return from_here_on(of_pairs).add_(passing_gradient(before, to_end, whole))

    def _halves(self, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """(s, exp(G_i - G_m) of second halves, exp(G_m - G_j) of first ones), (n, B, C / 2s, s, K) each."""
        at = CHUNK // 2
        while at:
            first, second = _half(self.total, at, 0), _half(self.total, at, 1)
            # Between the two: both exponents are at most 0, whatever g is.
            middle = first[:, :, :, -1:]
            yield at, (second - middle).to(dtype).exp_(), (middle - first).to(dtype).exp_()
            at //= 2

    def _within_documents(self, x: torch.Tensor) -> None:
        if self.same_document is not None:
            x.masked_fill_(~self.same_document, 0.0)


def _half(x: torch.Tensor, at: int, which: int) -> torch.Tensor:
    """The first or second half of each 2 ``at`` tokens of (n, B, C, K): a view (n, B, C / 2 at, at, K)."""
    return x.unflatten(2, (-1, 2, at))[:, :, :, which]


def _block(x: torch.Tensor, at: int) -> torch.Tensor:
    """The pairs of a second half with its first half, of (n, B, C, C): a view (n, B, C / 2 at, at, at)."""
    apart = x.unflatten(3, (-1, 2, at))[:, :, :, :, 0].unflatten(2, (-1, 2, at))[:, :, :, 1]
    return apart.diagonal(dim1=2, dim2=4).permute(0, 1, 4, 2, 3)
