import numpy as np
import pytest

from smp.data.mock_dataset import MockDataset
from tests.data.test_gpt_dataset import tokens_of
from tools.bigram_baseline import BigramModel, bigram_cross_entropy


def test_samples_are_a_function_of_seed_stream_and_index() -> None:
    def sample(seed: int, stream: int, index: int) -> list[int]:
        return tokens_of(MockDataset(100, 32, seed, stream), index).tolist()

    assert sample(1, 0, 5) == sample(1, 0, 5)
    others = [sample(1, 0, 6), sample(2, 0, 5), sample(1, 1, 5)]
    assert sample(1, 0, 5) not in others
    tokens = MockDataset(100, 32, 1).sample(5).input_ids
    assert tokens.shape == (32,) and tokens.dtype == np.int64


@pytest.mark.parametrize("vocab_size", [2, 3, 256])
def test_all_tokens_occur_and_none_other(vocab_size: int) -> None:
    data = MockDataset(vocab_size, 500, seed=0)
    assert set(np.concatenate([tokens_of(data, i) for i in range(20)]).tolist()) == set(range(vocab_size))


def test_there_is_something_to_learn() -> None:
    data = MockDataset(256, 1000, seed=0)
    tokens = np.concatenate([tokens_of(data, i) for i in range(100)])
    nats, _ = bigram_cross_entropy(tokens[:90_000], tokens[90_000:], 256)
    unigram = BigramModel.fit(tokens, 256).totals / len(tokens)
    entropy = -(unigram * np.log(unigram)).sum()
    assert nats < 1.2 and entropy < np.log(256) - 0.3
