"""Where recipes and configuration files lie, and what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smp.config import ConfigError
from smp.config.fields import did_you_mean
from smp.launch.yaml_text import load_text

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
PACKAGED = HERE / "recipes_collection"
"""In a wheel. In a checkout the collection is at the top."""


def collection() -> Path:
    """The folder with config.yaml, cluster/ and recipes/ that comes with this package."""
    return PACKAGED if PACKAGED.is_dir() else CHECKOUT / "recipes_collection"


def folders() -> list[Path]:
    """Collections that are searched, the caller's own before ours."""
    own = Path.cwd() / "recipes_collection"
    return [own, collection()] if own.is_dir() and own != collection() else [collection()]


def list_recipes() -> list[str]:
    """Names of all recipes, as ``recipes=`` takes them."""
    return sorted({name for folder in folders() for name in _names(folder / "recipes")})


def get_recipe(name: str) -> dict[str, Any]:
    """What a recipe's file says, interpolations unresolved.

    Raises:
        ConfigError: there is no such recipe.
    """
    return load_yaml(find_recipe(name))


def find_recipe(name: str) -> Path:
    """The file of a recipe: of a collection, or any path that ends in .yaml."""
    if name.endswith((".yaml", ".yml")):
        if Path(name).is_file():
            return Path(name)
        raise ConfigError(f"recipes={_one_line(name)}: there is no such file")
    return _find("recipes", name, list_recipes(), "--list names them all")


def find_cluster(name: str) -> Path:
    """The file of a cluster."""
    known = sorted({name for folder in folders() for name in _names(folder / "cluster")})
    return _find("cluster", name, known, ", ".join(known))


def load_yaml(path: Path) -> dict[str, Any]:
    """A YAML file of keys and values, interpolations unresolved.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        loaded = load_text(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(loaded, dict | None):
        raise ConfigError(f"{path}: expected lines of 'name: value'")
    return {str(key): value for key, value in (loaded or {}).items()}


def _find(kind: str, name: str, known: list[str], otherwise: str) -> Path:
    if name in known:
        return next(path for folder in folders() if (path := folder / kind / f"{name}.yaml").is_file())
    hint = did_you_mean(name, known, f" ({otherwise})")
    raise ConfigError(f"{kind}={_one_line(name)}: there is none of this name{hint}")


def _one_line(name: str) -> str:
    return " ".join(name.split())


def _names(folder: Path) -> list[str]:
    return [path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")]
