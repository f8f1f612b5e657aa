"""Run one function on N ranks of a gloo process group, each rank a spawned process.

A FileStore replaces a TCP port, so tests can run side by side without agreeing on port numbers.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PATIENCE = timedelta(seconds=120)
"""Timeout of every group and store: a rank that waits for a lost one says so before the parent's time is up."""
AT_EXIT = 10.0
"""Seconds that ranks have to end after their answers, all together."""
TO_WRITE = 1.0
"""Seconds that silent ranks have to write where they stand."""


def _worker(
    rank: int,
    world_size: int,
    folder: str,
    answer: Connection,
    environment: dict[str, str],
    device: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # A file, not a pipe to the parent: the handler writes without the GIL, so one that is never given up shows too.
    trace = _trace(folder, rank)
    written = os.open(f"{trace}.new", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    faulthandler.register(signal.SIGUSR1, file=written, all_threads=True)
    faulthandler.enable(file=written)  # a rank that crashes in native code says where
    os.dup2(written, 2)  # and why: what C++ says of an exception that nothing catches
    os.rename(f"{trace}.new", trace)
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    os.environ.clear()  # the server's, from when the first test started it
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        distributed_c10d.default_pg_timeout = PATIENCE  # new groups do not inherit it from the default one
        store = dist.FileStore(f"{folder}/store", world_size)
        store.set_timeout(PATIENCE)
        if device == "one card":
            from tests import one_card

            one_card.init(store, rank, world_size, PATIENCE)
        else:
            dist.init_process_group(
                "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=PATIENCE,
            )
        value = fn(rank, world_size, *args)
        answer.send((True, pickle.dumps(value)))  # by value: shared memory would die with this process
        with contextlib.suppress(EOFError):  # the parent hangs up
            answer.recv()  # until all have answered: a rank may still be connecting to this one
        dist.destroy_process_group()
    except BaseException:
        answer.send((False, traceback.format_exc()))
        raise SystemExit(1) from None


def _trace(folder: str, rank: int) -> Path:
    """Where a rank that gets SIGUSR1 writes what each of its threads is doing; it is there once it can."""
    return Path(folder, f"trace-{rank}")


def forkserver() -> Any:
    """Ranks are forked from a server that has imported what they need and done nothing else: seconds less for each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 270.0,
    device: str = "cpu",
    preloaded: bool = True,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on every rank and return the results in rank order.

    Args:
        fn: a module-level function (it is pickled by reference); its result must be picklable.
        world_size: number of processes.
        timeout: seconds until all processes are killed; with what comes after them it is less than pytest's limit.
        device: cpu; cuda: each rank has a GPU, and tensors there go through NCCL; or one card, see ``one_card.py``.
        preloaded: False for what has to see an import, each rank then starts as a new interpreter.

    Raises:
        RuntimeError: with the traceback of every rank that failed, and of those that never answered how they ended or
            where their threads stand.
    """
    context = forkserver() if preloaded else multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(world_size)]  # one each: no lock that a killed rank could hold
    with tempfile.TemporaryDirectory() as folder:
        common = dict(os.environ), device, fn, args
        workers = [
            context.Process(target=_worker, args=(r, world_size, folder, pipes[r][1], *common), daemon=True)
            for r in range(world_size)
        ]
        for w, (_, theirs) in zip(workers, pipes, strict=True):
            w.start()
            theirs.close()
        outcome = _collect([ours for ours, _ in pipes], workers, time.monotonic() + timeout)
        silent = _stand(folder, {r: w for r, w in enumerate(workers) if r not in outcome})
        for ours, _ in pipes:
            ours.close()
        deadline = time.monotonic() + (0 if silent else AT_EXIT)
        for w in workers:
            w.join(timeout=max(deadline - time.monotonic(), 0))
            w.kill()
            w.join()
    failures = [f"rank {r}:\n{text}" for r, (ok, text) in sorted(outcome.items()) if not ok]
    if silent:
        failures += [f"ranks without an answer: {sorted(silent)}", *silent.values()]
    if failures:
        raise RuntimeError("\n".join(failures))
    return [pickle.loads(outcome[r][1]) for r in range(world_size)]


def _collect(answers: list[Connection], workers: list[Any], deadline: float) -> dict[int, tuple[bool, Any]]:
    """Answers by rank, until all are in, time is up, or one failed (the others then hang in a collective)."""
    outcome: dict[int, tuple[bool, Any]] = {}
    open_ = dict(enumerate(answers))
    while open_ and (left := deadline - time.monotonic()) > 0:
        wait([*open_.values(), *(workers[r].sentinel for r in open_)], timeout=left)
        for rank, answer in list(open_.items()):
            gone = not workers[rank].is_alive()  # before the look into the pipe: what it sent last is there then
            if answer.poll():
                try:
                    outcome[rank] = answer.recv()
                except (EOFError, ConnectionResetError):  # it is ending; its exit code comes a moment later
                    workers[rank].join(timeout=1)
                    gone = True
            if rank in outcome or gone:
                del open_[rank]
            if rank in outcome and not outcome[rank][0]:
                # a moment for the other ranks to report their own error, then stop waiting
                deadline = min(deadline, time.monotonic() + 5)
    return outcome


def _stand(folder: str, silent: dict[int, Any]) -> dict[int, str]:
    """What is known of ranks that did not answer: an exit code, or the Python stack of each thread."""
    asked = [r for r, w in silent.items() if w.is_alive() and _trace(folder, r).exists()]
    for rank in asked:
        with contextlib.suppress(ProcessLookupError):  # it ends just now
            os.kill(silent[rank].pid, signal.SIGUSR1)
    if asked:
        time.sleep(TO_WRITE)
    said = {}
    for rank, worker in silent.items():
        if not worker.is_alive():
            crash = _trace(folder, rank).read_text() if _trace(folder, rank).exists() else ""
            at = f", at:\n{crash}" if crash else ""
            said[rank] = f"rank {rank} ended with exit code {worker.exitcode}{at}"
        elif rank in asked:
            said[rank] = f"rank {rank} stands at:\n{_trace(folder, rank).read_text()}"
        else:
            said[rank] = f"rank {rank} has not begun"
    return said
