"""Runs a job's command again until it is done, must wait, or makes no progress. A copy is in every job's folder.

    python3 supervise.py job FOLDER CHECKPOINTS MAX_TRIES [--requeue] [--before SCRIPT] [--after SCRIPT] -- COMMAND...
                                                                                       once per job
    python3 supervise.py node STATUS_FILE -- COMMAND...                                once per node, around torchrun

Only the standard library, Python >= 3.8, no other file of this project: it runs on hosts that have nothing installed.

``job`` reads from FOLDER/status.json, which rank 0 of the training writes, why a run ended. "done" ends the job.
"bad_config" would fail again and ends it too. "requeue" (a signal or a clock) queues it again or, without --requeue,
starts it again. Anything else ("failed", or still "running" because it was killed) is tried again. A try counts as lost
when it left no newer checkpoint than the one before it; after MAX_TRIES lost ones in a row the job gives up. The count
is kept in FOLDER/tries.json, so that it survives the node.

``node`` exists because torchrun answers SIGTERM by giving its workers 30 seconds, and dies of SIGUSR1, which Slurm
gives to every process of a step. So torchrun and its workers ignore SIGUSR1, and the workers get SIGTERM from here:
each of them saves and ends, and torchrun with them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

    Process = subprocess.Popen[bytes]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
EXIT_REQUEUE = 75
"""EX_TEMPFAIL of sysexits.h: not done, to be started again."""
EXIT_CODES = {"done": 0, "requeue": EXIT_REQUEUE, "bad_config": 2}


def read_json(path: str, default: Any) -> Any:
    """The content of a JSON file, or ``default`` when it is missing or broken."""
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError):
        return default


def write_json(path: str, value: Any) -> None:
    """Write a JSON file atomically."""
    with open(path + ".tmp", "w") as file:
        json.dump(value, file)
        file.write("\n")
    os.replace(path + ".tmp", path)


def say(text: str) -> None:
    """Print a line of this program to the job's log."""
    print("launcher: " + text, flush=True)


class Child:
    """A running command, which is asked to stop when this process is.

    Args:
        command: words.
        pass_on: called with the process when a stop is asked for.
        begin: called in the new process before it becomes the command.
    """

    def __init__(
        self, command: list[str], pass_on: Callable[[Process], None], begin: Callable[[], None] | None = None
    ) -> None:
        self.asked: str | None = None
        self._pass_on = pass_on
        self._process: Process | None = None
        # Before the process is started: a signal in between would end this program and leave the
        # child.
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)
        # A session of its own: Ctrl-C would also reach torchrun, which would kill its workers while
        # they save.
        self._process = subprocess.Popen(command, start_new_session=True, preexec_fn=begin)
        # A stop that came while Popen ran.
        if self.asked is not None:
            pass_on(self._process)

    def wait(self) -> int:
        """Wait for the end; returns the exit code."""
        assert self._process is not None, "started"
        return self._process.wait()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        process = self._process
        if process is not None and self.asked is not None and number == signal.SIGINT:  # a second Ctrl-C
            os.killpg(process.pid, signal.SIGKILL)
            sys.exit(130)
        self.asked = self.asked or signal.Signals(number).name
        if process is not None:
            self._pass_on(process)


def to_workers(process: Process) -> None:
    """SIGTERM to the children of a torchrun; to torchrun itself while it has none."""
    workers = children(process.pid)
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    if not workers and process.poll() is None:
        process.terminate()


def to_itself(process: Process) -> None:
    """SIGTERM to a torchrun, which passes it to its workers and waits for them."""
    if process.poll() is None:
        process.terminate()


