"""Bigram language model with interpolated Kneser-Ney smoothing: what a model must beat to have learned context.

    P(y | x) = max(c(x, y) - d, 0) / c(x) + d * n(x) / c(x) * P(y),    P(y) = (m(y) + k) / (sum(m) + k * V)

c are counts of the training tokens, n(x) the different successors of x, m(y) the different predecessors of y. A y that
was never seen has probability through k, an x that was never seen has P(y | x) = P(y).
Source: Kneser and Ney, ICASSP 1995; Chen and Goodman, 1999, section 2.7.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DISCOUNTS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
UNSEEN_COUNT = 0.5  # k
_TUNING_SHARE = 10  # the last 1/10 of the training tokens chooses d


@dataclass(frozen=True)
class BigramModel:
    """Counts of pairs of adjacent tokens; a pair (x, y) is the number x * vocab_size + y."""

    vocab_size: int
    pairs: npt.NDArray[np.int64]  # (different pairs,), sorted
    counts: npt.NDArray[np.int64]  # (different pairs,)
    totals: npt.NDArray[np.int64]  # (vocab,), pairs that start with x
    successors: npt.NDArray[np.int64]  # (vocab,), different pairs that start with x
    unigram: npt.NDArray[np.float64]  # (vocab,), P(y)

    @classmethod
    def fit(cls, tokens: npt.NDArray[np.int64], vocab_size: int) -> BigramModel:
        """Count the adjacent pairs of ``tokens`` (n,), n >= 2, ids below ``vocab_size``."""
        pairs, counts = np.unique(_pairs(tokens, vocab_size), return_counts=True)
        predecessors = np.bincount(pairs % vocab_size, minlength=vocab_size) + UNSEEN_COUNT
        return cls(
            vocab_size,
            pairs,
            counts,
            np.bincount(tokens[:-1], minlength=vocab_size),
            np.bincount(pairs // vocab_size, minlength=vocab_size),
            predecessors / predecessors.sum(),
        )

    def cross_entropy(self, tokens: npt.NDArray[np.int64], discount: float) -> float:
        """Mean of -ln P(y | x) in nats over the adjacent pairs of ``tokens`` (n,), n >= 2."""
        wanted = _pairs(tokens, self.vocab_size)
        at = np.minimum(np.searchsorted(self.pairs, wanted), len(self.pairs) - 1)
        count = np.where(self.pairs[at] == wanted, self.counts[at], 0)
        total = self.totals[tokens[:-1]]
        seen = np.maximum(total, 1)
        spread = np.where(total > 0, discount * self.successors[tokens[:-1]] / seen, 1.0)
        probability = np.maximum(count - discount, 0) / seen + spread * self.unigram[tokens[1:]]
        return float(-np.log(probability).mean())


def bigram_cross_entropy(train: npt.ArrayLike, valid: npt.ArrayLike, vocab_size: int) -> tuple[float, float]:
    """Held-out cross-entropy of a bigram model.

    Args:
        train, valid: token ids, (n,) each, documents back to back. Only ``train`` is learned from: the discount is the
            one of DISCOUNTS that is best for its last tenth when fitted to the rest.
        vocab_size: number of token ids.

    Returns:
        Nats per token of ``valid``, and the discount.

    Raises:
        ValueError: too few tokens, or an id outside the vocabulary.
    """
    train, valid = _checked(train, vocab_size, "training", 20), _checked(valid, vocab_size, "validation", 2)
    cut = len(train) - len(train) // _TUNING_SHARE
    tuning = BigramModel.fit(train[:cut], vocab_size)
    discount = min(DISCOUNTS, key=lambda candidate: tuning.cross_entropy(train[cut:], candidate))
    return BigramModel.fit(train, vocab_size).cross_entropy(valid, discount), discount


def _pairs(tokens: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.int64]:
    return tokens[:-1] * vocab_size + tokens[1:]


def _checked(tokens: npt.ArrayLike, vocab_size: int, name: str, least: int) -> npt.NDArray[np.int64]:
    ids = np.asarray(tokens).astype(np.int64)
    if len(ids) < least:
        raise ValueError(f"the {name} split has {len(ids)} tokens, a bigram model needs {least}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"{name} token ids {ids.min()}..{ids.max()} are outside a vocabulary of {vocab_size}")
    return ids
