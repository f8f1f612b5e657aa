"""Kinds of keys of a recipe of HyperPod's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from smp.config import ConfigError

Get = Callable[[str], Any]
Convert = Callable[[Any, Get], Mapping[str, Any] | str]
"""(value, getter of other keys) -> settings, or why it changes nothing here."""


@dataclass(frozen=True)
class Key:
    """What a key of a recipe becomes.

    Attributes:
        text: for the table in the docs.
        convert: does it.
        shape: describes the model; fine-tuning takes that from the model's folder.
    """

    text: str
    convert: Convert
    shape: bool = False


def to(name: str, shape: bool = False, scale: Callable[[Any], Any] = lambda value: value) -> Key:
    """A key that is the setting ``name``."""
    return Key(f"`{name}`", lambda value, get: {name: scale(value)}, shape=shape)


def only(values: tuple[Any, ...], why: str) -> Key:
    """A key of which no other values can be had."""

    def convert(given: Any, get: Get) -> Mapping[str, Any]:
        if given not in values:
            raise ConfigError(f"{given} cannot be had: {why}")
        return {}

    return Key(f"refused unless {' or '.join(map(_shown, values))}: {why}", convert)


def nothing(why: str) -> Key:
    """A key that changes nothing here."""
    return Key(f"changes nothing: {why}", lambda value, get: why)


def _shown(value: Any) -> str:
    return f"`{str(value).lower() if value is None or isinstance(value, bool) else value}`"
