"""The launcher's command line: ``python main.py recipes=NAME cluster=NAME key=value ...``, and its jobs."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from smp.config import Config, ConfigError, Layout
from smp.config.command_line.command import run_tool
from smp.config.command_line.commands import as_called_here
from smp.config.command_line.entry_points import FINETUNE, PRETRAIN
from smp.config.command_line.fields import Setting, as_text, did_you_mean, settings
from smp.launch.backends.backend import NOT_SUBMITTED, Backend, read_facts, write_artifacts
from smp.launch.compose import BACKENDS, compose
from smp.launch.folder import ORIGIN, alone_in, refuse_other_backend, refuse_other_recipe
from smp.launch.hyperpod import FeatureError
from smp.launch.job import Artifacts, Job, make_job
from smp.launch.library import list_recipes, read_recipe_text
from smp.launch.recipe import Recipe, read_recipe
from smp.launch.secrets import REMOVED, hidden_words, is_secret

USAGE = """\
Runs a recipe on this machine, on Slurm, on Kubernetes or on SageMaker.

    python main.py recipes=NAME [cluster=local] [key.path=value ...] [+key.path=value ...]
    python main.py status JOB          what a job does, and what its run says
    python main.py logs JOB [--follow]
    python main.py cancel JOB          asks the run to save and end; status says when it has
    python main.py resume JOB          continues from the newest checkpoint
    python main.py --list [WORDS]      recipes whose names have these words
    python main.py --help RECIPE       a recipe's keys
    python main.py --completion        for bash: eval "$(python main.py --completion)"

cluster   local (the default), slurm, k8s, sm_jobs
recipes   a name of --list, or a .yaml file: of this project or of HyperPod's catalogues
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
# Control characters and Unicode line separators: an error must stay one line.
_LINE_BREAKS = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
_ACTIONS = ("status", "logs", "cancel", "resume")
_KEYS = ("recipes=", "cluster=", "base_results_dir=", "instance_type=", "container=", "dry_run=true")


def main(words: list[str]) -> int:
    """Run a command line. Returns the exit code: 0, 1 when a job failed, 2 when it cannot be done."""
    return run_tool(lambda: _run(words))


def _run(words: list[str]) -> int:
    first = words[0] if words else "--help"
    if first in ("--help", "-h"):
        print(_recipe_help(words[1]) if len(words) > 1 else as_called_here(USAGE), end="")
    elif first == "--list":
        names = [name for name in list_recipes() if all(word in name for word in words[1:])]
        if not names:
            raise ConfigError(f"no recipe has {' and '.join(words[1:])} in its name; --list alone names them all")
        print("\n".join(names))
    elif first == "--completion":
        # Absolute: completion works in any folder.
        command = f"{sys.executable} {Path(sys.argv[0]).absolute()}"
        print(_COMPLETION.replace("COMMAND", command).replace("SCRIPT", Path(sys.argv[0]).name), end="")
    elif first == "--complete":
        print("\n".join(_complete(words[1] if len(words) > 1 else "")))
    elif first in _ACTIONS:
        return _act(first, words[1:])
    elif "=" not in first and not first.startswith(("~", "-m", "--multirun")):
        raise ConfigError(f"unexpected {first!r}{did_you_mean(first, [*_ACTIONS, '--list', '--help', '--completion'])}")
    else:
        return launch(words)
    return 0


def launch(words: list[str]) -> int:
    """Write a job's folder, and submit it unless it is a dry run."""
    try:
        job, artifacts = prepare(words)
    except ConfigError as error:
        # Values of words may be secrets: they are replaced before anything is printed.
        raise ConfigError(*hidden_words(words, [str(error)])) from None
    dry = job.tree.get("dry_run") is True
    # A dry run of an incomplete recipe is how users see what they still have to give.
    if not dry and job.recipe.missing:
        raise ConfigError(f"{job.recipe.name}: {_still_to_give(job)}")
    if not dry and job.recipe.unread:
        raise ConfigError(_unread(job))
    # The folder must exist to be locked.
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        also = ", and its pods see the same path" if job.backend == "k8s" else ""
        raise ConfigError(
            f"base_results_dir: {job.folder} cannot be made ({error.strerror}); a job's files are written there on "
            f"this machine{also}"
        ) from None
    # Two launchers in one folder would mix the files of two jobs.
    with alone_in(job.folder):
        if (job.folder / "job.json").is_file():
            refuse_other_recipe(job)
            _refuse_busy(job.folder)
            refuse_other_backend(job, dry)
        facts = {**json.loads(artifacts["job.json"]), ORIGIN: job.origin}
        write_artifacts(job.folder, {**artifacts, "job.json": _json(facts)})
        print(*hidden_words(words, ["\n".join(describe(job, artifacts))]), flush=True)
        return 0 if dry else _submit(job.folder)


