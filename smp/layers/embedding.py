"""Vocabulary-parallel token embedding and output layer, and learned positions.

The rows of both matrices are split over the TP ranks. Their number is padded so that every rank has the same, aligned
number of rows. The padding is zero, is left out of the loss, gets no gradient, and is not in checkpoints
(``logical_rows`` is the number of rows without padding).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp.layers.parameter import REPLICATE, SHARD_ROWS, Initializer, Normal, local, tp_parameter
from smp.parallel.collectives import reduce_from_group, reduce_scatter_tokens, split_tokens
from smp.parallel.context import ParallelContext


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """The smallest multiple of ``divisible_by * tp`` that holds the vocabulary."""
    multiple = divisible_by * tp
    return -(-vocab_size // multiple) * multiple


class VocabParallelEmbedding(nn.Module):
    """Token embedding with the vocabulary split over the TP ranks.

    Args:
        vocab_size: number of token ids, any number.
        hidden_size: width of a row.
        parallel: a context, or a plain 1-D tensor-parallel mesh. Under its ``sequence_parallel`` this rank's slice of
            the tokens (dim 0) is returned.
        divisible_by: rows per rank are padded to this multiple.
        init_std: standard deviation of the initial rows.
        compute_dtype: of the result; by default the parameter's.

    Shapes: ids (tokens, ...) -> (tokens [/p], ..., hidden). Each output element is nonzero on one rank only, so the sum
    over the ranks is exact in any precision.

    Raises:
        IndexError: for an id outside the vocabulary, in any layout; on a GPU a device-side assertion.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        parallel: ParallelContext | DeviceMesh,
        *,
        divisible_by: int = 128,
        init_std: float = 0.02,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        context = ParallelContext.of(parallel)
        self.group, self.sequence_parallel = context.tp_group, context.sequence_parallel
        self.vocab_size, self.compute_dtype = vocab_size, compute_dtype
        rows = padded_vocab_size(vocab_size, divisible_by, self.group.size)
        self.weight = tp_parameter((rows, hidden_size), SHARD_ROWS, context.tp)
        self.initializers: dict[str, Initializer] = {"weight": Normal(init_std)}
        # Read by ``init_weights`` and by checkpoints: padding is zero, and is not saved.
        self.logical_rows = {"weight": vocab_size}
        self.rows_per_rank = rows // self.group.size

    def table(self) -> torch.Tensor:
        """This rank's rows as ``forward`` uses them, (rows per rank, hidden), for a tied output layer too."""
        return local(self.weight, self.compute_dtype)

    def forward(self, ids: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        """ids (tokens, ...) int64 -> (tokens [/p], ..., hidden); ``table`` is what :meth:`table` gave before."""
        weight = self.table() if table is None else table
        unknown = (ids < 0) | (ids >= self.vocab_size)  # F.embedding refuses row -1, and the device does not wait
        if self.group.size == 1:
            return F.embedding(ids.masked_fill(unknown, -1), weight)
        # Ids of other ranks become row 0, whose result is then set to 0; an unknown id becomes -1 and fails on every
        # rank, also on those without the row.
        row = ids - self.group.rank * self.rows_per_rank
        elsewhere = (row < 0) | (row >= self.rows_per_rank)
        row = row.masked_fill(elsewhere, 0).masked_fill(unknown, -1)
        # Filled and not multiplied: a row may hold infinities.
        partial = F.embedding(row, weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.sequence_parallel:
            # One rank has each row, so this sum adds zeros to it and is exact in any order.
            return reduce_scatter_tokens(partial, self.group)
        return reduce_from_group(partial, self.group)


class PositionEmbedding(nn.Module):
    """Learned absolute positions, the whole table on every TP rank.

    Args:
        max_positions: most tokens of a sequence; the table has a row for each, and ``offset`` before them.
        hidden_size: width of a row.
        offset: row of the first token.
        parallel, init_std, compute_dtype: as of :class:`VocabParallelEmbedding`.

    Shapes: position_ids (tokens,) -> (tokens [/p], hidden).
    """

    def __init__(
        self,
        max_positions: int,
        hidden_size: int,
        parallel: ParallelContext | DeviceMesh,
        *,
        offset: int = 0,
        init_std: float = 0.02,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        context = ParallelContext.of(parallel)
        self.shared_by, self.compute_dtype, self.offset = context.shared_by, compute_dtype, offset
        self.weight = tp_parameter((offset + max_positions, hidden_size), REPLICATE, context.tp)
        self.initializers: dict[str, Initializer] = {"weight": Normal(init_std)}

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        """position_ids (tokens,) int64 -> (tokens [/p], hidden)."""
        # Under sequence parallelism each rank looks up its own tokens, so the table's gradient is a sum over them.
        weight = local(self.weight, self.compute_dtype, summed_over=self.shared_by)
        if self.shared_by is not None:
            position_ids = split_tokens(position_ids, self.shared_by)
        return F.embedding(position_ids + self.offset if self.offset else position_ids, weight)
