"""Forms of HyperPod's recipes: one for each of its trainers, known by ``run.model_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from smp.launch.hyperpod.key import Get, Key

COMMON = ("run.name", "run.time_limit", "trainer.num_nodes", "trainer.devices")
"""Keys that every recipe has, whatever its form."""


@dataclass(frozen=True)
class Form:
    """The translation of the keys of one of HyperPod's trainers.

    Attributes:
        name: for messages and the docs.
        keys: dotted name -> what it becomes. ``a.b.*`` stands for all keys below ``a.b``, ``*.a`` for those that end
            so.
        finetune: whether a recipe is for finetune.py.
        always: settings that this trainer has without a key, where no key says another thing.
        sizes: keys in the place of trainer.devices and trainer.num_nodes, where these are not given.
    """

    name: str
    keys: Mapping[str, Key]
    finetune: Callable[[Get], bool]
    always: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)

    def find(self, name: str) -> Key | None:
        """The translation of a key: by its own name, else by the longest pattern that matches it."""
        if (key := self.keys.get(name)) is not None:
            return key
        head, _, last = name.rpartition(".")
        while head:
            if (key := self.keys.get(f"{head}.*")) is not None:
                return key
            head = head.rpartition(".")[0]
        return self.keys.get(f"*.{last}")

    def is_section(self, name: str) -> bool:
        """Whether there are keys below ``name``."""
        return any(key.startswith(f"{name}.") for key in self.keys)
