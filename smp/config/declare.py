"""How a setting is declared in addition to type and default: text of several words, and what a setting needs to have an
effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any

Words = Annotated[str, "words"]
"""Text of several words, quoted as a shell would: a flag takes them one after the other, YAML in one line."""


GIVEN = object()
"""In :func:`only_with`: any value but the default."""


def only_with(default: Any, *, noted: bool = False, **needs: Any) -> Any:
    """A field that has an effect only with one of ``needs``: another setting with this value, one of several values, or
    any that is not its default (GIVEN).

    Elsewhere a value other than the default is refused; with ``noted`` the user is told, because command lines that
    serve several layouts give it.
    """
    return field(default=default, metadata={"needs": tuple(needs.items()), "noted": noted})


def one_of(default: str, table: Mapping[str, Any]) -> Any:
    """A field whose values are the names of ``table``, with rows that are added later; the ``summary`` of each row
    becomes part of its help text."""
    return field(default=default, metadata={"table": table})
