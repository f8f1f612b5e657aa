import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smp.config.schema import ConfigError, DataConfig
from smp.data.build import build_datasets
from smp.data.gpt_dataset import GPTDataset
from smp.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from smp.data.loader import BatchLoader, RankBatch
from smp.data.mock_dataset import MockDataset
from smp.data.packed_dataset import PackedDataset
from smp.data.sample import Sample
from tests.data.test_gpt_dataset import tokens_of


def read(dataset: object, micro: int, count: int, dp_size: int, start: int, steps: int) -> list[list[RankBatch]]:
    """[step][rank] batches of every rank."""
    loaders = [
        BatchLoader(
            dataset,
            micro_batch_size=micro,
            batch_size=micro * count * dp_size,
            dp_rank=rank,
            dp_size=dp_size,
            start_sample=start,
        )
        for rank in range(dp_size)
    ]
    batches = [[next(loader) for loader in loaders] for _ in range(steps)]
    assert {loader.consumed_samples for loader in loaders} == {start + steps * micro * count * dp_size}
    for loader in loaders:
        loader.close()
    return batches


def test_which_rank_reads_which_sample() -> None:
    (step,) = read(MockDataset(50, 8, 0), micro=2, count=3, dp_size=2, start=24, steps=1)
    assert step[0].sample_index.tolist() == [[24, 25], [28, 29], [32, 33]]
    assert step[1].sample_index.tolist() == [[26, 27], [30, 31], [34, 35]]


def test_tokens_and_labels_are_the_sample_shifted_by_one() -> None:
    data = MockDataset(50, 8, 0)
    (step,) = read(data, micro=2, count=3, dp_size=2, start=5, steps=1)
    for batch in step:
        assert batch.input_ids.shape == batch.labels.shape == (3, 2, 8)
        assert batch.input_ids.dtype == batch.labels.dtype == batch.sample_index.dtype == torch.int64
        for place in np.ndindex(3, 2):
            sample = tokens_of(data, int(batch.sample_index[place])).tolist()
            assert batch.input_ids[place].tolist() == sample[:-1] and batch.labels[place].tolist() == sample[1:]


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 50))
def test_a_step_holds_the_same_samples_in_every_layout(micro: int, count: int, dp_size: int, start: int) -> None:
    data = MockDataset(50, 4, 0)
    size = micro * count * dp_size
    for number, step in enumerate(read(data, micro, count, dp_size, start, steps=2)):
        indices = torch.cat([batch.sample_index.flatten() for batch in step]).sort().values
        assert indices.tolist() == list(range(start + number * size, start + (number + 1) * size))


def test_a_resumed_run_reads_what_the_first_would_have(tmp_path: Path) -> None:
    data = real_dataset(tmp_path)
    steps = read(data, micro=1, count=2, dp_size=2, start=0, steps=6)
    resumed = read(real_dataset(tmp_path), micro=4, count=1, dp_size=1, start=12, steps=3)
    for before, (after,) in zip(steps[3:], resumed, strict=True):
        rows = {
            int(i): row
            for b in before
            for i, row in zip(b.sample_index.flatten(), b.input_ids.view(-1, 4), strict=True)
        }
        for index, row in zip(after.sample_index.flatten(), after.input_ids.view(-1, 4), strict=True):
            assert torch.equal(rows[int(index)], row)


def real_dataset(folder: Path) -> GPTDataset:
    with IndexedDatasetWriter(folder / "data", np.uint16) as writer:
        for document in range(5):
            writer.add_document(range(document * 7, document * 7 + 7))
    return GPTDataset(IndexedDataset(folder / "data"), range(5), 4, seed=1)  # 8 samples per epoch


class FailsAt(MockDataset):
    """A dataset whose sample ``bad`` cannot be read."""

    bad = 4

    def sample(self, index: int) -> Sample:
        if index == self.bad:
            raise ValueError(f"sample {index} is bad")
        return super().sample(index)


def test_an_error_of_the_reader_is_raised_where_the_batch_is_due_and_stays() -> None:
    loader = BatchLoader(FailsAt(50, 4, 0), micro_batch_size=2, batch_size=2, dp_rank=0, dp_size=1)
    assert [next(loader).sample_index.tolist() for _ in range(2)] == [[[0, 1]], [[2, 3]]]
    for _ in range(3):
        with pytest.raises(ValueError, match="sample 4 is bad"):
            next(loader)
    assert loader.consumed_samples == 4
    loader.close()


def test_close_ends_the_thread() -> None:
    before = threading.active_count()
    loader = BatchLoader(MockDataset(50, 4, 0), micro_batch_size=2, batch_size=2, dp_rank=0, dp_size=1)
    next(loader)
    assert threading.active_count() == before + 1
    loader.close()
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="closed"):
        next(loader)


def test_padding_is_no_token(tmp_path: Path) -> None:
    """Two documents of five tokens are eight steps from one to the next, in a sequence of ten places."""
    with IndexedDatasetWriter(tmp_path / "data", np.uint16) as writer:
        for _ in range(4):
            writer.add_document(range(5))
    packed = PackedDataset(IndexedDataset(tmp_path / "data"), range(4), 10, seed=1)
    ((batch,),) = read(packed, micro=2, count=1, dp_size=1, start=0, steps=1)
    assert batch.input_ids.numel() == 20 and batch.num_tokens == 16 == batch.num_valid()
    ((batch,),) = read(MockDataset(50, 8, 0), micro=2, count=3, dp_size=1, start=0, steps=1)
    assert batch.num_tokens == batch.input_ids.numel() == 48


def test_build_mock() -> None:
    train, valid, test = build_datasets(DataConfig(mock_data=True, seq_length=16), vocab_size=50, seed=1)
    assert valid is not None and train.seq_length == valid.seq_length == 16 and test is None
    assert train.sample(0).input_ids.tolist() != valid.sample(0).input_ids.tolist()


def test_build_from_files(tmp_path: Path) -> None:
    real_dataset(tmp_path)
    config = DataConfig(data_path=str(tmp_path / "data"), seq_length=4, split="3,2")
    train, valid, _ = build_datasets(config, vocab_size=35, seed=1)
    assert valid is not None and (train.samples_per_epoch, valid.samples_per_epoch) == (5, 3)
    assert max(valid.sample(i).input_ids.max() for i in range(3)) >= 21
    assert max(train.sample(i).input_ids.max() for i in range(5)) < 21
    with pytest.raises(ValueError, match="token id 34 in document 4 at offset 6, the vocabulary has 34"):
        build_datasets(config, vocab_size=34, seed=1)


def test_build_refuses(tmp_path: Path) -> None:
    real_dataset(tmp_path)
    prefix = str(tmp_path / "data")
    for both in (DataConfig(seq_length=4), DataConfig(data_path=prefix, mock_data=True, seq_length=4)):
        with pytest.raises(ConfigError, match="one of --data-path and --mock-data"):
            build_datasets(both, 35, 1)
    with pytest.raises(ValueError, match="hold 35 tokens, one sample needs 101"):
        build_datasets(DataConfig(data_path=prefix, seq_length=100, split="1"), 35, 1)
    assert build_datasets(DataConfig(data_path=prefix, seq_length=4, split="1"), 35, 1).valid is None
