"""See :mod:`smp.kernels.cross_entropy`: a row of logits is read for its largest, and from the cache for the sum; the
gradient is written over it in one pass."""

from __future__ import annotations

import torch

from smp.kernels import cross_entropy
from smp.kernels.cpp.library import computes, library, pointers, require, rows_of


def softmax_stats(logits: torch.Tensor, columns: torch.Tensor, valid: int) -> torch.Tensor:
    """See :func:`smp.kernels.cross_entropy.softmax_stats`."""
    if not computes(logits) or valid == 0:
        return cross_entropy.softmax_stats_reference(logits, columns, valid)
    _require(logits, columns, valid)
    logits, columns = rows_of(logits), columns.contiguous()
    stats = logits.new_empty((3, logits.shape[0]), dtype=torch.float32)
    sizes = logits.shape[0], valid, logits.stride(0), torch.get_num_threads()
    library().smp_softmax_stats(logits.dtype == torch.bfloat16, *pointers(logits, columns, stats), *sizes)
    return stats


def logits_to_gradient(
    logits: torch.Tensor, stats: torch.Tensor, columns: torch.Tensor, valid: int, weights: torch.Tensor
) -> None:
    """See :func:`smp.kernels.cross_entropy.logits_to_gradient`."""
    in_place = logits.stride(-1) == 1  # what is written over cannot be a copy
    if not computes(logits) or not in_place or stats.dtype != torch.float32 or weights.dtype != torch.float32:
        return cross_entropy.logits_to_gradient_reference(logits, stats, columns, valid, weights)
    _require(logits, columns, valid)
    rows = logits.shape[0]
    require(stats.shape == (3, rows) and weights.shape == (rows,), "three statistics and a weight for each row")
    columns, stats, weights = columns.contiguous(), stats.contiguous(), weights.contiguous()
    sizes = *logits.shape, valid, logits.stride(0), torch.get_num_threads()
    tensors = pointers(logits, columns, stats, weights)
    library().smp_logits_to_gradient(logits.dtype == torch.bfloat16, *tensors, *sizes)
    return None


def _require(logits: torch.Tensor, columns: torch.Tensor, valid: int) -> None:
    fits = columns.shape == logits.shape[:1] and columns.dtype == torch.int64 and 0 <= valid <= logits.shape[1]
    require(fits, "a column, int64, for each row of logits, and no more columns than there are")
