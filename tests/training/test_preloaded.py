"""A program that is forked is to itself, and to who started it, one that an interpreter runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.training.preloaded import forked_of, python_path

TELLS = """
import atexit, json, multiprocessing, os, random, sys
import numpy as np

print(json.dumps({
    "session": os.getsid(0) == os.getpid(),
    "argv": sys.argv,
    "folder": os.getcwd(),
    "first on the path": os.path.realpath(sys.path[0]),
    "named": __name__,
    "variables": sorted(name for name in os.environ if name.startswith("OF_")),
    "descriptors": sorted(int(n) for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")),
    "daemon": multiprocessing.current_process().daemon,
    "parent": str(multiprocessing.parent_process()),
}))
print(json.dumps([random.random(), np.random.rand()]), file=sys.stderr)
atexit.register(print, "the end")
sys.exit(int(sys.argv[1]))
"""


def told(folder: Path, code: int, path: str) -> tuple[dict[str, Any], list[float]]:
    """What the program says of itself, and its random numbers."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OF_")}
    done = subprocess.run(
        [sys.executable, "tells.py", str(code)],
        cwd=folder,
        env=environment | {"PYTHONPATH": path, "OF_THIS": "1"},
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    assert done.returncode == code, done.stderr
    said, end = done.stdout.splitlines()
    assert end == "the end"
    return json.loads(said), json.loads(done.stderr)


@pytest.mark.usefixtures("forked")
def test_it_says_of_itself_what_an_interpreter_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    monkeypatch.setenv("OF_THE_TEST", "1")  # which the server does not know, nor the program
    own, numbers = told(tmp_path, 3, "")
    forked, others = told(tmp_path, 3, python_path())
    assert forked == own and own["session"] and own["variables"] == ["OF_THIS"]
    assert len({*numbers, *others, *told(tmp_path, 0, python_path())[1]}) == 6


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_what_was_started(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "waits.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(100)\n")
    command, environment = [sys.executable, "-u", "waits.py"], os.environ | {"PYTHONPATH": python_path()}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        pid = forked_of(process.pid)
        assert pid != process.pid
        process.send_signal(number)
        assert process.wait(timeout=60) == -number
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "it outlives who stood for it"
        time.sleep(0.01)
