"""An entry point's settings as a flat table: one ``Setting`` per field, and the rule that turns text into a value.

Flags, YAML keys, ``--help`` and the table in the docs all read this table, so none can disagree with the schema.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from smp.config.command_line.entry_points import FINETUNE, PRETRAIN, EntryPoint, Own
from smp.config.declare import GIVEN
from smp.config.schema import Config, ConfigError

_EXPECTED = {int: "an integer", float: "a finite number", str: "text", bool: "true or false"}


@dataclass(frozen=True)
class Setting:
    """One field of one group of the schema.

    Attributes:
        name: the field's name, which is also the YAML key.
        group: the name of the group in ``Config``, such as ``"model"``.
        type: ``int``, ``float``, ``str`` or ``bool``.
        choices: allowed texts of a ``Literal``, or names of a table; empty when any value of the type may be given.
        default: what it is when it is not given.
        declared: the dataclass that has it.
        own_text: what it means for this entry point, where that differs.
        many: several words make the value; a flag takes them one after the other.
        needs: names and values of settings; it has an effect with one of them only. See ``schema.only_with``.
        noted: elsewhere it is not refused, but the user is told.
    """

    name: str
    group: str
    type: type
    choices: Collection[str]
    default: Any
    declared: Any
    own_text: str = ""
    many: bool = False
    needs: tuple[tuple[str, Any], ...] = ()
    noted: bool = False

    @property
    def flag(self) -> str:
        """The flag on the command line, ``--kebab-case``."""
        return flag_of(self.name)

    @property
    def text(self) -> str:
        """The help text on one line. Read from the source on demand: a launcher never needs it."""
        if self.own_text:
            return self.own_text
        text = docstrings(self.declared)[self.name]
        table = next(item for item in fields(self.declared) if item.name == self.name).metadata.get("table")
        return text if table is None else f"{text} {'; '.join(f'{n}: {row.summary}' for n, row in table.items())}."

    @property
    def optional(self) -> bool:
        """Whether ``None`` (written ``none`` or ``null``) is an allowed value."""
        return self.default is None

    def parse(self, text: str, where: str) -> Any:
        """The value that ``text`` stands for, by one rule for flags and YAML scalars.

        Raises:
            ConfigError: ``text`` is not a value of this setting; the message begins with ``where``.
        """
        if self.optional and text.lower() in ("none", "null"):
            return None
        if self.choices and text not in self.choices:
            near = did_you_mean(text, self.choices)
            raise ConfigError(f"{where}: {text!r} is not one of {', '.join(self.choices)}{near}")
        try:
            return _convert(self.type, text)
        except ValueError:
            raise ConfigError(f"{where}: expected {_EXPECTED[self.type]}, got {text!r}") from None


def _convert(kind: type, text: str) -> Any:
    """``text`` as ``kind``; ValueError when it is not one. Empty text is an unset shell variable, never a value."""
    if kind is bool:
        # index raises ValueError for any other word.
        return ("false", "true").index(text.lower()) == 1
    value = kind(text)
    # float("nan") and float("inf") parse, and would pass comparisons in checks.
    if text == "" or (kind is float and not math.isfinite(value)):
        raise ValueError
    return value


def as_text(value: Any) -> str:
    """A value as written in YAML and after a flag: ``None`` is ``none``, ``True`` is ``true``."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def require(fits: bool, message: str) -> None:
    """Raise ConfigError with ``message`` unless ``fits``."""
    if not fits:
        raise ConfigError(message)


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """``": did you mean X?"`` with the nearest of ``known``, ignoring case, or ``otherwise`` when none is near."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f": did you mean {by_lower[near[0]]}?" if near else otherwise


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def given(group: Any, *names: str) -> list[str]:
    """Settings among ``names`` that differ from the schema's default, as written on a command line."""
    changed = {name: getattr(group, name) for name in names if getattr(group, name) != getattr(type(group)(), name)}
    return [_as_given(flag_of(name), value) for name, value in changed.items()]


