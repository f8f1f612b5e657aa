"""Kinds of keys of HyperPod's recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from smp.config import ConfigError
from smp.config.command_line.fields import as_text

Get = Callable[[str], Any]
Convert = Callable[[Any, Get], Mapping[str, Any] | str]
"""(value, getter of other keys) -> settings, or the reason why the key has no effect here."""


class FeatureError(ConfigError):
    """A recipe asks for something that smp does not do; none of its keys is wrong."""


@dataclass(frozen=True)
class Key:
    """The translation of a recipe's key.

    Attributes:
        text: for the table in the docs.
        convert: does it.
        shape: describes the model; fine-tuning takes that from the model's folder.
        default: what other keys say of the same settings goes before it.
        is_text: its value is a text, also where it looks like a number.
        is_list: or a list of them.
    """

    text: str
    convert: Convert
    shape: bool = False
    default: bool = False
    is_text: bool = False
    is_list: bool = False


def to(name: str, shape: bool = False, scale: Callable[[Any], Any] = lambda value: value) -> Key:
    """A key that becomes the setting ``name``."""
    return Key(f"`{name}`", lambda value, get: {name: scale(value)}, shape=shape)


def only(values: tuple[Any, ...], why: str) -> Key:
    """A key with only these values; others are refused."""

    def convert(given: Any, get: Get) -> Mapping[str, Any]:
        # 1 == True: a switch must not pass for a number.
        if not any(given == value and isinstance(given, bool) == isinstance(value, bool) for value in values):
            raise ConfigError(f"{as_text(given)} cannot be had: {why}")
        return {}

    unless = f" unless {' or '.join(map(_shown, values))}" if values else ""
    return Key(f"refused{unless}: {why}", convert)


def nothing(why: str) -> Key:
    """A key without effect here."""
    return Key(f"changes nothing: {why}", lambda value, get: why)


def read_with(name: str, *readers: str) -> Key:
    """A key that is read together with another one: one of ``readers`` (full names); without readers one that every
    recipe has."""

    def convert(value: Any, get: Get) -> Mapping[str, Any] | str:
        if not readers or any(get(reader) for reader in readers):
            return {}
        return f"it goes with {name}, which is unset or 0"

    return Key(f"with {name}", convert)


def _shown(value: Any) -> str:
    return f"`{as_text(value)}`"
