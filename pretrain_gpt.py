"""Pretrain a Llama/GPT-family model.

    torchrun --nproc-per-node 2 pretrain_gpt.py --model debug --mock-data --vocab-size 1000 --train-iters 20

``--help`` lists every setting, ``--dry-run`` shows what a command line resolves to. The last line of defence against a
wrong run is this order: settings are read and checked before torch is imported, and nothing is written until they fit
together.
"""

from __future__ import annotations

import sys
from pathlib import Path

from smp.config import ConfigError
from smp.models.presets import PRESETS
from smp.training.process import Process, forget_status, status_path, write_status
from smp.training.settings import read_settings, report, status_file_in


def main(argv: list[str]) -> int:
    """Parse, build, run. Returns the exit code: 0, 1 when the run failed, 2 when it could not start."""
    try:
        process = Process.from_environment()
    except ConfigError as error:
        report(str(error), 0)
        return 2
    try:
        config = read_settings(argv, PRESETS, process.world_size)
        if not config.training.dry_run:
            process.require_launcher()
            if process.rank == 0:
                forget_status(status_path(config.logging))
    except ConfigError as error:
        report(str(error), process.rank)
        if process.rank == 0 and (path := status_file_in(argv)) is not None:
            try:
                write_status(Path(path), "bad_config", str(error), 0)
            except OSError as unwritable:
                if not str(error).startswith("--status-file"):
                    report(f"--status-file {path}: {unwritable}", 0)
        return 2
    from smp.training.pretrain import launch  # imports torch, which takes seconds

    return launch(config, process)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
