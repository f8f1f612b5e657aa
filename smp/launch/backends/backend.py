"""The interface of all back-ends, and what they share: the files of a job's folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp.config import ConfigError
from smp.launch.compose import BACKENDS
from smp.launch.job import Artifacts, Job
from smp.launch.secrets import is_private

Facts = dict[str, Any]
"""The content of job.json: name of the back-end, what it needs to submit the folder again, and the id of the job."""


@dataclass(frozen=True)
class Backend:
    """A back-end that runs jobs. All functions except ``artifacts`` need only the job's folder.

    Attributes:
        artifacts: the files of a job; job.json among them.
        busy: says what a job of the folder does that has not ended; None when there is none.
        submit: starts what the folder holds; returns the exit code and what is to be added to job.json.
        state: one word and what else is known.
        logs: shows them, and with True also what comes.
        cancel: asks the run to save and end, or takes a waiting job away; returns which of these was done.
    """

    artifacts: Callable[[Job], Artifacts]
    busy: Callable[[Path, Facts], str | None]
    submit: Callable[[Path, Facts], tuple[int, Facts]]
    state: Callable[[Path, Facts], str]
    logs: Callable[[Path, Facts, bool], int]
    cancel: Callable[[Path, Facts], str]


NOT_SUBMITTED = "not submitted"
"""State of a job of which only the files were written."""
PRIVATE = ("secrets.sh", "secrets.json", "secret.yaml")
"""Files with secrets, readable by their owner only."""
ASKED = "asked to save and end"
"""State of a job that was cancelled and is still running."""


def facts_artifact(job: Job, **facts: Any) -> Artifacts:
    """The file job.json."""
    return {"job.json": json.dumps({"backend": job.backend, "name": job.recipe.name, **facts}, indent=1) + "\n"}


def read_facts(folder: Path) -> Facts:
    """The content of job.json.

    Raises:
        ConfigError: there is no job, or its file is damaged.
    """
    try:
        text = (folder / "job.json").read_text(encoding="utf-8")
    except OSError:
        missing = "it has no job.json" if folder.is_dir() else "there is no such folder"
        raise ConfigError(f"{folder} is not the folder of a job: {missing}") from None
    facts = _object(text)
    if facts.get("backend") not in BACKENDS or not isinstance(facts.get("name"), str):
        raise ConfigError(f"{folder}/job.json is damaged: submit the recipe again")
    return facts


def _object(text: str) -> dict[str, Any]:
    """A JSON object from text; {} where the text is cut off or something else."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def write_artifacts(folder: Path, artifacts: Artifacts) -> None:
    """Write all files of a job. Files of an earlier job are replaced; its checkpoints and logs stay."""
    folder.mkdir(parents=True, exist_ok=True)
    if "recipe.yaml" in artifacts:  # a new job must not get the secrets of the one before
        for name in PRIVATE:
            (folder / name).unlink(missing_ok=True)
    for name, text in artifacts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = 0o755 if name.endswith((".sh", ".sbatch")) else 0o644
        if name in PRIVATE or (name != "supervise.py" and is_private(text)):
            path.unlink(missing_ok=True)  # an existing file keeps its mode, which may be open to others
            mode &= 0o700
        # The mode is set when the file is made: chmod afterwards would leave a moment in which
        # others can read it.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode & 0o666), "w", encoding="utf-8") as file:
            file.write(text)
        if mode & 0o100:
            path.chmod(mode)


def said(folder: Path) -> str:
    """What the run says in its status file."""
    try:
        status = _object((folder / "status.json").read_text(encoding="utf-8"))
    except OSError:
        return "nothing yet"
    if "status" not in status:
        return "nothing yet"
    iteration, reason = status.get("iteration", 0), status.get("reason")
    if status["status"] == "running":  # the status file says where it began
        # The status file is written at start and end; in between the log of metrics is newer.
        iteration = max(iteration, _last_iteration(folder / "metrics.jsonl"))
    if status["status"] == "requeue":
        return f"it saved at iteration {iteration} and ended: {reason}"
    return f"{status['status']} at iteration {iteration}" + (f": {reason}" if reason else "")


def _last_iteration(metrics: Path) -> int:
    """The last iteration that a run has logged; 0: none. The last line may be incomplete."""
    found = 0
    with contextlib.suppress(OSError):
        # The last lines only: the newest may be half written, the one before it is whole.
        for line in metrics.read_text(encoding="utf-8").splitlines()[-3:]:
            with contextlib.suppress(ValueError):
                found = int(json.loads(line).get("iteration", found))
    return found


def with_request(folder: Path, doing: str | None) -> str | None:
    """What a job does, with a note when it was cancelled meanwhile."""
    return f"{doing}, {ASKED}" if doing and (folder / "cancelled").exists() else doing


def ended(folder: Path) -> str | None:
    """How the job ended, when nothing more will happen; None otherwise."""
    try:
        return str(json.loads((folder / "end.json").read_text(encoding="utf-8"))["end"])
    except (OSError, ValueError):  # cancelled before it started
        return "cancelled" if (folder / "cancelled").exists() else None


def start_afresh(folder: Path) -> None:
    """Forget that a job was cancelled or gave up. Checkpoints stay."""
    for name in ("cancelled", "end.json", "tries.json"):
        (folder / name).unlink(missing_ok=True)


def run(words: Sequence[str], *, needed_for: str) -> str:
    """The output of a command.

    Raises:
        ConfigError: the program is not installed.
        OSError: it failed; with what it said.
    """
    if shutil.which(words[0]) is None:
        raise ConfigError(f"{words[0]} is not installed, which {needed_for} needs")
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words[:2])}: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


def follow(paths: Callable[[], Sequence[Path]], alive: Callable[[], bool]) -> None:
    """Print files from their beginning, and what is appended to them while ``alive()``."""
    read_to: dict[Path, int] = {}
    while True:
        # Asked before reading: what was written up to the end is then read in the last round.
        last = not alive()
        for path in paths():
            if path.is_file():
                with path.open("rb") as file:
                    file.seek(read_to.get(path, 0))
                    print(file.read().decode(errors="replace"), end="", flush=True)
                    read_to[path] = file.tell()
        if last:
            return
        time.sleep(0.2)
