"""Train a sentencepiece tokenizer that loses nothing: decode(encode(text)) == text, white space included.

    python tools/train_tokenizer.py --input corpus.jsonl --model-prefix tokenizer --vocab-size 4096

Writes <model-prefix>.model. The same input and options give the same bytes.
"""

from __future__ import annotations

import argparse
import heapq
import io
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from smp.data.text_files import expand_paths, read_texts
from smp.data.tokenizer import END_OF_DOCUMENT

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
            minloglevel=1,
            **LOSSLESS,
        )
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"sentencepiece cannot train a {model_type} model of {vocab_size}: {reason}") from None
    return model.getvalue()


def write_atomically(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", required=True, help=".jsonl and .txt files or glob patterns")
    parser.add_argument("--json-key", default="text", help="key of the text in a .jsonl record (default: text)")
    parser.add_argument("--model-prefix", required=True, help="output path without .model")
    parser.add_argument("--vocab-size", type=int, required=True, help="number of pieces, 256 bytes included")
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="default: bpe")
    parser.add_argument(
        "--input-sentence-size", type=int, default=0, help="learn from a random sample of so many lines (default: all)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        texts = read_texts(expand_paths(args.input), args.json_key)
        model = train(texts, args.vocab_size, args.model_type, args.input_sentence_size)
        path = Path(f"{args.model_prefix}.model")
        write_atomically(path, model)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    print(f"{path}: {args.model_type}, {args.vocab_size} pieces")


if __name__ == "__main__":
    main()
