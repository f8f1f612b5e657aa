"""Held-out cross-entropy of a bigram model: what a language model must beat to have learned from context.

    python tools/bigram_baseline.py --data-path corpus_text_document --tokenizer-model tokenizer.model

Learns from the training documents of --split and prints nats per token of the validation documents.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

import numpy as np

from smp.config.blend import parse_split
from smp.config.command import CommandParser, run_tool
from smp.config.schema import DataConfig
from smp.data.bigram import bigram_cross_entropy
from smp.data.gpt_dataset import split_documents
from smp.data.indexed_dataset import IndexedDataset
from smp.data.tokenizer_files import PATTERNS, load_tokenizer


def documents(dataset: IndexedDataset, part: range) -> np.ndarray:
    """Tokens of a range of documents, back to back."""
    return dataset.tokens[dataset.document_offsets[part.start] : dataset.document_offsets[part.stop]]


def build_parser() -> CommandParser:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--data-path", required=True, help="prefix of the .bin/.idx pair")
    parser.add_argument("--split", default=DataConfig.split, help="as of pretrain_gpt.py")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--vocab-size", type=int, help="number of token ids")
    size.add_argument("--tokenizer-model", help="gives the vocabulary size and the bytes per token")
    parser.add_argument("--tiktoken-pattern", choices=PATTERNS, help="how a tiktoken file's text is cut")
    parser.add_argument("--bytes-per-token", type=float, help="report bits per byte too (default: from the tokenizer)")
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
    """Command line; returns the exit code, see :mod:`smp.config.command`."""
    return run_tool(lambda: print(report(build_parser().parse_args(argv))))


if __name__ == "__main__":
    sys.exit(main())