def prepare(words: list[str]) -> tuple[Job, Artifacts]:
    """A job and all of its files, of which nothing is written yet.

    Raises:
        ConfigError: one line that names the key and the file.
    """
    try:
        return _prepare(words)
    except ConfigError as error:
        # Typed values may have line breaks: they are shown escaped.
        raise _worded(error, _LINE_BREAKS.sub(lambda match: repr(match[0])[1:-1], str(error))) from None


def _prepare(words: list[str]) -> tuple[Job, Artifacts]:
    composed = compose(words)
    try:
        recipe = read_recipe(composed.tree["recipes"], composed.source.stem)
        recipe = replace(recipe, notes=(*composed.notes, *recipe.notes))
    except ConfigError as error:
        raise _worded(error, f"{composed.source}: {error}") from None
    try:
        job = replace(make_job(composed, recipe), instead=_instead(words, composed.removed, recipe))
        artifacts = backend_of(job.backend).artifacts(job)
    except ConfigError as error:
        # Errors of clusters and keys name the file that has, or should have, the key.
        raise ConfigError(f"{composed.file_of(str(error))}: {error}") from None
    command = shlex.join(["python", "main.py", *_without_secrets(words)])
    return job, {**artifacts, "command.txt": command + "\n"}


def _instead(words: list[str], removed: tuple[str, ...], recipe: Recipe) -> tuple[str, ...]:
    """A line for each word that removes keys of the recipe: the settings that they said, and the values without."""
    known = settings(FINETUNE if recipe.task == "finetune" else PRETRAIN)
    lines = []
    for word in removed:
        try:
            # Composed again without this word: the difference is what it takes away.
            others = compose([other for other in words if other != word])
            said = read_recipe(others.tree["recipes"], others.source.stem).settings
        except ConfigError:  # which the word is given against
            continue
        changed = [
            f"{name} {as_text(value)} {'is unset now' if now is None else f'has become {as_text(now)}'}"
            for name, value in said.items()
            if name not in recipe.missing and (now := _used(name, recipe, known)) != value
        ]
        lines += [f"{word} takes away what the recipe says: {', '.join(changed)}"] if changed else []
    return tuple(lines)


def _used(name: str, recipe: Recipe, known: Mapping[str, Setting]) -> Any:
    """A setting's value, by default the entry point's."""
    return recipe.settings.get(name, known[name].default if name in known else None)


def _worded(error: ConfigError, message: str) -> ConfigError:
    """An error of the same class with another message."""
    return FeatureError(message) if isinstance(error, FeatureError) else ConfigError(message)


def _without_secrets(words: list[str]) -> list[str]:
    keys = [word.partition("=")[0] for word in words]
    return [
        # Values of keys with a secret's name go as a whole.
        f"{key}={REMOVED}" if "=" in word and is_secret(key.rpartition(".")[2]) else text
        for key, word, text in zip(keys, words, hidden_words(words, words), strict=True)
    ]


def backend_of(name: str) -> Backend:
    """The back-end of a name, imported on use: each has its own libraries."""
    assert name in BACKENDS
    backend = importlib.import_module(f"smp.launch.backends.{name}").BACKEND
    assert isinstance(backend, Backend)
    return backend


