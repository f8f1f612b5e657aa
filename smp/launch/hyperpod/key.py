"""Kinds of keys of HyperPod's recipes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from smp.config import ConfigError
from smp.config.command_line.entry_points import FINETUNE, PRETRAIN
from smp.config.command_line.fields import Setting, as_text, settings

Get = Callable[[str], Any]
Convert = Callable[[Any, Get], Mapping[str, Any] | str]
"""(value, getter of other keys) -> settings, or the reason why the key has no effect here."""


class FeatureError(ConfigError):
    """A recipe asks for something that smp does not do; none of its keys is wrong."""


@dataclass(frozen=True)
class Kind:
    """What the values of a key are. Python takes any text for true, so a key that is only asked whether it is set would
    take ``no`` for yes: each value is checked before keys are converted.

    Attributes:
        name: for messages.
        fits: whether a value is one.
    """

    name: str
    fits: Callable[[Any], bool]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _is_list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
INTEGER = Kind("an integer", _is_integer)
NUMBER = Kind("a finite number", _is_number)
STEPS = Kind("an integer or after_each_epoch", lambda value: _is_integer(value) or value == "after_each_epoch")
PAIR = Kind("a list of two numbers", lambda value: _is_list_of(_is_number)(value) and len(value) == 2)
TEXT = Kind("a text", _is_text)
TEXTS = Kind("a text or a list of them", lambda value: _is_text(value) or _is_list_of(_is_text)(value))
LIST = Kind("a list", lambda value: isinstance(value, list))
NAMED = Kind("one of those that its line in docs/hyperpod.md names", lambda value: True)
"""Of a key that refuses all other values itself."""


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
        kind: what its values are; None: any, or what ``setting`` takes.
        setting: name of the setting that it is.
    """

    text: str
    convert: Convert
    shape: bool = False
    default: bool = False
    is_text: bool = False
    is_list: bool = False
    kind: Kind | None = None
    setting: str | None = None

    @property
    def needs_value(self) -> bool:
        """Whether an empty text says nothing of it: a number, a list, true or false."""
        if self.setting is not None:
            return _setting(self.setting).type is not str
        return not self.is_text and self.kind not in (None, TEXT, TEXTS, NAMED)

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError, which begins with ``name``, where a value is none of this key."""
        if self.kind is not None and not self.kind.fits(value):
            raise ConfigError(f"{name}: expected {self.kind.name}, got {as_text(value)!r}")
        if self.setting is None:
            return
        if _setting(self.setting).parse(as_text(value), name) is None:  # a text such as None, which is no number
            raise ConfigError(f"{name}: {value!r} is a text; null unsets a key")


def _setting(name: str) -> Setting:
    return settings(FINETUNE).get(name) or settings(PRETRAIN)[name]


def to(name: str, shape: bool = False) -> Key:
    """A key that becomes the setting ``name``."""
    return Key(f"`{name}`", lambda value, get: {name: value}, shape=shape, setting=name)


def only(values: tuple[Any, ...], why: str) -> Key:
    """A key with only these values; others are refused."""

    def convert(given: Any, get: Get) -> Mapping[str, Any]:
        # 1 == True: a switch must not pass for a number.
        if not any(given == value and isinstance(given, bool) == isinstance(value, bool) for value in values):
            raise ConfigError(f"{as_text(given)} cannot be had: {why}")
        return {}

    unless = f" unless {' or '.join(map(_shown, values))}" if values else ""
    return Key(f"refused{unless}: {why}", convert)


def switch(name: str, text: str = "") -> Key:
    """A key that is true or false, and the setting ``name`` where it is true."""
    return Key(text or f"`{name}`", lambda value, get: {name: True} if value else {}, kind=FLAG)


def nothing(why: str, kind: Kind | None = None) -> Key:
    """A key without effect here; others may read it."""
    return Key(f"changes nothing: {why}", lambda value, get: why, kind=kind)


def read_with(name: str, *readers: str, kind: Kind | None = None) -> Key:
    """A key that is read together with another one: one of ``readers`` (full names); without readers one that every
    recipe has."""

    def convert(value: Any, get: Get) -> Mapping[str, Any] | str:
        if not readers or any(get(reader) for reader in readers):
            return {}
        return f"it goes with {name}, which is unset or 0"

    return Key(f"with {name}", convert, kind=kind)


def _shown(value: Any) -> str:
    return f"`{as_text(value)}`"
