"""Python programs that are forked from a process which has imported all they need: hundreds of starts in a test cost
little more than their own work.

What torchrun or a keeper starts is ``stand_in``: it asks the server to fork a process with its command line,
environment and open descriptors, passes signals on, and ends as that one ends. Where it is killed the server kills that
one, too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing import connection, process, resource_tracker
from multiprocessing import forkserver as mp_forkserver
from pathlib import Path
from typing import Any

import numpy as np

from tests.distributed import forkserver

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "PRELOADED"
"""Environment variable with the path of the server's socket."""
_ASK = f"""
if wanted and "{ADDRESS}" in os.environ and not hasattr(sys, "forked"):
    import array, json, signal, socket
    link = socket.socket(socket.AF_UNIX)
    link.connect(os.environ["{ADDRESS}"])
    passed = [0, 1, 2, *map(int, os.environ.get("SMP_KEEPER", "").split())]
    asked = dict(argv=sys.argv, words=sys.orig_argv, environment=dict(os.environ), folder=os.getcwd(), pid=os.getpid())
    words = json.dumps(asked | dict(passed=passed)).encode() + b"\\n"
    link.sendmsg([words], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))])
    lines = link.makefile("r")
    pid = int(lines.readline())
    open(os.environ["{ADDRESS}"] + "." + str(os.getpid()), "w").write(str(pid))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    code = int(lines.readline())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if code != -signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)
"""
STAND_IN = f"""
import os, sys
wanted = True
{_ASK}
"""
"""First lines of a program that is forked where there is a server."""
TORCHRUN = f"""{STAND_IN}
import runpy
runpy.run_module("torch.distributed.run", run_name="__main__")
"""
SITE = f"""
import os, sys
words = sys.orig_argv[1:]
while words and words[0] in ("-u", "-B"):
    del words[0]
if words[:2] == ["-m", "torch.distributed.run"]:
    del words[0]
wanted = bool(words) and (words[0].endswith(".py") or words[0] == "torch.distributed.run")
if wanted:
    sys.argv = words
{_ASK}
"""
"""Imported by each interpreter that has its folder in PYTHONPATH: programs in files and torchrun are forked, others are
as ever."""
MODULES = (
    "pretrain_gpt smp.training.launch smp.training.pretraining torch.distributed.launcher.api "
    "torch.profiler._cupti_monitor"
)


@contextlib.contextmanager
def preloaded(folder: Path, modules: str = MODULES) -> Iterator[None]:
    """Context in which programs that begin with ``STAND_IN`` are forked, and those whose PYTHONPATH is
    :func:`python_path`. The server is forked itself, from the one of ``run_distributed``."""
    path, site = folder / "preloaded", folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    server = forkserver().Process(target=_serve, args=(str(path), modules.split()), daemon=True)
    server.start()
    try:
        while not path.exists():
            if not server.is_alive():
                raise RuntimeError(f"the server of {modules} has ended")
            time.sleep(0.01)
        os.environ[ADDRESS] = str(path)
        yield
    finally:
        os.environ.pop(ADDRESS, None)
        server.terminate()
        server.join()


def python_path() -> str:
    """PYTHONPATH of programs that tests start: with a server it forks them."""
    address = os.environ.get(ADDRESS)
    return os.pathsep.join([str(ROOT)] if address is None else [str(Path(address).with_name("site")), str(ROOT)])


def forked_of(pid: int) -> int:
    """The process that was forked for a stand-in; without a server the process itself."""
    if (address := os.environ.get(ADDRESS)) is None:
        return pid
    while not (found := Path(f"{address}.{pid}")).exists() or not (text := found.read_text()):
        os.kill(pid, 0)  # raises where it is gone
        time.sleep(0.01)
    return int(text)


