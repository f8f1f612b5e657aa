r"""Tokenize text into Megatron's indexed dataset.

    python tools/preprocess_data.py --input corpus.jsonl --tokenizer-model tokenizer.model \
        --output-prefix corpus --append-eod --workers 8

Reads .jsonl, .json, .csv, .txt (a document per file), .parquet and .arrow; text also as .gz or .zst. Writes
<output-prefix>_<key>_document.bin and .idx for every key; the prefix without .bin is what --data-path takes. The bytes
do not depend on the number of workers. Existing datasets are not overwritten. The same command continues a job that
was killed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import numpy as np

from smp.config.command_line.command import CommandParser, run_tool
from smp.config.command_line.commands import pip_install
from smp.config.command_line.hub import on_this_machine
from smp.data.contents import count_of
from smp.data.files.text_files import expand_paths
from smp.data.indexed_dataset import IndexedDataset, check_new
from smp.data.job_output import is_unfinished
from smp.data.preprocess import Encoder, preprocess
from smp.data.tokenizers.files import PATTERNS

_MUCH_UNKNOWN = 0.01
"""Share of the tokens from which on <unk> is warned of."""


def build_parser() -> CommandParser:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--input", nargs="+", required=True, help="files, folders, patterns or URLs, in this order")
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], help="keys or columns with text to tokenize (.txt: give one)"
    )
    parser.add_argument("--output-prefix", required=True, help="output path without _<key>_document.bin")
    parser.add_argument(
        "--tokenizer-model", required=True, help="file (sentencepiece, tokenizer.json, tiktoken) or folder"
    )
    parser.add_argument(
        "--tiktoken-pattern", choices=PATTERNS, help="how text is split before a tiktoken file's merges"
    )
    parser.add_argument(
        "--backend",
        choices=["reference", "gigatoken"],
        default="reference",
        help=f"gigatoken ({pip_install('gigatoken', 'awkward')}) is faster; its ids are checked against the file's",
    )
    parser.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    parser.add_argument(
        "--partitions", type=int, help="accepted for Megatron's sake, no effect: --workers share each file"
    )
    parser.add_argument(
        "--on-error", choices=["fail", "skip"], default="fail", help="what to do with a record that is not text"
    )
    return parser


def work(args: argparse.Namespace) -> None:
    """Tokenize, and say what came of it."""
    names = [f"{args.output_prefix}_{key}_document" for key in args.json_keys]
    if args.workers < 1:
        raise ValueError(f"--workers {args.workers} is not at least 1")
    if not is_unfinished(args.output_prefix):
        check_new(*names)
    encoder = Encoder(
        on_this_machine(args.tokenizer_model, "tokenizer", "--tokenizer-model"),
        tuple(args.json_keys),
        args.append_eod,
        args.tiktoken_pattern,
        args.backend,
        args.on_error == "skip",
    )
    paths = expand_paths([on_this_machine(name, "dataset", "--input") for name in args.input])
    if args.partitions is not None:
        print(f"note: --partitions {args.partitions} has no effect: the {args.workers} --workers share each file")
    report = preprocess(paths, args.output_prefix, names, encoder, args.workers, print)
    for line in report.named:
        print(f"dropped: {line}", file=sys.stderr)
    for name, size in zip(names, report.text_bytes, strict=True):
        _say_what_came(name, size, report.dropped, encoder.tokenizer.unk)


def _say_what_came(name: str, text_bytes: int, dropped: int, unk: int | None) -> None:
    dataset = IndexedDataset(name)
    ratio = f"{text_bytes / dataset.num_tokens:.4f}" if dataset.num_tokens else "no"
    lengths, unknown = np.diff(dataset.document_offsets), count_of(dataset, unk)
    share = unknown / max(dataset.num_tokens, 1)
    print(
        f"{name}: {dataset.num_documents} documents, {dataset.num_tokens} tokens, {ratio} bytes per token, "
        f"longest {lengths.max(initial=0)} tokens, {(lengths == 0).sum()} empty, {dropped} dropped"
        + (f", {unknown} <unk> ({100 * share:.2f} % of the tokens)" if unknown else "")
    )
    if share > _MUCH_UNKNOWN:
        print(
            f"WARNING: {name}: {100 * share:.2f} % of the tokens are <unk>: the tokenizer cannot spell much of this "
            "text, and a model learns nothing from it there",
            file=sys.stderr,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code, see :mod:`smp.config.command_line.command`."""
    return run_tool(lambda: work(build_parser().parse_args(argv)), "the same command continues from here")


if __name__ == "__main__":
    sys.exit(main())
