"""One job per folder of checkpoints: a file ``lock`` that only one process can create, and a heartbeat in it.

The holder writes the file again every few seconds. A dead holder is recognized at once when it ran on this machine, and
elsewhere by a lock that is not renewed while one watches; no clocks are compared. Who takes over creates the next file,
``lock.1`` after ``lock``: the lock with the highest number counts. A file is created by one process only, so of many
jobs that want the lock of a dead one, one has it.

This rests on exclusive creation: of links or new files on a file system, of objects on S3 (If-None-Match). fsspec's
back-ends of other object stores look first and put then. Two jobs that come in the same moment may both begin there;
the one that wrote first finds out when it looks again (``check``), before it commits or removes anything.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from smp.checkpoint.folders.folder import Folder
from smp.checkpoint.format.entries import CheckpointError

LOCK = "lock"
RENEWED_EVERY = 10.0
"""Seconds between two renewals."""
_PATIENCE = 6 * RENEWED_EVERY  # file attributes are cached for so long on NFS
_LOCKS = re.compile(rf"{LOCK}(?:\.(\d{{1,9}}))?")
LEFT_BY_TAKERS = re.compile(rf"{LOCK}(\.[0-9a-f]+)*\.tmp|{LOCK}\.[0-9a-f]{{16}}")
"""Temporary files next to the lock that a dying job may leave; version 0.1 made the longer names."""


class LockLostError(CheckpointError):
    """Another job has the folder now: this one must not write there any more."""


@dataclass(frozen=True)
class Holder:
    """A process, so that it is not mistaken for a later one with its number, or one in another container.

    Attributes:
        host: name of the machine.
        system: which start of the machine, and which of its process tables; empty where there is no /proc.
        pid: number of the process in that table.
        started: when, in ticks since the machine's start.
        token: chance, to tell two locks of one process apart.
        beat: how often the lock was renewed.
    """

    host: str
    system: str
    pid: int
    started: str
    token: str
    beat: int = 0

    @staticmethod
    def here() -> Holder:
        """The holder that is this process."""
        pid = os.getpid()
        return Holder(socket.gethostname(), _system(), pid, started_at(pid), secrets.token_hex(8))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.pid else "an unknown job"


_UNKNOWN = Holder(host="", system="", pid=0, started="", token="")
_TWO = "two jobs must not save into one folder"


def _system() -> str:
    # A container restarted on the same machine has another table of processes.
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}" if boot.exists() else ""


def started_at(pid: int) -> str:
    """Start time of a process; empty when there is none (or only its exit status is left)."""
    try:
        # The name in parentheses may have spaces: fields are counted after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return ""
    # Z and X: zombie, dead. Field 22 of proc(5), the start time, is number 19 after the name.
    return "" if fields[0] in "ZX" else fields[19]


class RunLock:
    """Holds the lock of ``root``, which exists, until it is released.

    ``say`` is told, in one line, when a dead job's lock is taken over, and before waiting to find out.

    Raises:
        CheckpointError: another job holds it.
        OSError: it cannot be read or written.
    """

    def __init__(self, root: Folder, say: Callable[[str], None]) -> None:
        self.root, self._me = root, Holder.here()
        self._lost: str | None = None
        # Taken before the thread starts: it renews only what is held.
        self._name = _take(root, self._me, say)
        self._renewed = time.monotonic()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="checkpoint-lock", daemon=True)
        self._thread.start()

    @property
    def token(self) -> str:
        """The token in the lock file as long as this lock is held; for :func:`require_lock` in another process."""
        return self._me.token

    def _keep(self) -> None:
        # Waits and hears of the release at the same time.
        while not self._released.wait(RENEWED_EVERY):
            try:
                self._renew()
            except LockLostError as error:
                self._lost = str(error)
                return
            except Exception:
                continue  # storage raises what it likes; check() looks at the time of the last good renewal

    def _renew(self) -> None:
        """Write the next beat, also where the file was deleted."""
        me = replace(self._me, beat=self._me.beat + 1)
        # Not blindly: a job that was asleep for minutes would write over the lock of the one that took over.
        require_lock(self.root, self.token)
        self.root.replace(self._name, _encode(me))
        self._me, self._renewed = me, time.monotonic()

    def check(self) -> None:
        """Check that the lock is still held. Call it before anything in the folder is changed.

        Raises:
            LockLostError: another job took it, which it does when this one seemed dead.
            CheckpointError: that cannot be found out, and so much time has passed since it was known that a job
                elsewhere may be about to take the lock.
        """
        if self._lost is not None:
            raise LockLostError(self._lost)
        try:
            require_lock(self.root, self.token)
        except LockLostError as error:
            self._lost = str(error)
            raise
        except OSError as error:
            silent = time.monotonic() - self._renewed
            # A job that wants the lock watches for the whole time without a beat. Half of it leaves time
            # for what follows this check.
            if silent > _PATIENCE / 2:
                raise CheckpointError(
                    f"the lock of {self.root} could not be renewed for {silent:.0f} s ({error}): "
                    "another job may have taken it"
                ) from error

    def release(self) -> None:
        """Release the lock. May be called twice."""
        if self._released.is_set():
            return
        self._released.set()
        # The thread has to be over before the file goes, or it would write the lock once more.
        self._thread.join()
        with suppress(OSError, LockLostError):  # left where storage is away, it is a dead job's
            require_lock(self.root, self.token)
            self.root.delete(self._name)


def require_lock(root: Folder, token: str) -> None:
    """Raise LockLostError when the lock of ``root`` names another holder than the one with this token.

    A lock that does not exist is nobody else's. Raises OSError when it cannot be read.
    """
    holder = _read(root, _locks(root)[-1])
    if holder is not None and holder.token != token:
        raise LockLostError(f"{root} was taken over by {holder} while this job was stopped")


def _take(root: Folder, me: Holder, say: Callable[[str], None]) -> str:
    """Create the next lock of ``root`` if the newest one's holder is dead; returns its name.

    Raises:
        CheckpointError: the holder lives, or another job is faster.
    """
    # Who has the number after the newest lock's is decided by who creates that file.
    newest = name = _locks(root)[-1]
    holder = _read(root, newest)
    if holder is not None and not holder.pid:
        time.sleep(1.0)  # without links, and without If-None-Match, a file may be seen before it is filled
        holder = _read(root, newest)
    if holder is not None:
        if _is_alive(holder, root, newest, say):
            raise CheckpointError(f"{root} is in use by {holder} (file '{newest}'): {_TWO}")
        # The dead job's file stays until the new one exists: in between nobody could tell the
        # folder from a free one.
        name = f"{LOCK}.{_number(newest) + 1}"
    root.create(name, _encode(me))
    # Looked at again, because storage without exclusive creation lets two jobs pass.
    now = _read(root, _locks(root)[-1])
    if now is None or now.token != me.token:
        raise CheckpointError(f"{root} was taken by {now or _UNKNOWN} just now: {_TWO}")
    if holder is not None:
        say(f"{root}: took over the lock of {holder}, which is gone")
    for older in _locks(root)[:-1]:
        with suppress(OSError):  # the newest one counts
            root.delete(older)
    return name


def _locks(root: Folder) -> list[str]:
    """Names of the locks of ``root`` in ascending order, of which the last counts; the first name, if there is none."""
    return sorted(filter(_LOCKS.fullmatch, root.names()), key=_number) or [LOCK]


def _number(name: str) -> int:
    return int(name.removeprefix(LOCK).removeprefix(".") or 0)


def _encode(holder: Holder) -> bytes:
    return (json.dumps(asdict(holder)) + "\n").encode()


def _read(root: Folder, name: str) -> Holder | None:
    """The holder that a lock names; None when there is no such lock."""
    try:
        holder = Holder(**json.loads(root.read(name)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return _UNKNOWN
    return holder if isinstance(holder.pid, int) else _UNKNOWN


# On this machine the table of processes tells; on others only beats do.
def _is_alive(holder: Holder, root: Folder, name: str, say: Callable[[str], None]) -> bool:
    if not holder.pid:
        # Nobody can be asked whether an unreadable lock's holder lives; it was given a second to be filled.
        return False
    if holder.system and (holder.host, holder.system) == (socket.gethostname(), _system()):
        # A process of the same number that started at another time is another one.
        return started_at(holder.pid) == holder.started != ""
    say(f"{root} has a lock of {holder}: watching for {_PATIENCE:.0f} s whether that is alive")
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        time.sleep(_PATIENCE / 60)
        found = _read(root, name)
        # A beat, or another job that took over meanwhile: in both cases somebody lives.
        if found is not None and found.pid and (found.token, found.beat) != (holder.token, holder.beat):
            return True
    return False
