"""Two settings of one model: whether the weights of the first fit into the second, and what else the second changes.

What decides is the inventory of both, names and shapes, and not a list of settings: a setting that changes no tensor
(RoPE and its scaling, a window, dropout, ...) may be another one than the weights were trained with. No torch here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from smp.config import ConfigError, ModelConfig
from smp.config.command_line.fields import as_text, flag_of
from smp.config.layers import effective
from smp.config.resolve import resolve_model
from smp.convert.huggingface.config import FREE, in_one_form, of_kinds
from smp.convert.huggingface.foreign import differences
from smp.models.inventory import weights_of

_SILENT = frozenset(
    ("model", "model_implementation", "model_config", "init_method_std", "make_vocab_size_divisible_by")
)
"""Settings that mean nothing once there are weights: how they began, and padding that no checkpoint has."""

_DERIVED = frozenset(("ffn_hidden_size", "moe_ffn_hidden_size", "kv_channels", "num_query_groups"))
"""Settings that follow from others where they are not given."""


def fits(trained: ModelConfig, asked: ModelConfig) -> bool:
    """Whether the two models have the same tensors. Both are resolved."""
    if trained.is_foreign or asked.is_foreign:  # equal descriptions need no meta model of transformers
        return not differences(trained, asked) or (trained.is_foreign and asked.is_foreign and _alike(trained, asked))
    return _alike(trained, asked)


def _alike(trained: ModelConfig, asked: ModelConfig) -> bool:
    return _shapes(trained) == _shapes(asked)


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {parameter.name: parameter.shape for parameter in weights_of(model)}


def misfit(trained: ModelConfig, asked: ModelConfig) -> str | None:
    """The setting by which ``asked`` has other tensors than ``trained``; None: all fit."""
    if fits(trained, asked):
        return None
    if trained.is_foreign or asked.is_foreign:
        raise ConfigError(f"the weights are of another model: {'; '.join(differences(trained, asked))}")
    different = [n for n, value in vars(trained).items() if n not in _SILENT and getattr(asked, n) != value]
    # Settings that were given come before those that follow from them: the message names the cause.
    different.sort(key=_DERIVED.__contains__)
    # A setting that alone changes the tensors is the clearest answer; a combination names its
    # first.
    alone = (name for name in different if not _fits_with(trained, name, getattr(asked, name)))
    return next(alone, different[0])


def _fits_with(trained: ModelConfig, name: str, value: Any) -> bool:
    """Whether changing this one setting leaves the tensors as they are."""
    try:
        return fits(trained, resolve_model(effective(replace(trained, **{name: value}))))
    except ConfigError:  # it does not go with the others: they had to change as well
        return False


def changes(trained: ModelConfig, asked: ModelConfig, leave: Collection[str] = ()) -> str:
    """The settings that ``asked`` changes, as ``--rotary-base 10000 -> 500000, ...``; empty: nothing.

    Args:
        leave: names of settings that are not to be said.
    """
    if trained.is_foreign or asked.is_foreign:
        return "; ".join(differences(trained, asked))
    before, now = in_one_form(trained), in_one_form(asked)
    # The canonical form of a setting may follow from other settings: only those that were set are
    # listed.
    one, other = vars(effective(trained)), vars(effective(asked))
    said = [n for n in one if n not in _SILENT and n not in leave and before[n] != now[n] and one[n] != other[n]]
    return ", ".join(f"{flag_of(name)} {_text(one[name])} -> {_text(other[name])}" for name in said)


def changes_of_files(described: ModelConfig, asked: ModelConfig, leave: Collection[str] = ()) -> str:
    """:func:`changes`, where ``described`` comes from another program's file, which has no settings of training."""
    return changes(described, asked, {*FREE, *leave})


def other_than_trained(load: object, changed: str) -> str:
    """The line for the user about what :func:`changes` found in the model at ``load``."""
    return f"--load {load}: the model differs from how it was trained: {changed}"


def _text(value: Any) -> str:
    # 1e15: larger floats do not have every whole number.
    return as_text(int(value) if type(value) is float and value.is_integer() and abs(value) < 1e15 else value)


def saved_model(saved: Mapping[str, Any], where: str) -> ModelConfig:
    """The model that a checkpoint's settings describe. Settings newer than the checkpoint are at their default.

    Raises:
        ConfigError: they are of no model.
    """
    # Settings that a later version has dropped are ignored.
    known = {f.name: saved[f.name] for f in fields(ModelConfig) if f.name in saved}
    try:
        return resolve_model(effective(of_kinds(known)))
    except (ConfigError, TypeError, OverflowError) as error:
        raise ConfigError(f"{where}: {error}") from None
