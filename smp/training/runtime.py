"""Starting and ending a process: devices, process group, signals and hang reports."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import io
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import IO

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from smp.config.rules.elastic import OWN_STORES
from smp.parallel.node_group import default_backend
from smp.pipeline.failure import LOST, function_of_thread
from smp.training.faults.hang import Hang, word_of_thread
from smp.training.host_memory import keep_freed_memory
from smp.training.inprocess.connections import bound_silence, open_connections
from smp.training.process import Process
from smp.training.settings import report, report_own

GRACE = 5.0
"""Seconds that a timeout is given at least to show as an error, on a busy machine too."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def start_process_group(
    process: Process, timeout_minutes: float, deterministic: bool, watchdog: Watchdog, shares_memory: bool = False
) -> torch.device:
    """Pick this process's device and join the default process group.

    CUDA tensors go through NCCL and CPU tensors through gloo, so small control messages never wait for the GPU. What is
    set here for libraries are defaults: the environment goes first.

    Args:
        shares_memory: on CPUs, the default group may exchange through memory.

    Returns:
        The device to train on.
    """
    cuda = torch.cuda.is_available()
    if cuda and not any(name in os.environ for name in ALLOCATOR):  # before anything is allocated
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"  # gathered weights come and go, and would leave holes
    device = torch.device("cuda", process.local_rank) if cuda else torch.device("cpu")
    if not cuda:
        keep_freed_memory()
    if deterministic:
        # cuBLAS and NCCL read these when they start; with them sums have one order.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        # Operators without a deterministic kernel raise from here on.
        torch.use_deterministic_algorithms(True)
    if cuda:
        # Before the process group: NCCL binds this process to the current device.
        torch.cuda.set_device(device)
        # "high": TF32 for fp32 products on tensor cores.
        torch.set_float32_matmul_precision("high")
    timeout = datetime.timedelta(minutes=timeout_minutes)
    store: dist.Store = dist.HashStore()  # one process alone needs no port and nobody to meet
    if process.under_launcher:
        before = open_connections()
        with watchdog.ending(waits=2):  # for the process that keeps the store, then for all that come to it
            found, _, _ = next(dist.rendezvous("env://", process.rank, process.world_size, timeout=timeout))
        found.set_timeout(timeout)
        bound_silence(before, timeout.total_seconds())
        # Each try to run has keys of its own, in the same processes and in those that torchrun starts again.
        tries = _starts() if process.link is None else process.restarts
        store = dist.PrefixStore(f"default_pg {tries}", found)
    with watchdog.ending():
        backends = "cpu:gloo,cuda:nccl" if cuda else default_backend() if shares_memory else "gloo"
        dist.init_process_group(
            backends, store=store, rank=process.rank, world_size=process.world_size, timeout=timeout
        )
    watchdog.meet_in(store)
    return device


def _starts() -> int:
    """How often torchrun has started the processes again, 0 on several nodes, whose numbers may differ.

    In torch 2.13 all these starts have one store, by a static rendezvous always, else unless
    ``OWN_STORES`` is set: a process would find addresses of the start before, where nobody answers.
    """
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if os.environ.get("GROUP_WORLD_SIZE") == "1" else 0


def note_on_restarts() -> str:
    """What several nodes need where torchrun may start the processes again; "": nothing. See :func:`_starts`."""
    told = os.environ
    several = told.get("GROUP_WORLD_SIZE", "1") != "1" and told.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if not several or told.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    return (
        "note: processes that torchrun starts again (--max-restarts) look for those that were lost: start it with "
        f"--rdzv-backend c10d and {OWN_STORES}=1 in its environment"
    )


def library_settings() -> str:
    """The environment's settings for CUDA and its libraries, in one line: where a run is slow or stuck, they are looked
    at first."""
    begin = (*ALLOCATOR, "CUBLAS_", "CUDA_", "NCCL_", "TORCH_NCCL_")
    told = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(begin)]
    return f"environment: {', '.join(told) or 'nothing about CUDA'}"


def report_once(message: str, rank: int) -> bool:
    """Print on stderr why this process ends, unless rank 0 says the same words.

    Rank 0 leaves its words in the store of the process group, because it may take seconds to end. A store that does not
    answer (see :class:`Watchdog`) is asked no longer than 15 seconds.

    Returns:
        Whether the store is done with. If not, a thread is still in torch's client, and a Python that ends meanwhile
        aborts: the process has to end by ``os._exit``.
    """
    store = dist.PrefixStore("report", distributed_c10d._get_default_store())
    said: list[str] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):  # it went down with another process, or rank 0 has nothing to say
            if rank == 0:
                store.set("rank 0", message)
            else:
                store.wait(["rank 0"], datetime.timedelta(seconds=10))
                said.append(store.get("rank 0").decode())

    # The limit of ``wait`` ends its first answer only: its client then tells the store so, and waits on.
    asking = threading.Thread(target=ask, name="report", daemon=True)
    asking.start()
    asking.join(10 + GRACE)
    if message not in said:
        # The words differ, or rank 0 could not be heard.
        (report if rank == 0 else report_own)(message, rank)
    return not asking.is_alive()


