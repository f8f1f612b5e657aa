"""Fine-tune a Llama/GPT-family model: all of its weights or adapters, on samples, on preferences, or by rewards of what
it writes itself.

    torchrun --nproc-per-node 2 finetune.py --load HF_FOLDER --data-path samples.jsonl --train-epochs 1 --lora-rank 16

``--help`` lists every setting, ``--dry-run`` shows what a command line resolves to, ``--preview 5`` what the model
would see. Settings are checked before torch is imported, --save before the data are read, and nothing is written until
all fits together.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from smp.config import Config, LoggingConfig
from smp.config.command_line.entry_points import FINETUNE
from smp.data.tuning.build import PromptData, TuningData
from smp.training.entry import importing, run_command
from smp.training.inprocess.link import has_keeper
from smp.training.process import Process
from smp.training.tuning.settings import read_finetune_settings, uncounted

if TYPE_CHECKING:
    from smp.training.kind import RunKind, StepCallback

Settings = tuple[Config, TuningData | PromptData | None]


def read(argv: list[str], world_size: int) -> tuple[Settings, LoggingConfig | None]:
    """Settings and data, and where logs of a run go."""
    config, data = read_finetune_settings(argv, world_size, check_save)
    return (config, data), None if config.training.dry_run or config.data.preview else config.logging


def check_save(config: Config) -> None:
    """Refuse a --save that is in use or holds another run's checkpoints; one process looks for all."""
    if config.checkpoint.save is not None and Process.from_environment().rank == 0 and not has_keeper():
        from smp.training.checkpoints.saving import try_save  # imports torch, which takes seconds

        try_save(config, print)


def run(settings: Settings, process: Process, callbacks: Sequence[StepCallback] = ()) -> int:
    """Show samples, or build and run."""
    config, data = settings
    if config.data.preview and data is not None:
        if process.rank == 0:
            samples = data.preview(config.data.preview, colours=sys.stdout is not None and sys.stdout.isatty())
            print("\n".join([*data.lines, *samples]))
        return 0
    with importing():  # torch, which takes seconds
        from smp.training.launch import launch
        from smp.training.tuning.kinds import tuning_kind

    def parts() -> RunKind:
        assert data is not None, "only a dry run may have none"
        kind = tuning_kind(config, data)
        kind.callbacks = callbacks
        return kind

    return launch(config, process, parts, notes=(*(data.lines if data else ()), *uncounted(config)))


def main(argv: list[str], callbacks: Sequence[StepCallback] = ()) -> int:
    """Parse, build, run. Returns the exit code: 0, 1 when it failed, 2 when what was asked cannot be done.

    Args:
        argv: the command line.
        callbacks: called after each step, see :data:`smp.training.kind.StepCallback`.
    """
    return run_command(argv, FINETUNE.own["log_dir"].default, read, partial(run, callbacks=callbacks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
