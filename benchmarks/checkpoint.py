"""Seconds and GB/s of saving, loading and verifying one state: smp beside torch's DCP and beside what the machine can.

Entries take turns, each once a round, in one process on the same tensors, so that whatever else the machine does hits
all of them. Dirty pages are flushed before each entry and files of the one before are gone. Reported are medians.

A virtual machine may give free memory back to its host within seconds, and then whatever entry touches it next pays up
to three seconds a gigabyte, limits too. So right before each entry that takes new memory another file, of three times
the state, is read and dropped from the page cache.

Before a "from disk" entry its files are dropped from the page cache, read, and dropped again: caches below this machine
have the files of all entries alike.

    python benchmarks/checkpoint.py --gb 1 --rounds 5 --folder /fast/disk
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from smp import checkpoint
from smp.checkpoint.commit import commit
from smp.checkpoint.folders.folder import open_folder
from smp.checkpoint.format.entries import Manifest, Shard, TensorEntry
from smp.checkpoint.format.tensor_bytes import lay_out, raw_bytes
from smp.checkpoint.format.tensor_file import write_file

State = dict[str, torch.Tensor]
WIDTH = 2048


@dataclass
class Entry:
    """One line of the table: what is timed, what is done before and after each time, whether it takes new memory."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    finish: Callable[[], object] = lambda: None
    grows: bool = True
    seconds: list[float] = field(default_factory=list)


