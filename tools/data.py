"""Look at indexed datasets, check them, and put them together or apart.

    python tools/data.py ls corpus_text_document other          # sizes; a folder lists what it holds
    python tools/data.py head corpus_text_document --tokenizer-model tokenizer.model --count 3
    python tools/data.py verify corpus_text_document --vocab-size 32000
    python tools/data.py merge all_text_document part1_text_document part2_text_document
    python tools/data.py split corpus_text_document --parts 8   # or --fractions 969,30,1

A dataset is named by its prefix, without .bin or .idx. merge writes what Megatron's own merge writes. verify reads
every token; with --data-cache-path a later run with that folder need not do so again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from smp.config.blend import parse_split
from smp.config.command_line.command import CommandParser, run_tool
from smp.config.schema import DataConfig
from smp.data.cache import NodeCache
from smp.data.contents import check_integers, check_vocabulary, contents_of
from smp.data.gpt_dataset import split_documents
from smp.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, check_new
from smp.data.tokenizers.files import PATTERNS, load_tokenizer


def describe(prefix: str) -> str:
    """One line about a dataset."""
    dataset = IndexedDataset(prefix)
    lengths = np.diff(dataset.document_offsets)
    mean = f"{lengths.mean():.1f}" if len(lengths) else "no"
    return (
        f"{prefix}: {dataset.num_documents} documents, {len(dataset)} sequences, {dataset.num_tokens} tokens, "
        f"{dataset.dtype.name}, mean {mean}, longest {lengths.max(initial=0)}, {(lengths == 0).sum()} empty"
    )


def prefixes_in(path: str) -> list[str]:
    """The datasets of a folder, or the one of that prefix."""
    if not Path(path).is_dir():
        return [path]
    found = sorted(str(idx)[: -len(".idx")] for idx in Path(path).glob("*.idx"))
    if not found:
        raise ValueError(f"{path}: holds no .idx file")
    return found


def copy(writer: IndexedDatasetWriter, dataset: IndexedDataset, documents: Iterable[int]) -> None:
    """Append documents, sequence by sequence as they are."""
    for number in documents:
        first, last = dataset.document_indices[number : number + 2]
        writer.add_document(dataset.document(number), dataset.lengths[first:last].tolist())


def ls(args: argparse.Namespace) -> None:
    for path in args.paths:
        for prefix in prefixes_in(path):
            print(describe(prefix))


def head(args: argparse.Namespace) -> None:
    dataset = IndexedDataset(args.prefix)
    tokenizer = load_tokenizer(args.tokenizer_model, args.tiktoken_pattern) if args.tokenizer_model else None
    if tokenizer:
        check_integers(dataset)
    if args.start >= dataset.num_documents:
        raise ValueError(f"--start {args.start}: {args.prefix} has {dataset.num_documents} documents")
    for number in range(args.start, min(args.start + args.count, dataset.num_documents)):
        ids = dataset.document(number)
        shown = ids[: args.tokens].tolist()
        rest = f" ... {len(ids) - len(shown)} more" if len(ids) > len(shown) else ""
        print(f"document {number}, {len(ids)} tokens: {repr(tokenizer.decode(shown)) if tokenizer else shown}{rest}")


def verify(args: argparse.Namespace) -> None:
    for path in args.paths:
        for prefix in prefixes_in(path):
            dataset = IndexedDataset(prefix)
            cache = NodeCache(args.data_cache_path) if args.data_cache_path else None
            contents = contents_of(dataset, cache)
            if args.vocab_size is not None:
                check_vocabulary(dataset, contents, args.vocab_size)
            print(f"{describe(prefix)}, ids {contents.lowest} to {contents.highest}, contents {contents.key}")


def merge(args: argparse.Namespace) -> None:
    parts = [IndexedDataset(prefix) for prefix in args.inputs]
    types = {part.dtype.name for part in parts}
    if len(types) > 1:
        raise ValueError(f"token types differ: {', '.join(f'{p.bin_path} {p.dtype.name}' for p in parts)}")
    check_new(args.output)
    with IndexedDatasetWriter(args.output, parts[0].dtype) as writer:
        for part in parts:
            copy(writer, part, range(part.num_documents))
    print(describe(args.output))


def split(args: argparse.Namespace) -> None:
    dataset = IndexedDataset(args.prefix)
    documents = dataset.num_documents
    if args.parts is not None:
        if not 0 < args.parts <= max(documents, 1):
            raise ValueError(f"--parts {args.parts}: there are {documents} documents")
        bounds = [round(i * documents / args.parts) for i in range(args.parts + 1)]
        ranges = {f"{i:05d}": range(*bounds[i : i + 2]) for i in range(args.parts)}
    else:
        fractions = parse_split(args.fractions, "--fractions")
        ranges = dict(zip(("train", "valid", "test"), split_documents(documents, fractions), strict=True))
    outputs = {f"{args.output or args.prefix}_{name}": part for name, part in ranges.items()}
    check_new(*outputs)
    for prefix, part in outputs.items():
        if not part:
            print(f"{prefix}: not written, it would have no documents")
            continue
        with IndexedDatasetWriter(prefix, dataset.dtype) as writer:
            copy(writer, dataset, part)
        print(describe(prefix))


def count(text: str) -> int:
    """An argument that is a number from 0 on."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or above")
    return number


def build_parser() -> CommandParser:
    parser = CommandParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for action in (ls, verify):
        one = commands.add_parser(action.__name__, help="sizes" if action is ls else "read everything and check it")
        one.add_argument("paths", nargs="+", help="prefixes, or folders of datasets")
        one.set_defaults(run=action)
        if action is verify:
            one.add_argument("--vocab-size", type=count, help="refuse token ids from here on")
            one.add_argument("--data-cache-path", help="keep what was found for training runs with this folder")
    one = commands.add_parser("head", help="show documents")
    one.add_argument("prefix", help="dataset: its path without .bin and .idx")
    one.add_argument("--count", type=count, default=3, help="documents")
    one.add_argument("--start", type=count, default=0, help="the first one")
    one.add_argument("--tokens", type=count, default=64, help="tokens of each")
    one.add_argument("--tokenizer-model", help="show text instead of ids")
    one.add_argument("--tiktoken-pattern", choices=PATTERNS, help="how a tiktoken file's text is cut")
    one.set_defaults(run=head)
    one = commands.add_parser("merge", help="several datasets to one, in their order")
    one.add_argument("output", help="prefix of the new dataset")
    one.add_argument("inputs", nargs="+", help="prefixes of the datasets")
    one.set_defaults(run=merge)
    one = commands.add_parser("split", help="one dataset to several, in its order")
    one.add_argument("prefix", help="dataset: its path without .bin and .idx")
    one.add_argument("--output", help="prefix of the parts' names (default: that of the input)")
    how = one.add_mutually_exclusive_group()
    how.add_argument("--parts", type=int, help="so many, with equal numbers of documents")
    how.add_argument("--fractions", default=DataConfig.split, help="train,valid,test")
    one.set_defaults(run=split)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code, see :mod:`smp.config.command_line.command`."""

    def work() -> None:
        args = build_parser().parse_args(argv)
        args.run(args)

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
