"""The order of the data is a function of (seed, contents, sample number) alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import smp.data.epochs as epochs_module
from smp.config.schema import DataConfig
from smp.data.blend import BlendedDataset
from smp.data.build import build_datasets
from smp.data.indexed_dataset import IndexedDatasetWriter
from smp.data.loader import BatchLoader
from tests.data.test_epochs import wait
from tests.data.test_gpt_dataset import write

GLOBAL = 24


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """A blend of two corpora, every token of which is another."""
    write(tmp_path / "one", [7, 0, 12, 30, 5, 9, 22, 14, 60])
    with IndexedDatasetWriter(tmp_path / "two", np.int32) as writer:
        for first in range(1000, 1300, 20):
            writer.add_document(np.arange(first, first + 20))
    path = f"0.4 {tmp_path}/one 0.6 {tmp_path}/two"
    return DataConfig(data_path=path, seq_length=8, split="1,0,0", data_cache_path=str(tmp_path / "cache"))


def train(config: DataConfig, seed: int = 1) -> BlendedDataset:
    return build_datasets(config, 2000, seed).train


def rows(
    data: BlendedDataset, dp: int = 1, workers: int = 1, micro: int = 1, start: int = 0, steps: int = 4
) -> torch.Tensor:
    """Token rows in the order of their numbers, (steps x GLOBAL, seq + 1), and their labels' last column."""
    loaders = [
        BatchLoader(
            data,
            micro_batch_size=micro,
            batch_size=GLOBAL,
            dp_rank=rank,
            dp_size=dp,
            start_sample=start,
            num_workers=workers,
        )
        for rank in range(dp)
    ]
    batches = [next(loader) for _ in range(steps) for loader in loaders]
    for loader in loaders:
        loader.close()
    index = torch.cat([batch.sample_index.flatten() for batch in batches])
    tokens = torch.cat([torch.cat((b.input_ids, b.labels[..., -1:]), dim=-1).flatten(0, 1) for b in batches])
    assert sorted(index.tolist()) == list(range(start, start + steps * GLOBAL))
    return tokens[index.argsort()]


@pytest.mark.parametrize("dp", [1, 2, 3, 8])
@pytest.mark.parametrize("workers", [0, 1, 4])
def test_ranks_and_workers_change_nothing(config: DataConfig, dp: int, workers: int) -> None:
    assert torch.equal(rows(train(config), dp, workers), rows(train(config)))


@pytest.mark.parametrize("micro", [2, 6, 24])
def test_accumulation_changes_nothing(config: DataConfig, micro: int) -> None:
    assert torch.equal(rows(train(config), micro=micro), rows(train(config)))


def test_resume_at_any_step(config: DataConfig) -> None:
    whole = rows(train(config), steps=12)
    for step in range(12):
        resumed = rows(train(config), dp=2, start=step * GLOBAL, steps=12 - step)
        assert torch.equal(resumed, whole[step * GLOBAL :])


def test_the_length_of_the_run_changes_nothing(config: DataConfig) -> None:
    """Samples of 100 iterations are the first of 10,000: no setting of either reaches the data; read out of order."""
    data, late_first = train(config), train(config)
    late_first.sample(10_000 * GLOBAL)
    for i in (0, 1, 99 * GLOBAL, 100 * GLOBAL - 1):
        assert data.sample(i).input_ids.tolist() == late_first.sample(i).input_ids.tolist()


def test_the_cache_changes_nothing(config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory = rows(train(config))
    assert not list((tmp_path / "cache").glob("*epoch*"))
    monkeypatch.setattr(epochs_module, "LARGE", 1)
    first = rows(train(config))
    wait()
    assert torch.equal(first, in_memory) and list((tmp_path / "cache").glob("*epoch*"))
    kept = sorted((tmp_path / "cache").glob("*.npy"))
    changed = [path.stat().st_mtime_ns for path in kept]
    assert torch.equal(rows(train(config)), first)
    wait()
    assert [path.stat().st_mtime_ns for path in kept] == changed
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    assert torch.equal(rows(train(config)), first)


def test_other_data_under_an_old_name_get_another_index(config: DataConfig, tmp_path: Path) -> None:
    first = rows(train(config))
    write(tmp_path / "one", [50, 60, 70])
    second = rows(train(config))
    assert not torch.equal(first, second)
    assert torch.equal(second, rows(train(replace(config, data_cache_path=str(tmp_path / "another")))))


@pytest.mark.parametrize("packing", ["stream", "best-fit"])
def test_each_sample_once_per_epoch(config: DataConfig, packing: str) -> None:
    config.packing = packing  # type: ignore[assignment]
    data = train(config)
    for source in data.sources:
        n = source.data.samples_per_epoch
        assert n is not None
        for epoch in range(3):
            samples = [source.data.sample(epoch * n + i) for i in range(n)]
            seen = Counter(
                pair for s in samples for pair in zip(s.input_ids[s.labels >= 0], s.labels[s.labels >= 0], strict=True)
            )
            assert max(seen.values()) == 1
    counts = Counter(data.locate(i)[0] for i in range(1000))
    assert (counts[0], counts[1]) == (400, 600)


def test_seeds_differ(config: DataConfig) -> None:
    assert not torch.equal(rows(train(config, 1)), rows(train(config, 2)))
