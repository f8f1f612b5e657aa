import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp.config.blend import parse_split
from smp.data.gpt_dataset import GPTDataset, split_documents
from smp.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from smp.data.sample import IGNORE_INDEX, SampleDataset

PINNED = [21, 82, 91, 19, 64, 39, 48, 14, 55, 30, 73, 49, 40, 89, 72, 81, 9, 22, 31, 18, 98, 0]


def write(prefix: Path, lengths: list[int], dtype: type = np.int32) -> IndexedDataset:
    """Documents of the given lengths whose tokens number the whole dataset: 0, 1, 2, ..."""
    ends = np.cumsum([0, *lengths])
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for start, end in itertools.pairwise(ends):
            writer.add_document(np.arange(start, end))
    return IndexedDataset(prefix)


def tokens_of(data: SampleDataset, index: int) -> np.ndarray:
    """A sample and its last label, of data whose labels all count."""
    sample = data.sample(index)
    return np.append(sample.input_ids, sample.labels[-1])


def reference_stream(data: GPTDataset, epoch: int) -> list[int]:
    """An epoch's tokens before the cut, found by joining samples at the token they share."""
    n = data.samples_per_epoch
    samples = [tokens_of(data, epoch * n + i).tolist() for i in range(n)]
    followers = {sample[0]: sample for sample in samples}
    start = next(s[0] for s in samples if s[0] not in {other[-1] for other in samples})
    stream = [start]
    for _ in range(n):
        stream += followers[stream[-1]][1:]
    assert len(stream) == n * data.seq_length + 1
    return stream


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    return write(tmp_path / "data", [7, 0, 12, 1, 30, 5, 0, 9, 22, 14])


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_an_epoch_is_whole_documents_cut_with_one_token_overlap(dataset: IndexedDataset, epoch: int) -> None:
    data = GPTDataset(dataset, range(10), seq_length=9, seed=1)
    assert data.samples_per_epoch == 11
    stream = reference_stream(data, epoch)
    position = 0
    starts = {int(document[0]): document.tolist() for document in map(dataset.document, range(10)) if len(document)}
    while position < len(stream):
        document = starts.pop(stream[position])
        assert stream[position : position + len(document)] == document[: len(stream) - position]
        position += len(document)
    left_out = sum(map(len, starts.values())) + position - len(stream)
    assert left_out == 0  # 100 tokens = 11 x 9 + 1


def test_each_sample_once_per_epoch_and_epochs_differ(dataset: IndexedDataset) -> None:
    data = GPTDataset(dataset, range(10), seq_length=9, seed=1)
    epochs = [[tuple(tokens_of(data, e * 11 + i).tolist()) for i in range(11)] for e in range(3)]
    for epoch in epochs:
        assert Counter(token for sample in epoch for token in sample[:-1]).most_common(1)[0][1] == 1
    assert len(set(map(tuple, epochs))) == 3
    assert set(epochs[0]) != set(epochs[1])  # the documents are shuffled too, not only the cuts


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_any_access_order_gives_the_same_samples(
    tmp_path_factory: pytest.TempPathFactory, indices: list[int], random: object
) -> None:
    dataset = write(tmp_path_factory.mktemp("order") / "data", [7, 12, 1, 30, 50])
    one = GPTDataset(dataset, range(5), seq_length=9, seed=3)
    for index in indices:
        fresh = GPTDataset(dataset, range(5), seq_length=9, seed=3)
        assert tokens_of(one, index).tolist() == tokens_of(fresh, index).tolist()


def test_the_seed_and_the_split_key_the_order(dataset: IndexedDataset) -> None:
    def order(seed: int, documents: range) -> list[int]:
        data = GPTDataset(dataset, documents, seq_length=4, seed=seed)
        return [int(tokens_of(data, i)[0]) for i in range(data.samples_per_epoch)]

    assert order(1, range(10)) == order(1, range(10))
    assert order(1, range(10)) != order(2, range(10))
    tail = order(1, range(5, 10))
    assert min(tail) >= 50  # documents 0..4 hold tokens 0..49


