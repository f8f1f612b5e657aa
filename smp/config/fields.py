"""The schema as a flat table: one ``Setting`` per dataclass field, and the one rule that turns text into a value.

Flags, YAML keys, ``--help`` and the table in the docs all read this table, so none can disagree with the schema.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from smp.config.schema import Config, ConfigError

_EXPECTED = {int: "an integer", float: "a finite number", str: "text", bool: "true or false"}


@dataclass(frozen=True)
class Setting:
    """One field of one group of the schema.

    Attributes:
        name: the field's name, which is also the YAML key.
        group: the name of the group in ``Config``, such as ``"model"``.
        type: ``int``, ``float``, ``str`` or ``bool``.
        choices: allowed texts of a ``Literal``; empty when any value of the type may be given.
        optional: whether ``None`` (written ``none`` or ``null``) is a value.
        default: the dataclass default.
        many: several words make the value; a flag takes them one after the other.
    """

    name: str
    group: str
    type: type
    choices: tuple[str, ...]
    optional: bool
    default: Any
    many: bool = False

    @property
    def flag(self) -> str:
        """The flag on the command line, ``--kebab-case``."""
        return "--" + self.name.replace("_", "-")

    def parse(self, text: str) -> Any:
        """The value that ``text`` stands for, the same for a flag and for a YAML scalar.

        Raises:
            ConfigError: ``text`` is not a value of this setting; the message does not name the setting.
        """
        if self.optional and text.lower() in ("none", "null"):
            return None
        if self.choices and text not in self.choices:
            raise ConfigError(f"{text!r} is not one of {', '.join(self.choices)}{did_you_mean(text, self.choices)}")
        try:
            return _convert(self.type, text)
        except ValueError:
            raise ConfigError(f"expected {_EXPECTED[self.type]}, got {text!r}") from None


def _convert(kind: type, text: str) -> Any:
    """``text`` as ``kind``; ``ValueError`` when it is not one. Empty text is an unset shell variable, never a value."""
    if kind is bool:
        return ("false", "true").index(text.lower()) == 1
    value = kind(text)
    if text == "" or (kind is float and not math.isfinite(value)):
        raise ValueError
    return value


def as_text(value: Any) -> str:
    """A value as it is written in YAML and after a flag: ``None`` is ``none``, ``True`` is ``true``."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """``": did you mean X?"`` with the nearest of ``known`` (case ignored), or ``otherwise`` when nothing is near."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f": did you mean {by_lower[near[0]]}?" if near else otherwise


def group_classes(tree: type = Config) -> dict[str, type]:
    """Name of each group in a tree of settings and its dataclass, in order."""
    hints = get_type_hints(tree)
    return {group.name: hints[group.name] for group in fields(tree)}


@cache
def settings(tree: type = Config) -> dict[str, Setting]:
    """Every setting by name, in the order of the schema."""
    table: dict[str, Setting] = {}
    for group, cls in group_classes(tree).items():
        hints = get_type_hints(cls, include_extras=True)
        for item in fields(cls):
            assert item.name not in table, f"{item.name} is in two groups, but flags are flat"
            table[item.name] = _setting(item, group, hints[item.name])
    return table


def _setting(item: Field[Any], group: str, hint: Any) -> Setting:
    assert item.default is not MISSING, f"{group}.{item.name} has no default"
    options = [arg for arg in get_args(hint) if arg is not type(None)]
    optional = get_origin(hint) is not Literal and type(None) in get_args(hint)
    base = options[0] if optional else hint
    many = get_origin(base) is Annotated
    base = get_args(base)[0] if many else base
    choices = get_args(base) if get_origin(base) is Literal else ()
    kind = str if choices else base
    assert kind in _EXPECTED, f"{group}.{item.name}: no rule for type {hint}"
    return Setting(item.name, group, kind, choices, optional, item.default, many)


def docstrings(cls: type) -> dict[str, str]:
    """The text under each field of a dataclass, on one line (from the source: Python keeps none at run time)."""
    texts: dict[str, str] = {}
    for base in cls.__bases__:
        texts |= {} if base is object else docstrings(base)
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    for item, following in zip(body.body, body.body[1:], strict=False):
        match item, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts
