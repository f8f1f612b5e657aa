"""A job: a recipe, a back-end, and a folder with everything needed to run it, now or again."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from smp.config import ConfigError
from smp.launch.compose import Composed
from smp.launch.elastic import is_elastic, nodes_of, variables_of
from smp.launch.environment import Instance, find_instance, variables
from smp.launch.library import CHECKOUT, HERE, PACKAGED, SUPERVISE
from smp.launch.paths import absolute
from smp.launch.recipe import Recipe
from smp.launch.secrets import is_secret, is_token, without_secrets

MODULES = {"pretrain": "pretrain_gpt", "finetune": "finetune"}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LIKE_A_NUMBER = re.compile(
    r"[-+]?(\.?\d[\d_.]*([eEpP][-+]?[\d_]*)?|0[xXoObB][\da-fA-F_.pP+-]*|\.?(inf|nan))|[yn]", re.I
)
Artifacts = dict[str, str]
"""Name of a file in the job's folder -> its text."""


@dataclass(frozen=True)
class Job:
    """A job to submit.

    Attributes:
        recipe: what runs.
        backend: where; see ``smp.launch.compose.BACKENDS``.
        tree: the composed configuration.
        folder: of artifacts, checkpoints and logs; absolute.
        instance: the kind of machine, where it is known.
        origin: what tells its recipe from others: name, file, what it says, and the objective.
        instead: what is used instead of keys that were taken away, a line for each word.
    """

    recipe: Recipe
    backend: str
    tree: dict[str, Any]
    folder: Path
    instance: Instance | None
    origin: dict[str, str]
    instead: tuple[str, ...] = ()

    @property
    def cluster(self) -> dict[str, Any]:
        """Settings of the back-end."""
        section = self.tree["cluster"]
        assert isinstance(section, dict)
        return section

    @property
    def checkpoints(self) -> str:
        """The checkpoints' folder as a word of a shell in which ``run_dir`` is set."""
        save = self.recipe.settings.get("save")
        return '"$run_dir/checkpoints"' if save is None else shlex.quote(save)

    @property
    def defaults(self) -> dict[str, str]:
        """Environment variables that are set unless ``env_vars`` or the node sets them."""
        found = variables(self.instance, self.recipe.num_nodes, self.recipe.devices)
        found |= variables_of(self.recipe)
        return {name: value for name, value in found.items() if name not in self._given}

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of ``env_vars`` without secrets."""
        return {name: value for name, value in self._given.items() if value is not None and name not in self._private}

    @property
    def secrets(self) -> dict[str, str]:
        """Secret variables of ``env_vars``, and secret arguments of a script as variables."""
        found = {name: value for name, value in self._given.items() if value is not None and name in self._private}
        return found | {name: word for _, word, name in _secret_words(self.recipe.script)}

    @property
    def _private(self) -> set[str]:
        """Names of secret variables, by their name or by the form of their value."""
        return {name for name, value in self._given.items() if is_secret(name) or is_token(value or "")}

    @property
    def _given(self) -> dict[str, str | None]:
        given = self.tree.get("env_vars") or {}
        return {str(name): None if value is None else _shown(value) for name, value in given.items()}


def make_job(composed: Composed, recipe: Recipe) -> Job:
    """The job of a composed command line.

    Raises:
        ConfigError: a key that does not fit; one line that names it.
    """
    tree = composed.tree
    results = tree.get("base_results_dir")
    if not isinstance(results, str) or not results:
        raise ConfigError("base_results_dir is missing: give the folder that jobs' folders are made in")
    # A URL is no place for a job's scripts and logs.
    if "://" in results:
        raise ConfigError(f"base_results_dir: {results} is no folder; recipes.save=URL is where checkpoints go")
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
    flag(tree, "dry_run")
    tries = tree.get("max_tries")
    if isinstance(tries, bool) or not isinstance(tries, int) or tries < 1:
        raise ConfigError(f"max_tries: {tries!r} is not a number above 0")
    instance = find_instance(tree.get("instance_type"), tree.get("instances") or {})
    # 0 devices: the instance has CPUs only.
    if instance is not None and 0 < instance.devices < recipe.devices:
        raise ConfigError(
            f"trainer.devices: {recipe.devices} on a machine with {instance.devices} (instance_type {instance.name})"
        )
    # Absolute: jobs run in other folders.
    folder = Path(results).expanduser().absolute() / recipe.name
    own = "sft" if recipe.task == "finetune" else recipe.task
    origin = {
        "recipe": composed.chosen,
        "file": str(composed.source.absolute()),
        "digest": composed.digest,
        "objective": recipe.settings.get("objective") or own,
    }
    job = Job(recipe, composed.backend, tree, folder, instance, origin)
    git = tree.get("git") or {}
    if job.backend in ("k8s", "sm_jobs") or _clone(git) is not None or code_of(job, git) == os.getcwd():
        return job  # its paths are those of a node's file system, or of the code's folder
    return replace(job, recipe=replace(recipe, settings=absolute(recipe.settings, Path.cwd())))


def flag(section: dict[str, Any], key: str, where: str = "") -> bool:
    """The value of a key that is true or false.

    Raises:
        ConfigError: it is something else, such as a text.
    """
    value = section.get(key)
    if not isinstance(value, bool | None):
        raise ConfigError(f"{where}{key}: expected true or false, got {value!r}")
    return bool(value)


def common_artifacts(job: Job, rendezvous: str, *, files: str | None = None, runner: str | None = None) -> Artifacts:
    """Files that every back-end needs: settings, the node's script, and the script that restarts it.

    Args:
        job: the job.
        rendezvous: torchrun's words for several nodes.
        files: where these files are seen by a node; by default in the job's folder.
        runner: what takes torchrun's place.
    """
    recipe = job.recipe
    artifacts = {
        # Recorded without secrets: the folder may be shared.
        "recipe.yaml": to_yaml(without_secrets(job.tree)),
        "train.sh": _train_script(job, rendezvous, files or str(job.folder), runner),
        "supervise.py": SUPERVISE.read_text(encoding="utf-8"),
    }
    # Other back-ends have places of their own for secrets: a Secret, or the request.
    if job.secrets and job.backend in ("local", "slurm"):
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in job.secrets.items()]
        artifacts["secrets.sh"] = "".join(lines)
    if recipe.task != "custom":
        artifacts["settings.yaml"] = to_yaml(recipe.settings)
    if recipe.notes:
        artifacts["notes.txt"] = "Keys of the recipe that change nothing here.\n\n" + "\n".join(recipe.notes) + "\n"
    return artifacts


def _train_script(job: Job, rendezvous: str, files: str, runner: str | None) -> str:
    recipe = job.recipe
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
        secrets=job.secrets and job.backend in ("local", "slurm"),
        clone=clone,
        code=code,
        module=recipe.task != "custom" or recipe.script[0] == "-m",
        python=python_of(job),
        runner=runner or f"{shlex.quote(python_of(job))} -m torch.distributed.run",
        status='"$run_dir/status.json"',
        rendezvous=_meeting(recipe, rendezvous),
        devices=recipe.devices,
        words=_script_words(job),
    )


def _meeting(recipe: Recipe, rendezvous: str) -> str:
    """torchrun's arguments for its nodes."""
    alone = recipe.num_nodes == 1 and not is_elastic(recipe)
    return "--standalone" if alone else f"{nodes_of(recipe)} {rendezvous}"


def _script_words(job: Job) -> list[str]:
    """What torchrun runs, as words of a shell."""
    recipe = job.recipe
    if recipe.task == "custom":
        # Secret words are variables in the script, whose file others can read.
        names = {index: name for index, _, name in _secret_words(recipe.script)}
        return [f'"${names[i]}"' if i in names else shlex.quote(word) for i, word in enumerate(recipe.script)]
    given = recipe.settings
    words = ["-m", MODULES[recipe.task], "--config", '"$files/settings.yaml"']
    if given.get("save") is None:
        words += ["--save", job.checkpoints]
    if recipe.task == "finetune":
        # The same command works for the first start and for restarts.
        words += ["--resume"]
    elif given.get("load") is None:
        words += ["--load", "auto"]
    if "log_dir" not in given:
        words += ["--log-dir", '"$run_dir"']
    words += ["--status-file", '"$run_dir/status.json"']
    if "progress_bar" not in given:
        words += ["--no-progress-bar"]
    if job.cluster.get("array") is not None and job.backend == "slurm":
        # Tasks of an array differ in their seed only.
        words += ["--seed", f"$(({given.get('seed', 1234)} + SLURM_ARRAY_TASK_ID))"]
    return words


def _secret_words(words: tuple[str, ...]) -> list[tuple[int, str, str]]:
    """Secret words of a script: (index, word, variable that holds it)."""
    found = []
    for index, (before, word) in enumerate(zip(("", *words), words, strict=False)):
        flag, equals, _ = word.partition("=")
        of_flag = before if before.startswith("-") else flag if equals and flag.startswith("-") else ""
        if is_secret(of_flag) or is_token(word):
            found.append((index, word, f"SMP_ARGUMENT_{index}"))
    return found


def code_of(job: Job, git: dict[str, Any]) -> str | None:
    """The folder in which a node runs; None in an image, where the package is installed."""
    local = git.get("repo_url_or_path")
    if local is not None:
        return str(Path(local).absolute())
    if job.backend in ("k8s", "sm_jobs"):
        return None
    if job.recipe.task == "custom":
        return os.getcwd()
    return None if PACKAGED.is_dir() else str(CHECKOUT)


def _clone(git: dict[str, Any]) -> dict[str, Any] | None:
    """What to clone; None: nothing."""
    url = git.get("repo_url_or_path")
    if unknown := [key for key in git if key not in ("repo_url_or_path", "branch", "commit")]:
        raise ConfigError(f"git.{unknown[0]}: there is no such key")
    if not isinstance(url, str | None):
        raise ConfigError(f"git.repo_url_or_path: {url!r} is neither a folder nor a URL")
    # git@HOST:PATH is ssh without a scheme. All else is a folder that nodes see, and is used as it is.
    if url is None or not ("://" in str(url) or str(url).startswith("git@")):
        if git.get("branch") or git.get("commit"):
            raise ConfigError("git.branch and git.commit go with a URL in git.repo_url_or_path")
        return None
    branch = f"--branch {shlex.quote(str(git['branch']))} " if git.get("branch") else ""
    return {"url": str(url), "branch": branch, "commit": git.get("commit")}


def python_of(job: Job) -> str:
    """The Python interpreter of the nodes."""
    return str(job.tree.get("python") or (sys.executable if job.backend == "local" else "python3"))


def to_yaml(tree: Any) -> str:
    """YAML that reads back equal also in YAML 1.2 readers and kubectl: 1e3, 0o17 and y are text to PyYAML only."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """With a rule of its own."""

    # Quoted where another reader of YAML would see a number or a truth value.
    def text(dumper: Any, value: str) -> Any:
        style = "'" if _LIKE_A_NUMBER.fullmatch(value) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return str(yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=False, width=1000))


def render(template: str, **values: Any) -> str:
    """A file of templates/ filled in; in it ``| sh`` quotes for a shell."""
    return str(_templates().get_template(template).render(**values))


@cache
def _templates() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        # StrictUndefined: a misspelled variable would be an empty text in a script.
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        keep_trailing_newline=False,
    )
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    return environment


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
