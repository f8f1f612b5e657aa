"""Launchers of ``csrc/cross_entropy.cu``; see :mod:`smp.kernels.cross_entropy`."""

from __future__ import annotations

import torch

from smp.kernels.cuda.library import check, library, stream


def _is_bf16(logits: torch.Tensor) -> int:
    if logits.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"logits of {logits.dtype}: the CUDA C++ kernels take bfloat16 and float32")
    if logits.stride(1) != 1:
        raise ValueError("the columns of the logits must be contiguous")
    return int(logits.dtype == torch.bfloat16)


def softmax_stats(logits: torch.Tensor, columns: torch.Tensor, valid: int) -> torch.Tensor:
    """See :func:`smp.kernels.cross_entropy.softmax_stats`."""
    stats, columns = logits.new_empty((3, logits.shape[0]), dtype=torch.float32), columns.long().contiguous()
    # The caller is on the tensor's device, see ``registry``: a launch takes the current one.
    error = library().smp_cross_entropy_stats(
        logits.data_ptr(),
        columns.data_ptr(),
        stats.data_ptr(),
        logits.shape[0],
        logits.stride(0),
        valid,
        _is_bf16(logits),
        stream(logits),
    )
    check(error, "softmax_stats")
    return stats


def logits_to_gradient(
    logits: torch.Tensor, stats: torch.Tensor, columns: torch.Tensor, valid: int, weights: torch.Tensor
) -> None:
    """See :func:`smp.kernels.cross_entropy.logits_to_gradient`."""
    columns, weights = columns.long().contiguous(), weights.float().contiguous()
    stats = stats.float().contiguous()
    error = library().smp_cross_entropy_gradient(
        logits.data_ptr(),
        stats.data_ptr(),
        columns.data_ptr(),
        weights.data_ptr(),
        logits.shape[0],
        logits.stride(0),
        logits.shape[1],
        valid,
        _is_bf16(logits),
        stream(logits),
    )
    check(error, "logits_to_gradient")
