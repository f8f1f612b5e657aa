"""From a command line to one tree: config.yaml, cluster/NAME.yaml and a recipe, then the overrides.

The grammar of a word is in ``smp.launch.overrides``, references between keys are in ``smp.launch.references``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from smp.config import ConfigError
from smp.config.command_line.fields import did_you_mean
from smp.launch.hyperpod import KEYS, OWN_MODEL, flatten, form_of, has_its_sections
from smp.launch.key_types import is_text, needs_value, value_of
from smp.launch.library import collection, find_cluster, load_recipe, load_yaml, own_config
from smp.launch.overrides import Override, read_text, read_word
from smp.launch.references import UnresolvedError, resolved

BACKENDS = ("local", "slurm", "k8s", "sm_jobs")
_ALIASES = {"bcm": "slurm"}  # the name in NeMo's launcher, from which HyperPod's was made
_CHOICES = ("recipes", "cluster", "cluster_type")
_OF_HYPERPODS_COMMAND = {"cluster.cluster_type": "cluster_type", "cluster.instance_type": "instance_type"}
"""Keys that the command hyperpod passes, and their names in a launcher's tree."""
_INSTEAD = {
    "hydra": "Hydra's own settings are not taken; base_results_dir=... says where files are written",
    "git.token": "it would be written into the job's files; give the nodes a credential helper of git's",
    "git.entry_script": "a recipe's script is this project's; +recipes.training_cfg.entry_script=... runs another one",
    "git.entry_module": "a recipe's module is this project's; +recipes.training_cfg.entry_module=... runs another one",
    "launch_json": "there is no such file here; dry_run=true writes all files of a job and submits none",
}
_WITHOUT_EFFECT = {
    "git.use_default": "the code is this project's unless git.repo_url_or_path says another one",
    "git.update_adapter": "nothing is installed when a job starts",
    "debug": "dry_run=true writes all files and submits none",
    "hydra.job.chdir": "a job's files are in base_results_dir, wherever it runs",
}
"""Keys of HyperPod's config.yaml that have no effect here, and why."""
_MODULES_OF_HYPERPOD = ("amzn_awsllm_fine_tuning.",)
"""Prefixes of ``git.entry_module`` in HyperPod's own scripts: trainers whose recipes are translated."""
_CLUSTER_WITHOUT_EFFECT = {
    ("cpu_instance_type",): "it is for a node that submits to Ray, which nothing here needs",
    ("sm_jobs_config", "pysdk_launch_executor"): "the request goes to SageMaker's API, through no SDK",
}
"""Keys of HyperPod's cluster/NAME.yaml that have no effect here, and why."""


@dataclass(frozen=True)
class Composed:
    """What a command line asks for.

    Attributes:
        tree: config.yaml with the keys ``cluster`` and ``recipes``, everything resolved.
        backend: one of ``BACKENDS``.
        source: the recipe's file.
        cluster: the cluster's file.
        base: config.yaml.
        chosen: the recipe's name, without its folders.
        digest: of what the recipe says, before overrides.
        notes: keys that change nothing here, and why.
        removed: words that take away what the recipe says.
    """

    tree: dict[str, Any]
    backend: str
    source: Path
    cluster: Path
    base: Path
    chosen: str
    digest: str
    notes: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def file_of(self, message: str) -> Path:
        """The file that has, or should have, the key with which an error's message begins."""
        section = re.split(r"[.:= ]", message, maxsplit=1)[0]
        if section == "cluster":
            return self.cluster
        return self.base if section in self.tree else self.source


