"""Cut what connects this process with others: torch has no other way to wake a thread that waits in gloo or a store.

A rank that has lost contact tells all others so, those too that wait for a rank which has not come and is well: their
connections are shut down, and whoever waits on one gets an error.
"""

from __future__ import annotations

import gc
import os
import socket
from contextlib import suppress
from pathlib import Path

_OPEN = Path("/proc/self/fd")


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
