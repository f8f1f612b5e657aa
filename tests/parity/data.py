"""The global batches of a problem, and a rank's share of them."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from smp.data.loader import RankBatch
from smp.data.sample import IGNORE_INDEX
from tests.parity.cases import Problem, Spread


def global_batch(problem: Problem, step: int) -> RankBatch:
    """All samples of a step as one micro-batch, tensors (1, global batch, length)."""
    generator = torch.Generator().manual_seed(100 + step)
    rows = torch.randint(0, problem.vocab[0], (problem.global_batch, problem.length + 1), generator=generator)
    labels = rows[:, 1:].clone()
    if problem.unequal:
        left_out = torch.rand(labels.shape, generator=generator) < 0.4
        left_out[:, -1] = False  # so that some token of the step counts
        labels[left_out] = IGNORE_INDEX
        if problem.micro_batches > 1:
            labels.view(problem.micro_batches, -1)[step % problem.micro_batches] = IGNORE_INDEX
    index = step * problem.global_batch + torch.arange(problem.global_batch)
    batch = RankBatch(rows[None, :, :-1].contiguous(), labels[None], index[None])
    if not problem.packed:
        return batch
    begins = torch.rand(labels.shape, generator=generator) < 0.25
    begins[:, 0] = True
    documents, place = begins.cumsum(dim=1), torch.arange(problem.length)
    first = torch.where(begins, place, 0).cummax(dim=1).values
    lengths = (documents[:, :, None] == documents[:, None, :]).sum(-1)
    return replace(
        batch, document_ids=documents[None], position_ids=(place - first)[None], sequence_lengths=lengths[None]
    )


def share(problem: Problem, spread: Spread, data_rank: int, step: int) -> RankBatch:
    """The part of data-parallel rank ``data_rank``, in the order that ``BatchLoader`` states."""
    whole, ranks, count = global_batch(problem, step), spread.data_parallel, spread.accumulation

    def part(x: torch.Tensor) -> torch.Tensor:
        return x[0].view(count, ranks, -1, *x.shape[2:])[:, data_rank]  # (micro-batches, micro-batch, ...)

    parts = {f.name: getattr(whole, f.name) for f in fields(whole)}
    return RankBatch(**{name: part(x) if isinstance(x, torch.Tensor) else x for name, x in parts.items()})
