"""Saving in the background: training stops only while the state is copied.

The copy goes into memory that is shared with a writer process and kept from save to save. At most one save is under way
per saver; what went wrong with it is raised on all ranks by the next call.
"""

from __future__ import annotations

import atexit
import secrets
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from smp.checkpoint.api import run_save
from smp.checkpoint.background.staging import StagingBuffer
from smp.checkpoint.background.writer import Answer, Commit, Job
from smp.checkpoint.background.writer_process import WriterProcess
from smp.checkpoint.commit import discard_unfinished
from smp.checkpoint.folders.folder import Folder, open_folder
from smp.checkpoint.folders.lock import RunLock
from smp.checkpoint.folders.retention import Retention
from smp.checkpoint.format.entries import CheckpointError, Manifest
from smp.checkpoint.format.tensor_file import FileLayout
from smp.parallel.agree import any_rank, every_rank, gather, on_rank_zero, rank

LAST_WAIT = 60.0
"""Seconds that the exit of a program waits for the files of other ranks, once its own is written."""


@dataclass(frozen=True)
class Saved:
    """A background save that was committed."""

    folder: Folder
    seconds: float  # from the call until this rank heard of the commit
    notes: tuple[str, ...] = ()  # lines about what was done after the commit


def async_save(
    state: Mapping[str, torch.Tensor],
    folder: Path | str | Folder,
    *,
    saver: AsyncSaver,
    extra: Mapping[str, Any],
    logical_rows: Mapping[str, int] | None = None,
    latest_in: Path | str | Folder | None = None,
    retention: Retention | None = None,
    lock: RunLock | None = None,
) -> None:
    """Copy ``state`` and let ``saver`` write it; ``state`` may be changed when this returns. Every rank calls it.

    Waits for the save before, if that is still under way.

    Args:
        state, folder, extra, logical_rows, lock: as for :func:`smp.checkpoint.save`.
        saver: made once, with ``AsyncSaver()``, on every rank. With ``AsyncSaver(group=)`` only the ranks of that group
            call this; together they hold all of every tensor.
        latest_in: folder whose ``latest`` is to name the checkpoint when it is complete.
        retention: which checkpoints stay in ``latest_in`` after that.

    Raises:
        TypeError: as :func:`smp.checkpoint.save`.
        CheckpointError: the save before failed, and this one did not begin; or this one cannot begin.
    """
    # The writer may still read the staging memory of the save before, which is about to be filled anew.
    saver.wait()
    started = time.monotonic()
    opened = open_folder(folder)
    root = None if latest_in is None else open_folder(latest_in).address  # an error here is one on all ranks
    parts: list[tuple[str, FileLayout]] = []
    manifests: list[Manifest] = []  # on rank 0, without checksums

    # No checksums yet: the writer hashes what it writes and puts them into the manifest at the commit.
    def stage(file: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        parts.append((file, saver._memory.fill(tensors)))
        return dict.fromkeys(tensors, "")

    run_save(state, opened, extra, logical_rows or {}, stage, manifests.append, saver.group)
    # A number that all writers know: a report of an earlier save under the same file name is not taken for one of this.
    save = on_rank_zero(lambda: secrets.token_hex(8), CheckpointError, saver.group)
    held = None if lock is None else (lock.root.address, lock.token)
    commits = [Commit(manifest, saver.patience, held, root, retention) for manifest in manifests]
    job = Job(opened.address, save, next(iter(parts), None), next(iter(commits), None))
    # The expected answers are noted first: the writer may answer at any time after the next line.
    saver._save = _UnderWay(opened, started, ["part", "commit"] if commits else ["part"])
    saver._writer.submit(job, saver._memory)


class AsyncSaver(AbstractContextManager["AsyncSaver"]):
    """A writer process and the memory it shares with this one. Make it before training: starting takes seconds.

    Close it, or use it as a context manager; at the exit of the program it waits for a save that is under way.

    Args:
        patience: seconds that rank 0's writer waits without hearing of any other rank's. While the trainers live they
            tell it when one fails; this is for a job that ended without rank 0 noticing.
        group: the ranks that save together, by default all.
    """

    def __init__(self, patience: float = 3600.0, group: dist.ProcessGroup | None = None) -> None:
        self.patience, self.group = patience, group
        self._memory, self._writer = StagingBuffer(), WriterProcess()
        self._save: _UnderWay | None = None
        # close() may never be called: a script may just end.
        atexit.register(self.close)

    @property
    def busy(self) -> bool:
        """Whether a save is under way; the same on all ranks."""
        return self._save is not None

    @property
    def writer_pid(self) -> int:
        return self._writer.pid

    def poll(self) -> Saved | None:
        """Hear without waiting whether the save under way is over; None when it is not, or there is none.

        Every rank calls it, once per training step. Costs a small collective, and that only during a save.

        Raises:
            CheckpointError: the save failed on some rank.
        """
        if self._save is None:
            return None
        self._listen(0.0)
        # Every rank knows of its own errors. That all files were committed only rank 0 hears.
        over = self._save.error is not None or (rank(self.group) == 0 and not self._save.awaited)
        return self.wait() if any_rank(over, self.group) else None

    def wait(self) -> Saved | None:
        """Wait for the save under way, if any. Every rank calls it.

        Raises:
            CheckpointError: the save failed on some rank; its files are deleted.
        """
        if self._save is None:
            return None
        save = self._save
        # In short rounds: a collective that waits for a disk would time out.
        while not every_rank(save.part_is_over, self.group):
            self._listen(1.0)
        # Two rounds: first all files, then the commit. Rank 0's writer would wait for the report of a rank that failed
        # until its patience ends; it is told to give up.
        errors = [f"rank {r}: {error}" for r, error in enumerate(gather(save.error, self.group)) if error is not None]
        if errors:
            self._writer.give_up()
        while not every_rank(not save.awaited, self.group):
            self._listen(1.0)
        errors = errors or [error for error in gather(save.error, self.group) if error is not None]
        self._save = None
        if errors:
            with suppress(CheckpointError):  # the next start cleans up what cannot be deleted now
                on_rank_zero(lambda: discard_unfinished(save.folder), CheckpointError, self.group)
            # A writer that died, such as by a lack of memory, would fail all later saves.
            if not self._writer.alive:
                self._writer.close()
                self._writer = WriterProcess()
            raise CheckpointError(f"cannot save {save.folder}: {'; '.join(dict.fromkeys(errors))}")
        notes = on_rank_zero(lambda: tuple(save.notes), CheckpointError, self.group)
        return Saved(save.folder, time.monotonic() - save.started, notes)

    def _listen(self, timeout: float) -> None:
        """Read the writer's answers until none is expected or it is silent for ``timeout`` seconds."""
        save = self._save
        assert save is not None
        while save.awaited and (answer := self._writer.answer(timeout)) is not None:
            save.hear(answer)

    def close(self) -> None:
        """Wait for a save that is under way, without the other ranks, and end the writer. May be called twice.

        Other ranks may have died without their files: they get as long again as this rank's file took, and
        :data:`LAST_WAIT`. A failure is printed: who did not wait before cannot be told otherwise.
        """
        atexit.unregister(self.close)
        if (save := self._save) is not None:
            # No collective here: other ranks may be gone already, or end in another order.
            # First this rank's own file, without a limit; then the others', with one.
            self._finish_alone(save)
            if save.error is not None:
                print(f"error: cannot save {save.folder}: {save.error}", file=sys.stderr, flush=True)
        self._save = None
        self._writer.close()
        self._memory.close()

    def _finish_alone(self, save: _UnderWay) -> None:
        while not save.part_is_over:
            self._listen(1.0)
        deadline = time.monotonic() + save.part_took + LAST_WAIT
        while save.awaited and time.monotonic() < deadline:
            self._listen(min(1.0, LAST_WAIT))
        # It answers that it gave up. One that does not answer even that hangs, and is left behind.
        if save.awaited:
            self._writer.give_up()
            self._listen(LAST_WAIT)
        if save.awaited:
            save.fail("another rank does not finish its file")

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass
class _UnderWay:
    """A save, and the answers of this rank's writer that have not come yet."""

    folder: Folder
    started: float
    awaited: list[str]
    error: str | None = None
    notes: list[str] = field(default_factory=list)
    part_took: float = 0.0  # seconds until this rank heard that its own file is written

    @property
    def part_is_over(self) -> bool:
        return "part" not in self.awaited

    def hear(self, answer: Answer) -> None:
        # Answers come in the order of the job: the part, then the commit.
        if self.awaited.pop(0) == "part":
            self.part_took = time.monotonic() - self.started
        error, notes = answer
        self.notes += notes
        if error is not None:
            self.fail(error)

    def fail(self, error: str) -> None:
        self.error = error
        # A failed part has no commit: nothing more is expected.
        self.awaited.clear()
