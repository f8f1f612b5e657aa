"""Copies of the training state in the memory of nodes, from which a run goes on after a failure without a disk.

A copy is a checkpoint like any other (a manifest and safetensors files), in a folder of a memory file system on each
node. Every rank writes its file there, sends it to a rank of the next node, and keeps what it gets from the node
before: any one node may be lost. Files are written and sent by a thread in the background, each with its part of the
manifest; a copy counts if the parts and files of all ranks are there, so all ranks go on from one step. That may be one
that was on its way when a process was lost. A start takes the parts together for the manifest: training has no work
with it that would grow with the number of ranks. Memory ~ 2 x (own file + neighbour's file): the copy before stays
until the new one is whole.

The folder belongs to the process that started this one (torchrun), and so outlives workers that are killed and started
again, but no job: copies of launchers that are gone are removed, and a new job never continues from them.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from smp.checkpoint.all_ranks import on_all_ranks
from smp.checkpoint.background.staging import StagingBuffer
from smp.checkpoint.dcp_planner import Item, LocalShard, assign, items_of, local_shards
from smp.checkpoint.folders.latest import iteration_name, iteration_of
from smp.checkpoint.folders.local import LocalFolder
from smp.checkpoint.folders.lock import started_at
from smp.checkpoint.format.entries import CheckpointError, Manifest
from smp.checkpoint.format.manifest import MANIFEST, check_extra, read_manifest, write_manifest
from smp.checkpoint.format.tensor_file import FileLayout, write_file
from smp.checkpoint.peer_files import Location, PeerFolder, next_nodes, receive, send
from smp.checkpoint.peer_parts import is_part, manifest_of, part_of, read_parts, write_part
from smp.checkpoint.spare_files import SpareNode
from smp.checkpoint.storage import build_manifest, write_items
from smp.checkpoint.verification import verify
from smp.config.rules.elastic import LAUNCHER
from smp.parallel.agree import any_rank, gather, rank

DONE = "done"
"""Name of a file instead of copies, with the last iteration of a run that has ended."""
_NAME = re.compile(r"iter_\d{7,}-[0-9a-f]{8}")


def own_folder(base: Path) -> Path:
    """The folder of copies of the launcher that started this process; those of launchers that are gone are removed.

    Raises:
        OSError: it cannot be made, or is another user's.
    """
    # Containers may share the memory and not the table of processes: who is gone is known within one table only.
    try:
        table = re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    except OSError:  # another system
        table = ""
    root = base / f"smp-copies-{os.getuid()}-{table}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Anybody may make a folder of this name in /dev/shm first, and would then read and change what is in it.
    found = root.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise PermissionError(f"{root} is another user's, or open to others: remove it")
    for path in root.iterdir():
        pid, _, began = path.name.partition("-")
        # The start time as well: process numbers are used again.
        if not pid.isdecimal() or started_at(int(pid)) != began:
            shutil.rmtree(path, ignore_errors=True)  # another rank may do the same
    parent = int(os.environ.get(LAUNCHER) or os.getppid())
    return root / f"{parent}-{started_at(parent)}"


def _file_of(rank: int) -> str:
    return f"shard_{rank:05d}.safetensors"


def _order(name: str) -> tuple[int, str]:
    return iteration_of(name.partition("-")[0]), name


@dataclass
class _UnderWay:
    """A copy that is being made."""

    folder: LocalFolder
    extra: Mapping[str, Any]
    thread: threading.Thread
    error: str = ""


class PeerCopies:
    """Makes copies in memory, and finds those that an earlier start of the workers has left. Every rank has one and
    calls the same methods in the same order.

    Args:
        base: a folder in memory, on every node.
        location: of this rank.
        say: tells the user a line.
        timeout: of messages between nodes.
        spare: nodes that do not train, the same on all ranks.

    Raises:
        CheckpointError: the folder cannot be made.
    """

    def __init__(
        self,
        base: str,
        location: Location,
        say: Callable[[str], None],
        timeout: timedelta | None = None,
        spare: Sequence[SpareNode] = (),
    ) -> None:
        self.say, self.location, self.spare = say, location, spare
        # All ranks know where all are: they pair up without another message. The copies of a start are numbered from a
        # drawn number on: of an iteration that an earlier start has copied as well there are two names.
        places, numbers = zip(*gather((location, secrets.randbits(32))), strict=True)
        self.locations: list[Location] = list(places)
        self._number = numbers[0]
        on_all_ranks(f"{base}: ", lambda: self._make(Path(base)), lambda _: None)
        self._to = next_nodes(self.locations)
        self._from = [r for r, to in enumerate(self._to) if to == rank()]
        # Of its own: a message in the background must not meet one of the training.
        self._group = dist.new_group(backend="gloo", timeout=timeout) if len(self.locations) > 1 else None
        self._memory = StagingBuffer()
        self._plan: list[tuple[str, Item]] = []
        self._offered: list[Item] | None = None  # what the plan was made for
        self._save: _UnderWay | None = None
        self._kept: str | None = None
        """Name of the copy that a new start would continue from."""
        self.newest: int | None = None
        self.seconds = 0.0
        """Seconds for which the newest copy has stopped training."""

    def _make(self, base: Path) -> None:
        self.root = own_folder(base)
        self.root.mkdir(parents=True, exist_ok=True)

    @property
    def busy(self) -> bool:
        """Whether a copy is being made; the same on all ranks."""
        return self._save is not None

    def find(self) -> tuple[PeerFolder, Manifest] | None:
        """The newest copy of which all files are on the nodes together, the same on all ranks. All others are removed:
        an older one is of no use, and an incomplete newer one must not be mistaken for the newest later."""
        found = gather({name: self._files(name) for name in self._copies()} if self._leads else {})
        elsewhere = [
            {name: files for name, files in node.copies.items() if _NAME.fullmatch(name)} for node in self.spare
        ]
        # By the whole name: of one iteration there may be two, and all ranks have to ask for them in one order.
        for name in sorted(set[str]().union(*found, *elsewhere), key=_order, reverse=True):
            manifests = gather(self._manifest(name))
            manifest = next((each for each in manifests if each is not None), None) or self._of_parts(name)
            if manifest is None:
                continue
            # A file that was being sent may be cut off: only those of the right size count.
            held = {
                self.locations[r].node: frozenset(f for f, size in manifest.files.items() if names[name].get(f) == size)
                for r, names in enumerate(found)
                if name in names
            }
            spare = [
                {file: size for file, size in names.get(name, {}).items() if manifest.files.get(file) == size}
                for names in elsewhere
            ]
            there = set[str]().union(*held.values(), *spare)
            if there.issuperset(manifest.files):
                self._keep_only(name)
                (self.root / name).mkdir(exist_ok=True)
                nodes = [replace(node, copies={name: of}) for node, of in zip(self.spare, spare, strict=True)]
                return PeerFolder(self.root / name, self.locations, held, self._group, nodes), manifest
        self._keep_only(None)
        return None

    def drop_damaged(self, folder: PeerFolder, manifest: Manifest) -> bool:
        """Remove the files of a copy that do not have their checksums, on every node; returns whether there were any.
        Every rank calls it."""
        damaged = []
        for file in manifest.files if self._leads else ():
            shards = {
                name: replace(entry, shards=of_file)
                for name, entry in manifest.tensors.items()
                if (of_file := tuple(shard for shard in entry.shards if shard.file == file))
            }
            alone = Manifest(shards, {file: manifest.files[file]}, {})
            path = folder.local / file
            try:
                wrong = verify(LocalFolder(folder.local), alone) if path.exists() else []
            except (CheckpointError, OSError) as error:
                wrong = [str(error)]
            if wrong:
                damaged.append(file)
                path.unlink(missing_ok=True)
        return any_rank(bool(damaged))

    def _copies(self) -> list[str]:
        """Names of the copies on this node, complete or not, oldest first."""
        return sorted((name for name in os.listdir(self.root) if _NAME.fullmatch(name)), key=_order)

    def _files(self, name: str) -> dict[str, int]:
        """Sizes in bytes of the files of a copy on this node, by name."""
        found = {}
        for path in (self.root / name).iterdir():
            with suppress(FileNotFoundError):  # a thread of a lost run has renamed it just now
                found[path.name] = path.stat().st_size
        return found

    def _manifest(self, name: str) -> Manifest | None:
        """The manifest of a copy on this node; rank 0 also asks nodes that do not train."""
        if not self._leads:
            return None
        with suppress(CheckpointError):
            return read_manifest(self.root / name)
        for node in self.spare if rank() == 0 else ():
            if MANIFEST in node.copies.get(name, ()):
                with suppress(CheckpointError, OSError):
                    (self.root / name).mkdir(exist_ok=True)
                    node.fetch(name, MANIFEST, self.root / name / MANIFEST)
                    return read_manifest(self.root / name)
        return None

    def _of_parts(self, name: str) -> Manifest | None:
        """The manifest of a copy, if the parts of all ranks are there; the same on all ranks, which call it
        together."""
        if rank() == 0:
            self._fetch_parts(name)
        parts = gather(read_parts(self.root / name) if self._leads else [])
        manifest = manifest_of([part for of_node in parts for part in of_node])
        if manifest is not None and self._leads:
            (self.root / name).mkdir(exist_ok=True)
            write_manifest(self.root / name, manifest)
        return manifest

    def _fetch_parts(self, name: str) -> None:
        """Fetch the parts that nodes which do not train have."""
        for node in self.spare:
            for file in node.copies.get(name, ()):
                if is_part(file) and not (self.root / name / file).exists():
                    (self.root / name).mkdir(exist_ok=True)
                    with suppress(OSError):  # then it does not exist, or cannot be read
                        node.fetch(name, file, self.root / name / file)

    @property
    def _leads(self) -> bool:
        """Whether this rank is the first of its node."""
        return self.location.local_rank == min(p.local_rank for p in self.locations if p.node == self.location.node)

    def begin(self, state: Mapping[str, torch.Tensor], extra: Mapping[str, Any], rows: Mapping[str, int]) -> None:
        """Copy ``state`` to host memory, and let a thread write and send it. Waits for the copy before.

        Args:
            state, extra, rows: as of ``smp.checkpoint.save``; ``extra`` has the iteration.
        """
        # The staging memory is that of the copy before.
        self.wait()
        started = time.perf_counter()
        shards = local_shards(state, rows)
        self._make_plan(shards)
        self._number = (self._number + 1) % (1 << 32)
        name = f"{iteration_name(extra['progress']['iteration'])}-{self._number:08x}"
        folder = LocalFolder(self.root / name)
        layout = self._memory.fill({key: shards[item.name].rows(item) for key, item in self._plan})
        # Now: the thread may outlive this object's memory, which its views keep.
        data = [(slot.key, self._memory.view(slot)) for slot in layout.slots]
        # Memory for two copies: the newest complete one and this one. By name, and not when the thread comes to it: it
        # may outlive this run of the process.
        outdated = [other for other in self._copies() if other not in (self._kept, name)]
        work = threading.Thread(target=self._work, args=(layout, data, outdated), daemon=True)
        self._save = _UnderWay(folder, extra, work)
        self._save.thread.start()
        self.seconds = time.perf_counter() - started

    def _make_plan(self, shards: Mapping[str, LocalShard]) -> None:
        """Choose keys and items of this rank's file; one rank has each replica. The plan is kept: only the source of
        batches changes its tensors from time to time."""
        items = items_of(shards)
        # Any rank's change concerns all, as the choice is made over all.
        if not any_rank(items != self._offered):
            return
        chosen = on_all_ranks("cannot copy: ", lambda: items, assign)
        mine, found = [items[n] for n in chosen[rank()]], list[tuple[str, Item]]()

        def keys(by_key: Mapping[str, Item]) -> dict[str, str]:
            found.extend(by_key.items())
            return dict.fromkeys(by_key, "")

        write_items("", mine, keys)
        first, self._plan, self._offered = self._offered is None, found, items
        if first:
            self._tell_size(shards)

    def _tell_size(self, shards: Mapping[str, LocalShard]) -> None:
        own = sum(t.numel() * t.element_size() for t in (shards[i.name].rows(i) for _, i in self._plan))
        most, free = max(gather(own)), shutil.disk_usage(self.root).free
        nodes = len({location.node for location in self.locations})
        where = "and in that of the next one" if nodes > 1 else "(there is no other one, whose loss it would survive)"
        self.say(
            f"copies in memory: at most {most / 1e9:,.3f} GB of a process, in {self.root} of its node {where}; "
            f"{free / 1e9:,.3f} GB are free there"
        )

    def _work(self, layout: FileLayout, data: Sequence[tuple[str, memoryview]], outdated: Sequence[str]) -> None:
        save = self._save
        assert save is not None
        # Every rank does it before it writes, so that there is room.
        self._remove(outdated)
        # A thread for each neighbour that sends: receiving blocks until it does. A pool has at least one.
        with ThreadPoolExecutor(1 + len(self._from)) as pool:
            folder, to = save.folder.local, self._to[rank()]
            with suppress(OSError):  # the process that writes there says it
                folder.mkdir(exist_ok=True)
            receiving = [pool.submit(self._receive, folder, r) for r in self._from]
            try:
                try:
                    hashes = self._write(save.folder, layout, data)
                    self._write_part(save, hashes)
                finally:
                    if to is not None:  # it waits for both messages, also if writing has failed here
                        for name in (part_of(rank()), _file_of(rank())):
                            send(folder / name, to, self._group)
                for each in receiving:
                    each.result()
            except Exception as error:  # the other ranks hear of it at a later step
                save.error = f"rank {rank()}: {type(error).__name__}: {error}"

    def _receive(self, folder: Path, source: int) -> None:
        """Receive a rank's part of the manifest and its file; both, also where the first fails."""
        failures = []
        for name in (part_of(source), _file_of(source)):
            try:
                receive(folder / name, source, self._group)
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _write_part(self, save: _UnderWay, hashes: dict[str, str]) -> None:
        file = _file_of(rank())
        written = write_items(file, [item for _, item in self._plan], lambda _: hashes)
        manifest = build_manifest([written], check_extra(save.extra))
        files = {file: (save.folder.local / file).stat().st_size} if written else {}
        write_part(save.folder.local, rank(), len(self.locations), replace(manifest, files=files))

    def _write(self, folder: LocalFolder, layout: FileLayout, data: Sequence[tuple[str, memoryview]]) -> dict[str, str]:
        return write_file(folder, _file_of(rank()), layout, data)

    def poll(self) -> None:
        """After each step: check without waiting whether the copy is complete. A small collective, only while one is
        being made."""
        if self._save is not None and not any_rank(self._save.thread.is_alive()):
            self.wait()

    def wait(self) -> None:
        """Wait for the copy that is being made, and commit it. A failure is printed; training continues without it."""
        if (save := self._save) is None:
            return
        save.thread.join()
        self._save = None
        if any_rank(bool(save.error)):
            errors = [error for error in gather(save.error) if error]
            self.say(f"WARNING: no copy in memory: {'; '.join(errors[:3])}; training continues")
            shutil.rmtree(save.folder.local, ignore_errors=True)
            return
        self.newest, self._kept = save.extra["progress"]["iteration"], save.folder.name

    def _keep_only(self, name: str | None) -> None:
        """Remove all other copies on this node."""
        self._kept = name
        if self._leads:
            self._remove([other for other in self._copies() if other != name])

    def _remove(self, copies: Sequence[str]) -> None:
        for name in copies:
            shutil.rmtree(self.root / name, ignore_errors=True)  # another rank may do the same

    def ended(self) -> int | None:
        """The last iteration of a run that an earlier start of the workers has finished, found on any node; None: there
        is none."""
        file = self.root / DONE
        found = gather(int(file.read_text()) if file.exists() else None)
        return next((iteration for iteration in found if iteration is not None), None)

    def close(self, done: int | None) -> None:
        """Free the memory, and remove the copies where the run is ``done`` after that iteration. A note of it stays: a
        node that joins at the same moment makes torchrun start the workers once more."""
        if self._save is not None:
            # 10 s at most: a peer may be gone.
            self._save.thread.join(10)
        self._memory.close()
        if done is not None:
            with suppress(OSError):
                temporary = self.root / f"{DONE}.{rank()}"  # renamed when it is complete: other ranks write it, too
                temporary.write_text(str(done))
                os.replace(temporary, self.root / DONE)
            for name in self._copies():
                shutil.rmtree(self.root / name, ignore_errors=True)
