"""This machine: torchrun under supervise.py, on CPUs or GPUs."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from smp.config import ConfigError
from smp.config.command_line.fields import did_you_mean
from smp.launch.backends.backend import (
    ASKED,
    NOT_SUBMITTED,
    Backend,
    Facts,
    ended,
    facts_artifact,
    follow,
    said,
    start_afresh,
    with_request,
)
from smp.launch.elastic import refuse
from smp.launch.job import Artifacts, Job, common_artifacts, flag, python_of, render
from smp.launch.stages import TRAINING, stage_artifacts, stage_names

LOG = "log.txt"


def artifacts(job: Job) -> Artifacts:
    """The files of a job."""
    for key in job.cluster:
        if key != "background":
            raise ConfigError(f"cluster.{key}: there is no such key{did_you_mean(key, ['background'])}")
    refuse(job.recipe, "cluster=local", "it is one machine")
    if job.recipe.num_nodes != 1:
        raise ConfigError(
            f"trainer.num_nodes: {job.recipe.num_nodes} with cluster=local, which is one machine; "
            "give recipes.trainer.num_nodes=1 or another cluster"
        )
    if job.tree.get("container"):
        raise ConfigError(f"container: {job.tree['container']} with cluster=local, which takes what is installed here")
    names = stage_names(job)
    # No scheduler here chains jobs: the script runs the stages before and after the training itself.
    script = render(
        "local.sh.j2",
        name=job.recipe.name,
        folder=job.folder,
        python=python_of(job),
        checkpoints=job.checkpoints,
        max_tries=job.tree["max_tries"],
        before=names[: names.index(TRAINING)],
        after=names[names.index(TRAINING) + 1 :],
    )
    stages = stage_artifacts(job, ".sh", lambda name: "#!/bin/bash")
    facts = facts_artifact(job, background=flag(job.cluster, "background", "cluster."))
    return {**common_artifacts(job, ""), "submit.sh": script, **stages, **facts}


def busy(folder: Path, facts: Facts) -> str | None:
    """The process that holds the folder; None: no job is running."""
    holder = _holder(folder)
    return None if holder is None else f"running (process {holder})"


def submit(folder: Path, facts: Facts) -> tuple[int, Facts]:
    """Start the job; show its log until the end unless it runs in the background."""
    start_afresh(folder)
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            # A session of its own: Ctrl-C here must not reach torchrun, which would kill workers
            # while they save.
            ["bash", str(folder / "submit.sh")],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    if facts["background"]:
        return 0, {"id": process.pid}
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # a container that is stopped sends SIGTERM: handled as Ctrl-C
    try:
        _show(folder, process)
    except KeyboardInterrupt:
        print("asking the run to save and stop; Ctrl-C again kills it", file=sys.stderr, flush=True)
        _stop(folder, process, signal.SIGUSR1)
        try:
            _show(folder, process)
        # The second Ctrl-C: supervise.py kills what it has started.
        except KeyboardInterrupt:
            _stop(folder, process, signal.SIGINT)
    return process.wait(), {"id": process.pid}


def _stop(folder: Path, process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to supervise.py, or end the job's script where that has not started yet."""
    (folder / "cancelled").touch()
    holder = _holder(folder)
    with suppress(ProcessLookupError):
        # supervise.py has not taken the lock yet: nothing is to be saved.
        if holder is None:
            os.killpg(process.pid, signal.SIGTERM)
        else:
            os.kill(holder, number)


def _show(folder: Path, process: subprocess.Popen[bytes]) -> None:
    follow(lambda: [folder / LOG], lambda: process.poll() is None)


def state(folder: Path, facts: Facts) -> str:
    """The job's state."""
    if not (folder / LOG).exists():
        return NOT_SUBMITTED
    doing = with_request(folder, busy(folder, facts)) or ended(folder) or "not running"
    return f"{doing}; the run says {said(folder)}"


def logs(folder: Path, facts: Facts, more: bool) -> int:
    """Show the log."""
    if not (folder / LOG).exists():
        raise ConfigError(f"{folder}: it was never submitted")
    follow(lambda: [folder / LOG], lambda: more and _holder(folder) is not None)
    return 0


def cancel(folder: Path, facts: Facts) -> str:
    """Ask the run to save and end."""
    holder = _holder(folder)
    if holder is None:
        raise ConfigError(f"{folder}: its job is not running")
    (folder / "cancelled").touch()
    with suppress(ProcessLookupError):
        os.kill(holder, signal.SIGUSR1)
    return ASKED


def _holder(folder: Path) -> int | None:
    """The process that holds the folder's lock; None: nobody."""
    try:
        with (folder / "lock").open("r") as file:
            try:
                # A shared lock is refused while supervise.py holds the exclusive one; it ends with
                # its process, however that ends.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                # The file holds the process number of the holder.
                return int(file.read() or 0) or None
    except OSError:
        return None
    return None


BACKEND = Backend(artifacts=artifacts, busy=busy, submit=submit, state=state, logs=logs, cancel=cancel)
