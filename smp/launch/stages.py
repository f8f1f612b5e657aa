"""Stages of a job other than the training: preparing data, converting, evaluating, exporting. A stage is a section of
the configuration with a command; it runs on one node after the stage before it has succeeded."""

from __future__ import annotations

import re
from typing import Any

from smp.config import ConfigError
from smp.launch.job import Artifacts, Job, code_of, render

TRAINING = "training"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def stage_names(job: Job) -> list[str]:
    """Names of all stages, in order.

    Raises:
        ConfigError: a name that cannot be one, or is given twice, or training is missing.
    """
    names = job.tree.get("stages") or [TRAINING]
    for name in names:
        # These are names of the job's own scripts.
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in ("submit", "train", "docker"):
            raise ConfigError(f"stages: {name!r} cannot be the name of a stage")
    if len(set(names)) != len(names) or TRAINING not in names:
        raise ConfigError(f"stages: {names} must have {TRAINING} and no name twice")
    return list(names)


def stage_artifacts(job: Job, suffix: str, head: Any) -> Artifacts:
    """A script for each stage other than the training.

    Args:
        job: the job.
        suffix: of its file.
        head: name of the stage -> first lines of its script.
    """
    return {
        f"{name}{suffix}": render(
            "stage.sh.j2",
            head=head(name),
            stage=name,
            name=job.recipe.name,
            folder=job.folder,
            setup=job.tree.get("setup") or [],
            env=job.environment.items(),
            secrets=bool(job.secrets),
            code=code_of(job, job.tree.get("git") or {}),
            command=_command(job, name),
        )
        for name in stage_names(job)
        if name != TRAINING
    }


def _command(job: Job, name: str) -> str:
    section = job.tree.get(name)
    if not isinstance(section, dict) or not isinstance(section.get("command"), str):
        raise ConfigError(f"stages: {name} has no command: give +{name}.command='...' ($run_dir is the job's folder)")
    if unknown := [key for key in section if key != "command"]:
        raise ConfigError(f"{name}.{unknown[0]}: there is no such key; a stage has a command")
    return str(section["command"])


def only_training(job: Job) -> None:
    """Raise ConfigError where there are stages: this back-end would need a workflow engine for them."""
    if (names := stage_names(job)) != [TRAINING]:
        raise ConfigError(
            f"stages: [{', '.join(names)}] with cluster={job.backend}, which runs training alone; take cluster=slurm "
            "or cluster=local, or submit each as a job of its own"
        )
