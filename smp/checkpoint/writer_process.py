"""The trainer's side of its writer process: start it, give it jobs, hear what became of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

from smp.checkpoint.staging import StagingBuffer


class WriterDiedError(Exception):
    """The writer process is gone."""


class WriterProcess:
    """One writer. Started as a fresh interpreter that imports nothing of the running program but ``smp.checkpoint``."""

    def __init__(self) -> None:
        own, other = socket.socketpair()
        with other:
            call = f"main({other.fileno()}, {os.getpid()})"
            code = f"import sys; sys.path[:] = {sys.path!r}; from smp.checkpoint.writer import main; {call}"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # it must never take memory of a GPU
            )
        self._connection = Connection(own.detach())
        self._generation = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def submit(self, job: dict[str, Any], memory: StagingBuffer) -> None:
        """Start a job on what ``memory`` holds. Raises WriterDiedError."""
        try:
            if memory.generation != self._generation:
                self._send({"memory": memory.size})
                send_handle(self._connection, memory.descriptor, self._process.pid)
                self._generation = memory.generation
            self._send(job)
        except OSError as error:
            raise self._death() from error

    def give_up(self) -> None:
        """Tell it not to wait for other ranks any longer."""
        try:
            self._send({"give_up": True})
        except OSError:
            return  # dead: then it does not wait either

    def _send(self, message: dict[str, Any]) -> None:
        self._connection.send_bytes(json.dumps(message).encode())

    def answer(self, timeout: float | None) -> dict[str, Any] | None:
        """The next answer; None when there is none within ``timeout`` seconds. Raises WriterDiedError."""
        try:
            if not self._connection.poll(timeout):
                return None
            return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._death() from error

    def _death(self) -> WriterDiedError:
        self._process.kill()
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return WriterDiedError(f"the process that writes checkpoints in the background {how}")

    def close(self) -> None:
        """End it, which loses what it is writing."""
        self._connection.close()
        self._process.kill()
        self._process.wait()
