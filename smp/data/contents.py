"""The contents of a data set: a hash of all its bytes, and its smallest and largest token id.

Both need every byte, so they are found in one pass, and remembered under the files' names, sizes and times of change.
The hash keys whatever is derived from the data: other data under an old name never meet an old index.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import numpy as np
import xxhash

from smp.data.cache import NodeCache
from smp.data.indexed_dataset import IndexedDataset

_CHUNK = 1 << 22  # tokens; a few MB stay in the processor's cache between the hash and the extremes


@dataclass(frozen=True)
class Contents:
    """What one data set contains.

    Attributes:
        key: hash of both files, 32 hexadecimal digits.
        lowest, highest: token ids; 0 and -1 when there are none.
    """

    key: str
    lowest: int
    highest: int


def check_integers(dataset: IndexedDataset) -> None:
    """Raise ValueError for a data set of floats: Megatron's format allows them, no vocabulary does."""
    if dataset.dtype.kind not in "iu":
        raise ValueError(f"{dataset.bin_path}: holds {dataset.dtype}, token ids are integers")


def scan(dataset: IndexedDataset) -> Contents:
    """Read everything once. Raises ValueError when the tokens are not integers."""
    check_integers(dataset)
    # The index first, then the tokens, as they come.
    state = xxhash.xxh3_128(np.memmap(dataset.idx_path, dtype=np.uint8, mode="r").data)
    lowest, highest = 0, -1
    for start, chunk in _chunks(dataset):
        state.update(chunk.view(np.uint8).data)
        low, high = int(chunk.min()), int(chunk.max())
        # The first chunk sets both; 0 and -1 mean that there are none.
        lowest, highest = (min(lowest, low), max(highest, high)) if start else (low, high)
    return Contents(state.hexdigest(), lowest, highest)


def count_of(dataset: IndexedDataset, token: int | None) -> int:
    """How often a token id occurs; None never does."""
    return 0 if token is None else sum(int(np.count_nonzero(chunk == token)) for _, chunk in _chunks(dataset))


def _chunks(dataset: IndexedDataset) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(dataset.tokens), _CHUNK):
        yield start, dataset.read(start, min(start + _CHUNK, len(dataset.tokens)))


def contents_of(dataset: IndexedDataset, cache: NodeCache | None) -> Contents:
    """The contents by ``scan``, once per node and state of the files; without a cache every time."""
    if cache is None:
        return scan(dataset)
    # mtime in ns and inode as well: a file replaced by another of the same size is new.
    # Reading all bytes takes minutes for large data. A change of a file changes one of these.
    stats = [(str(path.resolve()), (s := path.stat()).st_size, s.st_mtime_ns, s.st_ino) for path in dataset.paths]
    name = f"contents-{xxhash.xxh3_64_hexdigest(json.dumps(stats).encode())}.npy"
    # As text: a 128-bit hash has no type in numpy.
    key, lowest, highest = cache.array(name, lambda: np.array(astuple(scan(dataset)), dtype=str)).tolist()
    return Contents(key, int(lowest), int(highest))


def check_vocabulary(dataset: IndexedDataset, contents: Contents, vocab_size: int) -> None:
    """Refuse token ids outside of a vocabulary.

    Raises:
        ValueError: naming the file, the document and the offset in it of the first such id.
    """
    if contents.lowest >= 0 and contents.highest < vocab_size:
        return
    for start, chunk in _chunks(dataset):
        # In int64: an unsigned id of a narrow type would be compared after wrapping.
        bad = (chunk < 0) | (chunk.astype(np.int64) >= vocab_size)
        if bad.any():
            at = start + int(np.argmax(bad))
            document = int(np.searchsorted(dataset.document_offsets, at, side="right")) - 1
            raise ValueError(
                f"{dataset.bin_path}: token id {dataset.tokens[at]} in document {document} at offset "
                f"{at - dataset.document_offsets[document]}, the vocabulary has {vocab_size}"
            )
