"""Where recipes and configuration files are, and their content."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from smp.config import ConfigError
from smp.config.command_line.fields import did_you_mean
from smp.launch.overrides import settled, values
from smp.launch.recipe_table import Row, rows_of
from smp.launch.yaml_text import load_scalars

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
PACKAGED = HERE / "recipes_collection"
SUPERVISE = HERE / "backends" / "supervise.py"
"""The collection of a wheel is next to this file, that of a checkout at the top."""
TABLE = "table.yaml"
"""A collection's file of recipes that differ in a few words."""
_OF_THEIR_TRAINER = ("use_default", "update_adapter")


def collection() -> Path:
    """The folder with config.yaml, cluster/ and recipes/ that comes with this package."""
    return PACKAGED if PACKAGED.is_dir() else CHECKOUT / "recipes_collection"


def folders() -> list[Path]:
    """Collections to search: the caller's own before this project's."""
    own = Path.cwd() / "recipes_collection"
    return [own, collection()] if own.is_dir() and own != collection() else [collection()]


def list_recipes() -> list[str]:
    """Names of all recipes, as ``recipes=`` takes them."""
    return sorted({name for folder in folders() for name in [*_names(folder / "recipes"), *table(folder)]})


def get_recipe(name: str) -> dict[str, Any]:
    """The content of a recipe, with references unresolved.

    Raises:
        ConfigError: there is no such recipe.
    """
    return load_recipe(name)[0]


def load_recipe(name: str, is_text: Callable[..., bool] = lambda path: False) -> tuple[dict[str, Any], Path]:
    """The content of a recipe, with references unresolved, and the file that has it: its own, or a collection's table.

    Args:
        name: of a recipe, or a path that ends in .yaml.
        is_text: as of :func:`load_yaml`.

    Raises:
        ConfigError: there is no such recipe, or its file cannot be read.
    """
    text, path = read_recipe_text(name)
    return parse_yaml(text, path, is_text, "recipes"), path


def read_recipe_text(name: str) -> tuple[str, Path]:
    """A recipe as text, and the file it comes from.

    Raises:
        ConfigError: there is no such recipe, or its file cannot be read.
    """
    # A file of the caller's own, before names of collections.
    if name.endswith((".yaml", ".yml")):
        if Path(name).is_file():
            return _read(Path(name)), Path(name)
        raise ConfigError(f"recipes={_one_line(name)}: there is no such file")
    for folder in folders():
        if (path := folder / "recipes" / f"{name}.yaml").is_file():
            return _read(path), path
        if name in (rows := table(folder)):
            return rows[name](), folder / TABLE
    raise _unknown("recipes", name, list_recipes(), "--list names them all")


def find_cluster(name: str) -> Path:
    """The file of a cluster."""
    known = sorted({name for folder in folders() for name in _names(folder / "cluster")})
    if name not in known:
        raise _unknown("cluster", name, known, ", ".join(known))
    return next(path for folder in folders() if (path := folder / "cluster" / f"{name}.yaml").is_file())


def own_config() -> tuple[dict[str, Any], dict[str, str]]:
    """The settings in config.yaml of the caller's own collection, and the files that it chooses.

    It may be HyperPod's: Hydra's part of it says which cluster and recipe are meant.
    """
    path = Path.cwd() / "recipes_collection" / "config.yaml"
    # In a checkout this is the project's own file, which is read anyway.
    if not path.is_file() or path == collection() / "config.yaml":
        return {}, {}
    from smp.launch.key_types import is_text

    own = load_yaml(path, is_text)
    chosen = {
        name: str(item[name]) for item in own.pop("defaults", None) or [] for name in item if isinstance(item, dict)
    }
    if isinstance(asked := own.pop("cluster_type", None), str):
        chosen["cluster_type"] = asked
    # Sections of HyperPod's launcher that have no counterpart here.
    for name in ("hydra", "training_config", "launch_json"):
        own.pop(name, None)
    git = own.get("git")
    if isinstance(git, dict):
        own["git"] = {name: git[name] for name in git if git[name] is not None and name not in _OF_THEIR_TRAINER}
    # null in HyperPod's file means: as this project has it.
    own = {name: value for name, value in own.items() if value is not None}
    return own, {name: value for name, value in chosen.items() if name in ("cluster", "recipes", "cluster_type")}


def load_yaml(path: Path, is_text: Callable[..., bool] = lambda path: False, under: str = "") -> dict[str, Any]:
    """A YAML file of keys and values, with references unresolved.

    Args:
        path: of the file.
        is_text: whether the key of a path keeps its text; see ``smp.launch.key_types``.
        under: the key that the file is at in the configuration.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    return parse_yaml(_read(path), path, is_text, under)


def parse_yaml(text: str, path: Path, is_text: Callable[..., bool], under: str) -> dict[str, Any]:
    """The mapping in a YAML text from ``path``."""
    try:
        loaded = load_scalars(text)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(loaded, dict) and values(loaded) is not None:
        raise ConfigError(f"{path}: expected lines of 'name: value'")
    settings: dict[str, Any] = settled(loaded if isinstance(loaded, dict) else {}, is_text, (under,) if under else ())
    return settings


def table(folder: Path) -> dict[str, Row]:
    """The recipes of a collection's table by name, each as a function that gives its text; {} without a table."""
    path = folder / TABLE
    return rows_of(_read(path), path) if path.is_file() else {}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _unknown(kind: str, name: str, known: list[str], otherwise: str) -> ConfigError:
    hint = did_you_mean(name, known, f" ({otherwise})")
    if "_trn" in name:
        hint = ": it is for Trainium, which smp does not run on; take a GPU recipe"
    return ConfigError(f"{kind}={_one_line(name)}: there is none of this name{hint}")


def _one_line(name: str) -> str:
    return " ".join(name.split())


def _names(folder: Path) -> list[str]:
    return [path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")]
