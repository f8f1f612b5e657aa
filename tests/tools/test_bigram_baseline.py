import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from tools.bigram_baseline import UNSEEN_COUNT, BigramModel, bigram_cross_entropy


def slow_probability(train: list[int], vocab: int, discount: float, x: int, y: int) -> float:
    pairs = Counter(itertools.pairwise(train))
    successors, predecessors = defaultdict(set), defaultdict(set)
    for a, b in pairs:
        successors[a].add(b)
        predecessors[b].add(a)
    unigram = (len(predecessors[y]) + UNSEEN_COUNT) / (len(pairs) + UNSEEN_COUNT * vocab)
    total = sum(count for (a, _), count in pairs.items() if a == x)
    if total == 0:
        return unigram
    return max(pairs[x, y] - discount, 0) / total + discount * len(successors[x]) / total * unigram


def test_equals_the_definition_and_sums_to_one() -> None:
    vocab, train = 6, [0, 1, 2, 1, 2, 3, 0, 1, 1, 1, 4, 3]  # 5 never occurs
    model = BigramModel.fit(np.array(train), vocab)
    for x in range(vocab):
        fast = [math.exp(-model.cross_entropy(np.array([x, y]), 0.7)) for y in range(vocab)]
        assert fast == pytest.approx([slow_probability(train, vocab, 0.7, x, y) for y in range(vocab)], rel=1e-12)
        assert sum(fast) == pytest.approx(1.0)


def test_comes_close_to_the_entropy_of_a_markov_chain() -> None:
    random = np.random.default_rng(0)
    vocab = 8
    matrix = random.dirichlet(np.full(vocab, 0.5), size=vocab)
    tokens = [0]
    for draw in random.random(40_000):
        tokens.append(min(int(np.searchsorted(np.cumsum(matrix[tokens[-1]]), draw)), vocab - 1))
    train, valid = np.array(tokens[:30_000]), np.array(tokens[30_000:])
    truth = float(-np.log(matrix[valid[:-1], valid[1:]]).mean())
    nats, _ = bigram_cross_entropy(train, valid, vocab)
    assert truth < nats + 0.005 and nats < truth + 0.01


def test_the_validation_tokens_do_not_choose_the_discount() -> None:
    train = np.random.default_rng(0).integers(0, 50, 2000)
    rare = bigram_cross_entropy(train, np.array([1, 1, 1, 1]), 50)
    common = bigram_cross_entropy(train, train, 50)
    assert rare[1] == common[1]


@pytest.mark.parametrize(
    ("train", "valid", "message"),
    [
        ([1] * 19, [1, 1], "training split has 19 tokens"),
        ([1] * 20, [1], "validation split has 1 tokens"),
        ([1] * 20, [1, 9], "validation token ids 1..9 are outside a vocabulary of 9"),
        ([-1] * 20, [1, 1], "training token ids -1..-1"),
    ],
)
def test_bad_tokens(train: list[int], valid: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bigram_cross_entropy(train, valid, 9)
