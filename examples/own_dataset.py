"""A data set of one's own: a class that yields numbered samples, in a run that is otherwise pretrain_gpt.py's.

    torchrun --nproc-per-node 2 examples/own_dataset.py --num-layers 2 --hidden-size 64 --ffn-hidden-size 256 \
        --num-attention-heads 4 --seq-length 32 --train-iters 60 --micro-batch-size 16 --lr 0.003 \
        --save sums --eval-interval 20

The samples are sums, "17+25=42;", and only the digits of the result are learned. Sample i is a function of (seed, i)
alone: so any layout reads the same samples, and a run that is stopped goes on with ``--load auto`` behind the last one.
"""

from __future__ import annotations

import sys

import numpy as np

import pretrain_gpt
from smp.data.blend import BlendedDataset, Source
from smp.data.build import Datasets
from smp.data.sample import IGNORE_INDEX, Sample
from smp.training.pretraining import Pretraining

ALPHABET = "0123456789+=; "


class Sums:
    """Numbered samples without end, see :class:`smp.data.sample.SampleDataset`.

    Args:
        seq_length: tokens of a sample.
        seed, stream: other samples for another seed; training and validation have streams of their own.
    """

    samples_per_epoch = None  # a number, where samples come again

    def __init__(self, seq_length: int, seed: int, stream: int) -> None:
        self.seq_length, self.seed, self.stream = seq_length, seed, stream
        # What sample numbers mean. A checkpoint keeps it: a resume with another key begins at the first sample.
        self.key = f"sums length {seq_length} seed {seed}"

    def sample(self, index: int) -> Sample:
        """Sample ``index`` >= 0. Called from background threads, in any order: nothing is kept between calls."""
        generator = np.random.default_rng([self.seed, self.stream, index])
        text = ""
        while len(text) <= self.seq_length:
            a, b = generator.integers(0, 100, 2)
            text += f"{a}+{b}={a + b};"
        ids = np.array([ALPHABET.index(letter) for letter in text[: self.seq_length + 1]], np.int64)
        labels, counts, result = ids[1:].copy(), np.zeros(self.seq_length, bool), False
        for i, letter in enumerate(text[: self.seq_length + 1]):
            if i > 0:
                counts[i - 1] = result  # position i - 1 predicts letter i
            result = letter == "=" or (result and letter != ";")
        labels[~counts] = IGNORE_INDEX
        return Sample(ids[:-1], labels, document_ids=np.zeros(self.seq_length, np.int64))


class SumsRun(Pretraining):
    """Pretraining that reads :class:`Sums`; every other part of the run is as it was."""

    def datasets(self) -> Datasets:
        data, seed = self.config.data, self.config.training.seed
        assert data.seq_length is not None, "resolved before"
        train, valid = (Sums(data.seq_length, seed, stream) for stream in (0, 1))
        # A blend of one source; several take turns by their weights.
        return Datasets(*(BlendedDataset([Source("sums", one.key, one)], [1]) for one in (train, valid)), test=None)


if __name__ == "__main__":
    # Settings ask for a source of data: --mock-data is the one that needs no files, and SumsRun reads none.
    flags = ["--mock-data", "--vocab-size", str(len(ALPHABET)), *sys.argv[1:]]
    sys.exit(pretrain_gpt.main(flags, kind=SumsRun))
