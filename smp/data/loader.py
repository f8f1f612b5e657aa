"""From numbered samples to the micro-batches of one data-parallel rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from smp.data.sample import IGNORE_INDEX, Sample, SampleDataset

_PREFETCH = 2
ReadBatch = Callable[[np.ndarray], "RankBatch"]
"""Makes a batch of the samples with the given numbers, int64 (micro-batches, samples)."""


@dataclass(frozen=True)
class RankBatch:
    """One data-parallel rank's share of the samples of a step, on the CPU.

    Attributes:
        input_ids: int64 (num_microbatches, micro_batch, length).
        labels: like ``input_ids``, the next token; IGNORE_INDEX: no loss here.
        sample_index: int64 (num_microbatches, micro_batch), global numbers of the samples.
        document_ids: like ``input_ids``: tokens with one number see each other; None: all do.
        position_ids: like ``input_ids``; None: counted from 0 in every row.
        lengths: of each micro-batch, the columns before those that are padding in all of its rows; None: all columns.
        padding: tokens that are none, and those of rows that fill up.
        filling: rows that only fill up: they repeat another sample of the step, without labels.
        sequence_lengths: like ``input_ids``: tokens of the sequence of each token, or of its document where positions
            are counted in documents, without padding; None: all columns.
        attended_lengths: int64, tokens of each document, or of each row where tokens see other documents, without
            padding; None: rows are full and whole.
        metrics: what else the log is to say of a step on it; the same on all ranks.
        table: rows for people to read, by the names of their columns.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    sample_index: torch.Tensor
    document_ids: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    lengths: tuple[int, ...] | None = None
    padding: int = 0
    filling: int = 0
    sequence_lengths: torch.Tensor | None = None
    attended_lengths: npt.NDArray[np.int64] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    table: Sequence[Mapping[str, Any]] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank, without padding."""
        return self.input_ids.numel() - self.padding

    @property
    def num_samples(self) -> int:
        """Samples of this rank."""
        return self.sample_index.numel() - self.filling

    def num_valid(self) -> int:
        """Number of tokens with a label on this rank, which the loss is averaged over."""
        return int((self.labels != IGNORE_INDEX).sum())

    def pinned(self) -> RankBatch:
        """The same batch in page-locked memory, which a GPU copies asynchronously."""
        values = ((item.name, getattr(self, item.name)) for item in fields(self))
        pinned: dict[str, Any] = {name: x.pin_memory() for name, x in values if isinstance(x, torch.Tensor)}
        return replace(self, **pinned)


@dataclass(frozen=True)
class Unreadable:
    """Stands for a batch that this rank could not read."""

    reason: str


class BatchLoader(Iterator[RankBatch]):
    """Iterator over optimizer steps, without end, read ahead by background threads.

    In the step that starts at sample c, row j of micro-batch m on rank r is sample
    c + (m * dp_size + r) * micro_batch_size + j. A step holds the same samples in any layout; a resume needs only c.
    Rows of the last micro-batches that have no sample are filled up, see :func:`rank_share`.

    Args:
        dataset: where samples come from. It must not change afterwards.
        micro_batch_size: samples in one forward pass of one rank.
        batch_size: samples of a step over all ranks, or those of the step that starts at a sample.
        dp_rank, dp_size: this data-parallel rank and their number.
        start_sample: number of samples already consumed by all ranks together.
        num_workers: threads; each reads whole steps. Without any, a step is read when it is asked for.
        with_documents, with_positions: whether batches carry these.
        pin_memory: for faster copies to a GPU.
        read: makes the batches, instead of ``dataset.sample``.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        micro_batch_size: int,
        batch_size: int | Callable[[int], int],
        dp_rank: int,
        dp_size: int,
        start_sample: int = 0,
        num_workers: int = 1,
        with_documents: bool = False,
        with_positions: bool = False,
        pin_memory: bool = False,
        read: ReadBatch | None = None,
    ) -> None:
        assert micro_batch_size > 0 and 0 <= dp_rank < dp_size and start_sample >= 0
        self.dataset, self._make = dataset, read or self._stack
        self._micro, self._dp_rank, self._dp_size = micro_batch_size, dp_rank, dp_size
        # A ramp-up makes the size a function of the sample number.
        self._batch_size = (lambda start: batch_size) if isinstance(batch_size, int) else batch_size
        self._with_documents, self._with_positions, self._pin = with_documents, with_positions, pin_memory
        self._consumed = self._submitted = start_sample
        self._closed = False
        self._reader = ThreadPoolExecutor(num_workers, thread_name_prefix="batch-reader") if num_workers else None
        # In the order of the steps, whichever thread is done first.
        self._pending: deque[tuple[Future[RankBatch], int]] = deque()  # with where the next step starts
        # At least two steps ahead: one is used while the next is read.
        for _ in range(max(_PREFETCH, num_workers) if num_workers else 0):
            self._submit()

    @property
    def consumed_samples(self) -> int:
        """Samples that all ranks together have consumed: where a resumed loader starts."""
        return self._consumed

    def __next__(self) -> RankBatch:
        """The next step's batch. An exception of a reader is raised here, again on every further call.

        Raises:
            ValueError: the loader is closed, or the data are bad.
            OSError: the data cannot be read.
        """
        if self._closed:
            raise ValueError("the batch loader is closed")
        if self._reader is None:
            batch = self._read(self._consumed)
            self._consumed += self._batch_size(self._consumed)
            return batch
        future, end = self._pending[0]
        batch = future.result()  # stays in line when it raises, so that no step is ever skipped
        self._pending.popleft()
        self._consumed = end
        self._submit()
        return batch

    def next_or_reason(self) -> RankBatch | Unreadable:
        """As ``next``, but errors of the data are returned: a rank that raises alone would leave the others waiting."""
        try:
            return next(self)
        except (ValueError, OSError) as error:
            return Unreadable(str(error) or type(error).__name__)

    def state(self) -> dict[str, torch.Tensor]:
        """No tensors: everything follows from the number of consumed samples."""
        return {}

    def close(self) -> None:
        """Stop reading ahead and end the threads. Safe to call twice."""
        self._closed = True
        self._pending.clear()
        if self._reader is not None:
            self._reader.shutdown(wait=True, cancel_futures=True)

    def _submit(self) -> None:
        assert self._reader is not None
        start = self._submitted
        self._submitted += self._batch_size(start)
        self._pending.append((self._reader.submit(self._read, start), self._submitted))

    def _read(self, start: int) -> RankBatch:
        batch = self._make(rank_share(start, self._batch_size(start), self._micro, self._dp_rank, self._dp_size))
        # On the reader's thread: pinning memory takes time.
        return batch.pinned() if self._pin else batch

    def _stack(self, share: np.ndarray) -> RankBatch:
        # ~i marks a row that only fills up.
        real, indices = share >= 0, np.where(share < 0, ~share, share)
        samples = [self.dataset.sample(index) for index in indices.ravel().tolist()]
        own = [sample for sample, counts in zip(samples, real.flat, strict=True) if counts]

        def rows(arrays: list[np.ndarray]) -> torch.Tensor:
            return torch.from_numpy(np.stack(arrays)).view(*indices.shape, -1)

        return RankBatch(
            input_ids=rows([sample.input_ids for sample in samples]),
            labels=unlabelled(rows([sample.labels for sample in samples]), real),
            sample_index=torch.from_numpy(indices.copy()),
            document_ids=rows([sample.document_ids for sample in samples]) if self._with_documents else None,
            position_ids=rows([sample.position_ids for sample in samples]) if self._with_positions else None,
            # Columns of padding in real rows, and all of the rows that fill up.
            padding=indices.size * len(samples[0].input_ids) - sum(len(s.input_ids) - s.padding for s in own),
            filling=int((~real).sum()),
            sequence_lengths=rows([sample.sequence_lengths(self._with_positions) for sample in samples])
            if self._with_positions or any(sample.padding for sample in samples)
            else None,
            attended_lengths=self._attended(own),
        )

    def _attended(self, samples: list[Sample]) -> npt.NDArray[np.int64]:
        # (documents,): attention's work is the sum of squares of these.
        if self._with_documents:
            return np.concatenate([np.zeros(0, np.int64), *(sample.document_lengths for sample in samples)])
        # Where tokens see other documents a row is what attention computes.
        return np.array([len(sample.input_ids) - sample.padding for sample in samples], np.int64)


def rank_share(start: int, size: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> npt.NDArray[np.int64]:
    """Samples of a rank in the step of ``size`` samples that starts at ``start``, int64 (micro-batches, rows).

    Every rank has as many micro-batches of as many rows, so that all take part in the same collectives, and a pipeline
    or compiled code sees one shape. Where there is no sample, a row is ~i: sample i, the last of the step, without its
    labels. It has weight 0, and as it repeats what is in the step anyway it is no new maximum for scales of FP8.
    """
    count = -(-size // (micro_batch_size * dp_size))
    # Micro-batches, then data-parallel ranks: a step has the same samples in any layout.
    step = np.arange(count * dp_size * micro_batch_size).reshape(count, dp_size, micro_batch_size)[:, dp_rank]
    # ~x = -x - 1: negative for every sample, also for number 0.
    return np.where(step < size, start + step, ~(start + size - 1))


def unlabelled(labels: torch.Tensor, real: npt.NDArray[np.bool_]) -> torch.Tensor:
    """``labels`` (*rows, length) without those of rows that are not ``real``."""
    return labels if real.all() else labels.masked_fill_(~torch.from_numpy(real)[..., None], IGNORE_INDEX)
