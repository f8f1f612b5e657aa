"""Translates a HyperPod recipe into settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from smp.config import ConfigError
from smp.config.command_line.fields import as_text, did_you_mean
from smp.launch.hyperpod.form import COMMON, Form
from smp.launch.hyperpod.key import FeatureError, Key
from smp.launch.hyperpod.keys import V1


@dataclass(frozen=True)
class Translated:
    """A recipe in settings.

    Attributes:
        finetune: whether it is for finetune.py.
        values: name of a setting -> value.
        shape: values of the settings of the model, which a fine-tuning run takes from its folder.
        notes: what has no effect here.
        gone: settings that are unset, where keys change those of another recipe.
        said: name of a setting -> the key that says it.
    """

    finetune: bool
    values: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    gone: tuple[str, ...] = ()
    said: dict[str, str] = field(default_factory=dict)


_CHECKED_SHAPE = frozenset(("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size"))
"""Settings that a fine-tuning run gets although its model's folder has them: a model other than the recipe's is then an
error."""


def translate(leaves: Mapping[str, Any], form: Form = V1, others: Mapping[str, Any] | None = None) -> Translated:
    """The settings for the keys of a recipe.

    Args:
        leaves: dotted key -> value, as :func:`flatten` gives them.
        form: of the recipe.
        others: keys that are not of the form, which values may depend on: trainer.devices.

    Raises:
        FeatureError: values that cannot be had; one line that names each key.
        ConfigError: a key that is not known, a value of another type, or one that another key contradicts; one line
            that begins with the key.
    """
    # Conversions look other keys up, so they need all of them, and those of other sections.
    known = {**(others or {}), **leaves}
    result = Translated(finetune=form.finetune(known.get), values=dict(form.always))
    refused, defaults = [], dict[str, Any]()
    for name, key in _given(leaves, form).items():
        value = leaves[name]
        try:
            became = key.convert(value, known.get)
        except ConfigError as error:
            # Collected: all refusals are reported at once.
            refused.append(f"{name}: {error}")
            continue
        except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError):
            raise ConfigError(f"{name}: {value!r} is not a value of this key ({key.text})") from None
        if isinstance(became, str):
            result.notes.append(f"{name}: {became}")
        elif key.default:
            defaults.update(became)
        else:
            _say(result, result.shape if key.shape else result.values, name, became)
    if refused:
        raise FeatureError("; ".join(refused))
    # Values of a family (model_type) give way to the recipe's own keys.
    result.shape.update({setting: value for setting, value in defaults.items() if setting not in result.shape})
    given = result.shape if not result.finetune else {k: v for k, v in result.shape.items() if k in _CHECKED_SHAPE}
    result.values.update(given)
    return result


def _given(leaves: Mapping[str, Any], form: Form) -> dict[str, Key]:
    """The keys that have a value.

    Raises:
        ConfigError: one is not known, or its value is of another kind; what other keys become could depend on it.
    """
    found = {}
    for name, value in leaves.items():
        key = form.find(name)
        if key is None and value is not None and form.is_section(name):
            raise ConfigError(f"{name}: it is a section, and cannot be {as_text(value)}; give keys below it")
        if key is None and not form.is_section(name):
            raise ConfigError(f"{name}: there is no such key{did_you_mean(name, [*form.keys, *COMMON])}")
        # A section that a recipe sets to null is no unknown key; an empty text is a variable that was not set.
        if key is None or value is None or value == "":
            continue
        key.check(name, value)
        found[name] = key
    return found


def _say(result: Translated, settings: dict[str, Any], name: str, became: Mapping[str, Any]) -> None:
    """Add the settings of the key ``name`` to ``settings``. Raises ConfigError when another key gives one of them
    another value, since their order would decide."""
    for setting, value in became.items():
        # The first key that sets a setting is named in the error of the second.
        other = result.said.setdefault(setting, name)
        if other != name and settings.get(setting) != value:
            raise ConfigError(
                f"{name}: {setting} {as_text(value)} contradicts {other}, which says {as_text(settings.get(setting))}; "
                "say both alike"
            )
    settings.update(became)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of a tree; a section without keys counts as null."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves.update(flatten(value, f"{prefix}{key}.") or {f"{prefix}{key}": None})
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
