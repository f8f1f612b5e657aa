"""From the words of a command line to one tree: config.yaml, cluster/NAME.yaml and a recipe, then the overrides.

OmegaConf reads, merges and interpolates. Hydra, which HyperPod's launcher uses on top of it, needs a version of the
ANTLR runtime that excludes others' and takes a second to import; what it would add here is this file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp.config import ConfigError
from smp.config.fields import did_you_mean
from smp.launch.library import collection, find_cluster, find_recipe, load_yaml
from smp.launch.yaml_text import load_text

BACKENDS = ("local", "slurm", "k8s", "sm_jobs")
_ALIASES = {"bcm": "slurm"}  # NeMo's launcher, which HyperPod's is made from, calls it so
_WORD = re.compile(r"(?P<sign>\+{0,2})(?P<key>[A-Za-z_][\w.\-/]*)=(?P<value>.*)", re.DOTALL)
_CHOICES = ("recipes", "cluster", "cluster_type")


@dataclass(frozen=True)
class Composed:
    """What a command line asks for.

    Attributes:
        tree: config.yaml with the keys ``cluster`` and ``recipes``, everything resolved.
        backend: one of ``BACKENDS``.
        source: the recipe's file.
        cluster: the cluster's file.
        base: config.yaml.
    """

    tree: dict[str, Any]
    backend: str
    source: Path
    cluster: Path
    base: Path

    def file_of(self, message: str) -> Path:
        """The file that has, or would have, the key that the message of an error begins with."""
        section = re.split(r"[.:= ]", message, maxsplit=1)[0]
        if section == "cluster":
            return self.cluster
        return self.base if section in self.tree else self.source


def compose(words: list[str]) -> Composed:
    """Compose what ``words`` ask for: ``recipes=NAME``, ``cluster=NAME``, ``key.path=value`` and ``+key.path=value``.

    Raises:
        ConfigError: one line that names the key, and the file where it should have been.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    chosen, overrides = _split(words)
    recipe = chosen.get("recipes")
    if recipe is None:
        raise ConfigError("which recipe is missing: give recipes=NAME (--list names them all)")
    source, cluster = find_recipe(recipe), find_cluster(chosen.get("cluster", "local"))
    base = collection() / "config.yaml"
    files = {**load_yaml(base), "cluster": load_yaml(cluster), "recipes": load_yaml(source)}
    try:
        _register_resolvers()
        tree = OmegaConf.create(files)
        for word in overrides:
            _override(tree, word, base, cluster)
        resolved = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "recipes"
        file = {"recipes": source, "cluster": cluster}.get(re.split(r"[.[]", key, maxsplit=1)[0], base)
        raise ConfigError(f"{file}: {key}: {str(error).splitlines()[0]}") from None
    assert isinstance(resolved, dict)
    values = {str(key): value for key, value in resolved.items()}
    for section in ("cluster", "recipes"):
        if not isinstance(values[section], dict):
            raise ConfigError(f"{section} has become {values[section]!r}; expected keys and values")
    backend = _backend(values["cluster"], cluster.stem, chosen.get("cluster_type"))
    return Composed(values, backend, source=source, cluster=cluster, base=base)


def _split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The choices of files, and the other words."""
    chosen: dict[str, str] = {}
    overrides = []
    for word in words:
        match = _WORD.fullmatch(word)
        if match is None:
            raise ConfigError(
                f"unexpected {word!r}: expected key=value, +key=value or one of --list, --help, --version"
            )
        key = match["key"]
        if key not in _CHOICES:
            overrides.append(word)
        elif key in chosen and chosen[key] != match["value"]:
            raise ConfigError(f"{key}= is given twice: {chosen[key]!r} and {match['value']!r}")
        else:
            chosen[key] = match["value"]
    return chosen, overrides


def _override(tree: Any, word: str, base: Path, cluster: Path) -> None:
    """Apply one word. Keys of a recipe are checked when it is translated, where all are known."""
    match = _WORD.fullmatch(word)
    assert match is not None, "checked before"
    key, section = match["key"], match["key"].partition(".")[0]
    if ".." in key or key.endswith("."):
        raise ConfigError(f"{key}: a part of the name is empty")
    if not match["sign"] and section != "recipes":
        file = cluster if section == "cluster" else base
        _check_known(tree, key, file)
    try:
        value = load_text(match["value"])
    except ValueError as error:
        raise ConfigError(f"{key}={match['value']}: {error}") from None
    for part in reversed(key.split(".")):
        value = {part: value}
    tree.merge_with(value)


def _check_known(tree: Any, key: str, file: Path) -> None:
    from omegaconf import DictConfig

    node, parts = tree, key.split(".")
    for depth, part in enumerate(parts):
        if node is None or (depth and not isinstance(node, DictConfig)):
            return  # an unset or free section: its reader checks it
        if part not in node:
            near = did_you_mean(part, [str(name) for name in node])
            raise ConfigError(f"{key}: there is no such key in {file}{near}; +{key}=... adds one")
        node = node._get_node(part)
        if node is not None and node._is_none():
            return


def _register_resolvers() -> None:
    """The functions that HyperPod's recipes may call in ``${...}``."""
    from omegaconf import OmegaConf

    functions = {
        "multiply": lambda x, y: x * y,
        "divide_ceil": lambda x, y: -(-x // y),
        "divide_floor": lambda x, y: x // y,
    }
    for name, function in functions.items():
        OmegaConf.register_resolver(name, function, replace=True)


def _backend(cluster: dict[str, Any], name: str, asked: str | None) -> str:
    """The back-end, which follows from the cluster's file."""
    follows = cluster.pop("cluster_type", name)
    follows = _ALIASES.get(follows, follows)
    if follows not in BACKENDS:
        raise ConfigError(f"cluster={name}: cluster_type in its file must be one of {', '.join(BACKENDS)}")
    if asked is not None and _ALIASES.get(asked, asked) != follows:
        raise ConfigError(
            f"cluster_type={asked!r} contradicts cluster={name}, which is {follows}; leave cluster_type out"
        )
    return str(follows)
