"""Data behind URLs are the same data: text, tables and tokens, also when they are opened again."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from smp.config import Config
from smp.config.blend import is_text
from smp.config.resolve import check_files
from smp.config.schema import ConfigError, DataConfig
from smp.data.build import build_datasets
from smp.data.cache import NodeCache
from smp.data.files import remote
from smp.data.files.remote import RemoteDataset, RemoteError, RemoteFile, expand, of_size_only
from smp.data.files.text_files import expand_paths, read_chunks
from smp.data.indexed_dataset import IndexedDatasetWriter
from smp.data.tuning.files import parse, read_records
from tests.training.tiny_hf import write_tokenizer

fsspec = pytest.importorskip("fsspec")
ROWS = [{"text": f"document {i}", "n": str(i)} for i in range(5)]
VOCAB = 50


@pytest.fixture
def store() -> Iterator[fsspec.AbstractFileSystem]:
    """An empty ``memory://`` store."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


def put(files: fsspec.AbstractFileSystem, path: str, content: bytes) -> None:
    files.pipe_file(path, content)


def rows_of(*urls: str) -> list[dict[str, str]]:
    return [{key: str(value) for key, value in parse(record).items()} for _, record in read_records(urls)]


def test_text_and_tables_are_read_from_urls(store: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    put(store, "/d/a.jsonl", lines)
    put(store, "/d/b.jsonl.gz", gzip.compress(lines))
    put(store, "/d/c.csv", b"text,n\n" + b"".join(f"{row['text']},{row['n']}\n".encode() for row in ROWS))
    put(store, "/d/d.json", json.dumps(ROWS).encode())
    kinds = ["a.jsonl", "b.jsonl.gz", "c.csv", "d.json"]
    for kind in kinds:
        assert rows_of(f"memory://d/{kind}") == ROWS, kind
    assert rows_of("memory://d/*") == ROWS * 4
    where = [where for where, _ in read_records(["memory://d/a.jsonl"])]
    assert where[0] == "memory://d/a.jsonl:1"


def test_parquet_and_arrow_are_read_from_urls(store: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "x.parquet")
    with pyarrow.OSFile(str(tmp_path / "x.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    for name in ("x.parquet", "x.arrow"):
        put(store, f"/t/{name}", (tmp_path / name).read_bytes())
        assert rows_of(f"memory://t/{name}") == ROWS


def test_what_is_not_there_is_named(store: fsspec.AbstractFileSystem) -> None:
    put(store, "/d/a.jsonl", b"{}\n")
    with pytest.raises(ValueError, match=r"^memory://d/x\.jsonl: no such file$"):
        expand_paths(["memory://d/x.jsonl"])
    with pytest.raises(ValueError, match=r"^memory://d is a folder: name its files, as memory://d/\*\.jsonl$"):
        expand_paths(["memory://d"])
    with pytest.raises(ValueError, match="named twice"):
        expand_paths(["memory://d/a.jsonl", "memory://d/*.jsonl"])
    with pytest.raises(ValueError, match=r"^nowhere://x: .*pip install fsspec and its back-end"):
        expand_paths(["nowhere://x"])
    data = DataConfig(data_path="memory://d/a", seq_length=8)
    with pytest.raises(ConfigError, match=r"--data-path memory://d/a needs --data-cache-path FOLDER"):
        check_files(Config(data=data))


def documents() -> list[np.ndarray]:
    drawn = np.random.default_rng(0)
    return [drawn.integers(0, VOCAB, drawn.integers(1, 40)) for _ in range(60)]


def test_samples_are_those_of_the_files(store: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        for document in documents():
            writer.add_document(document)
    for ending in ("bin", "idx"):
        put(store, f"/b/x.{ending}", (tmp_path / f"x.{ending}").read_bytes())

    def samples(path: str) -> list[np.ndarray]:
        data = DataConfig(data_path=path, seq_length=16, split="1", data_cache_path=str(tmp_path / "cache"))
        train = build_datasets(data, VOCAB, seed=3).train
        return [train.sample(i).input_ids for i in range(2 * (train.samples_per_epoch or 0))]

    here, there = samples(str(tmp_path / "x")), samples("memory://b/x")
    assert len(here) > 20 and all(map(np.array_equal, here, there))
    again = samples("memory://b/x")  # as a run that goes on opens it: with the index that it kept
    assert all(map(np.array_equal, again, there))
    assert not list((tmp_path / "cache").glob("*.bin"))


def test_tokens_that_do_not_belong_are_refused_when_they_are_read(
    store: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document([1, 2, 49, 3])
    for ending in ("bin", "idx"):
        put(store, f"/b/x.{ending}", (tmp_path / f"x.{ending}").read_bytes())
    cache = NodeCache(tmp_path / "cache")
    assert RemoteDataset("memory://b/x", 50, cache).read(1, 3).tolist() == [2, 49]
    with pytest.raises(ValueError, match=r"^memory://b/x\.bin: token 2 has the id 49, the vocabulary 49$"):
        RemoteDataset("memory://b/x", 49, cache).read(1, 3)
    opened = RemoteDataset("memory://b/x", 50, cache)
    put(store, "/b/x.bin", (tmp_path / "x.bin").read_bytes()[:6])
    with pytest.raises(ValueError, match="cut while in use"):
        opened.read(0, 4)
    with pytest.raises(ValueError, match=r"6 bytes, x\.idx describes 8"):
        RemoteDataset("memory://b/x", 50, cache)
    with pytest.raises(ValueError, match=r"^memory://b/y\.bin: no such file$"):
        RemoteDataset("memory://b/y", 50, cache)


def test_a_file_with_other_contents_is_another_one(store: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    found = set()
    for tokens in ([1, 2, 3], [1, 2, 3], [1, 2, 4]):
        with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
            writer.add_document(tokens)
        if not found or tokens[-1] == 4:
            for ending in ("bin", "idx"):
                put(store, f"/b/x.{ending}", (tmp_path / f"x.{ending}").read_bytes())
        found.add(RemoteDataset("memory://b/x", 50, NodeCache(tmp_path / "cache")).contents().key)
    assert len(found) == 2


def test_chunks_name_the_url(store: fsspec.AbstractFileSystem) -> None:
    put(store, "/d/a.jsonl.gz", gzip.compress(b'{"text": "x"}\n')[:-9])
    with pytest.raises(ValueError, match=r"^memory://d/a\.jsonl\.gz: damaged after"):
        list(read_chunks(expand_paths(["memory://d/a.jsonl.gz"])))


class StoreError(Exception):
    """As libraries of stores have: no OSError."""


def fail(*_: object, **__: object) -> None:
    raise StoreError("503,\nmessage='busy'")


def test_errors_of_a_stores_own_library_are_one_line(
    store: fsspec.AbstractFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document([1, 2, 3])
    for ending in ("bin", "idx"):
        put(store, f"/b/x.{ending}", (tmp_path / f"x.{ending}").read_bytes())
    put(store, "/b/x.jsonl", b'{"text": "x"}\n')
    opened = RemoteDataset("memory://b/x", 50, NodeCache(tmp_path / "cache"))
    line = r"^memory://b/x\.bin: 503, message='busy'$"
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "cat_file", fail)
        with pytest.raises(RemoteError, match=line):
            opened.read(0, 2)
        patch.setattr(type(store), "info", fail)
        with pytest.raises(ValueError, match=line):
            RemoteDataset("memory://b/x", 50, NodeCache(tmp_path / "cache"))
        patch.setattr(type(store), "glob", fail)
        with pytest.raises(RemoteError, match=r"^memory://b/\*\.bin: 503, message='busy'$"):
            expand("memory://b/*.bin")
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFile.read", fail)
    with pytest.raises(RemoteError, match=r"^memory://b/x\.jsonl: 503, message='busy'$"):  # not "damaged"
        list(read_chunks(expand_paths(["memory://b/x.jsonl"])))
    with pytest.raises(ValueError, match=r"^memory://b/x\.idx: 503, message='busy'$"):  # not the cache folder's fault
        RemoteDataset("memory://b/x", 50, NodeCache(tmp_path / "another"))


def test_a_server_that_ignores_ranges_is_named(
    store: fsspec.AbstractFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document([1, 2, 3])
    for ending in ("bin", "idx"):
        put(store, f"/b/x.{ending}", (tmp_path / f"x.{ending}").read_bytes())
    opened = RemoteDataset("memory://b/x", 50, NodeCache(tmp_path / "cache"))
    monkeypatch.setattr(type(store), "cat_file", lambda *_, **__: bytes(6))
    with pytest.raises(ValueError, match=r"x\.bin: 6 bytes where 4 were asked for: its server ignores ranges"):
        opened.read(0, 2)


def test_marks_of_other_stores_tell_contents_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    file = RemoteFile("https://h/x.bin")

    def state(**info: object) -> str:
        monkeypatch.setattr(RemoteFile, "info", {"size": 4, **info})
        return file.state

    for key in ("etag", "ETag", "blob_id", "xet_hash", "lfs", "generation", "modificationTime", "Last-Modified"):
        assert state(**{key: "a"}) != state(**{key: "b"}), key
        assert of_size_only({"x": state(**{key: "a"})}) == []
    assert state(type="file") == state()
    said = "has no ETag or time: a change of the same size is not noticed"
    assert of_size_only({"a": "1 x", "b": state(), "c": "1 "}) == [f"WARNING: b (and 1 more) {said}"]
    assert of_size_only({"b": state()}) == [f"WARNING: b {said}"]


def test_a_store_that_tells_only_sizes_is_warned_of(
    store: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document([1, 2, 3])
    for ending in ("bin", "idx"):
        put(store, f"/b/x.{ending}", (tmp_path / f"x.{ending}").read_bytes())
    told = RemoteDataset("memory://b/x", 50, NodeCache(tmp_path / "cache")).notes
    of_the_store = type(store).info
    monkeypatch.setattr(type(store), "info", lambda *a, **k: {"size": of_the_store(*a, **k)["size"]})
    untold = RemoteDataset("memory://b/x", 50, NodeCache(tmp_path / "cache")).notes
    assert told == [] and "memory://b/x.bin (and 1 more) has no ETag or time" in untold[0] and len(untold) == 1


def test_the_text_of_such_a_store_is_warned_of_once_in_every_run(
    store: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(store, "/b/x.jsonl", b"".join(b'{"text": "many words of a text"}\n' for _ in range(40)))
    write_tokenizer(tmp_path)
    data = DataConfig(
        data_path="memory://b/x.jsonl",
        data_cache_path=str(tmp_path / "cache"),
        tokenizer_model=str(tmp_path / "tokenizer.json"),
        split="1,1,0",
        seq_length=8,
    )
    of_the_store = type(store).info
    monkeypatch.setattr(type(store), "info", lambda *a, **k: {"size": of_the_store(*a, **k)["size"]})
    for run in ("makes the tokens", "finds the tokens"):
        train, valid, _ = build_datasets(data, 300, 0)
        assert valid is not None
        (line,) = train.notes + valid.notes
        assert line.startswith("WARNING: memory://b/x.jsonl has no ETag or time"), run


def test_files_of_a_pattern_have_urls_that_lead_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    assert [file.url for file in expand(f"file://{tmp_path}/*.jsonl")] == [
        f"file://{tmp_path}/{name}.jsonl" for name in ("a", "b")
    ]

    files = fsspec.filesystem("memory")  # its names have no host, as those of sftp
    monkeypatch.setattr(files, "glob", lambda path: [path.replace("*", "a")])
    monkeypatch.setattr(remote, "_system", lambda url: (files, "/" + url.split("://")[1].partition("/")[2]))
    assert [file.url for file in expand("sftp://host/d/*.jsonl")] == ["sftp://host/d/a.jsonl"]
    monkeypatch.setattr(files, "glob", lambda path: ["elsewhere/a.jsonl"])
    with pytest.raises(ValueError, match=r"^sftp://host/d/\*\.jsonl: patterns .* name each file$"):
        expand("sftp://host/d/*.jsonl")


def test_the_query_of_a_url_does_not_hide_its_kind() -> None:
    assert is_text("https://h/x.jsonl?sig=1") and is_text("https://h/x.jsonl.gz?sig=a/b.c")
    assert not is_text("https://h/x?name=y.json") and is_text("s3://b/x?.jsonl")
