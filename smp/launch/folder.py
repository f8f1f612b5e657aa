"""A job's folder that already exists: whether this command may write into it. A run continues from the checkpoints in
its folder, so a job of another recipe would continue from weights that are none of its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from smp.config import ConfigError
from smp.launch.backends.backend import read_facts
from smp.launch.job import Job

ORIGIN = "origin"
"""Key of job.json: what the job was made of, see ``Job.origin``."""


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock a folder against other launchers: two at once would both find it free. Where folders cannot be locked (some
    network file systems) this has no effect."""
    # The folder itself is locked: no lock file is left behind by a launcher that was killed.
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(f"{folder}: another launcher works in it; give another run.name, or wait") from None
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(handle)


def refuse_other_recipe(job: Job) -> None:
    """Raise ConfigError where the folder has a job of another recipe, or of another objective: HyperPod's recipes of
    one model share a name, whatever they do. A recipe that has moved and says what it said is the same one."""
    before, now = read_facts(job.folder).get(ORIGIN), job.origin
    if not isinstance(before, dict):
        return
    # A job continues from the checkpoints in its folder: another recipe's would be trained further with these settings.
    moved = before.get("file") != now["file"] and before.get("digest") != now["digest"]
    if moved or any(before.get(key) != now[key] for key in ("recipe", "objective")):
        key = "recipes.training_cfg.run.name" if job.recipe.task == "custom" else "recipes.run.name"
        raise ConfigError(
            f"{job.folder} has a job of another recipe, {_named(before)}, and this is {_named(now)}: give another "
            f"{key} or base_results_dir"
        )


def _named(origin: dict[str, str]) -> str:
    return f"{origin.get('recipe')} ({origin.get('objective')}) of {origin.get('file')}"


def refuse_other_backend(job: Job, dry: bool) -> None:
    """Raise ConfigError where files of a job that ran would be replaced by those of a dry run or of another cluster."""
    facts = read_facts(job.folder)
    # "id": it was submitted. status.json: a run has written it, perhaps without this launcher.
    ran = "id" in facts or (job.folder / "status.json").is_file()
    if ran and (dry or facts.get("backend") != job.backend):
        raise ConfigError(
            f"{job.folder} is the folder of a job that ran with cluster={facts.get('backend')}: give another "
            "recipes.run.name or base_results_dir"
        )
