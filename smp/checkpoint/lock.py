"""One job per folder of checkpoints: the file ``lock``, made by whoever comes first.

It names its holder and is renewed every few seconds. A holder that died without removing it is recognized at once when
it ran on this machine, and elsewhere by a lock that is not renewed while one watches; no clocks are compared.

Who wants the lock of a dead job first makes the file ``lock.<the dead job's token>``. A file is made by one process
only, so one process only replaces that lock; and it looks whether the lock is still the dead job's after it made the
file, so who comes late changes nothing. On a file system that rests on ``link``; S3 makes an object only if there is
none when it is asked to (If-None-Match). Other object stores look first and put then, so that two jobs that come within
the same moment may both believe that they have the lock, until the one that wrote first looks again (``check``).
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
from typing import Any

import xxhash

from smp.checkpoint.entries import CheckpointError
from smp.checkpoint.folder import Folder

LOCK = "lock"
RENEWED_EVERY = 10.0
"""Seconds."""
_PATIENCE = 6 * RENEWED_EVERY  # file attributes are cached for so long on NFS
LEFT_BY_TAKERS = re.compile(r"lock\.[0-9a-f]{16}(\.[0-9a-f]+\.tmp)?|lock(\.[0-9a-f]+)?\.tmp")
"""Names of files beside the lock that a job that died while it took the lock leaves."""
_TOKEN = re.compile(r"[0-9a-f]{16}")


class LockLostError(CheckpointError):
    """Another job has the folder now: this one must not write there any more."""


@dataclass(frozen=True)
class Holder:
    """A process, so that it is not mistaken for a later one with its number, or one in another container.

    Attributes:
        host: name of the machine.
        system: which start of the machine, and which of its process tables.
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
        """This process."""
        pid = os.getpid()
        return Holder(socket.gethostname(), _system(), pid, _started(pid), secrets.token_hex(8))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _system() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    table = Path("/proc/self/ns/pid")
    return f"{boot.read_text().strip()} {os.readlink(table)}" if boot.exists() else ""


def _started(pid: int) -> str:
    """Start time of a process; empty when there is none (or only its exit status is left)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class RunLock:
    """Holds the lock of ``root`` until it is released.

    Args:
        root: the folder; it exists.
        say: told, in one line, when a dead job's lock is taken over, and before waiting to find out.

    Raises:
        CheckpointError: another job holds it.
        OSError: it cannot be read or written.
    """

    def __init__(self, root: Folder, say: Callable[[str], None]) -> None:
        self.root, self._me = root, Holder.here()
        self._lost: str | None = None
        if (gone := _take(root, LOCK, self._me, say)) is not None:
            say(f"{root}: took over the lock of {gone}, which is gone")
        self._renewed = time.monotonic()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="checkpoint-lock", daemon=True)
        self._thread.start()

    @property
    def token(self) -> str:
        """What the file says as long as this lock is held; for :func:`require_lock` in another process."""
        return self._me.token

    def _keep(self) -> None:
        while not self._released.wait(RENEWED_EVERY):
            try:
                self._renew()
            except LockLostError as error:
                self._lost = str(error)
                return
            except Exception:
                continue  # storage raises what it likes; check() looks at the time of the last good renewal

    def _renew(self) -> None:
        me = replace(self._me, beat=self._me.beat + 1)
        if self.root.size(LOCK) is None and self.root.create(LOCK, _encode(me)):  # somebody deleted it
            pass
        else:
            require_lock(self.root, self.token)
            self.root.replace(LOCK, _encode(me))
        self._me, self._renewed = me, time.monotonic()

    def check(self) -> None:
        """Look once more whether the lock is held. Call it before anything in the folder is changed.

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
            if silent > _PATIENCE / 2:
                raise CheckpointError(
                    f"the lock of {self.root} could not be renewed for {silent:.0f} s ({error}): "
                    "another job may have taken it"
                ) from error

    def release(self) -> None:
        """Give it back. May be called twice."""
        if self._released.is_set():
            return
        self._released.set()
        self._thread.join()
        with suppress(OSError):  # left where storage is away, it is a dead job's
            holder = _parse(_read(self.root, LOCK))
            if holder is not None and holder.token == self.token:
                self.root.delete(LOCK)


