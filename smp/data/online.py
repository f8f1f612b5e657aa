"""Text as a data path: tokenized when it is first used, and then a dataset like any other, in the cache folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import xxhash

from smp.config.schema import ConfigError, DataConfig
from smp.data.cache import NodeCache
from smp.data.indexed_dataset import dataset_paths
from smp.data.preprocess import Encoder, preprocess


def tokenized(path: str, data: DataConfig, cache: NodeCache) -> Path:
    """Prefix of the dataset that holds the documents of a text file, each with the end-of-document token.

    The first process of a node makes it, with all cores; the others wait for it.

    Args:
        path: .jsonl (its key text), .txt or .parquet, also compressed.
        data: names the tokenizer.
        cache: where it goes.

    Raises:
        ConfigError: there is no tokenizer.
        ValueError: bad text, named by file and line.
    """
    if data.tokenizer_model is None:
        raise ConfigError(f"{path} is text: give --tokenizer-model")
    encoder = Encoder(data.tokenizer_model, ("text",), True, data.tiktoken_pattern)
    stat = os.stat(path)
    stands_for = f"{os.path.realpath(path)} {stat.st_size} {stat.st_mtime_ns} {data.tiktoken_pattern}".encode()
    stands_for += Path(data.tokenizer_model).read_bytes()
    prefix = cache.folder / f"{Path(path).name}-{xxhash.xxh3_64_hexdigest(stands_for)}"
    if not dataset_paths(prefix)[1].exists():
        with cache.locked():
            if not dataset_paths(prefix)[1].exists():
                print(f"tokenizing {path} into {prefix}", file=sys.stderr)
                workers = os.cpu_count() or 1
                preprocess([Path(path)], str(prefix), [str(prefix)], encoder, workers if stat.st_size > 1 << 24 else 1)
    return prefix
