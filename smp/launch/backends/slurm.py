"""Slurm: sbatch of a script that runs supervise.py and srun. Bare, with enroot and pyxis, or with docker."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smp.config import ConfigError
from smp.launch.backends.backend import (
    ASKED,
    NOT_SUBMITTED,
    Backend,
    Facts,
    ended,
    facts_artifact,
    follow,
    run,
    said,
    start_afresh,
    with_request,
)
from smp.launch.job import Artifacts, Job, code_of, common_artifacts, flag, render
from smp.launch.stages import TRAINING, stage_artifacts, stage_names

_OURS = (
    *("job_name_prefix", "signal_seconds", "stderr_to_stdout", "slurm_create_submission_file_only"),
    *("srun_args", "container_mounts", "slurm_docker_cfg"),
)
"""Settings of cluster/slurm.yaml that are not options of sbatch."""
# Options of sbatch that follow from the recipe.
_DECIDED = ("nodes", "ntasks_per_node", "job_name", "time", "output", "error", "signal", "dependency", "open_mode")
_OPTION = re.compile(r"[a-z][a-z0-9_-]*")
RENDEZVOUS = '--rdzv-backend c10d --rdzv-endpoint "$SMP_RENDEZVOUS" --rdzv-id "$SMP_JOB_ID"'


def artifacts(job: Job) -> Artifacts:
    """The files of a job."""
    cluster, container = job.cluster, job.tree.get("container")
    # pyxis runs .sqsh images; any other name is docker's.
    docker = container is not None and not str(container).endswith(".sqsh")
    _check_container(cluster, container is not None, docker)
    srun_args = _words(cluster, "srun_args")
    if container is not None and not docker:
        srun_args += [f"--container-image={container}", f"--container-mounts={','.join(_mounts(job))}"]
    script = render(
        "slurm.sbatch.j2",
        head=_head(job, TRAINING),
        name=job.recipe.name,
        folder=job.folder,
        array=cluster.get("array") is not None,
        srun_args=srun_args,
        checkpoints=job.checkpoints,
        max_tries=job.tree["max_tries"],
        requeue=flag(cluster, "requeue", "cluster."),
        script="docker.sh" if docker else "train.sh",
    )
    names = stage_names(job)
    order = ["submit.sbatch" if name == TRAINING else f"{name}.sbatch" for name in names]
    facts = facts_artifact(job, order=order, submit=not flag(cluster, "slurm_create_submission_file_only", "cluster."))
    stages = stage_artifacts(job, ".sbatch", lambda name: _head(job, name))
    inside = {"docker.sh": _docker(job)} if docker else {}
    return {**common_artifacts(job, RENDEZVOUS), "submit.sbatch": script, **inside, **stages, **facts}


def _check_container(cluster: Mapping[str, Any], runs_one: bool, docker: bool) -> None:
    """Raise ConfigError for container settings without such a container."""
    if not runs_one and _words(cluster, "container_mounts"):
        raise ConfigError("cluster.container_mounts: there is no container; give one, or leave it out")
    section = cluster.get("slurm_docker_cfg")
    if not docker and isinstance(section, Mapping) and any(section.values()):
        raise ConfigError("cluster.slurm_docker_cfg: container is no image of docker's; leave it out")


def _head(job: Job, stage: str) -> str:
    """The #SBATCH lines of a stage's script."""
    recipe, cluster = job.recipe, job.cluster
    training = stage == TRAINING
    name = f"{cluster.get('job_name_prefix') or ''}{recipe.name}" + ("" if training else f"-{stage}")
    # sbatch fills in: %A_%a array job and task, %j job number.
    number = "%A_%a" if training and cluster.get("array") is not None else "%j"
    if "\\" in str(job.folder):
        raise ConfigError(
            f"base_results_dir: {job.folder} has a backslash, after which sbatch fills in no job's number"
        )
    # A % of the folder's own must be doubled.
    log = f"{str(job.folder).replace('%', '%%')}/log-{stage}_{number}"
    options: dict[str, Any] = {
        "job-name": name,
        "nodes": recipe.num_nodes if training else 1,
        "ntasks-per-node": 1,
        "time": recipe.time_limit,
        "output": f"{log}.out",
        "error": None if flag(cluster, "stderr_to_stdout", "cluster.") else f"{log}.err",
        # append: a requeued job writes to the same log.
        "open-mode": "append",
        # B: only the batch script gets the signal, which supervise.py passes on.
        "signal": f"B:USR1@{_seconds(job)}" if training and recipe.time_limit else None,
    }
    # Only the training is an array: other stages run once.
    options |= {key.replace("_", "-"): value for key, value in _options(cluster).items() if training or key != "array"}
    lines = [_option(key, value) for key, value in options.items() if value is not None and value is not False]
    return "\n".join(["#!/bin/bash", *lines])


def _options(cluster: Mapping[str, Any]) -> dict[str, Any]:
    """Options that the user adds; sbatch checks their names itself."""
    options = {key: value for key, value in cluster.items() if key not in _OURS}
    for key, value in options.items():
        if key.replace("-", "_") in _DECIDED:
            raise ConfigError(f"cluster.{key}: it follows from run.name, run.time_limit, trainer.num_nodes and stages")
        if not _OPTION.fullmatch(key) or isinstance(value, dict | list):
            raise ConfigError(f"cluster.{key}: {value!r} cannot be an option of sbatch")
        if "\n" in str(value):
            raise ConfigError(f"cluster.{key}: a value of sbatch has one line")
    return options


def _option(key: str, value: Any) -> str:
    """A line of sbatch's options, which sbatch splits into words as a shell does."""
    return f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={shlex.quote(str(value))}"


