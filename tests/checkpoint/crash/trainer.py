"""One rank of a run that saves after every step and whose state is known: all weights are the iteration's number.

python trainer.py ROOT STEPS [flags]: resumes from ROOT, checks what it got, makes STEPS more steps. Environment: RANK,
WORLD_SIZE, STORE. The file ROOT.stop ends it before that. ROOT.log has a line for each checkpoint that the run was told
to be committed.
"""

from __future__ import annotations

import datetime
import importlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from smp.config import Config, load_config, resolve
from smp.models.presets import PRESETS
from smp.parallel.agree import any_rank
from smp.training.checkpoints.saving import RunCheckpoints


def settings(root: str, flags: list[str]) -> Config:
    words = f"--mock-data --vocab-size 9 --train-iters 1 --save {root} --load auto --save-interval 1"
    return resolve(load_config([*words.split(), *flags], PRESETS), int(os.environ["WORLD_SIZE"]))


def main(root: str, steps: int, flags: list[str]) -> None:
    importlib.import_module("smp.checkpoint.background.async_saver").LAST_WAIT = 1.0  # type: ignore[attr-defined]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = dist.FileStore(os.environ["STORE"], world_size)
    patience = datetime.timedelta(seconds=200)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=patience)

    def say(line: str) -> None:
        if rank == 0:
            print(line, flush=True)
            if line.startswith("saved "):
                with open(root + ".log", "a") as told:
                    told.write(line.split("iter_")[1].split()[0] + "\n")

    # replicas are dealt out over the ranks, so both of them write
    model = nn.ParameterDict({f"w{i}": nn.Parameter(torch.zeros(100 + i)) for i in range(6)})
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = RunCheckpoints(settings(root, flags), say)
    progress = checkpoints.load(model, optimizer)
    for name, weight in model.items():
        assert weight.eq(progress.iteration).all(), (name, progress.iteration, weight)
    log = Path(root + ".log")
    told = [int(line) for line in log.read_text().split()] if log.exists() else [0]
    assert progress.iteration >= max(told), f"started from {progress.iteration}, though {max(told)} was committed"
    print(f"rank {rank} started from {progress.iteration}", flush=True)
    for _ in range(steps):
        if any_rank(Path(root + ".stop").exists()):
            break
        progress.iteration += 1
        with torch.no_grad():
            for weight in model.values():
                weight.fill_(progress.iteration)
        checkpoints.poll()
        checkpoints.save(model, optimizer, progress, None)
    checkpoints.finish(model, optimizer, progress, None)
    checkpoints.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
