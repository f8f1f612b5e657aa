"""Built-in reward functions, with the signature of any other: lists in, 1.0 or 0.0 for each completion out.

What is right stands in a column of the data: ``answer``, ``solution``, ``ground_truth`` or ``target``, the first that
there is; a ``pattern`` for regex, a ``schema`` for json_schema. None where a row has no such column.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from smp.config.command_line.commands import pip_install

_ANSWERS = ("answer", "solution", "ground_truth", "target")
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def text_of(completion: Any) -> str:
    """The text of a completion: itself, or the content of the last of its messages."""
    return completion if isinstance(completion, str) else str(completion[-1].get("content") or "")


def _each(
    completions: list[Any], columns: dict[str, list[Any]], names: tuple[str, ...], right: Callable[[str, Any], bool]
) -> list[float | None]:
    wanted: list[Any] = next((columns[name] for name in names if name in columns), [None] * len(completions))
    return [
        None if want is None else float(right(text_of(said), want))
        for said, want in zip(completions, wanted, strict=True)
    ]


def exact_match(completions: list[Any], **columns: list[Any]) -> list[float | None]:
    """The completion is the answer, but for white space around it."""
    return _each(completions, columns, _ANSWERS, lambda said, want: said.strip() == str(want).strip())


def last_number(text: str) -> Decimal | None:
    """The last number in a text, commas between digits left out; of GSM8K's "#### 42" as well."""
    found = _NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "")) if found else None
    except InvalidOperation:
        return None


def number(completions: list[Any], **columns: list[Any]) -> list[float | None]:
    """The last number of the completion is the last one of the answer."""

    def right(said: str, want: Any) -> bool:
        value = last_number(said)
        return value is not None and value == last_number(str(want))

    return _each(completions, columns, _ANSWERS, right)


def math(completions: list[Any], **columns: list[Any]) -> list[float | None]:
    """The completion's expression (LaTeX, boxed or plain) equals the answer's, as math-verify decides."""
    try:
        from math_verify import parse, verify
    except ImportError:
        raise ImportError(f"the reward math needs math-verify: {pip_install('math-verify[antlr4_13_2]')}") from None

    def read(text: str) -> Any:
        # Its own limit is an alarm of the main thread; this program has one around the call.
        return parse(text, parsing_timeout=None)

    def right(said: str, want: Any) -> bool:
        return bool(verify(gold_of(want), read(said), timeout_seconds=None))

    def gold_of(want: Any) -> Any:
        return read(str(want)) or read(f"${want}$")

    # An answer that cannot be read says nothing of a completion.
    known = {
        name: [x if x is None or gold_of(x) else None for x in columns[name]] for name in _ANSWERS if name in columns
    }
    return _each(completions, known, _ANSWERS, right)


def json_schema(completions: list[Any], **columns: list[Any]) -> list[float | None]:
    """The completion is JSON that the column ``schema`` (JSON schema, as an object or as text) allows."""
    try:
        from jsonschema import ValidationError, validate
    except ImportError:
        raise ImportError(f"the reward json_schema needs jsonschema: {pip_install('jsonschema')}") from None

    def right(said: str, schema: Any) -> bool:
        try:
            validate(json.loads(said), json.loads(schema) if isinstance(schema, str) else schema)
        except (ValueError, RecursionError, ValidationError):
            return False
        return True

    return _each(completions, columns, ("schema",), right)


def regex(completions: list[Any], **columns: list[Any]) -> list[float | None]:
    """The whole completion matches the column ``pattern`` (``re.fullmatch``; a point is any character)."""

    def right(said: str, pattern: Any) -> bool:
        return re.fullmatch(str(pattern), said.strip(), re.DOTALL) is not None

    return _each(completions, columns, ("pattern",), right)
