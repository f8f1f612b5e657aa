"""Python imports this at the start of every process whose PYTHONPATH has this folder: crash tests put it there.

CRASH=role:rank:count:root kills one process, once, at its count-th call that touches files under root. A write dies in
the middle. FAIL=errno:file:root lets a call of a writer fail: that which brings the number in ``file``, lowered by one
at every call, to 0. Imports nothing but the standard library, because everything else comes after it.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

CALLS = ("open", "write", "posix_fallocate", "fsync", "replace", "rename", "unlink", "rmdir", "mkdir", "link")


def is_victim(role: str, rank: str) -> bool:
    here = "writer" if any("smp.checkpoint.background.writer" in word for word in sys.orig_argv) else "trainer"
    return role == here and os.environ.get("RANK") == rank


def install_failures(error: int, counter: str, root: str) -> None:
    plain = {name: getattr(os, name) for name in CALLS}

    def number() -> int:
        descriptor = plain["open"](counter, os.O_RDWR)
        try:
            left = int(os.read(descriptor, 20)) - 1
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(left).encode(), 0)
            return left
        finally:
            os.close(descriptor)

    def watched(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else os.fspath(args[0])
            if root + "/" in path + "/" and number() == 0:
                raise OSError(error, os.strerror(error))
            return plain[name](*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, watched(name))


def install(count: int, root: str) -> None:
    seen = 0
    plain = {name: getattr(os, name) for name in CALLS}

    def path(argument: Any) -> str:
        return os.readlink(f"/proc/self/fd/{argument}") if isinstance(argument, int) else os.fspath(argument)

    def die(name: str, args: tuple[Any, ...]) -> None:
        try:
            os.close(plain["open"](root + ".fired", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return  # the process that took the victim's place lives
        if name == "write":
            plain["write"](args[0], args[1][: len(args[1]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    def watched(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal seen
            if root + "/" in path(args[0]) + "/":
                seen += 1
                if seen == count:
                    die(name, args)
            return plain[name](*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, watched(name))


if "CRASH" in os.environ:
    wanted_role, wanted_rank, wanted_count, wanted_root = os.environ["CRASH"].split(":")
    if is_victim(wanted_role, wanted_rank):
        install(int(wanted_count), wanted_root)

if "FAIL" in os.environ and any("smp.checkpoint.background.writer" in word for word in sys.orig_argv):
    code, counter_file, failing_root = os.environ["FAIL"].split(":")
    install_failures(int(code), counter_file, failing_root)
