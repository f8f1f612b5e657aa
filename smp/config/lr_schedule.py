"""Lengths of the parts of the learning-rate schedule, all in iterations or all in samples.

Iterations are what the schedule counts by default. Samples are Megatron's other way, and the only one under which a
schedule means the same with another batch size: a warm-up in samples rises slowly while a batch that grows is small.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from smp.config.batch import BatchSizes
from smp.config.command_line.fields import flag_of
from smp.config.schema import ConfigError, OptimizerConfig

_PARTS = ("lr_decay", "lr_warmup", "lr_wsd_decay")


class Lengths(NamedTuple):
    """Lengths of the parts of a resolved schedule.

    Attributes:
        unit: ``iters`` or ``samples``.
        warmup: of the linear warm-up.
        decay: where the decay ends; None: there is none.
        final: of WSD's decay.
    """

    unit: str
    warmup: int
    decay: int | None
    final: int | None

    def flag(self, part: str) -> str:
        """The flag of a part, such as ``lr_warmup``."""
        return flag_of(f"{part}_{self.unit}")


def lengths(optim: OptimizerConfig) -> Lengths:
    """The lengths of a resolved config."""
    # resolve_schedule fills in one unit, also with 0: None says that it is the other one.
    if optim.lr_warmup_samples is None:
        return Lengths("iters", optim.lr_warmup_iters, optim.lr_decay_iters, optim.lr_wsd_decay_iters)
    return Lengths("samples", optim.lr_warmup_samples, optim.lr_decay_samples, optim.lr_wsd_decay_samples)


def resolve_schedule(
    optim: OptimizerConfig, sizes: BatchSizes, train_iters: int | None, train_samples: int | None
) -> OptimizerConfig:
    """``optim`` with the lengths of its schedule filled in. In a dry run of unknown length they stay unknown.

    Args:
        optim: as given.
        sizes: of batches.
        train_iters: of the run.
        train_samples: of the run, where its length was given so.

    Raises:
        ConfigError: lengths in both units, or a warm-up said twice.
    """
    # In samples also with a constant batch: the run that resumes it may have another size.
    unit = _unit(optim, "samples" if train_samples is not None else "iters")
    decay, warmup, final = (f"{part}_{unit}" for part in _PARTS)
    given, fraction = getattr(optim, warmup), optim.lr_warmup_fraction
    if fraction is not None and given:
        raise ConfigError(f"{flag_of(warmup)} {given} and --lr-warmup-fraction {fraction} are both given; give one")
    end = getattr(optim, decay)
    if end is None and train_iters is not None:
        # The schedule counts samples: the run's length is converted by the batch sizes.
        end = train_iters if unit == "iters" else train_samples or sizes.samples(train_iters)
    if end is None:
        return optim
    last = getattr(optim, final)
    filled = {
        # A constant rate needs no end.
        decay: None if optim.lr_decay_style == "constant" else end,
        # A fraction is of the whole schedule, as in Megatron.
        warmup: given or 0 if fraction is None else round(fraction * end),
        # WSD's final decay takes a tenth of the run where nothing is said.
        final: max(1, end // 10) if optim.lr_decay_style == "WSD" and last is None else last,
    }
    return replace(optim, lr_warmup_fraction=None, **filled)


def _unit(optim: OptimizerConfig, otherwise: str) -> str:
    """The unit of the given flags, or ``otherwise``. 0 warm-up iterations are the default and say nothing."""
    iters = [name for part in _PARTS if getattr(optim, name := f"{part}_iters")]
    samples = [name for part in _PARTS if getattr(optim, name := f"{part}_samples") is not None]
    if iters and samples:
        both = ", ".join(f"{flag_of(name)} {getattr(optim, name)}" for name in (*iters, *samples))
        raise ConfigError(f"{both}: a schedule counts iterations or samples; give all in one unit")
    return "samples" if samples else "iters" if iters else otherwise
