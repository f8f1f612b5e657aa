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
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from smp.checkpoint.api import run_save
from smp.checkpoint.entries import CheckpointError
from smp.checkpoint.folder import Folder
from smp.checkpoint.local import open_folder
from smp.checkpoint.lock import RunLock
from smp.checkpoint.retention import Retention
from smp.checkpoint.staging import StagingBuffer, StagingWriter
from smp.checkpoint.storage import discard_unfinished
from smp.checkpoint.writer_process import WriterDiedError, WriterProcess
from smp.parallel.agree import any_rank, every_rank, gather, on_rank_zero, rank

LAST_WAIT = 60.0
"""Seconds that the end of a program waits for the files of other ranks, once its own is written."""


@dataclass(frozen=True)
class Saved:
    """A background save that was committed.

    Attributes:
        folder: its folder.
        seconds: from the call until this rank heard of the commit.
        notes: lines about what was done after the commit.
    """

    folder: Folder
    seconds: float
    notes: tuple[str, ...] = ()


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
        state: as for :func:`smp.checkpoint.save`.
        folder: as for :func:`smp.checkpoint.save`.
        saver: made once, with ``AsyncSaver()``, on every rank.
        extra: as for :func:`smp.checkpoint.save`.
        logical_rows: as for :func:`smp.checkpoint.save`.
        latest_in: folder whose ``latest`` is to name the checkpoint when it is complete.
        retention: which checkpoints stay in ``latest_in`` after that.
        lock: as for :func:`smp.checkpoint.save`.

    Raises:
        TypeError: as :func:`smp.checkpoint.save`.
        CheckpointError: the save before failed, and this one did not begin; or this one cannot begin.
    """
    saver.wait()
    after = None
    if latest_in is not None:
        keep = None if retention is None else asdict(retention)
        after = {"root": open_folder(latest_in).address, "retention": keep}
    saver.begin(state, open_folder(folder), extra, logical_rows or {}, after, lock)


class AsyncSaver:
    """A writer process and the memory it shares with this one. Make it before training: starting takes seconds.

    Close it, or use it as a context manager; at the exit of the program it waits for a save that is under way.

    Args:
        patience: seconds that rank 0's writer waits without hearing of any other rank's. While the trainers live they
            tell it when one fails; this is for a job that ended without rank 0 noticing.
    """

    def __init__(self, patience: float = 3600.0) -> None:
        self.patience = patience
        self._memory, self._writer = StagingBuffer(), WriterProcess()
        self._save: _UnderWay | None = None
        atexit.register(self.close)

    @property
    def busy(self) -> bool:
        """Whether a save is under way; the same on all ranks."""
        return self._save is not None

    @property
    def writer_pid(self) -> int:
        """Process number of this rank's writer."""
        return self._writer.pid

    def begin(
        self,
        state: Mapping[str, torch.Tensor],
        folder: Folder,
        extra: Mapping[str, Any],
        logical_rows: Mapping[str, int],
        after: dict[str, Any] | None,
        lock: RunLock | None,
    ) -> None:
        """Copy and hand over; see :func:`async_save`."""
        assert self._save is None
        started = time.monotonic()
        staged = StagingWriter(folder, extra, self._memory)
        run_save(state, staged, logical_rows)
        token = on_rank_zero(lambda: secrets.token_hex(8), CheckpointError)
        commit = None
        if staged.manifest is not None:
            held = None if lock is None else {"root": lock.root.address, "token": lock.token}
            commit = {"manifest": asdict(staged.manifest), "patience": self.patience, "after": after, "lock": held}
        self._save = _UnderWay(folder, started, awaited=["part"] + ["commit"] * (commit is not None))
        try:
            job = {"save": token, "folder": folder.address, "part": staged.part, "commit": commit}
            self._writer.submit(job, self._memory)
        except WriterDiedError as error:
            self._save.fail(str(error))

    def poll(self) -> Saved | None:
        """Hear without waiting whether the save under way is over; None when it is not, or there is none.

        Every rank calls it, once per training step. Costs a small collective, and that only during a save.

        Raises:
            CheckpointError: the save failed on some rank.
        """
        if self._save is None:
            return None
        self._listen(0.0)
        over = self._save.error is not None or (rank() == 0 and not self._save.awaited)
        return self.wait() if any_rank(over) else None

    def wait(self) -> Saved | None:
        """Wait for the save under way, if any. Every rank calls it.

        Raises:
            CheckpointError: the save failed on some rank; its files are deleted.
        """
        if self._save is None:
            return None
        save = self._save
        while not every_rank(save.part_is_over):  # in short rounds: a collective that waits for a disk would time out
            self._listen(1.0)
        errors = [f"rank {r}: {error}" for r, error in enumerate(gather(save.error)) if error is not None]
        if errors:
            self._writer.give_up()
        while not every_rank(not save.awaited):
            self._listen(1.0)
        errors = errors or [error for error in gather(save.error) if error is not None]
        self._save = None
        if errors:
            with suppress(CheckpointError):  # the next start cleans up what cannot be deleted now
                on_rank_zero(lambda: discard_unfinished(save.folder), CheckpointError)
            self._replace_dead_writer()
            raise CheckpointError(f"cannot save {save.folder}: {'; '.join(dict.fromkeys(errors))}")
        notes = on_rank_zero(lambda: tuple(save.notes), CheckpointError)
        return Saved(save.folder, time.monotonic() - save.started, notes)

    def _listen(self, timeout: float | None) -> None:
        """Take in what the writer says, until it has nothing more to say or is silent for ``timeout`` seconds."""
        save = self._save
        assert save is not None
        while save.awaited:
            try:
                answer = self._writer.answer(timeout)
            except WriterDiedError as error:
                save.fail(str(error))
                return
            if answer is None:
                return
            save.hear(answer)

    def _replace_dead_writer(self) -> None:
        if not self._writer.alive:
            self._writer.close()
            self._writer = WriterProcess()

    def close(self) -> None:
        """Wait for a save that is under way, without the other ranks, and end the writer. May be called twice.

        Other ranks may have died without their files: they get as long again as this rank's file took, and
        :data:`LAST_WAIT`. A failure is printed: who did not wait before cannot be told otherwise.
        """
        atexit.unregister(self.close)
        if self._save is not None:
            self._finish_alone(self._save)
            if self._save.error is not None:
                print(f"error: cannot save {self._save.folder}: {self._save.error}", file=sys.stderr, flush=True)
        self._save = None
        self._writer.close()
        self._memory.close()

    def _finish_alone(self, save: _UnderWay) -> None:
        while not save.part_is_over:
            self._listen(1.0)
        deadline = time.monotonic() + save.part_took + LAST_WAIT
        while save.awaited and time.monotonic() < deadline:
            self._listen(min(1.0, LAST_WAIT))
        if save.awaited:
            self._writer.give_up()
            self._listen(LAST_WAIT)
        if save.awaited:
            save.fail("another rank does not finish its file")

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass
class _UnderWay:
    """A save, and the answers of this rank's writer that are still to come."""

    folder: Folder
    started: float
    awaited: list[str]
    error: str | None = None
    notes: list[str] = field(default_factory=list)
    part_took: float = 0.0
    """Seconds until this rank heard that its own file is written."""

    @property
    def part_is_over(self) -> bool:
        return "part" not in self.awaited

    def hear(self, answer: dict[str, Any]) -> None:
        what = self.awaited.pop(0)
        if what == "part":
            self.part_took = time.monotonic() - self.started
        self.notes += answer["notes"]
        if answer[what] is not None:
            self.fail(answer[what])

    def fail(self, error: str) -> None:
        self.error = error
        self.awaited.clear()
