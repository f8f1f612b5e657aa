"""Write a small real corpus without a download: the sources of Python's standard library.

    python tools/demo_corpus.py --output corpus.jsonl

One record {"text", "path"} per module. The order is that of a hash of the path, so that the last documents, which
become the validation split, are a fair sample.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

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


def write(output: Path, seed: int, max_bytes: float) -> tuple[int, int]:
    """Write the corpus, under its name only once it is whole; returns documents and bytes of text."""
    documents = size = 0
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for text, path in records(Path(sysconfig.get_path("stdlib")), seed, max_bytes):
            file.write(json.dumps({"text": text, "path": path}) + "\n")
            documents += 1
            size += len(text.encode())
    if not documents:
        temporary.unlink()
        raise ValueError(f"no module of the standard library fits into {max_bytes / 1e6} MB (--max-mb)")
    temporary.replace(output)
    return documents, size


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help=".jsonl file to write")
    parser.add_argument("--max-mb", type=float, default=float("inf"), help="megabytes of text (default: all there is)")
    parser.add_argument("--seed", type=int, default=0, help="key of the order (default: 0)")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        documents, size = write(args.output, args.seed, args.max_mb * 1e6)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    print(f"{args.output}: {documents} documents, {size / 1e6:.2f} MB of text")


if __name__ == "__main__":
    main()
