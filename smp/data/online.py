"""Text as a data path: tokenized when it is first used, and then a dataset like any other, in the cache folder."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

import xxhash

from smp.config.schema import ConfigError, DataConfig
from smp.data.cache import NodeCache
from smp.data.files.remote import file_state, local_or_remote, of_size_only
from smp.data.indexed_dataset import dataset_paths
from smp.data.preprocess import Encoder, preprocess
from smp.data.tokenizers.files import tokenizer_key

_LARGE = 1 << 24
"""Bytes of text from which on more than one process is worth its start."""


def tokenized(path: str, data: DataConfig, cache: NodeCache) -> tuple[Path, list[str]]:
    """(prefix of the dataset with the documents of a text file, each with the end-of-document token; notes for the
    user, also for a dataset that was there before).

    The first process of a node makes it, with all cores; the others wait for it.

    Args:
        path: a file or a URL: .jsonl (its key text), .txt or .parquet, also compressed.
        data: names the tokenizer.
        cache: where it goes.

    Raises:
        ConfigError: there is no tokenizer.
        ValueError: bad text, named by file and line.
    """
    source = local_or_remote(path)
    if data.tokenizer_model is None:
        raise ConfigError(f"{source} is text: give --tokenizer-model")
    name, size, state = file_state(source)
    key = tokenizer_key(data.tokenizer_model, data.tiktoken_pattern)
    # Everything that the tokens depend on is in the name, so nothing stale is ever found.
    stands_for = f"{name} {size} {state} {key}"
    prefix = cache.folder / f"{source.name}-{xxhash.xxh3_64_hexdigest(stands_for.encode())}"
    finished, notes = dataset_paths(prefix), of_size_only({str(source): state})
    if finished[1].exists():
        return prefix, notes
    with cache.locked():
        if not finished[1].exists():
            print(f"tokenizing {source} into {prefix}", file=sys.stderr)
            # A name of this node: another one that shares the folder works in its own.
            own = str(cache.folder / f".{prefix.name}.{socket.gethostname()}")
            encoder = Encoder(data.tokenizer_model, ("text",), True, data.tiktoken_pattern)
            workers = os.cpu_count() or 1 if size > _LARGE else 1
            try:
                preprocess([source], own, [own], encoder, workers)
            except ValueError:  # the text has to be changed, so these parts are of no further use
                shutil.rmtree(f"{own}.partial", ignore_errors=True)
                raise
            # Another node that shares the folder has made equal bytes; replacing a file leaves open
            # maps of it intact.
            for made, final in zip(dataset_paths(own), finished, strict=True):
                made.replace(final)
    return prefix, notes
