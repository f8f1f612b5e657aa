"""Fine-tune a Llama/GPT-family model: all of its weights or adapters, on samples or on preferences.

    torchrun --nproc-per-node 2 finetune.py --load HF_FOLDER --data-path samples.jsonl --train-epochs 1 --lora-rank 16

``--help`` lists every setting, ``--dry-run`` shows what a command line resolves to, ``--preview 5`` what the model
would see. Settings are checked before torch is imported, and nothing is written until all fits together.
"""

from __future__ import annotations

import sys
from pathlib import Path

from smp.config import ConfigError
from smp.training.finetune_settings import read_finetune_settings
from smp.training.process import Process, write_status
from smp.training.settings import report, status_file_in


def main(argv: list[str]) -> int:
    """Parse, build, run. Returns the exit code: 0, 1 when the run failed, 2 when it could not start."""
    process = Process.from_environment()
    try:
        config, data = read_finetune_settings(argv, process.world_size)
    except ConfigError as error:
        report(str(error), process.rank)
        if process.rank == 0 and (path := status_file_in(argv)) is not None:
            write_status(Path(path), "bad_config", str(error), 0)
        return 2
    if config.data.preview and data is not None:
        if process.rank == 0:
            print("\n".join([*data.lines, *data.preview(config.data.preview)]))
        return 0
    from smp.training.finetune import launch_finetune  # imports torch, which takes seconds

    return launch_finetune(config, data, process)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
