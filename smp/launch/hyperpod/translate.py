"""A recipe of HyperPod's in settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from smp.config import ConfigError
from smp.config.fields import did_you_mean
from smp.launch.hyperpod.keys import KEYS


@dataclass(frozen=True)
class Translated:
    """A recipe in settings.

    Attributes:
        finetune: whether it is for finetune.py.
        values: name of a setting -> value.
        shape: values of the settings of the model, which a fine-tuning run takes from its folder.
        notes: what has no effect here.
    """

    finetune: bool
    values: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


_SECTIONS = {".".join(name.split(".")[:depth]) for name in KEYS for depth in range(1, name.count(".") + 1)}
_CHECKED_SHAPE = frozenset(("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size"))
"""What a fine-tuning run is told although its folder says it too: another model than the recipe's is then an error."""


def translate(leaves: Mapping[str, Any]) -> Translated:
    """The settings that the keys of a v1 recipe stand for.

    Args:
        leaves: dotted key -> value, as :func:`flatten` gives them.

    Raises:
        ConfigError: a key that is not known, or a value that cannot be had; one line that begins with the key.
    """
    result = Translated(finetune=bool(leaves.get("model.do_finetune")))
    refused = []
    for name, value in leaves.items():
        if name not in KEYS and (value is not None or name not in _SECTIONS):
            raise ConfigError(f"{name}: there is no such key{did_you_mean(name, KEYS)}")
        if value is None:
            continue
        key = KEYS[name]
        try:
            became = key.convert(value, leaves.get)
        except ConfigError as error:
            refused.append(f"{name}: {error}")
            continue
        except (TypeError, ValueError, AttributeError, KeyError):
            raise ConfigError(f"{name}: {value!r} is not a value of this key ({key.text})") from None
        if isinstance(became, str):
            result.notes.append(f"{name}: {became}")
        elif key.shape:
            result.shape.update(became)
        else:
            result.values.update(became)
    if refused:
        raise ConfigError("; ".join(refused))
    given = result.shape if not result.finetune else {k: v for k, v in result.shape.items() if k in _CHECKED_SHAPE}
    result.values.update(given)
    return result


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of a tree; a section without keys counts as unset."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves.update(flatten(value, f"{prefix}{key}.") or {f"{prefix}{key}": None})
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
