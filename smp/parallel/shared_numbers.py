"""Numbers in memory that processes share, and waiting for one of them: Linux' futex, which no module of Python has.

A process that only looks until the number is there uses up its turn of a busy machine, and is the last to get another
one. One that sleeps in the kernel gets a processor as soon as it is woken. So a wait looks for as long as that has paid
lately, at most 0.1 ms, and then sleeps.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable

_CALLS = {"x86_64": 202}
"""Number of the system call, by machine. Others than x86 do not keep the order of stores either."""
_WAIT, _WAKE, _ALL = 0, 1, (1 << 31) - 1
_SPINS, _LONGEST = 3000, 1e-4
"""Looks at a number before a process sleeps, and about how long they take, in seconds."""
LOOK = 0.02
"""Seconds of sleep after which a process looks whether it waits in vain."""


class AbsentError(Exception):
    """The number that is waited for will not come; the text says why."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_possible() -> bool:
    """Whether this system can."""
    return sys.platform.startswith("linux") and platform.machine() in _CALLS


class Numbers:
    """Numbers (int64) at the beginning of memory that processes share.

    Args:
        memory: of which each number is written by one process at a time.
        ranks: processes that use this machine. With more of them than processors a process that looks takes the time of
            one that is waited for.
    """

    def __init__(self, memory: mmap.mmap, ranks: int) -> None:
        # Aligned: a processor writes one at once, so a reader never sees half a number.
        self.values = memoryview(memory).cast("q")
        """May be read and, where nobody waits for them, written."""
        self._memory = (ctypes.c_char * 1).from_buffer(memory)  # keeps it where it is
        self._begins = ctypes.addressof(self._memory)
        self._most_spins = _SPINS if ranks <= len(os.sched_getaffinity(0)) else 0
        self._spins = self._most_spins
        # A CDLL gives up the interpreter lock: other threads of this process go on.
        self._call = ctypes.CDLL(None).syscall
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self._call.argtypes = (ctypes.c_long, pointer, integer, ctypes.c_uint32, pointer, pointer, integer)
        self._call.restype = ctypes.c_long
        self._number = _CALLS[platform.machine()]
        self._limit = _Timespec(0, int(LOOK * 1e9))
        self._pointer = ctypes.addressof(self._limit)

    def publish(self, at: int, value: int) -> None:
        """Write a number, after all that this process wrote before, and wake those that wait for it."""
        self.values[at] = value
        self.wake(at)

    def wake(self, at: int) -> None:
        """Have all that wait for a number look again. (The call orders memory: who begins to wait later sees what was
        written before.)"""
        self._call(self._number, self._begins + 8 * at, _WAKE, _ALL, None, None, 0)

    def wait(self, at: int, least: int, absent: Callable[[float], str]) -> float:
        """Wait until a number has grown to ``least``.

        Args:
            absent: asked, at times, with the seconds that have passed: why the number will not grow; empty: it may.

        Returns:
            Seconds that it took.

        Raises:
            AbsentError: ``absent`` said why.
        """
        values, started = self.values, time.perf_counter()
        for _ in range(self._spins):
            if values[at] >= least:
                break
        while (seen := values[at]) < least:
            why = absent(time.perf_counter() - started)
            if why and values[at] < least:
                raise AbsentError(why)
            # Ends when it is woken, when the number is no longer what was seen, by a signal, whose handler then runs,
            # and after LOOK.
            self._call(self._number, self._begins + 8 * at, _WAIT, seen & 0xFFFFFFFF, self._pointer, None, 0)
        taken = time.perf_counter() - started
        # What would have been there within the longest loop, or not.
        paid = taken < _LONGEST
        self._spins = min(2 * self._spins, self._most_spins) if paid else max(self._spins // 2, self._most_spins // 64)
        return taken
