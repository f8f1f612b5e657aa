"""The trainer's side of its writer process: start it, give it jobs, hear what became of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle

from smp.checkpoint.background.staging import StagingBuffer
from smp.checkpoint.background.writer import Answer, Job


class WriterProcess:
    """One writer. Started as a fresh interpreter that imports nothing of the running program but ``smp.checkpoint``."""

    def __init__(self) -> None:
        own, other = socket.socketpair()
        # Closed on this side once the process has it: when one side ends, the other one reads the end of the file.
        with other:
            call = f"main({other.fileno()}, {os.getpid()})"
            # The same packages as here, without running the program's main module again.
            code = f"import sys; sys.path[:] = {sys.path!r}; from smp.checkpoint.background.writer import main; {call}"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "CUDA_VISIBLE_DEVICES": "",
                },  # a CUDA context would take hundreds of megabytes of the GPU
            )
        self._connection = Connection(own.detach())
        self._generation = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def submit(self, job: Job, memory: StagingBuffer) -> None:
        """Start a job on the contents of ``memory``."""
        # Mapping costs time, and the memory is kept from save to save.
        if memory.generation != self._generation:
            # The number, then the descriptor: ``main`` expects them in this order.
            self._send(memory.size)
            with suppress(OSError):
                send_handle(self._connection, memory.descriptor, self._process.pid)
            self._generation = memory.generation
        self._send(job)

    def give_up(self) -> None:
        """Tell it not to wait for other ranks any longer."""
        self._send(None)

    def _send(self, message: Job | int | None) -> None:
        with suppress(OSError):  # it is dead, which answer() says
            self._connection.send(message)

    def answer(self, timeout: float) -> Answer | None:
        """The next answer, or how the process ended; None when there is none within ``timeout`` seconds."""
        try:
            return self._connection.recv() if self._connection.poll(timeout) else None
        except (EOFError, OSError):
            # A process that closed its socket is of no use, even where it still runs.
            self._process.kill()
            code = self._process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            return f"the process that writes checkpoints in the background {how}", []

    def close(self) -> None:
        """End the process. What it is writing is lost."""
        self._connection.close()
        self._process.kill()
        self._process.wait()
