"""Multipliers of parts of a layer, several in one setting (Falcon-H1)."""

from __future__ import annotations

import math

from smp.config.command_line.fields import flag_of, require
from smp.config.model import ModelConfig
from smp.config.schema import ConfigError


def ssm_multipliers(model: ModelConfig) -> tuple[float, ...]:
    """Multipliers of Mamba-2's gates, values, keys, queries and steps; raises as :func:`_numbers`."""
    return _numbers(model, "ssm_multipliers", 5)


def mlp_multipliers(model: ModelConfig) -> tuple[float, ...]:
    """Multipliers of an MLP's gate and of its result; raises as :func:`_numbers`."""
    return _numbers(model, "mlp_multipliers", 2)


def as_text(numbers: tuple[float, ...]) -> str | None:
    """The setting for these numbers, one text for equal numbers; None: all are 1."""
    return None if set(numbers) <= {1.0} else " ".join(str(float(number)) for number in numbers)


def check_multipliers(model: ModelConfig) -> None:
    """Check a model with its defaults filled in.

    Raises:
        ConfigError: one line that names the flag, and what works.
    """
    ssm_multipliers(model)
    mlp_multipliers(model)
    require(
        model.mlp_multipliers is None or model.num_experts is None,
        f"--mlp-multipliers {model.mlp_multipliers} and --num-experts exclude each other: experts have none; leave out "
        "one",
    )


def _numbers(model: ModelConfig, name: str, count: int) -> tuple[float, ...]:
    """The numbers of a setting; 1 each where it is not given.

    Raises:
        ConfigError: they are no numbers above 0, or not ``count``.
    """
    text, flag = getattr(model, name), flag_of(name)
    if text is None:
        return (1.0,) * count
    try:
        numbers = tuple(float(word) for word in text.split())
    except ValueError:
        raise ConfigError(f"{flag} {text}: expected {count} numbers") from None
    require(len(numbers) == count, f"{flag} {text}: expected {count} numbers, not {len(numbers)}")
    # 0 would cut a branch off, and nan or inf pass float(): refused here, where the flag is known.
    require(all(0 < number < math.inf for number in numbers), f"{flag} {text}: expected numbers above 0")
    return numbers