def test_the_order_never_changes(dataset: IndexedDataset) -> None:
    """Pinned: a resumed run must go on with the samples it would have read."""
    data = GPTDataset(dataset, range(10), seq_length=9, seed=1234)
    assert [int(tokens_of(data, i)[0]) for i in range(22)] == PINNED
    assert tokens_of(data, 0).dtype == np.int64 and tokens_of(data, 0).shape == (10,)


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(1, 15), st.integers(0, 2))
def test_every_layout_of_documents(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int, epoch: int
) -> None:
    dataset = write(tmp_path_factory.mktemp("layout") / "data", lengths)
    data = GPTDataset(dataset, range(len(lengths)), seq_length, seed=0)
    n = max(0, sum(lengths) - 1) // seq_length
    assert data.samples_per_epoch == n
    seen = [token for i in range(n) for token in tokens_of(data, epoch * n + i).tolist()[:-1]]
    assert len(seen) == len(set(seen)) == n * seq_length


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 12), st.booleans())
def test_documents_positions_and_labels_are_those_of_the_tokens(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int, mask_ends: bool
) -> None:
    """A token is its place in the data set, so everything else about it can be looked up there."""
    dataset = write(tmp_path_factory.mktemp("labels") / "data", lengths)
    data = GPTDataset(dataset, range(len(lengths)), seq_length, seed=0, mask_ends=mask_ends)
    plain = GPTDataset(dataset, range(len(lengths)), seq_length, seed=0)
    owner = [document for document, length in enumerate(lengths) for _ in range(length)]
    for i in range(2 * data.samples_per_epoch):
        sample, tokens = data.sample(i), tokens_of(plain, i).tolist()
        assert sample.input_ids.tolist() == tokens[:-1]
        runs = [len(list(run)) for _, run in itertools.groupby(owner[token] for token in tokens)]
        assert sample.position_ids.tolist() == [place for run in runs for place in range(run)][:seq_length]
        numbers = sample.document_ids.tolist()
        for (a, b), (x, y) in zip(itertools.pairwise(numbers), itertools.pairwise(tokens), strict=False):
            assert (a < b) if owner[x] != owner[y] else a == b
        ends = [mask_ends and owner[x] != owner[y] for x, y in itertools.pairwise(tokens)]
        assert sample.labels.tolist() == [IGNORE_INDEX if end else y for end, y in zip(ends, tokens[1:], strict=True)]


def test_split_documents() -> None:
    def parts(count: int, split: str) -> tuple[range, range, range]:
        return split_documents(count, parse_split(split))

    assert parts(1000, "969,30,1") == (range(0, 969), range(969, 999), range(999, 1000))
    assert parts(7, "1,1") == (range(0, 4), range(4, 7), range(7, 7))  # Python rounds 3.5 to 4, as Megatron
    assert parts(5, "100") == (range(0, 5), range(5, 5), range(5, 5))
    assert parts(10, "0.5,0.25,0.25") == (range(0, 5), range(5, 8), range(8, 10))


relative = st.one_of(st.integers(0, 1000).map(str), st.floats(0, 1e6).map("{:.3f}".format))
splits = st.lists(relative, min_size=1, max_size=3).filter(lambda words: any(map(float, words))).map(",".join)


@given(st.integers(0, 10**6), splits)
def test_splits_cover_every_document_once(count: int, split: str) -> None:
    parts = split_documents(count, parse_split(split))
    assert parts[0].start == 0 and parts[0].stop == parts[1].start and parts[1].stop == parts[2].start
    assert parts[2].stop == count and sum(map(len, parts)) == count


def test_a_split_without_a_sample(dataset: IndexedDataset) -> None:
    data = GPTDataset(dataset, range(3, 4), seq_length=9, seed=0)
    assert data.samples_per_epoch == 0
    with pytest.raises(ValueError, match=r"documents 3 to 4 hold 1 tokens, one sample needs 10"):
        tokens_of(data, 0)
