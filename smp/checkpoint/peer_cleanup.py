"""Frees the memory of a launcher's copies when that is gone: a small process of each node, this file run as a program.

Copies outlive the workers, so that nobody else is left to do it where a launcher (torchrun) ends with an error, is
stopped by a signal, or is killed. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_WORKERS_END = 10.0
"""Seconds in which workers of a launcher that is gone may still write a file."""


def remove_with_launcher(folder: Path) -> None:
    """Have the folder of a launcher's copies removed when that has ended. May be called any number of times: one
    process waits.

    Where the system cannot wait for any process (before Linux 5.3) the next job removes it.

    Args:
        folder: named by the launcher's process number and start time, see ``own_folder``.
    """
    from smp.checkpoint.folders.lock import started_at  # here: as a program this file finds no other

    launcher, _, began = folder.name.partition("-")
    if not hasattr(os, "pidfd_open") or not launcher.isdecimal():
        return
    with suppress(OSError):  # it has ended; no descriptor or process is left
        process = os.pidfd_open(int(launcher))
        try:
            if started_at(int(launcher)) == began:  # the number may be another process's by now
                words = [sys.executable, "-I", "-S", __file__, str(process), str(folder.absolute())]
                # A session of its own: torchrun kills its workers' groups. No output: whoever reads the job's would
                # wait for its end.
                nothing = subprocess.DEVNULL
                subprocess.Popen(
                    words,
                    stdin=nothing,
                    stdout=nothing,
                    stderr=nothing,
                    pass_fds=[process],
                    cwd="/",
                    start_new_session=True,
                )
        finally:
            os.close(process)


def wait_and_remove(process: int, folder: Path) -> None:
    """Remove ``folder`` when the process of a descriptor has ended, unless another process waits to do it."""
    with socket.socket(socket.AF_UNIX) as only:
        try:
            # A name without a file, which the system frees with the process.
            only.bind("\0smp-copies-" + hashlib.sha256(bytes(folder)).hexdigest())
        except OSError:
            return
        select.select([process], [], [])
        for seconds in (_WORKERS_END, 0.0):
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(seconds)
        with suppress(OSError):  # other launchers have copies there
            folder.parent.rmdir()


if __name__ == "__main__":
    wait_and_remove(int(sys.argv[1]), Path(sys.argv[2]))