def make_state(size: float) -> State:
    """Tensors like those of a model and its optimizer: matrices of 64 MB at most and some small vectors, fp32."""
    rows, state, left, number = 8192, State(), int(size), 0
    while left > 0:
        count = max(min(rows, left // (4 * WIDTH)), 1)
        state[f"layers.{number}.weight"] = torch.randn(count, WIDTH)
        state[f"layers.{number}.norm"] = torch.randn(WIDTH)
        left -= 4 * WIDTH * (count + 1)
        number += 1
    return state


def drop(path: Path) -> None:
    """Let the page cache forget a file."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def read(path: Path) -> None:
    """Read a file to nowhere."""
    buffer = bytearray(1 << 22)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


class SpareMemory:
    """A file whose pages are freed for others, see the top of this file."""

    def __init__(self, path: Path, data: memoryview, copies: int) -> None:
        self.path = path
        with path.open("wb", buffering=0) as file:
            for _ in range(copies):
                write_all(file.fileno(), data)
            os.fsync(file.fileno())

    def make_room(self) -> None:
        """Have its pages in memory, and give them up."""
        read(self.path)
        drop(self.path)


class Bench:
    """The state, a place for it to be loaded to, and the folders of all entries."""

    def __init__(self, root: Path, size: float) -> None:
        self.root, self.state = root, make_state(size)
        self.target = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        self.bytes = sum(tensor.nbytes for tensor in self.state.values())
        self.memory = torch.zeros(self.bytes, dtype=torch.uint8)
        self.spare = SpareMemory(root / "spare", raw_bytes(self.memory), copies=3)
        self.saver = checkpoint.AsyncSaver()
        self.first_async: float | None = None

    def paths(self, name: str) -> list[Path]:
        """The files under a name."""
        found = self.root / name
        return [found] if found.is_file() else [path for path in found.rglob("*") if path.is_file()]

    def cached(self, name: str) -> Callable[[], None]:
        """Have what is under a name in the page cache."""

        def prepare() -> None:
            for path in self.paths(name):
                read(path)

        return prepare

    def fresh(self, name: str) -> Callable[[], None]:
        """Remove a folder, and let nothing be left to write to disk."""

        def prepare() -> None:
            shutil.rmtree(self.root / name, ignore_errors=True)
            (self.root / name).unlink(missing_ok=True) if (self.root / name).is_file() else None
            os.sync()

        return prepare

    def cold(self, name: str) -> Callable[[], None]:
        """Drop what is under a name from the page cache, after reading it: see the top of this file."""

        def prepare() -> None:
            os.sync()
            for path in self.paths(name):
                drop(path)
                read(path)
            for path in self.paths(name):
                drop(path)

        return prepare

    def write_limit(self) -> None:
        """One write and one fsync of as many bytes, with room made for them as smp makes it."""
        descriptor = os.open(self.root / "limit", os.O_WRONLY | os.O_CREAT, 0o644)
        os.posix_fallocate(descriptor, 0, self.bytes)
        write_all(descriptor, raw_bytes(self.memory))
        os.fsync(descriptor)
        os.close(descriptor)

    def read_limit(self) -> None:
        """Read them into memory that is there."""
        descriptor = os.open(self.root / "limit", os.O_RDONLY)
        data, offset = raw_bytes(self.memory), 0
        while data:
            count = os.preadv(descriptor, [data], offset)
            data, offset = data[count:], offset + count
        os.close(descriptor)

    def memcpy(self) -> None:
        """Copy the state into memory that is there."""
        start = 0
        for tensor in self.state.values():
            self.memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            start += tensor.nbytes

    def save(self) -> None:
        checkpoint.save(self.state, self.root / "smp", extra={})

    def begin_async(self) -> None:
        started = time.perf_counter()
        checkpoint.async_save(self.state, self.root / "async", saver=self.saver, extra={})
        self.first_async = self.first_async or time.perf_counter() - started

    def end_async(self) -> None:
        """Wait, and delete now: while the disk still frees a gigabyte the next entry would not have what memcpy has."""
        self.saver.wait()
        self.fresh("async")()

    def load(self, name: str) -> Callable[[], object]:
        return lambda: checkpoint.load(self.target, self.root / name)

    def verify(self) -> None:
        problems = checkpoint.verify(self.root / "smp")
        assert not problems, problems

    def save_cut(self) -> None:
        """A checkpoint as two ranks with tensor parallelism along dimension 1 write it."""
        folder = open_folder(self.root / "cut")
        folder.make()
        shards: dict[str, list[Shard]] = {name: [] for name in self.state}
        for rank in (0, 1):
            parts = {n: t.chunk(2, -1)[rank].contiguous() for n, t in self.state.items()}
            layout = lay_out(parts)
            data = [(slot.key, raw_bytes(parts[slot.key])) for slot in layout.slots]
            file = f"shard_{rank:05d}.safetensors"
            for name, digest in write_file(folder, file, layout, data).items():
                offsets = (*[0] * (parts[name].ndim - 1), rank * parts[name].shape[-1])
                shards[name].append(Shard(file, name, offsets, tuple(parts[name].shape), digest))
        tensors = {n: TensorEntry(tuple(t.shape), "F32", tuple(shards[n])) for n, t in self.state.items()}
        commit(folder, Manifest(tensors, {}, {}))

    def dcp_save(self) -> None:
        dcp.save(self.state, storage_writer=dcp.FileSystemWriter(self.root / "dcp", overwrite=True))

    def dcp_load(self) -> None:
        dcp.load(self.target, storage_reader=dcp.FileSystemReader(self.root / "dcp"))

    def hf_save(self) -> None:
        dcp.save(self.state, storage_writer=HuggingFaceStorageWriter(path=str(self.root / "hf")))

    def hf_load(self) -> None:
        dcp.load(self.target, storage_reader=HuggingFaceStorageReader(path=str(self.root / "hf")))

    def entries(self) -> list[Entry]:
        return [
            Entry("limit: one write + fsync", self.write_limit, self.fresh("limit")),
            Entry("smp save", self.save, self.fresh("smp")),
            Entry("DCP FileSystemWriter save", self.dcp_save, self.fresh("dcp")),
            Entry("DCP HuggingFaceStorageWriter save", self.hf_save, self.fresh("hf")),
            Entry("limit: memcpy", self.memcpy, os.sync, grows=False),
            Entry("smp async_save, until it returns", self.begin_async, os.sync, self.end_async, grows=False),
            Entry("limit: one read from disk", self.read_limit, self.cold("limit")),
            Entry("smp load from disk", self.load("smp"), self.cold("smp")),
            Entry("smp load from disk, other cut", self.load("cut"), self.cold("cut")),
            Entry("DCP FileSystemReader from disk", self.dcp_load, self.cold("dcp")),
            Entry("DCP HuggingFaceStorageReader from disk", self.hf_load, self.cold("hf")),
            Entry("reference: one read from page cache", self.read_limit, self.cached("limit"), grows=False),
            Entry("smp load from page cache", self.load("smp"), self.cached("smp"), grows=False),
            Entry("smp load from page cache, other cut", self.load("cut"), self.cached("cut"), grows=False),
            Entry("DCP FileSystemReader from page cache", self.dcp_load, self.cached("dcp")),
            Entry("DCP HuggingFaceStorageReader from page cache", self.hf_load, self.cached("hf"), grows=False),
            Entry("smp verify from page cache", self.verify, self.cached("smp"), grows=False),
        ]

    def check(self) -> None:
        """What was loaded last is what was saved."""
        for name, tensor in self.state.items():
            assert torch.equal(tensor, self.target[name]), name
            self.target[name].zero_()


def interleave(bench: Bench, entries: list[Entry], rounds: int) -> None:
    """A warm-up round and ``rounds`` timed ones."""
    for turn in range(rounds + 1):
        for entry in entries:
            entry.prepare()
            if entry.grows:  # read right before, too: what the disk did last is the same for all
                bench.spare.make_room()
            started = time.perf_counter()
            entry.run()
            seconds = time.perf_counter() - started
            entry.finish()
            if turn:
                entry.seconds.append(seconds)
            if "load" in entry.name:
                bench.check()


def show(bench: Bench, entries: list[Entry]) -> None:
    """GB/s from the medians, and the ratio to the limit or reference above."""
    print(f"state of {bench.bytes / 1e9:.2f} GB in {len(bench.state)} tensors, {torch.get_num_threads()} threads")
    beside, kind = 0.0, "limit"
    for entry in entries:
        median = statistics.median(entry.seconds)
        if ":" in entry.name:
            beside, kind = median, entry.name.split(":")[0]
        spread = f"{min(entry.seconds):.3f}-{max(entry.seconds):.3f} s"
        # verifying copies nothing: no entry has its work
        ratio = f"{beside / median:6.2f} of the {kind}" if "verify" not in entry.name else ""
        print(f"  {entry.name:46s} {median:7.3f} s {bench.bytes / median / 1e9:6.2f} GB/s {ratio:23s}  ({spread})")
    print(f"  the first async_save of all, whose memory was not there yet: {bench.first_async:.3f} s", flush=True)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.1, help="size of the state")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--folder", help="on the disk to measure; default: that of temporary files")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=args.folder) as root:
        bench = Bench(Path(root), args.gb * 1e9)
        bench.save_cut()
        entries = bench.entries()
        interleave(bench, entries, args.rounds)
        show(bench, entries)
        bench.saver.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
