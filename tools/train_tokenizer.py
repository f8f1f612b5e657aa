"""Train a sentencepiece tokenizer that loses nothing: decode(encode(text)) == text, white space included.

    python tools/train_tokenizer.py --input corpus.jsonl --model-prefix tokenizer --vocab-size 4096

Writes <model-prefix>.model, which must not be there yet. The same input and options give the same bytes.
"""

from __future__ import annotations

import argparse
import heapq
import io
import os
import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from smp.config.command_line.command import CommandParser, refuse_existing, run_tool
from smp.data.files.text_files import expand_paths, read_texts
from smp.data.tokenizers.tokenizer import END_OF_DOCUMENT

LOSSLESS: dict[str, Any] = {
    "byte_fallback": True,  # a character without a piece becomes its UTF-8 bytes
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "allow_whitespace_only_pieces": True,  # one piece for an indentation
    "split_digits": True,
    "user_defined_symbols": ["\n"],  # sentencepiece learns from lines and never sees one
}


def lines_of(texts: Iterable[str]) -> Iterator[str]:
    """Lines without their end: what sentencepiece calls a sentence."""
    for text in texts:
        yield from (line for line in text.split("\n") if line)


def sample(lines: Iterable[str], count: int) -> Iterator[str]:
    """``count`` of the lines, each as likely as any other, in their order. (Sentencepiece's own sample has no seed.)"""
    draw = random.Random(0).random
    chosen = heapq.nsmallest(count, ((draw(), number, line) for number, line in enumerate(lines)))
    return (line for _, _, line in sorted(chosen, key=lambda item: item[1]))


def train(texts: Iterable[str], vocab_size: int, model_type: str, input_sentence_size: int) -> bytes:
    """A serialized sentencepiece model.

    Raises:
        ValueError: there is no text, or it cannot give that many pieces.
    """
    if vocab_size < 1:
        raise ValueError(f"--vocab-size {vocab_size} must be above 0")
    model = io.BytesIO()
    lines = lines_of(texts)
    if input_sentence_size:
        lines = sample(lines, input_sentence_size)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            max_sentence_length=2**30,  # in bytes; longer lines would be left out
            num_threads=16,  # partial sums of the unigram model depend on it: not the number of cores
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            eos_piece=END_OF_DOCUMENT,
            minloglevel=2,  # its warnings name its own flags
            **LOSSLESS,
        )
    except RuntimeError as error:
        raise ValueError(_explained(str(error), vocab_size)) from None
    return model.getvalue()


def _explained(reason: str, vocab_size: int) -> str:
    """What sentencepiece says, as what to do."""
    if "sentences_.empty()" in reason:
        return "--input holds no text"
    if most := re.search(r"too high .* value <= (\d+)", reason):
        return f"--vocab-size {vocab_size}: the text gives {most[1]} pieces at most; ask for fewer, or give more text"
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", reason):
        return f"--vocab-size {vocab_size}: bytes and characters of the text alone are {least[1]} pieces; ask for more"
    return f"sentencepiece: {' '.join(reason.split())}"


def write_atomically(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def build_parser() -> CommandParser:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--input", nargs="+", required=True, help=".jsonl and .txt files or glob patterns")
    parser.add_argument("--json-key", default="text", help="key of the text in a .jsonl record")
    parser.add_argument("--model-prefix", required=True, help="output path without .model")
    parser.add_argument("--vocab-size", type=int, required=True, help="number of tokens, including the 256 bytes")
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="algorithm")
    parser.add_argument(
        "--input-sentence-size", type=int, default=0, help="learn from a random sample of this many lines (0: all)"
    )
    return parser


def work(args: argparse.Namespace) -> None:
    """Train, write, and say what."""
    path = Path(f"{args.model_prefix}.model")
    refuse_existing(path)
    texts = read_texts(expand_paths(args.input), args.json_key)
    write_atomically(path, train(texts, args.vocab_size, args.model_type, args.input_sentence_size))
    print(f"{path}: {args.model_type}, {args.vocab_size} pieces")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code, see :mod:`smp.config.command_line.command`."""
    return run_tool(lambda: work(build_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
