"""From the data settings to a training and a validation dataset."""

from __future__ import annotations

from smp.config.schema import ConfigError, DataConfig
from smp.data.gpt_dataset import GPTDataset, SampleDataset, split_documents
from smp.data.indexed_dataset import IndexedDataset
from smp.data.mock_dataset import MockDataset


def build_datasets(data: DataConfig, vocab_size: int, seed: int) -> tuple[SampleDataset, SampleDataset]:
    """Training and validation samples, keyed by ``seed``.

    The validation split may be too small for one sample: its ``samples_per_epoch`` is then 0 and reading it raises.

    Args:
        data: ``seq_length`` is resolved (not None).
        vocab_size: unpadded; token ids from here on are refused.

    Raises:
        ConfigError: neither or both of --data-path and --mock-data are given.
        ValueError: the files are missing or damaged, or the training split has too few tokens for one sample.
    """
    assert data.seq_length is not None
    if data.mock_data == (data.data_path is not None):
        raise ConfigError(
            f"give one of --data-path and --mock-data (data path {data.data_path}, mock {data.mock_data})"
        )
    if data.data_path is None:
        return (
            MockDataset(vocab_size, data.seq_length, seed, stream=0),
            MockDataset(vocab_size, data.seq_length, seed, stream=1),
        )
    dataset = IndexedDataset(data.data_path)
    train_range, valid_range, _ = split_documents(dataset.num_documents, data.split)
    train = GPTDataset(dataset, train_range, data.seq_length, seed, vocab_size)
    train.check_not_empty()
    return train, GPTDataset(dataset, valid_range, data.seq_length, seed, vocab_size)
