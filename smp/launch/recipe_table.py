"""Recipes that differ in a few words, as one table: what a kind of recipes shares, and a line for each.

KIND:
  shared: {settings, run and trainer}
  recipes:
    NAME: {about: first line of the recipe, name: run.name, nodes: trainer.num_nodes, base: run.base_model,
           tp: tensor_model_parallel_size with sequence_parallel, and settings}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from smp.config import ConfigError
from smp.launch.yaml_text import load_text

Row = Callable[[], str]
"""Returns the text of a recipe."""
_SECTIONS = {"name": ("run", "name"), "base": ("run", "base_model"), "nodes": ("trainer", "num_nodes")}


def rows_of(text: str, path: Path) -> dict[str, Row]:
    """The recipes of a table: name -> function that returns its text.

    Raises:
        ConfigError: it is no such table.
    """
    try:
        kinds = load_text(text) or {}
        return {
            str(name): partial(_recipe, kind["shared"], row)
            for kind in kinds.values()
            for name, row in kind["recipes"].items()
        }
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: {error} (a table of recipes)") from None


def _recipe(shared: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """A recipe as the text of a file."""
    sections: dict[str, dict[str, Any]] = {"run": {}, "trainer": {}}
    settings: dict[str, Any] = {}
    for key, value in row.items():
        if key in _SECTIONS:
            section, name = _SECTIONS[key]
            sections[section][name] = value
        # Sequence parallelism goes with every tensor-parallel recipe: it saves memory and sends no more.
        elif key == "tp":
            settings |= {"tensor_model_parallel_size": value, "sequence_parallel": True}
        elif key != "about":
            settings[key] = value
    for key, value in shared.items():
        if key in sections:
            sections[key] |= value
        else:
            # The row wins over what is shared.
            settings.setdefault(key, value)
    lines = [f"# {row['about']}", *(f"{name}: {_flow(section)}" for name, section in sections.items()), ""]
    return "\n".join([*lines, *(f"{name}: {_scalar(value)}" for name, value in settings.items())]) + "\n"


def _flow(section: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name}: {_scalar(value)}" for name, value in section.items()) + "}"


def _scalar(value: Any) -> str:
    if isinstance(value, bool | None):
        return json.dumps(value)
    text = str(value)
    # Quoted where YAML would read something else, or flow brackets would end.
    plain = not isinstance(value, str) or (load_text(text) == value and not set(text) & set(",[]{}#&*!|>'\"%@`"))
    return text if plain else json.dumps(text)
