"""Contents: the hash that keys an index, and the check of every token id."""

import os
from pathlib import Path

import numpy as np
import pytest

import smp.data.contents as contents_module
from smp.data.cache import DamagedCacheError, NodeCache
from smp.data.contents import check_vocabulary, contents_of, scan
from smp.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter


def write(prefix: Path, documents: list[list[int]], dtype: type = np.int32) -> IndexedDataset:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(prefix)


@pytest.mark.parametrize(("bad", "vocab_size"), [(77, 50), (50, 50), (-1, 50)])
@pytest.mark.parametrize("chunk", [2, 1 << 22])
def test_an_id_outside_of_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int, vocab_size: int, chunk: int
) -> None:
    monkeypatch.setattr(contents_module, "_CHUNK", chunk)
    dataset = write(tmp_path / "data", [[1, 2, 3], [], [4, 49, bad, 5], [6, 7, 8]])
    with pytest.raises(
        ValueError, match=rf"data\.bin: token id {bad} in document 2 at offset 2, the vocabulary has 50"
    ):
        check_vocabulary(dataset, scan(dataset), vocab_size)
    check_vocabulary(dataset, scan(dataset), 78) if bad > 0 else None


def test_tokens_must_be_integers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds float32, token ids are integers"):
        scan(write(tmp_path / "data", [[1, 2]], np.float32))


def test_extremes_and_key(tmp_path: Path) -> None:
    one, same = write(tmp_path / "one", [[5, 9], [7]]), write(tmp_path / "same", [[5, 9], [7]])
    other, cut = write(tmp_path / "other", [[5, 9], [8]]), write(tmp_path / "cut", [[5], [9, 7]])
    assert (scan(one).lowest, scan(one).highest) == (5, 9)
    assert scan(one) == scan(same)
    assert len({scan(d).key for d in (one, other, cut)}) == 3
    empty = scan(write(tmp_path / "empty", []))
    assert (empty.lowest, empty.highest) == (0, -1)


def test_files_are_read_once_until_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, cache, scans = write(tmp_path / "data", [[5, 9]]), NodeCache(tmp_path / "cache"), []
    monkeypatch.setattr(contents_module, "scan", lambda d: scans.append(d) or scan(d))
    assert contents_of(dataset, cache) == contents_of(IndexedDataset(tmp_path / "data"), cache) == scan(dataset)
    assert len(scans) == 1
    changed = write(tmp_path / "data", [[5, 8]])
    os.utime(changed.bin_path, ns=(1, 1))
    assert contents_of(changed, cache).highest == 8 and len(scans) == 2


@pytest.mark.parametrize("size", [0, 40, 150])
def test_damaged_notes_are_named(tmp_path: Path, size: int) -> None:
    dataset, cache = write(tmp_path / "data", [[5, 9]]), NodeCache(tmp_path / "cache")
    contents_of(dataset, cache)
    (path,) = (tmp_path / "cache").glob("contents-*.npy")
    os.truncate(path, size)
    with pytest.raises(DamagedCacheError, match=r"contents-\w+\.npy: damaged; delete it, and it is made again"):
        contents_of(dataset, cache)