def _seconds(job: Job) -> int:
    """How many seconds before its time limit a job is told."""
    seconds = job.cluster.get("signal_seconds")
    # sbatch --signal=B:TERM@SECONDS takes 16 bits.
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not 0 < seconds < 65536:
        raise ConfigError(f"cluster.signal_seconds: {seconds!r} is not a number of seconds from 1 to 65535")
    limit = job.recipe.seconds
    if limit is not None and limit <= seconds:
        raise ConfigError(
            f"run.time_limit: {job.recipe.time_limit} is not longer than cluster.signal_seconds {seconds}: the run "
            "would be asked to stop when it starts"
        )
    return seconds


def _words(section: Mapping[str, Any], key: str) -> list[str]:
    value = section.get(key) or []
    if not isinstance(value, list):
        raise ConfigError(f"cluster.{key}: expected a list, not {value!r}")
    return [str(word) for word in value if word is not None]


def _mounts(job: Job) -> list[str]:
    """The job's folder, the code and the user's mounts, each under its own path."""
    code = code_of(job, job.tree.get("git") or {})
    paths = [str(job.folder), *([code] if code else []), *_words(job.cluster, "container_mounts")]
    return [path if ":" in path else f"{path}:{path}" for path in dict.fromkeys(paths)]


def _docker(job: Job) -> str:
    section = job.cluster.get("slurm_docker_cfg") or {}
    if not isinstance(section, dict):
        raise ConfigError(f"cluster.slurm_docker_cfg: expected keys and values, not {section!r}")
    return render(
        "docker.sh.j2",
        name=job.recipe.name,
        folder=str(job.folder),
        mounts=_mounts(job),
        container=job.tree["container"],
        docker_args=_words(section, "docker_args"),
        commands=_words(section, "post_launch_commands"),
    )


def busy(folder: Path, facts: Facts) -> str | None:
    """States of the jobs of all stages in Slurm's queue; None: none is there."""
    return ", ".join(f"{state} (job {number})" for number, state in _in_queue(facts).items()) or None


def submit(folder: Path, facts: Facts) -> tuple[int, Facts]:
    """sbatch of every stage, each depending on the one before it."""
    if not facts["submit"]:
        return 0, {}
    start_afresh(folder)
    ids: dict[str, str] = {}
    for script in facts["order"]:
        # kill-on-invalid-dep: a stage whose predecessor failed would wait in the queue for ever.
        after = [f"--dependency=afterok:{list(ids.values())[-1]}", "--kill-on-invalid-dep=yes"] if ids else []
        said = run(["sbatch", "--parsable", *after, str(folder / script)], needed_for="cluster=slurm")
        # --parsable prints number;cluster.
        ids[script] = said.splitlines()[-1].partition(";")[0]
        print(f"{script}: job {ids[script]}")
    return 0, {"id": ids["submit.sbatch"], "ids": list(ids.values())}


def _in_queue(facts: Facts) -> dict[str, str]:
    """Job number -> state, for the jobs of all stages that Slurm has not finished."""
    states = {str(number): _queued(str(number)) for number in facts.get("ids", [])}
    return {number: state for number, state in states.items() if state is not None}


def _queued(number: str) -> str | None:
    """The state of a job that Slurm has not finished; None otherwise."""
    try:
        states = run(["squeue", "--noheader", "--format=%T", "--jobs", number], needed_for="cluster=slurm")
    except OSError:  # squeue does not know it any more
        return None
    # An array has a state for each task.
    return ", ".join(sorted(set(states.split()))) or None


def state(folder: Path, facts: Facts) -> str:
    """The job's state by Slurm and by the run's status file."""
    if not facts.get("id"):
        return NOT_SUBMITTED
    runs = sorted(folder.glob("array-*")) or [folder]
    said_of = "; ".join(f"{path.name + ': ' if path != folder else ''}{said(path)}" for path in runs)
    ending = f"{ended(folder) or 'not in the queue'} (job {facts['id']})"
    return f"{with_request(runs[0], busy(folder, facts)) or ending}; the run says {said_of}"


def logs(folder: Path, facts: Facts, more: bool) -> int:
    """Show the logs of all stages."""
    if not facts.get("id"):
        raise ConfigError(f"{folder}: it was never submitted")
    follow(lambda: sorted(folder.glob("log-*.out")), lambda: more and _queued(str(facts.get("id"))) is not None)
    return 0


def cancel(folder: Path, facts: Facts) -> str:
    """Ask a running training to save and end; remove waiting jobs and other stages from the queue."""
    if not facts.get("id"):
        raise ConfigError(f"{folder}: it was never submitted")
    number, queued = str(facts["id"]), _in_queue(facts)
    if not queued:
        raise ConfigError(f"{folder}: it has no job in Slurm's queue: {ended(folder) or 'it is gone'}")
    # The mark is set before the signal: supervise.py reads it when the run ends.
    for path in sorted(folder.glob("array-*")) or [folder]:
        (path / "cancelled").touch()
    training = queued.get(number, "")
    running = "RUNNING" in training
    # Other stages have nothing to save.
    if ended_at_once := [other for other in queued if other != number or not running]:
        _scancel(*ended_at_once)
    if not running:
        return "taken out of the queue"
    # Tasks that wait have nothing to save.
    if "PENDING" in training:  # tasks of an array
        _scancel("--state=PENDING", number)
    # --batch: to the batch script only, since torchrun would die of SIGUSR1.
    _scancel("--batch", "--signal=USR1", number)
    return ASKED


def _scancel(*words: str) -> None:
    run(["scancel", *words], needed_for="cluster=slurm")


BACKEND = Backend(artifacts=artifacts, busy=busy, submit=submit, state=state, logs=logs, cancel=cancel)
