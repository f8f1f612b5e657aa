"""The schedules by name. Each is a module: a function from sizes to an order of computation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from smp.config import ConfigError
from smp.pipeline.actions import Schedule
from smp.pipeline.communication import add_communication
from smp.pipeline.schedules import gpipe, interleaved, one_f_one_b, zb_h1, zb_v
from smp.pipeline.schedules.evaluation import forward_only


class ScheduleModule(Protocol):
    """What a file in this folder holds."""

    CHUNKS: int  # default

    def schedule(self, ranks: int, micro_batches: int, chunks: int) -> Schedule:
        """Computation only. Raises ConfigError for sizes that it cannot take."""


SCHEDULES: Mapping[str, ScheduleModule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
}


def build_schedule(
    name: str,
    ranks: int,
    micro_batches: int,
    chunks: int | None = None,
    prefetch: int = 1,
    reshard_after_use: bool = False,
) -> Schedule:
    """A complete schedule for training.

    Args:
        name: key of ``SCHEDULES``.
        ranks: pipeline-parallel processes.
        micro_batches: per step.
        chunks: stages per rank; default: what the schedule needs, or 2.
        prefetch, reshard_after_use: see ``add_communication``.

    Raises:
        ConfigError: unknown name, or sizes that the schedule cannot take.
    """
    return add_communication(_order(name, ranks, micro_batches, chunks), prefetch, reshard_after_use)


def build_forward_schedule(
    name: str,
    ranks: int,
    micro_batches: int,
    chunks: int | None = None,
    prefetch: int = 1,
    reshard_after_use: bool = False,
) -> Schedule:
    """A complete schedule for evaluation, with stages on the ranks where training with ``name`` has them.

    Arguments and errors as for ``build_schedule``.
    """
    training = _order(name, ranks, micro_batches, chunks)
    return add_communication(forward_only(training), prefetch, reshard_after_use)


def _order(name: str, ranks: int, micro_batches: int, chunks: int | None) -> Schedule:
    if name not in SCHEDULES:
        raise ConfigError(f"--pipeline-schedule {name!r} does not exist; there are {', '.join(SCHEDULES)}")
    module = SCHEDULES[name]
    return module.schedule(ranks, micro_batches, module.CHUNKS if chunks is None else chunks)
