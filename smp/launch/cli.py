"""The launcher's command line: ``python main.py recipes=NAME cluster=NAME key=value ...``, and its jobs."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from smp.config import Config, ConfigError, Layout
from smp.config.command import run_tool
from smp.config.commands import as_called_here
from smp.config.credentials import without_credentials
from smp.config.fields import did_you_mean
from smp.launch.backend import NOT_SUBMITTED, Backend, read_facts, write_artifacts
from smp.launch.compose import BACKENDS, compose
from smp.launch.job import SECRETS, Artifacts, Job, make_job
from smp.launch.library import find_recipe, list_recipes
from smp.launch.recipe import read_recipe

USAGE = """\
Runs a recipe on this machine, on Slurm, on Kubernetes or on SageMaker.

    python main.py recipes=NAME [cluster=local] [key.path=value ...] [+key.path=value ...]
    python main.py status JOB          what a job does, and what its run says
    python main.py logs JOB [--follow]
    python main.py cancel JOB          asks the run to save and end; status says when it has
    python main.py resume JOB          goes on from the newest checkpoint
    python main.py --list [WORDS]      recipes whose names have these words
    python main.py --help RECIPE       a recipe's keys
    python main.py --completion        for bash: eval "$(python main.py --completion)"

cluster   local (the default), slurm, k8s, sm_jobs
recipes   a name of --list, or a .yaml file: of this project or of HyperPod's recipes v1
JOB       a job's folder, base_results_dir/run.name
Keys are those of recipes_collection/config.yaml, cluster.* of cluster/NAME.yaml and recipes.* of the recipe;
recipes.* takes every setting of pretrain_gpt.py or finetune.py by its name. dry_run=true submits nothing.
"""
_COMPLETION = """\
_smp_launch() {
    local word=${COMP_LINE:0:COMP_POINT}
    word=${word##* }
    mapfile -t COMPREPLY < <(COMMAND --complete "$word" 2> /dev/null)
    # readline replaces what follows the last of COMP_WORDBREAKS only
    local cut=${word%"${word##*[=:]}"}
    COMPREPLY=("${COMPREPLY[@]#"$cut"}")
    compopt -o nospace
}
complete -F _smp_launch SCRIPT
"""
_ACTIONS = ("status", "logs", "cancel", "resume")
_KEYS = ("recipes=", "cluster=", "base_results_dir=", "instance_type=", "container=", "dry_run=true")


def main(words: list[str]) -> int:
    """Do what a command line says. Returns the exit code: 0, 1 when a job failed, 2 when it cannot be done."""
    return run_tool(lambda: _run(words))


def _run(words: list[str]) -> int:
    first = words[0] if words else "--help"
    if first in ("--help", "-h"):
        print(_recipe_help(words[1]) if len(words) > 1 else as_called_here(USAGE), end="")
    elif first == "--list":
        print("\n".join(name for name in list_recipes() if all(word in name for word in words[1:])))
    elif first == "--completion":
        command = f"{sys.executable} {Path(sys.argv[0]).absolute()}"
        print(_COMPLETION.replace("COMMAND", command).replace("SCRIPT", Path(sys.argv[0]).name), end="")
    elif first == "--complete":
        print("\n".join(_complete(words[1] if len(words) > 1 else "")))
    elif first in _ACTIONS:
        return _act(first, words[1:])
    elif first.startswith("-") or "=" not in first:
        raise ConfigError(f"unexpected {first!r}{did_you_mean(first, [*_ACTIONS, '--list', '--help', '--completion'])}")
    else:
        return launch(words)
    return 0


def launch(words: list[str]) -> int:
    """Write a job's folder and, unless it is a dry run, submit it."""
    job, artifacts = prepare(words)
    dry = job.tree.get("dry_run") is True
    if not dry and job.recipe.missing:
        raise ConfigError(f"{job.recipe.name}: {_still_to_give(job)}")
    job.folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(job.folder):
        if (job.folder / "job.json").is_file():
            _refuse_busy(job.folder)
            _refuse_other(job, dry)
        write_artifacts(job.folder, artifacts)
        print(without_credentials("\n".join(describe(job, artifacts))), flush=True)
        return 0 if dry else _submit(job.folder)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other launchers out of a folder: two at once would both find it free. Where folders cannot be locked (some
    network file systems) the first to submit is not known."""
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


def _refuse_other(job: Job, dry: bool) -> None:
    """Raise ConfigError where files of a job that ran would be replaced by those of a dry run or of another cluster."""
    facts = read_facts(job.folder)
    ran = "id" in facts or (job.folder / "status.json").is_file()
    if ran and (dry or facts.get("backend") != job.backend):
        raise ConfigError(
            f"{job.folder} is the folder of a job that ran with cluster={facts.get('backend')}: give another "
            "recipes.run.name or base_results_dir"
        )


def prepare(words: list[str]) -> tuple[Job, Artifacts]:
    """A job and all of its files, of which nothing is written yet.

    Raises:
        ConfigError: one line that names the key and the file.
    """
    composed = compose(words)
    try:
        recipe = read_recipe(composed.tree["recipes"], composed.source.stem)
    except ConfigError as error:
        raise ConfigError(f"{composed.source}: {error}") from None
    try:
        job = make_job(composed, recipe)
        artifacts = backend_of(job.backend).artifacts(job)
    except ConfigError as error:
        raise ConfigError(f"{composed.file_of(str(error))}: {error}") from None
    command = shlex.join(["python", "main.py", *map(_without_secret, words)])
    return job, {**artifacts, "command.txt": command + "\n"}


def _without_secret(word: str) -> str:
    key, equals, _ = word.partition("=")
    secret = equals and key.rpartition(".")[2] in SECRETS
    return f"{key}=(removed)" if secret else str(without_credentials(word))


def backend_of(name: str) -> Backend:
    """The back-end of a name. Imported when it is used: each has its own libraries."""
    assert name in BACKENDS
    backend = importlib.import_module(f"smp.launch.{name}").BACKEND
    assert isinstance(backend, Backend)
    return backend


def describe(job: Job, artifacts: Artifacts) -> list[str]:
    """What is going to run, and the tree of files that says so."""
    recipe = job.recipe
    nodes = f"{recipe.num_nodes} node{'s' if recipe.num_nodes > 1 else ''} x {recipe.devices}"
    lines = [f"{recipe.name}: {recipe.task} with cluster={job.backend} on {nodes} processes"]
    lines += [_layout(recipe.config, recipe.world_size)] if recipe.config is not None else []
    lines += [f"environment: {_shown(job.environment)}"] if job.environment else []
    lines += [f"environment, where a node does not have it: {_shown(job.defaults)}"] if job.defaults else []
    if recipe.notes:
        lines.append(f"{len(recipe.notes)} keys of the recipe change nothing here; notes.txt says why")
    if recipe.time_limit is not None and job.backend in ("local", "k8s"):
        lines.append(f"run.time_limit {recipe.time_limit} is not used: cluster={job.backend} has no time limit")
    if recipe.missing:
        lines.append(_still_to_give(job))
    names = sorted(artifacts)
    branches = ["├── "] * (len(names) - 1) + ["└── "]
    return [*lines, f"{job.folder}/", *(branch + name for branch, name in zip(branches, names, strict=True))]


def _shown(environment: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in environment.items())


def _layout(config: Config, world_size: int) -> str:
    layout = Layout.from_config(config.parallel, world_size)
    data = config.data
    assert data.global_batch_size is not None and data.seq_length is not None, "resolved"
    tokens = data.global_batch_size * data.seq_length
    context = f"context {layout.cp}, " if layout.cp > 1 else ""
    return (
        f"layout: tensor {layout.tp}, pipeline {layout.pp}, {context}sharded over {layout.dp_shard * layout.cp}, "
        f"{layout.dp_replicate} replicas; {tokens:,} tokens per step"
    )


def _still_to_give(job: Job) -> str:
    return "still to give: " + ", ".join(f"recipes.{name}=..." for name in job.recipe.missing)


def _refuse_busy(folder: Path) -> None:
    """Raise ConfigError when the folder is that of a job that has not ended."""
    facts = read_facts(folder)
    if (doing := backend_of(facts["backend"]).busy(folder, facts)) is not None:
        raise ConfigError(f"{folder}: its job is {doing}; cancel it first, or give another run.name")


def _submit(folder: Path) -> int:
    facts = read_facts(folder)
    code, more = backend_of(facts["backend"]).submit(folder, facts)
    write_artifacts(folder, {"job.json": _json({**facts, **more})})
    return code


def _json(facts: dict[str, object]) -> str:
    import json

    return json.dumps(facts, indent=1) + "\n"


def _act(action: str, words: list[str]) -> int:
    paths = [Path(word).absolute() for word in words if not word.startswith("-")]
    options = [word for word in words if word.startswith("-")]
    if len(paths) != 1 or set(options) - ({"--follow", "-f"} if action == "logs" else set()):
        raise ConfigError(f"{action} takes one folder of a job" + (" and --follow" if action == "logs" else ""))
    folder = paths[0]
    facts = read_facts(folder)
    backend = backend_of(facts["backend"])
    if action == "resume":
        with _alone_in(folder):
            _refuse_busy(folder)
            return _submit(folder)
    if action == "logs":
        return backend.logs(folder, facts, bool(options))
    if action == "cancel":
        done = backend.cancel(folder, facts)
        print(
            f"{facts['name']}: {done}"
            + as_called_here(f"; python main.py status {shlex.quote(str(folder))} says when it has ended")
        )
        return 0
    state = backend.state(folder, facts)
    hint = (
        as_called_here(f"; python main.py resume {shlex.quote(str(folder))} submits it")
        if state == NOT_SUBMITTED
        else ""
    )
    print(f"{facts['name']}: {state}{hint}")
    return 0


def _recipe_help(name: str) -> str:
    path = find_recipe(name)
    return f"# {path}; any of these: recipes.KEY=VALUE\n{path.read_text(encoding='utf-8')}"


def _complete(word: str) -> list[str]:
    """What a word may become."""
    if word.startswith("recipes="):
        known = [f"recipes={name}" for name in list_recipes()]
    elif word.startswith("cluster="):
        known = [f"cluster={name}" for name in BACKENDS]
    else:
        known = [*_KEYS, *_ACTIONS]
    return [name for name in known if name.startswith(word)]
