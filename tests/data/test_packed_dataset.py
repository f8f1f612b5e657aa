"""Best-fit samples: every step between two tokens once per epoch, no document cut that fits."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import smp.data.epochs as epochs_module
from smp.data.cache import NodeCache
from smp.data.packed_dataset import PackedDataset
from smp.data.sample import IGNORE_INDEX
from tests.data.test_gpt_dataset import write


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=25), st.integers(1, 12), st.integers(0, 2))
def test_every_step_from_token_to_token_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int, epoch: int
) -> None:
    dataset = write(tmp_path_factory.mktemp("packed") / "data", lengths)
    data = PackedDataset(dataset, range(len(lengths)), seq_length, seed=0)
    n = data.samples_per_epoch
    steps: Counter[tuple[int, int]] = Counter()
    filled = 0
    for i in range(epoch * n, (epoch + 1) * n):
        sample = data.sample(i)
        assert sample.input_ids.shape == sample.labels.shape == sample.document_ids.shape == (seq_length,)
        counts = sample.labels != IGNORE_INDEX
        steps.update(zip(sample.input_ids[counts].tolist(), sample.labels[counts].tolist(), strict=True))
        filled += int(counts.sum())
        owner = np.searchsorted(dataset.document_offsets, sample.input_ids[counts], side="right")
        for number in set(sample.document_ids[counts].tolist()):  # one document, whole if it fits
            part = sample.document_ids[counts] == number
            assert len(set(owner[part].tolist())) == 1
            length = lengths[int(owner[part][0]) - 1]
            assert length > seq_length + 1 or int(part.sum()) == length - 1
    starts = dataset.document_offsets.tolist()
    expected = [(t, t + 1) for a, b in itertools.pairwise(starts) for t in range(a, b - 1)]
    assert steps == Counter(expected)
    assert data.filled == pytest.approx(filled / max(1, n * seq_length))


def test_epochs_differ_and_the_order_is_a_function_of_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs_module, "LARGE", 1)
    dataset = write(tmp_path / "data", [9, 4, 7, 7, 12, 3, 5, 7, 7])

    def epoch(number: int, seed: int, cache: NodeCache | None = None) -> list[list[int]]:
        data = PackedDataset(dataset, range(9), 12, seed, cache=cache, key="k")
        n = data.samples_per_epoch
        return [data.sample(number * n + i).input_ids.tolist() for i in range(n)]

    assert epoch(0, 1) == epoch(0, 1) == epoch(0, 1, NodeCache(tmp_path / "cache"))
    assert len({str(order) for order in (epoch(0, 1), epoch(1, 1), epoch(2, 1), epoch(0, 2))}) == 4
    assert epoch(2, 1) == epoch(2, 1, NodeCache(tmp_path / "cache"))


def test_nothing_to_learn_from_is_refused(tmp_path: Path) -> None:
    data = PackedDataset(write(tmp_path / "data", [1, 0, 1]), range(3), 4, seed=0)
    assert data.samples_per_epoch == 0
    with pytest.raises(ValueError, match="documents 0 to 3 hold no two tokens in a row"):
        data.sample(0)


def test_positions_begin_anew_with_every_document(tmp_path: Path) -> None:
    data = PackedDataset(write(tmp_path / "data", [4, 3]), range(2), 7, seed=0)
    sample = data.sample(0)
    assert sample.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert sample.document_ids.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert sample.labels.tolist() == [1, 2, 3, 5, 6, IGNORE_INDEX, IGNORE_INDEX]