class StopSignal:
    """Records SIGTERM and SIGINT, and lets the process go on.

    A second SIGINT ends the process at once: somebody is at the keyboard. More SIGTERMs change nothing, because
    launchers and schedulers both send one, and the checkpoint is being written.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        # Only the main thread may set handlers (a rule of Python).
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None and number == signal.SIGINT:
            raise SystemExit(128 + number)
        # Only a note: the run looks at it between steps, on all ranks at once.
        self.name = self.name or signal.Signals(number).name


class Watchdog:
    """Dumps all Python stacks of a process that makes no progress, before its collective times out.

    The process that hangs is not the one at fault: the ranks whose dumps show a collective wait for one that shows
    something else, or nothing.

    Collectives end by themselves; what asks torch's store may not. Its client waits for answers without a time limit,
    so where the link to the store is cut, or the process that keeps it has stopped, no error is raised. See
    :meth:`ending`. Time that the process itself was suspended (SIGSTOP, a debugger) does not count.

    Args:
        process: its rank is named.
        timeout_minutes: of collectives.
        end: ends the process, for this reason; None: nothing ends it.
    """

    def __init__(self, process: Process, timeout_minutes: float, end: Callable[[str], object] | None = None) -> None:
        self._title = f"rank {process.rank} of {process.world_size} has made no progress for"
        limit = 60 * timeout_minutes
        # 0.9: stacks are dumped before the collective itself fails.
        self._limit, self._timeout = 0.9 * limit, limit
        self._end = end
        # Inside of :meth:`ending`, the thread that called it and how many seconds it has.
        self._ending: tuple[int, float] | None = None
        self._last = time.monotonic()
        self._closed = threading.Event()
        self._dumping: threading.Thread | None = None
        self._process = process
        self._store: dist.Store | None = None
        self._main = threading.get_ident()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def progress(self) -> None:
        """Something was finished: count from now."""
        self._last = time.monotonic()

    @contextlib.contextmanager
    def ending(self, waits: int = 1) -> Iterator[None]:
        """Inside, a standstill of half a timeout (at least ``GRACE`` seconds) more than ``waits`` timeouts ends the
        process. Only for what torch itself should have ended by then, with progress told after each part of it."""
        self.progress()
        self._ending = threading.get_ident(), waits * self._timeout + max(GRACE, self._timeout / 2)
        try:
            yield
        finally:
            self._ending = None
            self.progress()

    def meet_in(self, store: dist.Store) -> None:
        """Tell the watchdog the store through which ranks that make no progress hear of each other, see
        :mod:`smp.training.faults.hang`."""
        self._store = store

    def close(self) -> None:
        """Stop watching; a dump that has begun gets a moment to be written."""
        self._closed.set()
        if self._dumping is not None:
            self._dumping.join(1)

    def _watch(self) -> None:
        reported, tick = 0.0, min(1.0, self._limit / 20)  # well within the tenth that is left
        looked, seen, passed = time.monotonic(), 0.0, 0.0
        while not self._closed.wait(tick):
            # Before the time: who enters :meth:`ending` counts anew and then sets it.
            ending, last, now = self._ending, self._last, time.monotonic()
            # A tick that is much longer than asked: this process was suspended.
            awake = min(now - looked, tick + 1.0)
            passed = min(now - last, awake + (passed if last == seen else 0.0))
            looked, seen = now, last
            # Once for each standstill.
            if passed > self._limit and reported != last:
                reported = last
                # In a thread of its own: nobody may read stderr, a pipe that is full.
                dumping = threading.Thread(target=self._dump, args=(last,), name="watchdog's dump", daemon=True)
                dumping.start()
                self._dumping = dumping  # now that it can be waited for
            if ending is not None and passed > ending[1] and self._end is not None:
                where = function_of_thread(ending[0])
                self._end(f"{where} failed: no answer and no error for {passed:.0f} s, so this process ends; {LOST}")

    def _dump(self, last: float) -> None:
        """Write all stacks to stderr, by way of a file: faulthandler holds the GIL while it writes, and a pipe may be
        full."""
        try:
            with _scratch_file() as file:
                faulthandler.dump_traceback(file)
                file.seek(0)
                stacks = file.read()
        except OSError as error:
            stacks = f"not there: {error}\n".encode()
        with contextlib.suppress(OSError):  # nobody reads it any more
            # Not through sys.stderr's buffer, whose lock the interpreter needs when it ends.
            os.write(_stderr(), f"{self._title} {self._limit:.0f} s; its stacks:\n".encode() + stacks)
        if self._store is not None and self._process.world_size > 1:
            self._ask_others(self._store, time.time() - (time.monotonic() - last))

    def _ask_others(self, store: dist.Store, since: float) -> None:
        """Report on stderr which ranks have not come, by the lowest rank that answers: well before the collective times
        out."""
        hang = Hang(store, self._process.rank, self._process.world_size, since)
        with contextlib.suppress(RuntimeError, OSError):  # the store went down with another process
            # Half of what is left of the timeout.
            said = hang.report(word_of_thread(self._main), (self._timeout - self._limit) / 2)
            os.write(_stderr(), f"{said}\n".encode() if said else b"")


def _scratch_file() -> IO[bytes]:
    """A file in memory where the system has them: a container may have no writable folder."""
    with contextlib.suppress(AttributeError, OSError):  # another system, or one that refuses it
        return os.fdopen(os.memfd_create("stacks"), "w+b")
    return tempfile.TemporaryFile()


def _stderr() -> int:
    """The descriptor of stderr, the system's own where Python's stream has none, as in a notebook; -1: it is closed."""
    if sys.stderr is None:
        return -1
    try:
        return sys.stderr.fileno()
    except (AttributeError, io.UnsupportedOperation):  # io.UnsupportedOperation is a ValueError too, so it comes first
        return 2
    except ValueError:
        return -1
