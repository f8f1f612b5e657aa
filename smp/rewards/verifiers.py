"""Built-in reward functions with the signature of all others: lists in, 1.0 or 0.0 for each completion out.

What is right stands in a column of the data: ``answer``, ``solution``, ``ground_truth`` or ``target``, the first that
a row has; a ``pattern`` for regex, a ``schema`` for json_schema. None where a row has no such column.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

_ANSWERS = ("answer", "solution", "ground_truth", "target")
# Signs, thousands' commas, decimals and exponents.
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def text_of(completion: Any) -> str:
    """The text of a completion: itself, or the content of the last message of the assistant, and not of a tool."""
    if isinstance(completion, str):
        return completion
    said = (message.get("content") for message in reversed(completion) if message.get("role") == "assistant")
    return str(next(said, None) or "")


def _each(
    completions: list[Any], columns: dict[str, list[Any]], names: tuple[str, ...], right: Callable[[str, Any], bool]
) -> list[float | None]:
    given = [columns[name] for name in names if name in columns]
    rows: list[tuple[Any, ...]] = list(zip(*given, strict=True)) if given else [()] * len(completions)
    wanted = [next((x for x in row if x is not None), None) for row in rows]
    return [
        None if want is None else float(right(text_of(said), want))
        for said, want in zip(completions, wanted, strict=True)
    ]


def exact_match(completions: list[Any], **columns: list[Any]) -> list[float | None]:
    """Whether the completion is the answer, except for surrounding white space."""
    return _each(completions, columns, _ANSWERS, lambda said, want: said.strip() == str(want).strip())


def last_number(text: str) -> Decimal | None:
    """The last number in a text without commas between digits, such as 42 in GSM8K's "#### 42"."""
    found = _NUMBER.findall(text)
    try:
        # Decimal: 0.1 and 0.10 are equal, and no rounding makes different numbers so.
        return Decimal(found[-1].replace(",", "")) if found else None
    except InvalidOperation:
        return None


def number(completions: list[Any], **columns: list[Any]) -> list[float | None]:
    """Whether the last number of the completion is the last one of the answer."""

    def right(said: str, want: Any) -> bool:
        value = last_number(said)
        return value is not None and value == last_number(str(want))

    return _each(completions, columns, _ANSWERS, right)


def _lacks(reward: str, library: str, package: str) -> ImportError:
    # The import brings all settings, most of the time that a process of rewards takes to start.
    from smp.config.command_line.commands import pip_install

    return ImportError(f"the reward {reward} needs {library}: {pip_install(package)}")


def math(completions: list[Any], **columns: list[Any]) -> list[float | None]:
    """Whether the completion's expression (LaTeX, boxed or plain) equals the answer's by math-verify."""
    try:
        from math_verify import parse, verify
    except ImportError:
        raise _lacks("math", "math-verify", "math-verify[antlr4_13_2]") from None

    def read(text: str) -> Any:
        # Its own limit is an alarm of the main thread; this program has one around the call.
        return parse(text, parsing_timeout=None)

    def right(said: str, want: Any) -> bool:
        return bool(verify(gold_of(want), read(said), timeout_seconds=None))

    def gold_of(want: Any) -> Any:
        # math-verify reads LaTeX only in math environments: a bare expression is put into one.
        return read(str(want)) or read(f"${want}$")

    # An answer that cannot be read says nothing of a completion.
    known = {
        name: [x if x is None or gold_of(x) else None for x in columns[name]] for name in _ANSWERS if name in columns
    }
    return _each(completions, known, _ANSWERS, right)


def json_schema(completions: list[Any], **columns: list[Any]) -> list[float | None]:
    """Whether the completion is JSON that the column ``schema`` (a JSON schema as object or text) allows."""
    try:
        from jsonschema import ValidationError, validate
    except ImportError:
        raise _lacks("json_schema", "jsonschema", "jsonschema") from None

    def right(said: str, schema: Any) -> bool:
        try:
            validate(json.loads(said), json.loads(schema) if isinstance(schema, str) else schema)
        except (ValueError, RecursionError, ValidationError):
            return False
        return True

    return _each(completions, columns, ("schema",), right)


def regex(completions: list[Any], **columns: list[Any]) -> list[float | None]:
    """Whether the whole completion matches the column ``pattern`` (``re.fullmatch``; a dot matches line ends, too)."""

    def right(said: str, pattern: Any) -> bool:
        # Patterns of the data may be numbers in a table.
        return re.fullmatch(str(pattern), said.strip(), re.DOTALL) is not None

    return _each(completions, columns, ("pattern",), right)
