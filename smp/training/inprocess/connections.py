"""Shut down this process's connections: torch has no other way to wake a thread that waits in gloo or in a store.

When a rank detects a failure, all ranks shut down their connections, also those that wait for a healthy rank. Every
thread that waits on such a connection gets an error.
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_OPEN = Path("/proc/self/fd")
_LONGEST = 32767.0
"""Seconds that Linux takes at most for keep-alive messages."""


def open_connections() -> dict[str, int]:
    """Open sockets of this process, descriptor by the system's name for them; none without /proc, where waits end by
    timeouts."""
    found = {}
    with suppress(OSError):
        for descriptor in os.listdir(_OPEN):
            with suppress(OSError):
                name = os.readlink(_OPEN / descriptor)
                if name.startswith("socket:"):
                    found[name] = int(descriptor)
    return found


def cut_connections(spared: set[str]) -> int:
    """Shut down all of torch's TCP connections to other processes except ``spared``; returns how many there were.
    Sockets that Python made (a tracker's, a remote file system's) are left alone."""
    found = open_connections()  # first: one that Python opens meanwhile is not among them
    # By its type: others' ``__class__`` may be a property, which warns.
    pythons = {one.fileno() for one in gc.get_objects() if issubclass(type(one), socket.socket)}
    return sum(
        _shut_down(name, descriptor)
        for name, descriptor in found.items()
        if name not in spared and descriptor not in pythons
    )


def bound_silence(spared: Iterable[str], seconds: float) -> int:
    """Let TCP connections except ``spared`` end with an error where the other machine is not heard of for so many
    seconds, as behind a cut link; returns how many there were. Else the system tries for a quarter of an hour, and the
    client of torch's store waits for it. A process that is stopped does not count: its system answers."""
    found = open_connections()
    return sum(_bound(found[name], seconds) for name in found.keys() - set(spared))


def _bound(descriptor: int, seconds: float) -> bool:
    """Bound the silence of a TCP connection; returns whether it was one."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:  # OSError: it was closed meanwhile
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return False
        bound_connection(one, seconds)
        return True
    return False


def bound_connection(one: socket.socket, seconds: float) -> None:
    """Let a TCP connection end with an error where the other machine is not heard of for so many seconds; only on
    Linux."""
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    seconds = min(seconds, _LONGEST)
    # An answer may be awaited: then nothing is sent that would have to be acknowledged, but the system asks.
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        one.setsockopt(socket.IPPROTO_TCP, option, max(1, int(seconds / 4)))
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))


def _shut_down(name: str, descriptor: int) -> bool:
    """Shut down a TCP connection; returns whether it was one."""
    try:
        # dup: the number may be closed and reused by another thread at any time.
        one = socket.socket(fileno=os.dup(descriptor))
    except OSError:  # it was closed meanwhile
        return False
    with one:
        if os.readlink(_OPEN / str(one.fileno())) != name:  # the number is another's by now
            return False
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return False
        if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # it listens
            return False
        # shutdown, not close: it wakes the thread that waits on the connection.
        with suppress(OSError):  # the other end is gone
            one.shutdown(socket.SHUT_RDWR)
        return True
