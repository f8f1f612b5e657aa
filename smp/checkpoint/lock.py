"""One job per folder of checkpoints: the file ``lock``, made by whoever comes first.

It names its holder and is renewed every few seconds. A holder that died without removing it is recognized at once when
it ran on this machine, and elsewhere by a lock that is not renewed while one watches; no clocks are compared.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from smp.checkpoint.entries import CheckpointError
from smp.checkpoint.folder import Folder

LOCK = "lock"
RENEWED_EVERY = 10.0
"""Seconds."""
_PATIENCE = 6 * RENEWED_EVERY  # file attributes are cached for so long on NFS


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
    """

    def __init__(self, root: Folder, say: Callable[[str], None]) -> None:
        self.root, self._me = root, Holder.here()
        self._lost: str | None = None
        self._take(say)
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="checkpoint-lock", daemon=True)
        self._thread.start()

    def _take(self, say: Callable[[str], None]) -> None:
        if self.root.create(LOCK, _encode(self._me)):
            return
        holder = _read(self.root) or _read_again(self.root)
        if holder is not None and _is_alive(holder, self.root, say):
            raise CheckpointError(
                f"{self.root} is in use by {holder} (file '{LOCK}'): two jobs must not save into one folder"
            )
        self.root.replace(LOCK, _encode(self._me))
        time.sleep(0.1)  # somebody else who came at the same moment has written now, and the last one has it
        if (winner := _read(self.root)) is None or winner.token != self._me.token:
            raise CheckpointError(f"{self.root} was taken by {winner} just now: two jobs must not save into one folder")
        say(f"{self.root}: took over the lock of {holder or 'an unknown job'}, which is gone")

    def _renew(self) -> None:
        while not self._released.wait(RENEWED_EVERY):
            try:
                holder = _read(self.root)
                if holder is not None and holder.token != self._me.token:
                    self._lost = f"{self.root} was taken over by {holder} while this job was stopped"
                    return
                self._me = replace(self._me, beat=self._me.beat + 1)
                self.root.replace(LOCK, _encode(self._me))
            except OSError:
                continue  # a full or absent disk is for the save to complain about

    def check(self) -> None:
        """Raise CheckpointError when another job took the lock, which it does when this one seemed dead."""
        if self._lost is not None:
            raise CheckpointError(self._lost)

    def release(self) -> None:
        """Give it back. May be called twice."""
        if self._released.is_set():
            return
        self._released.set()
        self._thread.join()
        holder = _read(self.root)
        if holder is not None and holder.token == self._me.token:
            self.root.delete(LOCK)


def _encode(holder: Holder) -> bytes:
    return (json.dumps(asdict(holder)) + "\n").encode()


def _read(root: Folder) -> Holder | None:
    """The holder that the lock names; None when it names none that can be understood."""
    try:
        content: Any = json.loads(root.read(LOCK))
        holder = Holder(**content)
    except (OSError, ValueError, TypeError):
        return None
    return holder if isinstance(holder.pid, int) and isinstance(holder.token, str) else None


def _read_again(root: Folder) -> Holder | None:
    """After a moment: whoever makes the lock may not have filled it yet."""
    time.sleep(1.0)
    return _read(root)


def _is_alive(holder: Holder, root: Folder, say: Callable[[str], None]) -> bool:
    if holder.host == socket.gethostname() and holder.system == _system():
        return _started(holder.pid) == holder.started != ""
    say(f"{root} has a lock of {holder}: watching for {_PATIENCE:.0f} s whether that is alive")
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        time.sleep(_PATIENCE / 60)
        found = _read(root)
        if found is not None and (found.token, found.beat) != (holder.token, holder.beat):
            return True
    return False