def describe(job: Job, artifacts: Artifacts) -> list[str]:
    """Lines for the user: what will run, and the tree of its files."""
    recipe = job.recipe
    nodes = f"{recipe.num_nodes} node{'s' if recipe.num_nodes > 1 else ''} x {recipe.devices}"
    lines = [f"{recipe.name}: {recipe.task} with cluster={job.backend} on {nodes} processes"]
    if recipe.spare_nodes:
        lines.append(f"spare nodes, which wait to take the place of lost ones: {recipe.spare_nodes}")
    lines += [_layout(recipe.config, recipe.world_size)] if recipe.config is not None else []
    lines += [f"environment: {_shown(job.environment)}"] if job.environment else []
    lines += [f"environment, not shown: {' '.join(job.secrets)}"] if job.secrets else []
    lines += [f"environment, where a node does not have it: {_shown(job.defaults)}"] if job.defaults else []
    lines += job.instead
    if recipe.form is not None:
        lines.append(f"translated from HyperPod's keys ({recipe.form}); settings.yaml is what they became")
    if recipe.notes:
        lines.append(f"{len(recipe.notes)} keys of the recipe change nothing here; notes.txt says why")
    # A job's folder is often shared, so no token is ever written there from a recipe.
    if any(note.partition(":")[0].endswith("hf_access_token") for note in recipe.notes):
        lines.append("the token in hf_access_token is not kept: give +env_vars.HF_TOKEN=..., which nodes are told")
    if recipe.time_limit is not None and job.backend in ("local", "k8s"):
        lines.append(f"run.time_limit {recipe.time_limit} is not used: cluster={job.backend} has no time limit")
    machines = [name.removeprefix("ml.") for name in recipe.instance_types]
    if machines and job.instance is not None and job.instance.name not in machines:
        lines.append(f"instance_type {job.instance.name} is none that HyperPod names for it: {', '.join(machines)}")
    if recipe.missing:
        lines.append(_still_to_give(job))
    if recipe.unread:
        lines.append(_unread(job))
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


def _unread(job: Job) -> str:
    return (
        f"recipes.load: {job.recipe.settings.get('load')} cannot be trained so: finetune.py does not have "
        f"{job.recipe.unread} yet"
    )


def _still_to_give(job: Job) -> str:
    return "still to give: " + ", ".join(f"recipes.{name}=..." for name in job.recipe.missing)


def _refuse_busy(folder: Path) -> None:
    """Raise ConfigError when the folder belongs to a job that has not ended."""
    facts = read_facts(folder)
    if (doing := backend_of(facts["backend"]).busy(folder, facts)) is not None:
        raise ConfigError(f"{folder}: its job is {doing}; cancel it first, or give another run.name")


def _submit(folder: Path) -> int:
    facts = read_facts(folder)
    code, more = backend_of(facts["backend"]).submit(folder, facts)
    # After the submission: its id is what later commands need.
    write_artifacts(folder, {"job.json": _json({**facts, **more})})
    return code


def _json(facts: dict[str, object]) -> str:
    return json.dumps(facts, indent=1) + "\n"


def _act(action: str, words: list[str]) -> int:
    paths = [Path(word).absolute() for word in words if not word.startswith("-")]
    options = [word for word in words if word.startswith("-")]
    # The folder alone says which cluster has the job, so commands take nothing else.
    if len(paths) != 1 or set(options) - ({"--follow", "-f"} if action == "logs" else set()):
        raise ConfigError(f"{action} takes one folder of a job" + (" and --follow" if action == "logs" else ""))
    folder = paths[0]
    facts = read_facts(folder)
    backend = backend_of(facts["backend"])
    if action == "resume":
        # Checked under the lock: two resumes at once would submit the job twice.
        with alone_in(folder):
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
    text, path = read_recipe_text(name)
    return f"# {path}; any of these: recipes.KEY=VALUE\n{text}"


def _complete(word: str) -> list[str]:
    """The words that ``word`` may be completed to."""
    if word.startswith("recipes="):
        known = [f"recipes={name}" for name in list_recipes()]
    elif word.startswith("cluster="):
        known = [f"cluster={name}" for name in BACKENDS]
    else:
        known = [*_KEYS, *_ACTIONS]
    return [name for name in known if name.startswith(word)]
