"""A row of the table of Megatron's flags. See ``smp.config.megatron.table``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Fate = Literal["same", "becomes", "derived", "left out", "refused"]
"""same: a flag of this project; becomes: other words; derived: what it becomes depends on other flags, see
``translate``; left out: accepted, and changes nothing here; refused: what it asks for does not exist."""


@dataclass(frozen=True)
class Row:
    """Flags of Megatron's with one answer.

    Attributes:
        flags: each with the number of its values: ``--x`` none, ``--x:1`` one, ``--x:+`` any number.
        fate: what becomes of them.
        answer: to who gives one: what to write here, or why it is not needed or not there.
        words: the flags of this project that stand for it; ``{}`` is its value.
        values: values that do not share the row's fate, and the words for each (empty: it is left out).
    """

    flags: str
    fate: Fate
    answer: str = ""
    words: str = ""
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def arities(self) -> dict[str, str]:
        """Number of values by flag: "", "1" or "+"."""
        return {flag: arity for flag, _, arity in (word.partition(":") for word in self.flags.split())}


def same(flags: str) -> Row:
    """A row of flags with the same name, values and meaning here."""
    return Row(flags, "same", "the same")


def becomes(flags: str, words: str, answer: str = "") -> Row:
    """A row of flags that become other words of this project, whatever their value."""
    return Row(flags, "becomes", answer, words)


def chosen(flags: str, values: Mapping[str, str], answer: str) -> Row:
    """A row of flags each of whose ``values`` has its own words; other values are refused with ``answer``."""
    return Row(flags, "refused", answer, values=values)


def derived(flags: str, answer: str) -> Row:
    """A row of flags whose translation depends on other flags."""
    return Row(flags, "derived", answer)


def left_out(flags: str, answer: str) -> Row:
    """A row of flags that are accepted and have no effect here."""
    return Row(flags, "left out", answer)


def refused(flags: str, answer: str, values: Mapping[str, str] | None = None) -> Row:
    """A row of flags that ask for something that does not exist. Some values, such as Megatron's default, ask for
    nothing."""
    return Row(flags, "refused", answer, values=values or {})