def require_lock(root: Folder, token: str) -> None:
    """Raise LockLostError when the lock of ``root`` names another holder than the one with this token.

    A lock that is not there is nobody else's. Raises OSError when it cannot be read.
    """
    found = _read(root, LOCK)
    holder = _parse(found)
    if found is not None and (holder is None or holder.token != token):
        raise LockLostError(f"{root} was taken over by {holder or 'another job'} while this job was stopped")


def _take(root: Folder, name: str, me: Holder, say: Callable[[str], None]) -> str | None:
    """Make the file ``name``, or take it over when its holder is dead; who that was.

    Raises:
        CheckpointError: its holder lives, or somebody else was faster.
    """
    seen = _make_or_read(root, name, me)
    if seen is None:
        return None
    holder = _parse(seen)
    if holder is not None and _is_alive(holder, root, name, say):
        raise CheckpointError(f"{root} is in use by {holder} (file '{name}'): two jobs must not save into one folder")
    election = f"{LOCK}.{_identity(seen)}"
    _take(root, election, me, say)  # who dies in between is a dead holder of that file, and nothing else is stuck
    try:
        now = _read(root, name)
        if now is None or _identity(now) != _identity(seen):
            raise CheckpointError(
                f"{root} was taken by {_parse(now) or 'another job'} just now: two jobs must not save into one folder"
            )
        root.replace(name, _encode(me))
    finally:
        with suppress(OSError):  # it names a job that is gone, so it can never be in the way
            root.delete(election)
    return str(holder or "an unknown job")


def _make_or_read(root: Folder, name: str, me: Holder) -> bytes | None:
    """None when the file was made for ``me``; else what is in it, which may be gone again at the first look."""
    for pause in (0.0, 0.1, 0.5):
        time.sleep(pause)
        if root.create(name, _encode(me)):
            return None
        seen = _read(root, name)
        if seen is not None and _parse(seen) is None:
            time.sleep(1.0)  # without links, and without If-None-Match, a file may be seen before it is filled
            seen = _read(root, name)
        if seen is not None:
            holder = _parse(seen)
            return None if holder is not None and holder.token == me.token else seen
    raise CheckpointError(f"{root}/{name} can neither be made nor read")


def _encode(holder: Holder) -> bytes:
    return (json.dumps(asdict(holder)) + "\n").encode()


def _read(root: Folder, name: str) -> bytes | None:
    """None when it is not there."""
    try:
        return root.read(name)
    except FileNotFoundError:
        return None


def _parse(data: bytes | None) -> Holder | None:
    """The holder that a lock names; None when it names none that can be understood."""
    try:
        content: Any = json.loads(data or b"")
        holder = Holder(**content)
        known = isinstance(holder.pid, int) and _TOKEN.fullmatch(holder.token) is not None
    except (ValueError, TypeError):
        return None
    return holder if known else None


def _identity(data: bytes) -> str:
    """The same for all states of one holder's lock, and 16 hexadecimal digits."""
    holder = _parse(data)
    return xxhash.xxh3_64_hexdigest(data) if holder is None else holder.token


def _is_alive(holder: Holder, root: Folder, name: str, say: Callable[[str], None]) -> bool:
    if holder.host == socket.gethostname() and holder.system == _system():
        if holder.system:
            return _started(holder.pid) == holder.started != ""
        if not _is_a_process(holder.pid):
            return False  # where the system does not tell when a process started, there may be another of its number
    say(f"{root} has a lock of {holder}: watching for {_PATIENCE:.0f} s whether that is alive")
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        time.sleep(_PATIENCE / 60)
        found = _parse(_read(root, name))
        if found is not None and (found.token, found.beat) != (holder.token, holder.beat):
            return True
    return False


def _is_a_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's
    return True
