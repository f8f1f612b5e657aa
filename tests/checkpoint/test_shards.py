"""Large tensors are cut into shards, and whoever wants little of one reads little."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import xxhash

from smp.checkpoint import AsyncSaver, CheckpointError, DamagedError, async_save, load, read_manifest, save, verify
from smp.checkpoint.folders.folder import open_folder
from smp.checkpoint.folders.local import _LocalSink, _LocalSource
from smp.checkpoint.format import tensor_file
from smp.checkpoint.format.tensor_bytes import lay_out, raw_bytes
from smp.checkpoint.format.tensor_file import read_header, write_file
from smp.checkpoint.read_ahead import Wanted, read_ahead
from smp.checkpoint.rewrite import rewrite
from smp.checkpoint.tensor_slices import read_region
from tests.checkpoint.plain_reader import read_checkpoint
from tests.checkpoint.test_folder import zeros

LIMIT = 256


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "rows": torch.randn(100, 8, generator=generator),  # 32 bytes each: 8 in a shard
        "across": torch.randn(8, 50, generator=generator).t(),  # not as it lies in memory
        "long": torch.randn(1000, generator=generator),
        "wide": torch.randn(3, 100, generator=generator),  # a row is more than a shard
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
    }


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smp.checkpoint.format.tensor_file.LARGEST_SHARD", LIMIT)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of each read of a data file."""
    sizes: list[int] = []
    plain = _LocalSource.read_into

    def counted(self: _LocalSource, offset: int, into: memoryview) -> None:
        sizes.append(len(into))
        plain(self, offset, into)

    monkeypatch.setattr(_LocalSource, "read_into", counted)
    yield sizes


def check(folder: Path) -> None:
    manifest = read_manifest(folder)
    for name, tensor in state().items():
        row = tensor.nbytes // max(len(tensor), 1) if tensor.ndim else 4
        sizes = [s.sizes for s in manifest.tensors[name].shards]
        assert all(torch.Size(size).numel() * 4 <= max(LIMIT, row) for size in sizes), (name, sizes)
    assert len(manifest.tensors["rows"].shards) == 13 and len(manifest.tensors["wide"].shards) == 3
    into = zeros(state())
    load(into, folder)
    assert all(torch.equal(into[name], tensor) for name, tensor in state().items())
    strangers, _ = read_checkpoint(folder)
    assert all(torch.equal(torch.from_numpy(strangers[name]), tensor) for name, tensor in state().items())
    assert verify(folder) == []


def test_what_a_rank_writes_is_cut(tmp_path: Path, small_shards: None) -> None:
    save(state(), tmp_path / "x", extra={})
    check(tmp_path / "x")
    with AsyncSaver() as saver:
        async_save(state(), tmp_path / "y", saver=saver, extra={})
        saver.wait()
    for name in ("manifest.json", "shard_00000.safetensors"):
        assert (tmp_path / "x" / name).read_bytes() == (tmp_path / "y" / name).read_bytes()


@pytest.mark.parametrize("files", [1, 3])
def test_what_reshard_writes_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    save(state(), tmp_path / "x", extra={})
    assert {len(entry.shards) for entry in read_manifest(tmp_path / "x").tensors.values()} == {1}
    monkeypatch.setattr("smp.checkpoint.format.tensor_file.LARGEST_SHARD", LIMIT)
    rewrite(open_folder(tmp_path / "x"), open_folder(tmp_path / "y"), files)
    assert len(read_manifest(tmp_path / "y").files) == files
    manifest = read_manifest(tmp_path / "y")
    assert all(s.sizes[0] * 32 <= LIMIT for s in manifest.tensors["rows"].shards)
    into = zeros(state())
    load(into, tmp_path / "y")
    assert all(torch.equal(into[name], tensor) for name, tensor in state().items())


def test_little_is_read_for_little(tmp_path: Path, small_shards: None, count: list[int]) -> None:
    save(state(), tmp_path / "x", extra={})
    folder, manifest = open_folder(tmp_path / "x"), read_manifest(tmp_path / "x")
    header = int.from_bytes((tmp_path / "x/shard_00000.safetensors").read_bytes()[:8], "little") + 8
    count.clear()
    region = read_region(folder, manifest, "rows", (41, 2), (1, 3))
    assert torch.equal(region, state()["rows"][41:42, 2:5]) and sum(count) == header + LIMIT
    count.clear()
    whole = read_region(folder, manifest, "rows", (0, 0), (100, 8))
    assert torch.equal(whole, state()["rows"]) and sum(count) == header + 3200