def _as_given(flag: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag if value else "--no-" + flag[2:]
    return f"{flag} {value}"


def without_effect(config: Config, *groups: str) -> list[Setting]:
    """Settings that differ from their default although nothing that they need is set.

    Args:
        config: resolved or not.
        groups: to look at; by default all.
    """
    return [
        setting
        for setting in settings(entry_point_of(config)).values()
        if not groups or setting.group in groups
        if getattr(config, setting.group) is not None
        if getattr(getattr(config, setting.group), setting.name) != setting.default
        if not has_effect(config, setting)
    ]


def has_effect(config: Config, setting: Setting) -> bool:
    """Whether one of the settings that ``setting`` needs has the needed value, and has an effect itself."""
    known = settings(entry_point_of(config))
    return not setting.needs or any(
        # Recursive: a setting that needs another idle one is idle, too.
        _holds(config, name, wanted) and (name not in known or has_effect(config, known[name]))
        for name, wanted in setting.needs
    )


def _holds(config: Config, name: str, wanted: Any) -> bool:
    group = next(group for group in vars(config).values() if hasattr(group, name))
    # Names are unique over all groups.
    value = getattr(group, name)
    # Any value other than the default counts as given: a flag at its default changes nothing.
    if wanted is GIVEN:
        return bool(value != getattr(type(group), name))
    return value in wanted if isinstance(wanted, tuple) else bool(value == wanted)


def said_without_effect(config: Config, idle: Iterable[Setting]) -> str:
    """The message about settings that :func:`without_effect` found: those that lack the same as the first one."""
    first, *others = idle
    # One cause per message: the next one is reported once this is fixed.
    alike = [first, *(setting for setting in others if setting.needs == first.needs)]
    named = [_as_given(s.flag, getattr(getattr(config, s.group), s.name)) for s in alike]
    return f"{', '.join(named)} has no effect {_lacking(config, first)}"


def _lacking(config: Config, setting: Setting) -> str:
    """What is missing, as text: ``without --optimizer adam or apex-adam``, ``with --mock-data``."""
    texts = []
    known = settings(entry_point_of(config))
    for name, wanted in setting.needs:
        if name not in known:
            continue  # not of this entry point
        if _holds(config, name, wanted):  # and has no effect itself, or this would not be said
            return _lacking(config, known[name])
        default = next(getattr(type(group), name) for group in vars(config).values() if hasattr(group, name))
        if isinstance(wanted, bool):
            # A switch needed at its default: the user has turned it.
            if wanted == default:
                return f"with {_as_given(flag_of(name), not wanted)}"
            texts.append(_as_given(flag_of(name), wanted))
        elif wanted is GIVEN:
            texts.append(flag_of(name) + ("" if default is None else f" above {default}"))
        else:
            *some, last = wanted if isinstance(wanted, tuple) else (wanted,)
            texts.append(f"{flag_of(name)} {', '.join(some)}{' or ' if some else ''}{last}")
    return f"without {' or '.join(texts)}"


def entry_point_of(config: Config) -> EntryPoint:
    """The entry point whose run ``config`` describes."""
    return PRETRAIN if config.objective is None else FINETUNE


@cache
def group_classes(entry: EntryPoint = PRETRAIN) -> Mapping[str, type]:
    """Dataclass of each group of an entry point by name, in order."""
    hints = get_type_hints(Config)
    # Groups that only some entry points have are declared Optional.
    return {group: get_args(hints[group])[0] if get_args(hints[group]) else hints[group] for group in entry.groups}


@cache
def settings(entry: EntryPoint = PRETRAIN) -> dict[str, Setting]:
    """Every setting of an entry point by name, in the order of --help."""
    table: dict[str, Setting] = {}
    for group, cls in group_classes(entry).items():
        hints = get_type_hints(cls, include_extras=True)
        items = {item.name: item for item in fields(cls) if item.name not in entry.leaves_out}
        for name in entry.groups[group] or items:
            assert name not in table, f"{name} is in two groups, but flags are flat"
            table[name] = _setting(items[name], group, cls, hints[name], entry.own.get(name, Own()))
    return table


def _setting(item: Field[Any], group: str, declared: type, hint: Any, own: Own) -> Setting:
    assert item.default is not MISSING, f"{group}.{item.name} has no default"
    # A Literal may itself contain None; Optional[X] is unpacked to X.
    options = [arg for arg in get_args(hint) if arg is not type(None)]
    base = options[0] if get_origin(hint) is not Literal and type(None) in get_args(hint) else hint
    # Annotated is Words: text of several words.
    many = get_origin(base) is Annotated
    base = get_args(base)[0] if many else base
    choices: Collection[str] = get_args(base) if get_origin(base) is Literal else ()
    if "table" in item.metadata:
        table: Mapping[str, Any] = item.metadata["table"]
        choices = table.keys()  # a view: rows may be added
    kind = str if choices else base
    assert kind in _EXPECTED, f"{group}.{item.name}: no rule for type {hint}"
    default = item.default if own.default is ... else own.default
    return Setting(
        name=item.name,
        group=group,
        type=kind,
        choices=own.choices or choices,
        default=default,
        declared=declared,
        own_text=own.text or "",
        many=many,
        needs=item.metadata.get("needs", ()),
        noted=item.metadata.get("noted", False),
    )


@cache
def docstrings(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, on one line. Python keeps none at run time, so they are read from
    the source."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for item, following in zip(body.body, body.body[1:], strict=False):
        match item, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts


def title_of(entry: EntryPoint, group: str) -> str:
    """The title of a group in --help."""
    return entry.titles.get(group) or group_classes(entry)[group].__doc__ or ""