def compose(words: list[str]) -> Composed:
    """Compose what ``words`` ask for: ``recipes=NAME``, ``cluster=NAME`` and overrides of keys.

    Raises:
        ConfigError: one line that names the key, and the file where it should have been.
    """
    own, chosen_there = own_config()
    given, overrides = _split(words)
    chosen = chosen_there | given
    if (recipe := chosen.get("recipes")) is None:
        raise ConfigError("which recipe is missing: give recipes=NAME (--list names them all)")
    recipes, source = load_recipe(recipe, is_text)
    # Before overrides: a job may be started again with other ones, but not with another recipe.
    digest = hashlib.sha256(json.dumps(recipes, default=str).encode()).hexdigest()[:16]
    # Hydra's two names of the choice; words before the file's own.
    asked = next(
        filter(None, (some.get(key) for some in (given, chosen_there) for key in ("cluster", "cluster_type"))), None
    )
    cluster = find_cluster(_ALIASES.get(asked, asked) if asked else _default_cluster(recipes, overrides))
    base = collection() / "config.yaml"
    notes, removed = list[str](), list[str]()
    settings, backend = _cluster(cluster, given.get("cluster_type"))
    # Order: a user's own configuration wins over config.yaml, and words over both.
    tree: dict[str, Any] = {**_merged(load_yaml(base, is_text), own), "cluster": settings, "recipes": recipes}
    # From a config.yaml of HyperPod's; as words of the command line they get a note below.
    for name in [name for name in tree if name in _WITHOUT_EFFECT]:
        del tree[name]
    for override in overrides:
        said = _at(tree, override.path)
        _apply(tree, override, cluster if override.path[0] == "cluster" else base, notes)
        if override.path[0] == "recipes" and said not in (None, "") and _at(tree, override.path) in (None, ""):
            removed.append(override.word)
    _read_hyperpods_cluster(tree, notes)
    files = {"recipes": source, "cluster": cluster}
    # At the end: an override may be what a reference points to.
    values = _resolved(tree, files, base)
    for section in ("cluster", "recipes"):
        if not isinstance(values[section], dict):
            raise ConfigError(f"{section} has become {values[section]!r}; expected keys and values")
    name = re.sub(r"\.ya?ml$", "", Path(recipe).name)
    return Composed(values, backend, source, cluster, base, name, digest, tuple(notes), tuple(removed))


def _split(words: list[str]) -> tuple[dict[str, str], list[Override]]:
    """The choices of files by key, and the overrides."""
    chosen: dict[str, str] = {}
    overrides = []
    for word in words:
        if word in ("-m", "--multirun"):
            raise ConfigError(f"{word}: there are no sweeps; start a job for each value")
        if word.startswith(("--config-path", "--config-name", "--config-dir")):
            raise ConfigError(f"{word.partition('=')[0]}: give the file of a recipe, recipes=FILE.yaml")
        override = read_word(word)
        if (moved := _OF_HYPERPODS_COMMAND.get(override.key)) is not None:
            override = replace(override, path=(moved,))
        key = override.key
        if key not in _CHOICES or override.operator == "~":
            overrides.append(override)
            continue
        # Hydra's grammar: a comma outside of quotes is a sweep.
        value = read_text(override.text or "")
        if "," in value:
            raise ConfigError(f"{key}={value}: that is a sweep; start a job for each")
        if key in chosen and chosen[key] != value:
            raise ConfigError(f"{key}= is given twice: {chosen[key]!r} and {value!r}")
        chosen[key] = value
    return chosen, overrides


def _default_cluster(recipes: Mapping[str, Any], overrides: list[Override]) -> str:
    """The default cluster: this machine; or Slurm, HyperPod's default, for several nodes or a container."""
    found: dict[str, Any] = {}
    # Recipes of this project and HyperPod's, and its form for a script of one's own.
    for section, key in (("trainer", "num_nodes"), ("training_cfg.run", "nodes")):
        node: Any = recipes
        for part in section.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        if isinstance(node, Mapping) and key in node:
            found["nodes"] = str(node[key])
        for override in overrides:
            if override.key == f"recipes.{section}.{key}":
                found["nodes"] = override.text
            elif override.key == "container":
                found["container"] = override.text
    return "local" if found.get("nodes", "1") in ("1", "null", "", None) and not found.get("container") else "slurm"


_NEVER_NULL = ("namespace", "pullPolicy", "shm_size")
"""Keys of clusters that always have a value: where a file leaves them null, the default is used."""


def _cluster(path: Path, asked: str | None) -> tuple[dict[str, Any], str]:
    """The settings of a cluster, completed by its back-end's own file, and the name of the back-end."""
    given = load_yaml(path, is_text, "cluster")
    backend = _backend(given, path.stem, asked)
    own = collection() / "cluster" / f"{backend}.yaml"
    defaults = {} if path == own else load_yaml(own, is_text, "cluster")
    said = {key: value for key, value in given.items() if value is not None or key not in _NEVER_NULL}
    return _merged(defaults, said), backend


