"""A job: a recipe, a back-end and a folder that holds everything needed to run it, now or again."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from smp.config import ConfigError
from smp.config.credentials import without_credentials
from smp.launch.compose import Composed
from smp.launch.environment import Instance, find_instance, variables
from smp.launch.library import CHECKOUT, HERE, PACKAGED
from smp.launch.recipe import Recipe

MODULES = {"pretrain": "pretrain_gpt", "finetune": "finetune"}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRETS = ("hf_access_token", "token")
Artifacts = dict[str, str]
"""Name of a file in the job's folder -> its text."""


@dataclass(frozen=True)
class Job:
    """What is submitted.

    Attributes:
        recipe: what runs.
        backend: where; see ``smp.launch.compose.BACKENDS``.
        tree: the composed configuration.
        folder: of artifacts, checkpoints and logs; absolute.
        instance: the kind of machine, where it is known.
    """

    recipe: Recipe
    backend: str
    tree: dict[str, Any]
    folder: Path
    instance: Instance | None

    @property
    def cluster(self) -> dict[str, Any]:
        """Settings of the back-end."""
        section = self.tree["cluster"]
        assert isinstance(section, dict)
        return section

    @property
    def checkpoints(self) -> str:
        """Where they are, as a word of a shell in which ``run_dir`` is known."""
        save = self.recipe.settings.get("save")
        return '"$run_dir/checkpoints"' if save is None else shlex.quote(save)

    @property
    def defaults(self) -> dict[str, str]:
        """Variables that are set where neither ``env_vars`` nor a node's own environment sets them."""
        found = variables(self.instance, self.recipe.num_nodes, self.recipe.devices)
        return {name: value for name, value in found.items() if name not in self._given}

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every process that ``env_vars`` sets."""
        return {name: value for name, value in self._given.items() if value is not None}

    @property
    def _given(self) -> dict[str, str | None]:
        given = self.tree.get("env_vars") or {}
        return {str(name): None if value is None else _shown(value) for name, value in given.items()}


def make_job(composed: Composed, recipe: Recipe) -> Job:
    """A job of a composed command line.

    Raises:
        ConfigError: a key that does not fit; one line that names it.
    """
    tree = composed.tree
    results = tree.get("base_results_dir")
    if not isinstance(results, str) or not results:
        raise ConfigError("base_results_dir is missing: give the folder that jobs' folders are made in")
    if not results.isprintable():
        raise ConfigError(f"base_results_dir: {results!r} has line breaks or other control characters")
    for key in ("setup", "stages"):
        if not isinstance(tree.get(key), list | None):
            raise ConfigError(f"{key}: expected a list, not {tree[key]!r}")
    for key in ("env_vars", "git", "instances"):
        if not isinstance(tree.get(key), dict | None):
            raise ConfigError(f"{key}: expected keys and values, not {tree[key]!r}")
    for name in tree.get("env_vars") or {}:
        if not _VARIABLE.fullmatch(str(name)):
            raise ConfigError(f"env_vars: {name!r} cannot be the name of a variable")
    tries = tree.get("max_tries")
    if isinstance(tries, bool) or not isinstance(tries, int) or tries < 1:
        raise ConfigError(f"max_tries: {tries!r} is not a number above 0")
    instance = find_instance(tree.get("instance_type"), tree.get("instances") or {})
    if instance is not None and recipe.devices > instance.devices:
        raise ConfigError(
            f"trainer.devices: {recipe.devices} on a machine with {instance.devices} (instance_type {instance.name})"
        )
    folder = Path(results).expanduser().absolute() / recipe.name
    return Job(recipe=recipe, backend=composed.backend, tree=tree, folder=folder, instance=instance)


def common_artifacts(job: Job, rendezvous: str, *, files: str | None = None, runner: str | None = None) -> Artifacts:
    """What every back-end needs: the settings, what a node runs, and what runs it again.

    Args:
        job: the job.
        rendezvous: torchrun's words for several nodes.
        files: where these files are seen by a node; by default in the job's folder.
        runner: what takes torchrun's place.
    """
    recipe = job.recipe
    artifacts = {
        "recipe.yaml": to_yaml(_without_secrets(job.tree)),
        "train.sh": _train_script(job, rendezvous, files or str(job.folder), runner),
        "supervise.py": (HERE / "supervise.py").read_text(encoding="utf-8"),
    }
    if recipe.task != "custom":
        artifacts["settings.yaml"] = to_yaml(recipe.settings)
    if recipe.notes:
        artifacts["notes.txt"] = "Keys of the recipe that change nothing here.\n\n" + "\n".join(recipe.notes) + "\n"
    return artifacts


def _train_script(job: Job, rendezvous: str, files: str, runner: str | None) -> str:
    recipe = job.recipe
    start = recipe.settings.get("load") if recipe.task == "pretrain" else None
    git = job.tree.get("git") or {}
    clone = _clone(git)
    code = code_of(job, git) if clone is None else None
    return render(
        "train.sh.j2",
        name=recipe.name,
        files=files,
        run_dir=str(job.folder),
        setup=job.tree.get("setup") or [],
        defaults=job.defaults.items(),
        env=job.environment.items(),
        clone=clone,
        code=code,
        module=recipe.task != "custom" or recipe.script[0] == "-m",
        python=python_of(job),
        runner=runner or f"{shlex.quote(python_of(job))} -m torch.distributed.run",
        checkpoints=job.checkpoints,
        status='"$run_dir/status.json"',
        rendezvous="--standalone" if recipe.num_nodes == 1 else f"--nnodes {recipe.num_nodes} {rendezvous}",
        devices=recipe.devices,
        resumes_by_itself=start not in (None, "auto"),
        words=_script_words(job),
    )


def _script_words(job: Job) -> list[str]:
    """What torchrun runs, as words of a shell."""
    recipe = job.recipe
    if recipe.task == "custom":
        return [shlex.quote(word) for word in recipe.script]
    given = recipe.settings
    words = ["-m", MODULES[recipe.task], "--config", '"$files/settings.yaml"']
    if given.get("save") is None:
        words += ["--save", job.checkpoints]
    if recipe.task == "finetune":
        words += ["--resume"]
    elif given.get("load") is None:
        words += ["--load", "auto"]
    if "log_dir" not in given:
        words += ["--log-dir", '"$run_dir"']
    words += ["--status-file", '"$run_dir/status.json"']
    if "progress_bar" not in given:
        words += ["--no-progress-bar"]
    if job.cluster.get("array") is not None and job.backend == "slurm":
        words += ["--seed", f"$(({given.get('seed', 1234)} + SLURM_ARRAY_TASK_ID))"]
    return words


def code_of(job: Job, git: dict[str, Any]) -> str | None:
    """The folder that a node runs in; None in an image, where the package is installed."""
    local = git.get("repo_url_or_path")
    if local is not None:
        return str(Path(local).absolute())
    if job.backend in ("k8s", "sm_jobs"):
        return None
    if job.recipe.task == "custom":
        return os.getcwd()
    return None if PACKAGED.is_dir() else str(CHECKOUT)


def _clone(git: dict[str, Any]) -> dict[str, Any] | None:
    """What to clone."""
    url = git.get("repo_url_or_path")
    if unknown := [key for key in git if key not in ("repo_url_or_path", "branch", "commit")]:
        raise ConfigError(f"git.{unknown[0]}: there is no such key")
    if not isinstance(url, str | None):
        raise ConfigError(f"git.repo_url_or_path: {url!r} is neither a folder nor a URL")
    if url is None or not ("://" in str(url) or str(url).startswith("git@")):
        if git.get("branch") or git.get("commit"):
            raise ConfigError("git.branch and git.commit go with a URL in git.repo_url_or_path")
        return None
    branch = f"--branch {shlex.quote(str(git['branch']))} " if git.get("branch") else ""
    return {"url": str(url), "branch": branch, "commit": git.get("commit")}


def python_of(job: Job) -> str:
    """The interpreter of the nodes."""
    return str(job.tree.get("python") or (sys.executable if job.backend == "local" else "python3"))


def to_yaml(tree: Any) -> str:
    """YAML that reads back equal."""
    import yaml

    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=False, width=1000))


def render(template: str, **values: Any) -> str:
    """A file of templates/ filled in. In it, ``| sh`` quotes for a shell."""
    return str(_templates().get_template(template).render(**values))


@cache
def _templates() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        keep_trailing_newline=False,
    )
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    return environment


def _without_secrets(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {
            key: "(removed)" if key in SECRETS and value is not None else _without_secrets(value)
            for key, value in tree.items()
        }
    return without_credentials(tree)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
