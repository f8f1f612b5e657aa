"""Jobs of several nodes on one machine: each node is a torchrun of its own, which may be stopped, killed or added."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.training.preloaded import STAND_IN, TORCHRUN, forked_of

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
{stand_in}
import os, sys, time
if "--inprocess-restart" not in sys.argv or "SMP_KEEPER" in os.environ:  # else it keeps one that trains
    from smp.training import trainer

    start_step = trainer.Trainer.start_step
    def slow(self, *args):
        time.sleep(float(os.environ["STEP"]))
        return start_step(self, *args)
    trainer.Trainer.start_step = slow
import {entry}
sys.exit({entry}.main(sys.argv[1:]))
"""
QUICK = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=8,is_host=0"
"""Rendezvous of seconds, at a store that no node has: any of them may go."""


def children_of(pid: int) -> list[int]:
    """Process numbers of what a process has started, the oldest first; who listens to its signs of life does not
    count."""
    return [child for child, listens in _children(pid) if not listens]


def listener_of(pid: int) -> int:
    """Who listens to the signs of life of a process."""
    (found,) = (child for child, listens in _children(pid) if listens)
    return found


def _children(pid: int) -> list[tuple[int, bool]]:
    """All of them, and whether they listen."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):  # it has ended
            found.append((int(child), b"silence.py" in Path(f"/proc/{child}/cmdline").read_bytes()))
    return found


class Job:
    """A program on nodes that come and go.

    Args:
        folder: where it runs, and its logs are.
        flags: its command line.
        least, most: nodes.
        entry: module with ``main``.
        step: seconds that a step takes at least, so that there is time to change something.
        each: processes of a node.
    """

    def __init__(
        self,
        folder: Path,
        flags: str,
        least: int,
        most: int,
        *,
        entry: str = "pretrain_gpt",
        step: float = 0.2,
        each: int = 1,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.flags, self.step, self.each = folder, flags, step, each
        self.range = f"{least}:{most}"
        (folder / "program.py").write_text(PROGRAM.format(stand_in=STAND_IN, entry=entry))
        (folder / "torchrun.py").write_text(TORCHRUN)
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.endpoint = f"127.0.0.1:{self.store.port}"
        self.nodes: list[subprocess.Popen[bytes]] = []

    def start(self, count: int = 1) -> None:
        """Start nodes."""
        launcher = (
            f"--nnodes {self.range} --nproc-per-node {self.each} --rdzv-backend c10d "
            f"--rdzv-endpoint {self.endpoint} --rdzv-id job --rdzv-conf {QUICK} --max-restarts 100000 "
            "--monitor-interval 0.1 program.py"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "STEP": str(self.step)}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        for _ in range(count):
            log = (self.folder / f"node{len(self.nodes)}.txt").open("wb")
            before, own, more = self.where(len(self.nodes))
            torchrun = [sys.executable, str(self.folder / "torchrun.py"), *own, *launcher.split()]
            words = [*before, *torchrun, *shlex.split(self.flags)]
            self.nodes.append(
                subprocess.Popen(
                    words,
                    cwd=self.folder,
                    env=environment | more,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def where(self, number: int) -> tuple[Sequence[str], Sequence[str], dict[str, str]]:
        """Of the node that is started as this one: words before its torchrun, options of that, and environment."""
        return (), (), {}

    def records(self) -> dict[int, dict[str, Any]]:
        """What metrics.jsonl says of each iteration."""
        found = {}
        for path in self.folder.glob("logs/metrics.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # it is being written
                    record = json.loads(line)
                    if "lm loss" in record:
                        found[record["iteration"]] = record
        return found

    def losses(self) -> dict[int, float]:
        """Of each iteration."""
        return {iteration: record["lm loss"] for iteration, record in self.records().items()}

    def now(self) -> str:
        """Of the newest start: the line of its number of nodes."""
        lines = [(path.stat().st_mtime, line) for path in self.logs() for line in self.starts(path)]
        return max(lines, default=(0.0, ""))[1]

    def logs(self) -> list[Path]:
        """What each node has printed."""
        return sorted(self.folder.glob("node*.txt"))

    @staticmethod
    def starts(path: Path) -> list[str]:
        """Of each start whose rank 0 was on that node, the line of its number of nodes."""
        return [line for line in path.read_text(errors="replace").splitlines() if line.endswith("(now)")][-1:]

    def node_of(self, start: str) -> int:
        """The node with rank 0 of the newest start whose line begins so."""
        return next(i for i, path in enumerate(self.logs()) if any(x.startswith(start) for x in self.starts(path)))

    def kill_worker(self, node: int) -> None:
        """Kill the first worker of a node, whose launcher lives."""
        os.kill(self.workers(node)[0], signal.SIGKILL)

    @property
    def iteration(self) -> int:
        """The newest one that is logged."""
        found = 0
        for path in self.folder.glob("logs/metrics.jsonl"):
            with path.open("rb") as file:  # its end alone: this is asked many times a second
                file.seek(max(path.stat().st_size - 4096, 0))
                for number in re.findall(rb'"iteration": (\d+)[^\n]*"lm loss"[^\n]*\n', file.read()):
                    found = max(found, int(number))
        return found

    def said(self) -> str:
        """All that all nodes have printed."""
        return "".join(path.read_text(errors="replace") for path in self.logs())

    def mark(self) -> dict[Path, int]:
        """How much each node has printed."""
        return {path: path.stat().st_size for path in self.logs()}

    def since(self, mark: dict[Path, int]) -> str:
        """What nodes have printed after that."""
        return "".join(path.read_bytes()[mark.get(path, 0) :].decode(errors="replace") for path in self.logs())

    def until(self, happened: Callable[[], bool], seconds: float = 240.0) -> float:
        """Wait for it; returns how long that took."""
        began = time.monotonic()
        while not happened():
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"at iteration {self.iteration}:\n{self.said()[-6000:]}")
            if all(node.poll() is not None for node in self.nodes):
                raise RuntimeError(f"all nodes have ended at iteration {self.iteration}:\n{self.said()[-6000:]}")
            time.sleep(0.05)
        return time.monotonic() - began

    def reach(self, iteration: int) -> None:
        """Wait until so many steps are done."""
        self.until(lambda: self.iteration >= iteration)

    def leave(self, node: int) -> None:
        """Ask a node to go."""
        self.nodes[node].send_signal(signal.SIGTERM)

    def kill(self, node: int) -> None:
        """Take a node away, launcher and workers at once."""
        for worker in self.workers(node):
            os.kill(worker, signal.SIGKILL)
        self.nodes[node].kill()

    def workers(self, node: int) -> list[int]:
        """Their process numbers."""
        return children_of(forked_of(self.nodes[node].pid))

    def trainers(self, node: int) -> list[int]:
        """With --inprocess-restart, of each worker the process that trains: the first that it started, of those that
        live."""
        return [children_of(forked_of(worker))[0] for worker in self.workers(node)]

    def finish(self, seconds: float = 240.0) -> list[int]:
        """Wait for the end; exit codes of all nodes."""
        deadline = time.monotonic() + seconds
        for node in self.nodes:
            try:
                node.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"at iteration {self.iteration}:\n{self.said()[-6000:]}") from None
        return [node.returncode for node in self.nodes]

    def close(self) -> None:
        """Kill what is left."""
        for number, node in enumerate(self.nodes):
            with contextlib.suppress(OSError):
                self.kill(number)
            node.wait()