def _read_hyperpods_cluster(tree: dict[str, Any], notes: list[str]) -> None:
    """Translate keys of HyperPod's cluster/NAME.yaml in place."""
    cluster = tree.get("cluster")
    if not isinstance(cluster, dict):
        return
    # HyperPod's own switch between the two kinds of jobs of an operator; a kind that was said has to agree.
    wanted = cluster.pop("use_hyperpod_pytorch_job", None)
    if not isinstance(wanted, bool | None):
        raise ConfigError(f"cluster.use_hyperpod_pytorch_job: expected true or false, got {wanted!r}")
    kind, hyperpods, kubeflows = cluster.get("kind"), "HyperPodPyTorchJob", "PyTorchJob"
    if wanted is not None and kind not in (None, hyperpods if wanted else kubeflows):
        raise ConfigError(f"cluster.use_hyperpod_pytorch_job: {str(wanted).lower()} contradicts cluster.kind={kind}")
    if wanted is not None:
        cluster["kind"] = hyperpods if wanted else kubeflows
    for (*path, name), why in _CLUSTER_WITHOUT_EFFECT.items():
        section: Any = cluster
        for part in path:
            section = section.get(part)
            section = section if isinstance(section, dict) else {}
        if section.pop(name, None) is not None:
            notes.append(f"{'.'.join(('cluster', *path, name))}: {why}")
    section = cluster.get("sm_jobs_config")
    changes = section.pop("recipe_overrides", None) if isinstance(section, dict) else None
    if not isinstance(changes, dict | None):
        raise ConfigError(f"cluster.sm_jobs_config.recipe_overrides: expected keys and values, not {changes!r}")
    # Overrides of a recipe in a cluster's file are those of HyperPod's SDK: they come after all
    # words.
    for key, value in flatten(changes or {}).items():
        _set(tree, _translated_path(tree, ("recipes", *key.split(".")), value), value)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of both, merged section by section; ``above`` wins."""
    merged = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], Mapping) and isinstance(above[key], Mapping):
            merged[key] = _merged(below[key], above[key])
    return merged


def _apply(tree: dict[str, Any], override: Override, file: Path, notes: list[str]) -> None:
    """Apply one override. Keys of a recipe are checked when it is translated, when all are known."""
    key, path = override.key, override.path
    if (why := _without_effect(override)) is not None:
        notes.append(f"{key}: {why}")
        return
    for name in (key, path[0]):
        if name in _INSTEAD:
            if isinstance(tree["recipes"], Mapping):
                form_of(tree["recipes"])  # raises first if the recipe as a whole cannot be used
            raise ConfigError(f"{key}: {_INSTEAD[name]}")
    if path[0] == "run" and "run" not in tree:  # HyperPod's scripts for newer recipes omit "recipes."
        path = ("recipes", *path)
    try:
        if override.operator == "~":
            _remove(tree, override)
            return
        value = value_of(override)
        if value == "" and needs_value(path):
            raise ValueError("a value is missing; leave the word out, or give null to take the key away")
        if path[0] != "recipes":
            # "+" adds a key; without it a misspelled key would be added in silence.
            _check_new(tree, path) if override.operator else _check_known(tree, path, file)
        _set(tree, _translated_path(tree, path, value), value)
    except ValueError as error:
        raise ConfigError(f"{override.word}: {error}") from None


def _without_effect(override: Override) -> str | None:
    """Why an override has no effect here; None: it has one."""
    if override.key == "git.entry_module" and (override.text or "").startswith(_MODULES_OF_HYPERPOD):
        return "the recipe is this project's to train"
    return _WITHOUT_EFFECT.get(override.key)


def _translated_path(tree: Mapping[str, Any], path: tuple[str, ...], value: Any) -> tuple[str, ...]:
    """The path under which a key of the other vocabulary is kept: HyperPod's section ``model`` and this project's
    setting of that name must not replace each other."""
    recipes = tree["recipes"]
    if path[0] != "recipes" or len(path) < 2 or not isinstance(recipes, Mapping):
        return path
    if has_its_sections(recipes):
        return ("recipes", OWN_MODEL) if path[1:] == ("model",) and isinstance(value, str) else path
    key = ".".join(path[1:])
    if (path[1] in ("model", "exp_manager") and len(path) > 2) or key in KEYS:
        return ("recipes", key)
    return path


def _set(tree: Any, path: tuple[str, ...], value: Any) -> None:
    """Set the value at a path; keys and values are merged into those that are there."""
    node, name = _descend(tree, path)
    if isinstance(node, list):
        index = _index(node, path, len(node))
        # The index after the last one appends.
        if index == len(node):
            node.append(None)
        both = isinstance(value, dict) and isinstance(node[index], dict)
        node[index] = _merged(node[index], value) if both else value
    elif isinstance(value, dict) and isinstance(node.get(name), dict):
        node[name] = _merged(node[name], value)
    else:
        node[name] = value


def _descend(tree: Any, path: tuple[str, ...]) -> tuple[Any, str]:
    """The section or list that holds the last name of a path; missing ones are made."""
    node = tree
    for depth, (name, following) in enumerate(pairwise(path), 1):
        if isinstance(node, list):
            index: Any = _index(node, path[:depth], len(node))
            if index == len(node):
                node.append(None)
        else:
            index = name
            node.setdefault(name, None)
        # A list where the next name is a number, as in Hydra's dotted paths.
        if node[index] is None:
            node[index] = [] if following.isdigit() else {}
        if not isinstance(node[index], dict | list):
            raise ValueError(f"{'.'.join(path[:depth])} is {node[index]!r} and has no keys")
        node = node[index]
    return node, path[-1]


def _index(node: list[Any], path: tuple[str, ...], last: int) -> int:
    if not path[-1].isdigit() or int(path[-1]) > last:
        raise ValueError(
            f"{'.'.join(path[:-1])} is a list of {len(node)}; {path[-1]} is no number of an item of it, from 0"
        )
    return int(path[-1])


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    """The value at ``path``; None: there is none."""
    for name in path:
        tree = _item(tree, name)
    return tree


def _remove(tree: Any, override: Override) -> None:
    node: Any = _at(tree, override.path[:-1])
    held, name = _item(node, override.path[-1]), override.path[-1]
    if node is None or held is None:
        raise ValueError("there is no such key to remove")
    # Hydra: ~key=value removes only if the value is the same.
    if override.text is not None and value_of(override) != held:
        raise ValueError(f"it is {held!r} and is not removed")
    del node[int(name) if isinstance(node, list) else name]


def _item(node: Any, name: str) -> Any:
    if isinstance(node, list):
        return node[int(name)] if name.isdigit() and int(name) < len(node) else None
    return node.get(name) if isinstance(node, Mapping) else None


def _check_known(tree: Any, path: tuple[str, ...], file: Path) -> None:
    node, key = tree, ".".join(path)
    for depth, part in enumerate(path):
        if node is None or (depth and not isinstance(node, dict)):
            return  # an unset or free section: its reader checks it
        if part not in node:
            near = did_you_mean(part, [str(name) for name in node])
            if not depth and part in _OF_RECIPES:
                near = f": did you mean recipes.{key}?"
            raise ConfigError(f"{key}: there is no such key in {file}{near or f'; +{key}=... adds one'}")
        node = node[part]


_OF_RECIPES = ("trainer", "model", "exp_manager", "training_config")


def _check_new(tree: Mapping[str, Any], path: tuple[str, ...]) -> None:
    """Raise ValueError for a section of its own that nothing would read: ``+recipe.lr`` next to ``recipes``."""
    known = [*tree, *_OF_RECIPES]
    if path[0] in tree or path[1:] == ("command",):  # a stage's
        return
    if near := f": did you mean recipes.{'.'.join(path)}?" if path[0] in _OF_RECIPES else did_you_mean(path[0], known):
        raise ValueError(f"there is no such key{near}")


def _resolved(tree: dict[str, Any], files: Mapping[str, Path], base: Path) -> dict[str, Any]:
    """The tree with references replaced by their values."""
    try:
        return resolved(tree)
    except UnresolvedError as error:
        if isinstance(tree["recipes"], Mapping):
            form_of(
                tree["recipes"]
            )  # raises first for a trainer without counterpart here, which may have its own references
        file = files.get(re.split(r"[.[]", error.key, maxsplit=1)[0], base)
        raise ConfigError(f"{file}: {error.key}: {error}") from None


def _backend(cluster: dict[str, Any], name: str, asked: str | None) -> str:
    """The back-end that a cluster's file is for."""
    follows = cluster.pop("cluster_type", name)
    # Aliases in files, too.
    follows = _ALIASES.get(follows, follows)
    if follows not in BACKENDS:
        raise ConfigError(f"cluster={name}: cluster_type in its file must be one of {', '.join(BACKENDS)}")
    if asked is not None and _ALIASES.get(asked, asked) != follows:
        raise ConfigError(
            f"cluster_type={asked!r} contradicts cluster={name}, which is {follows}; leave cluster_type out"
        )
    return str(follows)
