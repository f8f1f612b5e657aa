"""Synthetic tokens with something to learn, for tests and benchmarks without data."""

from __future__ import annotations

import numpy as np

from smp.data.keyed_random import keyed_uniform
from smp.data.sample import Sample

_JUMP = 0.1  # probability that a token is drawn anew


class MockDataset:
    """Endless samples that are a function of (seed, stream, sample index).

    The next token is the current one plus 1 (modulo the vocabulary), except that one in ten is drawn anew, low ids more
    often than high ones. A model first learns the frequencies (0.4 nats below ln(vocab_size) at 256 ids, 0.9 at many),
    then the rule (its entropy is 0.1 ln(vocab_size) + 0.3 or less).

    Args:
        vocab_size: number of token ids; all of them occur.
        seq_length: a sample has one token more.
        seed, stream: different ones give different samples of the same language (streams: train, validation).
    """

    def __init__(self, vocab_size: int, seq_length: int, seed: int, stream: int = 0) -> None:
        assert vocab_size > 1 and seq_length > 0
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self.seed = seed
        self.stream = stream

    @property
    def samples_per_epoch(self) -> None:
        """Samples never repeat."""
        return None

    def sample(self, index: int) -> Sample:
        """Sample ``index`` >= 0, one document."""
        assert index >= 0
        length = self.seq_length + 1
        chance, value = keyed_uniform(2 * length, self.seed, self.stream, index).reshape(2, length)
        # The cube makes low ids more frequent: something to learn before the rule.
        drawn = (value * value * value * self.vocab_size).astype(np.int64)
        position = np.arange(length)
        jump = chance < _JUMP
        jump[0] = True
        # Position of the last jump at or before each token, from which the rule counts.
        last_jump = np.maximum.accumulate(np.where(jump, position, 0))
        tokens = (drawn[last_jump] + position - last_jump) % self.vocab_size
        return Sample(tokens[:-1], tokens[1:], np.zeros(self.seq_length, np.int64))
