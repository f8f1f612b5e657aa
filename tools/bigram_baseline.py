"""Held-out cross-entropy of a bigram model: what a language model must beat to have learned from context.

    python tools/bigram_baseline.py --data-path corpus_text_document --tokenizer-model tokenizer.model

Learns from the training documents of --split and prints nats per token of the validation documents. The model is
smoothed by interpolated Kneser-Ney (Kneser and Ney, ICASSP 1995; Chen and Goodman, 1999, section 2.7):

    P(y | x) = max(c(x, y) - d, 0) / c(x) + d * n(x) / c(x) * P(y),    P(y) = (m(y) + k) / (sum(m) + k * V)

c are counts of the training tokens, n(x) the different successors of x, m(y) the different predecessors of y. A y that
was never seen has probability through k, an x that was never seen has P(y | x) = P(y).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from smp.config.blend import parse_split
from smp.config.command_line.command import CommandParser, run_tool
from smp.config.schema import DataConfig
from smp.data.gpt_dataset import split_documents
from smp.data.indexed_dataset import IndexedDataset
from smp.data.tokenizers.files import PATTERNS, load_tokenizer

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


def documents(dataset: IndexedDataset, part: range) -> np.ndarray:
    """Tokens of a range of documents, back to back."""
    return dataset.tokens[dataset.document_offsets[part.start] : dataset.document_offsets[part.stop]]


def build_parser() -> CommandParser:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--data-path", required=True, help="prefix of the .bin/.idx pair")
    parser.add_argument("--split", default=DataConfig.split, help="as for pretrain_gpt.py")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--vocab-size", type=int, help="number of token ids")
    size.add_argument("--tokenizer-model", help="tokenizer that gives the vocabulary size and the bytes per token")
    parser.add_argument(
        "--tiktoken-pattern", choices=PATTERNS, help="how text is split before a tiktoken file's merges"
    )
    parser.add_argument(
        "--bytes-per-token",
        type=float,
        help="mean bytes per token, to report bits per byte too (default: from the tokenizer)",
    )
    return parser


def report(args: argparse.Namespace) -> str:
    tokenizer = load_tokenizer(args.tokenizer_model, args.tiktoken_pattern) if args.tokenizer_model else None
    dataset = IndexedDataset(args.data_path)
    train_part, valid_part, _ = split_documents(dataset.num_documents, parse_split(args.split))
    train, valid = documents(dataset, train_part), documents(dataset, valid_part)
    nats, discount = bigram_cross_entropy(train, valid, tokenizer.vocab_size if tokenizer else args.vocab_size)
    line = f"bigram: {nats:.4f} nats per token over {len(valid)} validation tokens"
    bytes_per_token = args.bytes_per_token
    if bytes_per_token is None and tokenizer:
        bytes_per_token = len(tokenizer.decode(valid.tolist()).encode()) / len(valid)
    if bytes_per_token is not None:
        line += f", {nats / math.log(2) / bytes_per_token:.4f} bits per byte at {bytes_per_token:.4f} bytes per token"
    return f"{line} (Kneser-Ney discount {discount}, {len(train)} training tokens)"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code, see :mod:`smp.config.command_line.command`."""
    return run_tool(lambda: print(report(build_parser().parse_args(argv))))


if __name__ == "__main__":
    sys.exit(main())
