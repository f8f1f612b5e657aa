"""From numbered samples to the micro-batches of one data-parallel rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from smp.data.gpt_dataset import SampleDataset

IGNORED_LABEL = -100
_PREFETCH = 2


@dataclass(frozen=True)
class GlobalBatch:
    """One data-parallel rank's part of an optimizer step's samples, on the CPU."""

    tokens: torch.Tensor  # int64 (num_microbatches, micro_batch, seq)
    labels: torch.Tensor  # int64 (num_microbatches, micro_batch, seq), the next token; IGNORED_LABEL: no loss here
    sample_index: torch.Tensor  # int64 (num_microbatches, micro_batch), global sample numbers
    documents: torch.Tensor | None = None  # int64 like tokens: those with one number see each other; None: all do
    positions: torch.Tensor | None = None  # int64 like tokens; None: counted from 0 in every row
    widths: tuple[int, ...] | None = None  # columns of each micro-batch that are not padding in all rows; None: all are

    held: int | None = None  # tokens that are not padding; None: all

    def held_tokens(self) -> int:
        """Tokens of this rank that are not padding."""
        return self.tokens.numel() if self.held is None else self.held

    def count(self) -> int:
        """What the loss is averaged over, on this rank: tokens with a label."""
        return int((self.labels != IGNORED_LABEL).sum())


class BatchLoader(Iterator[GlobalBatch]):
    """Iterator over optimizer steps, without end. Two steps are read ahead by one background thread.

    In the step that starts at sample c, row j of micro-batch m on rank r is sample
    c + (m * dp_size + r) * micro_batch_size + j. A step holds the same samples in any layout; a resume needs only c.

    Args:
        dataset: where samples come from. It must not change afterwards.
        micro_batch_size: samples in one forward pass of one rank.
        num_microbatches: forward passes per step.
        dp_rank, dp_size: this data-parallel rank and their number.
        start_sample: number of samples already consumed by all ranks together.
        read: makes a batch of the samples with given numbers, (micro-batches, samples); by default of tokens that all
            predict the next.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        micro_batch_size: int,
        num_microbatches: int,
        dp_rank: int,
        dp_size: int,
        start_sample: int = 0,
        read: Callable[[npt.NDArray[np.int64]], GlobalBatch] | None = None,
    ) -> None:
        assert micro_batch_size > 0 and num_microbatches > 0 and 0 <= dp_rank < dp_size and start_sample >= 0
        self.dataset = dataset
        self._read = read or partial(_read_batch, dataset)
        self.global_batch_size = micro_batch_size * num_microbatches * dp_size
        self._consumed = start_sample
        step = np.arange(self.global_batch_size).reshape(num_microbatches, dp_size, micro_batch_size)
        self._offsets = step[:, dp_rank]  # (num_microbatches, micro_batch)
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-reader")
        self._pending: deque[Future[GlobalBatch]] = deque()
        for ahead in range(_PREFETCH):
            self._submit(start_sample + ahead * self.global_batch_size)

    @property
    def consumed_samples(self) -> int:
        """Samples that all ranks together have consumed: where a resumed loader starts."""
        return self._consumed

    def __next__(self) -> GlobalBatch:
        """The next step's batch. An exception of the reader is raised here, again on every further call.

        Raises:
            ValueError: the loader is closed, or the data are bad.
        """
        if not self._pending:
            raise ValueError("the batch loader is closed")
        batch = self._pending[0].result()  # stays in line when it raises, so that no step is ever skipped
        self._pending.popleft()
        self._submit(self._consumed + _PREFETCH * self.global_batch_size)
        self._consumed += self.global_batch_size
        return batch

    def close(self) -> None:
        """Stop reading ahead and end the thread. Safe to call twice."""
        self._pending.clear()
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _submit(self, start: int) -> None:
        self._pending.append(self._reader.submit(self._read, start + self._offsets))


def _read_batch(dataset: SampleDataset, indices: np.ndarray) -> GlobalBatch:
    samples = np.stack([dataset[index] for index in indices.ravel().tolist()])
    rows = torch.from_numpy(samples).view(*indices.shape, -1)  # (num_microbatches, micro_batch, seq + 1)
    return GlobalBatch(rows[..., :-1].contiguous(), rows[..., 1:].contiguous(), torch.from_numpy(indices))