def _serve(path: str, modules: list[str]) -> None:
    for module in modules:
        __import__(module)
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    # A name for its log. It looks through all modules to find it, so slowly with as many as there are here that other
    # nodes have changed the rendezvous meanwhile, each time that this one wants to.
    dynamic_rendezvous.get_method_name = lambda depth=2: "method"
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{path}.new")
    server.listen(64)
    os.rename(f"{path}.new", path)
    children: dict[int, socket.socket] = {}
    try:
        while True:
            ready = connection.wait([server, *children.values()], 0.02)
            if server in ready:
                link, _ = server.accept()
                with contextlib.suppress(OSError):  # killed before it had said all
                    if (pid := _fork(link)) is not None:
                        children[pid] = link
            for pid, link in list(children.items()):
                if link in ready:  # it says nothing: it is gone
                    os.kill(pid, signal.SIGKILL)
                if _ended(pid, link):
                    del children[pid]
    finally:
        for pid in children:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _ended(pid: int, link: socket.socket) -> bool:
    """Whether a process has ended, which is told then."""
    found, status = os.waitpid(pid, os.WNOHANG)
    if found:
        with contextlib.suppress(OSError), link:
            link.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    return bool(found)


def _fork(link: socket.socket) -> int | None:
    """Fork what is asked for; returns its process number."""
    data, descriptors, _, _ = socket.recv_fds(link, 1 << 20, 8)
    while data and not data.endswith(b"\n"):
        data += (more := link.recv(1 << 20))
        data = data if more else b""
    if not data:  # it was killed before it had said anything
        link.close()
        return None
    if not (pid := os.fork()):
        _become(json.loads(data), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    with contextlib.suppress(OSError):  # it is gone, and so is what was forked for it, soon
        link.sendall(f"{pid}\n".encode())
    return pid


def _enter_network(pid: int) -> None:
    """Move to the network namespace of a process, if it is another one."""
    of_it = Path(f"/proc/{pid}/ns/net")
    if os.readlink(of_it) != os.readlink("/proc/self/ns/net"):
        libc = ctypes.CDLL(None, use_errno=True)
        with of_it.open("rb") as file:
            if libc.setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")


def _become(asked: dict[str, Any], descriptors: list[int]) -> None:
    """Run the program as its own process would, and end."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        _take_descriptors(descriptors, asked["passed"])
        _enter_network(asked["pid"])
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        _forget_server()
        sys.__dict__["forked"] = True  # what STAND_IN asks for
        sys.argv, sys.orig_argv = asked["argv"], asked["words"]
        sys.stdout.reconfigure(write_through="-u" in sys.orig_argv[1:3])  # type: ignore[union-attr]
        parents = Path(f"/proc/{asked['pid']}/stat")
        # As if it were where its stand-in is. "pid (name) state parent ..."
        os.getppid = lambda: int(parents.read_text().rsplit(")", 1)[1].split()[1])
        _run(sys.argv[0])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _take_descriptors(descriptors: list[int], numbers: list[int]) -> None:
    """Those that were sent get their numbers; of others only these are left."""
    high = [os.dup2(descriptor, 100 + n) for n, descriptor in enumerate(descriptors)]
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in high:
            with contextlib.suppress(OSError):  # the list's own
                os.close(number)
    for descriptor, number in zip(high, numbers, strict=True):
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)


def _forget_server() -> None:
    """What a new interpreter does not have: a parent that is multiprocessing's, with a server, and its random numbers
    (``random`` sees to itself)."""
    own: Any = process.current_process()
    own._name, own._config["daemon"] = "MainProcess", False
    process.__dict__.update(_parent_process=None)
    server, tracker = mp_forkserver._forkserver, resource_tracker._resource_tracker
    for name in ("_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid", "_inherited_fds"):
        setattr(server, name, None)
    tracker._fd = tracker._pid = None  # type: ignore[attr-defined]
    np.random.seed()


def _run(program: str) -> None:
    """A file, or a module by its name."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if program.endswith(".py"):
        sys.path[0:0] = [str(Path(program).resolve().parent), *paths]
        runpy.run_path(program, run_name="__main__")
    else:
        sys.path[0:0] = [os.getcwd(), *paths]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
