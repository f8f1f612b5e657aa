"""Run one function on N ranks of a gloo process group, each rank a spawned process.

A FileStore replaces a TCP port, so tests can run side by side without agreeing on port numbers.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any


def _worker(
    rank: int,
    world_size: int,
    store: str,
    results: Any,
    environment: dict[str, str],
    device: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    os.environ.clear()  # the server's, from when the first test started it
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=120),
        )
        value = fn(rank, world_size, *args)
        results.put((rank, True, pickle.dumps(value)))  # by value: shared memory would die with this process
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        raise SystemExit(1) from None


def forkserver() -> Any:
    """Ranks are forked from a server that has imported torch and done nothing else: seconds less for each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["smp.training.launch", "tests.distributed"])
    return context


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 280.0, device: str = "cpu"
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on every rank and return the results in rank order.

    Args:
        fn: a module-level function (it is pickled by reference); its result must be picklable.
        world_size: number of processes.
        timeout: seconds until all processes are killed.
        device: cpu, or cuda: each rank has a GPU, and tensors there go through NCCL.

    Raises:
        RuntimeError: with the traceback of every rank that failed, or naming the ranks that never answered.
    """
    context = forkserver()
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        common = world_size, f"{folder}/store", results, dict(os.environ), device
        workers = [context.Process(target=_worker, args=(r, *common, fn, args), daemon=True) for r in range(world_size)]
        for w in workers:
            w.start()
        outcome = _collect(results, workers, time.monotonic() + timeout)
        for w in workers:
            w.join(timeout=10)
            w.kill()
    failures = [f"rank {r}:\n{text}" for r, (ok, text) in sorted(outcome.items()) if not ok]
    missing = sorted(set(range(world_size)) - set(outcome))
    if failures or missing:
        silent = [f"ranks without an answer: {missing}"] if missing else []
        raise RuntimeError("\n".join(failures + silent))
    return [pickle.loads(outcome[r][1]) for r in range(world_size)]


def _collect(results: Any, workers: list[Any], deadline: float) -> dict[int, tuple[bool, Any]]:
    """Answers by rank, until all are in, time is up, or one failed (the others then hang in a collective)."""
    outcome: dict[int, tuple[bool, Any]] = {}
    while len(outcome) < len(workers) and time.monotonic() < deadline:
        try:
            rank, ok, value = results.get(timeout=0.2)
        except queue.Empty:
            if all(not w.is_alive() for w in workers) and results.empty():
                break
            continue
        outcome[rank] = (ok, value)
        if not ok:  # a moment for the other ranks to report their own error, then stop waiting
            deadline = min(deadline, time.monotonic() + 5)
    return outcome
