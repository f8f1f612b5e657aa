"""Run a program on N ranks without the seconds that torchrun and importing torch take.

Each process is forked from a server that has imported torch, gets the variables that torchrun sets, and runs the file
as ``python file.py`` does. What is about starting, signals or lost processes is tested with torchrun itself.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from torch.distributed import TCPStore

from tests.distributed import forkserver


def run_program(
    program: Path,
    words: Iterable[object],
    folder: Path,
    processes: int = 1,
    launcher: bool | None = None,
    timeout: float = 200.0,
    grace: float = 5.0,
    port: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``program`` in ``folder``; returns the first exit code that is not 0, and what all ranks printed.

    Args:
        program: a Python file.
        words: its command line.
        folder: where it runs.
        processes: how many ranks.
        launcher: whether to set what torchrun sets. Default: only for more than one process.
        timeout: seconds until all processes are killed.
        grace: seconds that the others have after the first failed, as they may have something to say.
        port: of a store on this machine; None: one is made where there are several processes.
    """
    command = [str(program), *map(str, words)]
    # The store that torchrun gives its ranks: a free port that one of them opens later may be taken by then.
    wanted = port is None and (launcher or processes > 1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if wanted else None
    with tempfile.TemporaryDirectory() as logs:
        common = processes, port if store is None else store.port, dict(os.environ), str(folder), logs, command
        workers = [forkserver().Process(target=_run, args=(rank, *common)) for rank in range(processes)]
        for worker in workers:
            worker.start()
        code, ended, deadline = 0, 0.0, time.monotonic() + timeout
        while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
            code = code or next((worker.exitcode for worker in workers if worker.exitcode), 0)
            if code:
                ended = ended or time.monotonic()
                deadline = min(deadline, ended + grace)
            time.sleep(0.02)
        late = any(worker.is_alive() for worker in workers)
        for worker in workers:
            worker.kill()
            worker.join()
        out, err = (Path(logs, name).read_text(encoding="utf-8") for name in ("out", "err"))
    if late and not code:
        raise subprocess.TimeoutExpired(command, timeout, out, err)
    code = code or next((worker.exitcode for worker in workers if worker.exitcode), 0)
    return subprocess.CompletedProcess(command, code, out, err)


def _run(
    rank: int, world: int, port: int | None, environment: dict[str, str], folder: str, logs: str, command: list[str]
) -> None:
    os.environ.clear()  # the server's, from when the first test started it
    os.environ.update(environment)
    if port is not None:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        place |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        os.environ.update({name: str(value) for name, value in place.items()})
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(logs, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), number)
    import torch

    torch.set_num_threads(1)
    sys.argv = command
    sys.path[0:1] = [str(Path(command[0]).parent)]
    runpy.run_path(command[0], run_name="__main__")
