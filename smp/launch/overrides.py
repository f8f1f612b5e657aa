"""Words of a command line, in the grammar of Hydra's overrides: key.path=value, +key=value, ++key=value, ~key.

hydra-core itself excludes the versions of OmegaConf and of the ANTLR runtime that others need, and takes longer to
import than a dry run takes; the grammar is this file. A sweep is refused: one command line is one job.

A scalar that is written without quotes keeps its text: 00123, 1.10 and on are numbers and truth values for a key that
is one, and what was typed for a key that is a text (``smp.launch.key_types``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from smp.config import ConfigError

Path = tuple[str, ...]
"""Names of keys, and indices of list items."""
_WORD = re.compile(r"(?P<sign>\+{0,2}|~)(?P<key>[^=\s+~][^=\s]*?)(?:=(?P<value>.*))?", re.DOTALL)
# Hydra's lexer, as regular expressions: identifiers and integers, quoted texts, escapes, elements
# of lists.
_PART = re.compile(r"[A-Za-z_$][\w$-]*|0|[1-9](?:_?\d)*|[\w.$/-]+")
_INTEGER = re.compile(r"[+-]?(?:0|[1-9](?:_?\d)*)")
_POINT = r"(?:(?:0|[1-9](?:_?\d)*)\.|(?:0|[1-9](?:_?\d)*)?\.\d(?:_?\d)*)"
_FLOAT = re.compile(rf"[+-]?(?:{_POINT}|(?:{_POINT}|0|[1-9](?:_?\d)*)[eE][+-]?\d(?:_?\d)*|[Ii][Nn][Ff]|[Nn][Aa][Nn])")
_QUOTED = re.compile(r"""(['"])((?:\\.|(?!\1)[^\\])*)\1""", re.DOTALL)
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")
_ELEMENT = re.compile(r"(?:\\[\\()\[\]{}:=, \t]|\$\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|[^,()\[\]{}])+", re.DOTALL)
_KEY = re.compile(r"(?:\\[\\()\[\]{}:=, \t]|[^,()\[\]{}:])+", re.DOTALL)
_FUNCTION = re.compile(r"\s*([A-Za-z_][\w-]*)[ \t]*\(")
_SWEEPS = ("choice", "range", "interval", "glob", "tag", "sort", "shuffle")


@dataclass(frozen=True)
class Scalar:
    """A number, a truth value or null, written without quotes.

    Attributes:
        text: as it was written.
        value: what it stands for where no text is wanted.
    """

    text: str
    value: Any


@dataclass(frozen=True)
class Override:
    """One word.

    Attributes:
        word: as it was typed.
        operator: ``~`` removes; the others set, ``+`` and ``++`` also what does not exist.
        path: names, and numbers of items of lists.
        text: after the ``=``; None without one.
    """

    word: str
    operator: str
    path: Path
    text: str | None

    @property
    def key(self) -> str:
        return ".".join(self.path)


def read_word(word: str) -> Override:
    """Split a word; its value is read by :func:`read_value` or :func:`read_text` once the key is known.

    Raises:
        ConfigError: it is no override.
    """
    match = _WORD.fullmatch(word)
    if match is None or (match["value"] is None and match["sign"] != "~"):
        raise ConfigError(
            f"unexpected {word!r}: expected key=value, +key=value, ~key or one of --list, --help, --version"
        )
    key = match["key"]
    # Hydra's package overrides (group@package=name) and groups of its own.
    if "@" in key or ("/" in key and key.partition("/")[0] in ("hydra", "cluster", "recipes")):
        raise ConfigError(f"{key}: there are no groups but recipes=NAME and cluster=NAME")
    path = tuple(key.split("."))
    if not all(path):
        raise ConfigError(f"{key}: a part of the name is empty")
    if not all(_PART.fullmatch(part) for part in path):
        raise ConfigError(f"unexpected {word!r}: {key} cannot be the name of a key")
    return Override(word, match["sign"], path, match["value"])


def read_text(text: str) -> str:
    """A text value: as typed, without the quotes around it.

    Raises:
        ValueError: it is a sweep.
    """
    function = _FUNCTION.match(text)
    if function and function[1] in _SWEEPS and text.rstrip().endswith(")"):
        raise ValueError(f"{function[1]}(...) is a sweep; start a job for each value, or quote it if it is a text")
    quoted = _QUOTED.fullmatch(text)
    return text if quoted is None else _unquoted(quoted)


def read_value(text: str) -> Any:
    """A value in Hydra's grammar: text, lists, dictionaries and :class:`Scalar`.

    Raises:
        ValueError: it is none.
    """
    reader = _Reader(text)
    reader.skip_blanks()
    if reader.at_end:
        return ""
    value = reader.element()
    reader.skip_blanks()
    if reader.at(","):
        raise ValueError("values with commas between are a sweep; start a job for each, or write a list: [a,b]")
    if not reader.at_end:
        raise ValueError(f"{reader.rest!r} is not expected; quote a text: \"'...'\"")
    return value


class _Reader:
    """Reads the text of a value from left to right."""

    def __init__(self, text: str):
        self.text, self.position, self.depth = text, 0, 0

    @property
    def rest(self) -> str:
        return self.text[self.position :]

    @property
    def at_end(self) -> bool:
        return self.position >= len(self.text)

    def at(self, mark: str) -> bool:
        return self.text.startswith(mark, self.position)

    def skip_blanks(self) -> None:
        while not self.at_end and self.text[self.position] in " \t":
            self.position += 1

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        if match := pattern.match(self.text, self.position):
            self.position = match.end()
        return match

    def element(self) -> Any:
        self.skip_blanks()
        if self.at("["):
            return self._items("]", self.element)
        if self.at("{"):
            return dict(self._items("}", self._pair))
        if self.at("'") or self.at('"'):
            if (quoted := self.take(_QUOTED)) is None:
                raise ValueError(f"{self.rest!r} has no closing quote")
            return _unquoted(quoted)
        # Hydra's functions are sweeps, which would be several jobs, and casts: here a key's type is known.
        if function := _FUNCTION.match(self.text, self.position):
            raise ValueError(
                f"{function[1]}(...) is {'a sweep' if function[1] in _SWEEPS else 'a function'}; write the value"
            )
        return _scalar(self._plain(_ELEMENT))

    def _plain(self, pattern: re.Pattern[str]) -> str:
        match = self.take(pattern)
        text = match[0].lstrip(" \t") if match else ""
        bare = text.rstrip(" \t")
        if bare != text and re.search(r"(?<!\\)(?:\\\\)*\\$", bare):  # a blank after a backslash belongs to the text
            bare = text[: len(bare) + 1]
        if not bare:
            raise ValueError("a value is missing" + (f" before {self.rest!r}" if self.rest else ""))
        return bare

    def _items(self, end: str, item: Callable[[], Any]) -> list[Any]:
        self.position, self.depth = self.position + 1, self.depth + 1
        # Recursion: thousands of brackets would overflow Python's stack.
        if self.depth > 32:
            raise ValueError("has more than 32 levels")
        items: list[Any] = []
        self.skip_blanks()
        while not self.at(end):
            items.append(item())
            self.skip_blanks()
            if self.at_end or self.text[self.position] not in ("," + end):
                raise ValueError(f"expected , or {end}" + (f" and not {self.rest!r}" if self.rest else " at the end"))
            if self.at(","):
                self.position += 1
                self.skip_blanks()
                if self.at(end):
                    raise ValueError(f"a value is missing before {self.rest!r}")
        self.position, self.depth = self.position + 1, self.depth - 1
        return items

    def _pair(self) -> tuple[str, Any]:
        self.skip_blanks()
        quoted = self.take(_QUOTED)
        key = _unquoted(quoted) if quoted else _ESCAPED.sub(r"\1", self._plain(_KEY))
        self.skip_blanks()
        if not self.at(":"):
            raise ValueError(f"expected a : after {key}")
        self.position += 1
        return key, self.element()


def _unquoted(match: re.Match[str]) -> str:
    """The text between quotes. Backslashes escape only in front of a quote, the closing one included."""
    quote, text = match[1], match[2]
    # Backslashes in front of the closing quote are pairs: each pair is one.
    body = text.rstrip("\\")
    # Of n backslashes in front of a quote, every second one and the quote remain.
    inside = re.sub(rf"\\+{quote}", lambda found: found[0][1::2], body)
    return inside + "\\" * ((len(text) - len(body)) // 2)


def _scalar(text: str) -> Any:
    lower = text.lower()
    if lower == "null":
        return Scalar(text, None)
    if lower in ("true", "false"):
        return Scalar(text, lower == "true")
    # As in Hydra: 1_000 is a number, and 007, such as a job's name, is a text.
    if _INTEGER.fullmatch(text):
        return Scalar(text, int(text))
    if _FLOAT.fullmatch(text):
        return Scalar(text, float(text))
    return _ESCAPED.sub(r"\1", text)


def settled(node: Any, is_text: Callable[[Path], bool], path: Path = ()) -> Any:
    """``node`` with each :class:`Scalar` replaced: by its text where ``is_text`` says so for its path, else by its
    value."""
    if isinstance(node, dict):
        names = {key.text if isinstance(key, Scalar) else str(key): value for key, value in node.items()}
        return {name: settled(value, is_text, (*path, name)) for name, value in names.items()}
    if isinstance(node, list):
        return [settled(value, is_text, (*path, str(index))) for index, value in enumerate(node)]
    if isinstance(node, Scalar):
        return node.text if node.value is not None and is_text(path) else node.value
    return node


def values(node: Any) -> Any:
    """``node`` with the values of all scalars."""
    return settled(node, lambda path: False)
