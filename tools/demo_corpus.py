"""Write a small real corpus without a download: the sources of Python's standard library.

    python tools/demo_corpus.py --output corpus.jsonl
    python tools/demo_corpus.py --output pairs.jsonl --pairs

One record {"text", "path"} per module. The order is that of a hash of the path, so that the last documents, which
become the validation split, are a fair sample. With --pairs one record {"prompt", "completion", "path"} per function
that has a docstring, to fine-tune on: its head, and the first paragraph of the docstring. A file that is there already
is not overwritten.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from smp.config.command_line.command import CommandParser, refuse_existing, run_tool

QUOTES = '"""'
LONGEST_PAIR = 500
"""Characters of a head and its docstring."""
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def module_paths(root: Path, seed: int) -> list[Path]:
    """Python files below ``root``, relative to it, in hashed order; tests and installed packages are left out."""
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    kept = [path for path in paths if not SKIPPED_FOLDERS.intersection(path.parts)]
    return sorted(kept, key=lambda path: hashlib.sha256(f"{seed} {path.as_posix()}".encode()).digest())


def records(root: Path, seed: int, max_bytes: float) -> Iterator[tuple[str, str]]:
    """(text, path) of non-empty UTF-8 modules until their text reaches ``max_bytes``."""
    written = 0
    for path in module_paths(root, seed):
        content = (root / path).read_bytes()
        try:
            text = content.decode()
        except UnicodeDecodeError:  # a few modules declare another encoding
            continue
        if written + len(content) > max_bytes:
            return
        if text:
            written += len(content)
            yield text, path.as_posix()


def functions(source: str) -> Iterator[tuple[str, str]]:
    """(head with the quotes of the docstring, its first paragraph with the closing quotes) of each function."""
    lines = source.splitlines()
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # a module that shows what does not compile
        return
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            head = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1]))
            paragraph = text.split("\n\n")[0]
            if head and len(head) + len(paragraph) <= LONGEST_PAIR and QUOTES not in paragraph:
                yield f"{head}\n    {QUOTES}", f"{paragraph}{QUOTES}"


def pairs_of(documents: Iterable[tuple[str, str]]) -> Iterator[dict[str, str]]:
    """Records for fine-tuning, each prompt once."""
    seen = set()
    for source, path in documents:
        for prompt, completion in functions(source):
            if prompt not in seen:
                seen.add(prompt)
                yield {"prompt": prompt, "completion": completion, "path": path}


def write(output: Path, seed: int, max_bytes: float, pairs: bool = False) -> tuple[int, int]:
    """Write the corpus, under its name only once it is whole; returns records and bytes of text."""
    documents = size = 0
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        modules = records(Path(sysconfig.get_path("stdlib")), seed, max_bytes)
        for record in pairs_of(modules) if pairs else ({"text": text, "path": path} for text, path in modules):
            file.write(json.dumps(record) + "\n")
            documents += 1
            size += sum(len(text.encode()) for key, text in record.items() if key != "path")
    if not documents:
        temporary.unlink()
        raise ValueError(f"no module of the standard library fits into {max_bytes / 1e6} MB (--max-mb)")
    temporary.replace(output)
    return documents, size


def build_parser() -> CommandParser:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help=".jsonl file to write")
    parser.add_argument("--max-mb", type=float, default=float("inf"), help="megabytes of text (default: all there is)")
    parser.add_argument("--pairs", action="store_true", help="functions and their docstrings instead of whole modules")
    parser.add_argument("--seed", type=int, default=0, help="key of the order")
    return parser


def work(args: argparse.Namespace) -> None:
    """Write, and say how much."""
    refuse_existing(args.output)
    documents, size = write(args.output, args.seed, args.max_mb * 1e6, args.pairs)
    print(f"{args.output}: {documents} {'pairs' if args.pairs else 'documents'}, {size / 1e6:.2f} MB of text")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code, see :mod:`smp.config.command_line.command`."""
    return run_tool(lambda: work(build_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
