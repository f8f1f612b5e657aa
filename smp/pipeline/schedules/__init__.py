"""The schedules by name. Each is a module: a function from sizes to an order of computation. Read ``gpipe`` first, the
shortest one."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from smp.config import ConfigError
from smp.pipeline.actions import Schedule
from smp.pipeline.communication import add_communication
from smp.pipeline.schedules import gpipe, interleaved, one_f_one_b, zb_h1, zb_v
from smp.pipeline.schedules.evaluation import forward_only

SCHEDULES: Mapping[str, ModuleType] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
}
"""Each file has ``schedule(ranks, micro_batches, chunks)``, computation only, which raises ConfigError for sizes that
it cannot take, and ``CHUNKS``, the default."""


def build_schedule(
    name: str,
    ranks: int,
    micro_batches: int,
    chunks: int | None = None,
    *,
    prefetch: int = 1,
    reshard_after_use: bool = False,
    evaluation: bool = False,
) -> Schedule:
    """A complete schedule.

    Args:
        name: key of ``SCHEDULES``.
        ranks: pipeline-parallel processes.
        micro_batches: per step.
        chunks: stages per rank; default: what the schedule needs, or 2.
        prefetch, reshard_after_use: see ``add_communication``.
        evaluation: forward only, with stages on the ranks where training has them.

    Raises:
        ConfigError: unknown name, or sizes that the schedule cannot take.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"--pipeline-schedule {name!r} does not exist; there are {', '.join(SCHEDULES)}")
    module = SCHEDULES[name]
    order: Schedule = module.schedule(ranks, micro_batches, module.CHUNKS if chunks is None else chunks)
    # Evaluation is derived from the training order because stages must lie on the ranks that hold their weights.
    return add_communication(forward_only(order) if evaluation else order, prefetch, reshard_after_use)