def children(pid: int) -> list[int]:
    """Process ids of the children of ``pid``."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:  # not Linux, or a kernel without that file
        found = subprocess.run(["pgrep", "-P", str(pid)], stdout=subprocess.PIPE, check=False)
        return [int(word) for word in found.stdout.split()]


def ignore_usr1() -> None:
    """Ignore SIGUSR1 in this process, in what it becomes by exec, and in its children."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def to_group(process: Process) -> None:
    """SIGTERM to a stage and everything it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)


def to_nodes(process: Process) -> None:
    """SIGUSR1 to srun, which passes it to every task (on SIGTERM it would kill all of them), or to the only node."""
    if process.poll() is not None:  # between two tries
        return
    # os.write: print is not safe in a signal handler, which may interrupt another print.
    os.write(1, b"launcher: asked to stop: every training process gets SIGTERM, on which it saves and ends\n")
    process.send_signal(signal.SIGUSR1)


def node(status_file: str, command: list[str]) -> int:
    """Run torchrun. The exit code says why the run ended, which torchrun's own does not. An elastic torchrun is asked
    to stop itself, and passes the signal on: it would restart workers that end without it."""
    # An elastic launcher has a range of nodes, least:most.
    elastic = any(word == "--nnodes" and ":" in command[i + 1] for i, word in enumerate(command[:-1]))
    child = Child(command, to_itself if elastic else to_workers, begin=ignore_usr1)
    code = child.wait()
    said = read_json(status_file, {}).get("status")
    if said is None and child.asked is not None:
        return EXIT_REQUEUE
    if said is None and code == 0:
        return 0  # a script of the user's own, which writes no status file
    return EXIT_CODES.get(said, code if code > 0 else 1)


def progress(folder: str, checkpoints: str) -> Any:
    """A value that changes when the run progresses: its newest checkpoint, or in an object store its iteration."""
    if "://" in checkpoints:
        return read_json(os.path.join(folder, "status.json"), {}).get("iteration", 0)
    try:
        with open(os.path.join(checkpoints, "latest")) as file:
            return file.read().strip()
    except OSError:
        return "none"


def count_try(folder: str, checkpoints: str) -> int:
    """Number of consecutive tries, this one included, that began with the same progress."""
    path = os.path.join(folder, "tries.json")
    # Progress is compared with that at the start of the try before.
    before, now = read_json(path, {}), progress(folder, checkpoints)
    tries = before.get("tries", 0) + 1 if before.get("progress") == now else 1
    write_json(path, {"tries": tries, "progress": now})
    return int(tries)


def lock(folder: str) -> Any:
    """Lock the folder until this process ends; None when another one holds it."""
    file = open(os.path.join(folder, "lock"), "a+")  # noqa: SIM115 - stays open as long as this process
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:  # a file system without locks: go on
        say(f"no lock on {folder}: {error}")
    # Emptied only under the lock: opening with "a+" keeps the number of another holder.
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def job(
    folder: str,
    checkpoints: str,
    max_tries: int,
    requeue: bool,
    command: list[str],
    before: tuple[str, ...] = (),
    after: tuple[str, ...] = (),
) -> int:
    """Run a job to its end, with the scripts of stages before and after the training. Returns the exit code."""
    os.makedirs(folder, exist_ok=True)
    held = lock(folder)
    if held is None:
        say(f"another job is running in {folder}")
        return 2
    if os.path.exists(os.path.join(folder, "end.json")):  # left by a job that its scheduler stopped and started again
        os.remove(os.path.join(folder, "end.json"))
    for script in before:
        if (code := stage(folder, script)) is not None:
            return code
    code = train(folder, checkpoints, max_tries, requeue, command)
    if code != 0 or was_cancelled(folder):
        return code
    for script in after:
        if (failed := stage(folder, script)) is not None:
            return failed
    return 0


def stage(folder: str, script: str) -> int | None:
    """Run a stage's script. Returns None when the next one may follow, else the job's exit code."""
    name = os.path.splitext(os.path.basename(script))[0]
    say("stage " + name)
    child = Child(["bash", script], to_group)
    code = child.wait()
    if code == 0 and child.asked is None and not was_cancelled(folder):
        return None
    if was_cancelled(folder):
        return finish(folder, "cancelled")
    # The scheduler asked for an end, the user did not: the job is queued again.
    if child.asked is not None:
        return finish(folder, "requeue")
    write_json(os.path.join(folder, "end.json"), {"end": f"stage {name} failed with {code}"})
    say(f"stage {name} failed with {code}")
    return code if code > 0 else 1


def train(folder: str, checkpoints: str, max_tries: int, requeue: bool, command: list[str]) -> int:
    """Run the training until it ends or makes no progress. Returns the exit code."""
    status_file = os.path.join(folder, "status.json")
    while count_try(folder, checkpoints) <= max_tries:
        # A status from an earlier try would be taken for this one's.
        if os.path.exists(status_file):
            os.remove(status_file)
        child = Child(command, to_nodes)
        code = child.wait()
        status = read_json(status_file, {})
        said = status.get("status", "nothing")
        say(f"the run ended with {code} and says {said}: {status.get('reason', '')}")
        end = decide(said, code, child.asked, was_cancelled(folder))
        if end in ("again", "requeue") and taken_back():
            say("Slurm has taken the job back: a node is lost, or somebody requeued it")
            write_json(os.path.join(folder, "end.json"), {"end": "requeue"})
            return EXIT_REQUEUE
        if end == "again" or (end == "requeue" and child.asked is None and not requeue):
            # A run that fails at once must not spin.
            time.sleep(1)
            if child.asked is None:
                continue
            end = "cancelled" if was_cancelled(folder) else "requeue"  # asked to stop between two tries
        if end == "requeue" and requeue and child.asked in (None, "SIGUSR1"):  # SIGTERM: the scheduler takes the job
            say("queueing the job again")
            return subprocess.call(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]])
        return finish(folder, end)
    say(f"giving up: {max_tries} tries in a row left no newer checkpoint than {progress(folder, checkpoints)}")
    write_json(os.path.join(folder, "end.json"), {"end": "gave up"})
    return 1


def was_cancelled(folder: str) -> bool:
    """Whether the job was cancelled."""
    return os.path.exists(os.path.join(folder, "cancelled"))


def finish(folder: str, end: str) -> int:
    """Record how the job ended. Returns the exit code."""
    write_json(os.path.join(folder, "end.json"), {"end": end})
    say(end)
    return {"done": 0, "cancelled": 0, "bad_config": 2}.get(end, EXIT_REQUEUE)


def taken_back() -> bool:
    """Whether Slurm has requeued or ended this job while its script still runs: another try would be refused."""
    number = os.environ.get("SLURM_JOB_ID", "")
    words = ["squeue", "--noheader", "--format=%A %T", "--jobs", number]
    try:
        asked = (
            subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False) if number else None
        )
    except OSError:  # no squeue here
        return False
    lines = asked.stdout.decode().splitlines() if asked is not None and asked.returncode == 0 else []
    return any(line.split()[0] == number and line.split()[1] != "RUNNING" for line in lines)


def decide(said: str, code: int, asked: str | None, cancelled: bool) -> str:
    """What follows a run that has ended: done, bad_config, cancelled, requeue, or again in this allocation."""
    if said in ("done", "bad_config"):
        return said
    if said == "nothing" and code == 0 and asked is None:
        return "done"  # a script of the user's own
    if cancelled:
        return "cancelled"
    return "requeue" if said == "requeue" or asked is not None else "again"


def main(words: list[str]) -> int:
    """Do what the command line says."""
    split = words.index("--")
    options, command = words[:split], words[split + 1 :]
    if options[0] == "node":
        return node(options[1], command)
    _, folder, checkpoints, max_tries, *rest = options
    before, after = (
        tuple(rest[i + 1] for i, word in enumerate(rest) if word == flag) for flag in ("--before", "--after")
    )
    try:
        return job(folder, checkpoints, int(max_tries), "--requeue" in rest, command, before, after)
    except OSError as error:  # a full disk; the log may be on it too
        with contextlib.suppress(OSError):
            say(f"giving up: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
