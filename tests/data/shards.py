"""Tokenized shards on a disk, and runs that read them there and elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from smp.data.indexed_dataset import IndexedDatasetWriter
from tests.training.flag_runs import TINY, Run, run_here

SHARDS = ("a", "b")
DATA = TINY.replace("--mock-data ", "")


def write_shards(folder: Path) -> None:
    """``a`` and ``b``, each .bin and .idx."""
    drawn = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for shard in SHARDS:
        with IndexedDatasetWriter(folder / shard, np.uint16) as writer:
            for length in drawn.integers(5, 60, 400):
                writer.add_document(drawn.integers(0, 97, length))


def train(folder: Path, place: Path | str, flags: str) -> Run:
    """Four steps on both shards, with a cache of its own."""
    data = " ".join(f"{place}/{shard}" for shard in SHARDS)
    run = run_here(folder, f"--data-path {data} --data-cache-path cache --train-iters 4 {flags}", base=DATA)
    assert run.code == 0, run.err
    return run


def check_streamed(folder: Path, local: Path, url: str) -> list[Run]:
    """Runs on the shards at ``url`` train with the bits of those on a disk, also when a machine that has read nothing
    yet goes on in the middle; returns them."""
    wanted = train(folder / "disk", local, "")
    whole = train(folder / "whole", url, "")
    first = train(folder / "first", url, f"--exit-interval 2 --save {folder}/checkpoints")
    second = train(folder / "second", url, f"--load auto --save {folder}/checkpoints")
    assert len(set(wanted.losses)) == 4 and whole.losses == wanted.losses
    assert first.losses + second.losses == wanted.losses and len(second.losses) == 2
    for run in (whole, second):
        assert run.final.keys() == wanted.final.keys()
        assert all(torch.equal(run.final[name], tensor) for name, tensor in wanted.final.items())
        assert not list(run.folder.rglob("*.bin")), "tokens are not kept"
    return [whole, first, second]
