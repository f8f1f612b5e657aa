"""Matrix products with their collective as one operator each, opaque to whoever rewrites graphs.

torch.compile would otherwise keep the gathered input for the backward pass and wait for a reduction too early, and
selective recompute would keep both the partial products and their sum, or repeat the collective. A process group is
given as the fields of a ``Group``: operators take no objects.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from smp.parallel.collectives import Group, start_all_gather, start_all_reduce, start_reduce_scatter, wait


@torch.library.custom_op("smp::column_parallel", mutates_args=())
def column_forward(
    x: torch.Tensor, weights: list[torch.Tensor], name: str, size: int, rank: int, sequence_parallel: bool
) -> list[torch.Tensor]:
    """Products of one input with several weights, after one gather for all of them: (tokens, ..., out/p) each."""
    group = Group(name, size, rank)
    full = wait(start_all_gather(x, group), group) if sequence_parallel else x
    return [F.linear(full, w) for w in weights]


@column_forward.register_fake
def _(
    x: torch.Tensor, weights: list[torch.Tensor], name: str, size: int, rank: int, sequence_parallel: bool
) -> list[torch.Tensor]:
    tokens = x.shape[0] * (size if sequence_parallel else 1)
    return [x.new_empty(tokens, *x.shape[1:-1], w.shape[0]) for w in weights]


@torch.library.custom_op("smp::row_parallel", mutates_args=())
def row_forward(
    x: torch.Tensor, weight: torch.Tensor, name: str, size: int, rank: int, sequence_parallel: bool
) -> torch.Tensor:
    """The product summed over the ranks, (tokens, ..., out) or each rank's (tokens / p, ..., out)."""
    group = Group(name, size, rank)
    partial = F.linear(x, weight)
    start = start_reduce_scatter if sequence_parallel else start_all_reduce
    return wait(start(partial, group), group)


@row_forward.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, name: str, size: int, rank: int, sequence_parallel: bool) -> torch.Tensor:
    tokens = x.shape[0] // (size if sequence_parallel else 1)
    return x.new_empty(tokens, *x.shape[1:-1], weight.shape[0])
