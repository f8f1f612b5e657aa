"""A command line of Megatron-LM while it is translated: what was given, what it becomes, what the user is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from smp.config.command_line.fields import settings


@dataclass
class Line:
    """A line while it is translated.

    Attributes:
        processes: of the run.
        given: Megatron's flags and their values.
        own: flags that only this project has; they go before all else.
        words: the result: flag and values by name of the setting.
        left_out: what changes nothing.
        refused: flags and values by the answer to them.
        problems: what else cannot be, a clause each.
        notes: what the user should know besides.
    """

    processes: int
    given: dict[str, list[str]] = field(default_factory=dict)
    own: list[str] = field(default_factory=list)
    words: dict[str, list[str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def one(self, flag: str) -> str | None:
        """The value of a flag of Megatron's; None: not given."""
        return self.given[flag][0] if flag in self.given else None

    def put(self, *words: str) -> None:
        """Put flags of this project, each with its values, into the result; the last one wins."""
        name = ""
        for word in words:
            if word.startswith("--"):
                name = setting_of(word)
                self.words[name] = []
            self.words[name].append(word)

    def number(self, name: str, otherwise: int = 1) -> int:
        """The value of an integer setting of the result."""
        words = self.words.get(name)
        return otherwise if words is None else settings()[name].parse(words[1], words[0])

    def says(self, name: str, value: str | None = None) -> bool:
        """Whether the result has this switch on, or the setting at ``value``."""
        words = self.words.get(name)
        # The whole list is compared: the value of a switch is its presence.
        return words == ([settings()[name].flag] if value is None else [settings()[name].flag, value])


def setting_of(flag: str) -> str:
    """Name of the setting of a flag of this project; ``--no-x`` belongs to x."""
    name = flag.removeprefix("--").replace("-", "_")
    return name if name in settings() else name.removeprefix("no_")


def leave(line: Line, names: Sequence[str], why: str) -> None:
    """Leave out settings of the result that this project would refuse and Megatron ignores."""
    for name in names:
        if name in line.words:
            line.left_out.append(f"{' '.join(line.words.pop(name))} ({why})")
