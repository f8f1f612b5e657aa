"""Pretrain a Llama/GPT-family model.

    torchrun --nproc-per-node 2 pretrain_gpt.py --model debug --mock-data --vocab-size 1000 --train-iters 20

``--help`` lists every setting, ``--dry-run`` shows what a command line resolves to, ``--from-megatron`` takes a line of
Megatron-LM's. The last line of defence against a wrong run is this order: settings are read and checked before torch is
imported, and nothing is written until they fit together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from smp.config import Config, LoggingConfig
from smp.models.presets import PRESETS
from smp.training.entry import importing, run_command
from smp.training.process import Process
from smp.training.settings import in_own_flags, read_settings

if TYPE_CHECKING:
    from smp.training.kind import RunKind, StepCallback


def read(argv: list[str], world_size: int) -> tuple[Config, LoggingConfig | None]:
    """Settings, and where logs of a run go."""
    argv = in_own_flags(argv, world_size, Process.from_environment().rank)
    config = read_settings(argv, PRESETS, world_size)
    return config, None if config.training.dry_run else config.logging


def run(
    config: Config,
    process: Process,
    kind: Callable[[Config], RunKind] | None = None,
    callbacks: Sequence[StepCallback] = (),
) -> int:
    """Build and run."""
    with importing():  # torch, which takes seconds
        from smp.training.launch import launch
        from smp.training.pretraining import Pretraining

    def parts() -> RunKind:
        made = (kind or Pretraining)(config)
        made.callbacks = callbacks
        return made

    return launch(config, process, parts)


def main(
    argv: list[str],
    kind: Callable[[Config], RunKind] | None = None,
    callbacks: Sequence[StepCallback] = (),
) -> int:
    """Parse, build, run. Returns the exit code: 0, 1 when it failed, 2 when what was asked cannot be done.

    Args:
        argv: the command line.
        kind: a subclass of :class:`smp.training.pretraining.Pretraining`, for a data set of one's own; None: itself.
        callbacks: called after each step, see :data:`smp.training.kind.StepCallback`.
    """
    return run_command(argv, LoggingConfig.log_dir, read, partial(run, kind=kind, callbacks=callbacks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