def test_files_are_written_in_pieces_that_are_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors shorter than a piece, longer, of no bytes, and given in parts."""
    sizes, plain = list[int](), _LocalSink.write

    def noted(self: _LocalSink, data: memoryview) -> None:
        sizes.append(len(data))
        plain(self, data)

    monkeypatch.setattr(tensor_file, "PIECE", 64)
    monkeypatch.setattr(_LocalSink, "write", noted)
    whole = {f"{size}": torch.arange(size, dtype=torch.uint8) for size in (0, 1, 63, 64, 65, 127, 128, 129, 200)}
    layout = lay_out(whole)
    parts = [(slot.key, raw_bytes(part)) for slot in layout.slots for part in whole[slot.key].split(90)]
    hashes = write_file(open_folder(tmp_path), "x.safetensors", layout, parts)
    ends = list(accumulate(sizes))
    assert ends[0] == len(layout.header)
    assert all(begin // 64 == (end - 1) // 64 for begin, end in pairwise(ends))
    found = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert found.keys() == whole.keys() and all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    assert hashes == {name: xxhash.xxh3_64_hexdigest(raw_bytes(tensor)) for name, tensor in whole.items()}


def test_a_file_that_is_given_too_little_is_none(tmp_path: Path) -> None:
    """Room for all of it is made before: the rest would be zeros."""
    whole = {"a": torch.ones(5), "b": torch.ones(7)}
    layout = lay_out(whole)
    with pytest.raises(AssertionError, match="are not what was laid out"):
        write_file(open_folder(tmp_path), "x.safetensors", layout, [("a", raw_bytes(whole["a"]))])
    assert not list(tmp_path.iterdir())


def test_no_memory_for_a_buffer_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(state(), tmp_path / "x", extra={})

    def refused(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("smp.checkpoint.read_ahead.mmap.mmap", refused)
    manifest = read_manifest(tmp_path / "x")
    with pytest.raises(MemoryError, match=r"tried to allocate \d+ bytes"):
        read_region(open_folder(tmp_path / "x"), manifest, "rows", (0, 0), (3, 8))


def test_parameters_are_filled(tmp_path: Path, small_shards: None) -> None:
    """They require gradients, and threads read them: where a shard fits in one piece, and where it goes by a buffer."""
    save(state(), tmp_path / "x", extra={})
    into: dict[str, Any] = {name: torch.nn.Parameter(tensor) for name, tensor in zeros(state()).items()}
    into["across"] = torch.nn.Parameter(torch.zeros(8, 50).t())
    load(into, tmp_path / "x")
    assert all(torch.equal(into[name], tensor) for name, tensor in state().items())
    assert all(parameter.grad_fn is None and parameter.is_leaf for parameter in into.values())


def test_one_element_may_lie_at_any_stride(tmp_path: Path) -> None:
    """Torch calls it contiguous."""
    whole = {name: torch.arange(4.0)[::3][at : at + 1] for at, name in enumerate("ab")}
    save(whole, tmp_path / "x", extra={})
    into = {name: torch.zeros(4)[1::3][:1] for name in whole}
    assert into["a"].stride() == (3,) and into["a"].is_contiguous()
    load(into, tmp_path / "x")
    assert (into["a"].item(), into["b"].item()) == (0, 3)


@pytest.mark.parametrize("piece", [1, 60])
def test_a_shard_comes_in_many_blocks(
    tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """In the order of the file. It is checked when the last is there, whether it goes straight to its place or by a
    buffer."""
    monkeypatch.setattr(_LocalSource, "piece", piece)
    monkeypatch.setattr(_LocalSource, "readers", 1)
    save(state(), tmp_path / "x", extra={})
    for across in (torch.zeros(50, 8), torch.zeros(8, 50).t()):
        into, offsets = zeros(state()) | {"across": across}, list[int]()
        with monkeypatch.context() as patch:
            during_reads(patch, offsets.append)
            load(into, tmp_path / "x")
        assert all(torch.equal(into[name], tensor) for name, tensor in state().items())
        assert offsets == sorted(offsets) and len(offsets) > 100
    manifest = read_manifest(tmp_path / "x")
    region = read_region(open_folder(tmp_path / "x"), manifest, "rows", (3, 1), (40, 5))
    assert torch.equal(region, state()["rows"][3:43, 1:6])


def test_inference_tensors_are_filled(tmp_path: Path, small_shards: None) -> None:
    """Threads know of no mode, and need none: they write bytes. What goes by a buffer is copied by the caller."""
    save(state(), tmp_path / "x", extra={})
    with torch.inference_mode():
        into = zeros(state()) | {"across": torch.zeros(8, 50).t()}
        load(into, tmp_path / "x")
    assert all(torch.equal(into[name], tensor) for name, tensor in state().items())


def during_reads(monkeypatch: pytest.MonkeyPatch, action: Callable[[int], object]) -> set[int]:
    """Call ``action`` with the offset of each read by a thread that is not this one; which threads those are."""
    here, threads, plain = threading.get_ident(), set[int](), _LocalSource.read_into

    def read_into(source: _LocalSource, offset: int, into: memoryview) -> None:
        if threading.get_ident() != here:
            threads.add(threading.get_ident())
            action(offset)
        plain(source, offset, into)

    monkeypatch.setattr(_LocalSource, "read_into", read_into)
    return threads


@pytest.mark.parametrize("readers", [1, 3])
def test_as_many_shards_are_read_at_a_time_as_the_source_says(
    tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch, readers: int
) -> None:
    """A read ends when so many are under way."""
    whole = torch.randn(6 * LIMIT // 4)
    monkeypatch.setattr(_LocalSource, "readers", readers)
    save({"w": whole}, tmp_path / "x", extra={})
    into = {"w": torch.zeros_like(whole)}
    together = threading.Barrier(readers, timeout=60)
    threads = during_reads(monkeypatch, lambda _: together.wait())
    load(into, tmp_path / "x")
    assert torch.equal(into["w"], whole) and len(threads) == readers


def test_no_read_is_under_way_when_an_error_is_raised(
    tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"w": torch.randn(6 * LIMIT // 4)}, tmp_path / "x", extra={})
    under_way: list[int] = []

    def fail_or_wait(offset: int) -> None:
        under_way.append(offset)
        if len(under_way) == 1:
            under_way.clear()
            raise EOFError("gone")
        time.sleep(0.1)
        under_way.remove(offset)

    during_reads(monkeypatch, fail_or_wait)
    with pytest.raises(DamagedError, match="gone"):
        load({"w": torch.zeros(6 * LIMIT // 4)}, tmp_path / "x")
    assert under_way == []


def test_blocks_come_in_order_from_a_few_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever thread is first; a row that is larger than a piece is held once."""
    monkeypatch.setattr(_LocalSource, "readers", 3)
    monkeypatch.setattr(_LocalSource, "piece", 64)
    during_reads(monkeypatch, lambda offset: time.sleep(0.002 * (offset // 64 % 3)))
    for width, memories in ((4, 5), (20, 1)):
        whole = torch.randn(50, width)
        save({"w": whole}, tmp_path / f"{width}", extra={})
        with open_folder(tmp_path / f"{width}").reader("shard_00000.safetensors") as source:
            found, used = torch.zeros_like(whole), set()
            for block in read_ahead(source, [Wanted(read_header(source)["w"])]):
                found[block.first : block.first + len(block.rows)] = block.rows
                used.add(block.rows.data_ptr())
        assert torch.equal(found, whole) and len(used) == memories


def test_a_shard_without_rows_is_one_empty_block(tmp_path: Path) -> None:
    save(state(), tmp_path / "x", extra={})
    with open_folder(tmp_path / "x").reader("shard_00000.safetensors") as source:
        slots = read_header(source)
        blocks = list(read_ahead(source, [Wanted(slots["empty"]), Wanted(slots["scalar"])]))
    assert [(b.number, tuple(b.rows.shape), b.checksum is not None) for b in blocks] == [
        (0, (0, 4), True),
        (1, (1,), True),
    ]


def test_names_that_are_like_our_keys_are_refused(tmp_path: Path, small_shards: None) -> None:
    twins: dict[str, Any] = {"w": torch.zeros(100), "w[0:64]": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"w\[0:64\] would be two tensors in one file"):
        save(twins, tmp_path / "x", extra={})
    assert not (tmp_path / "x").exists()
