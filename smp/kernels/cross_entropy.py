"""Cross-entropy over one rank's columns of the logits.

With local logits z (n, v), the softmax over the whole vocabulary needs from each rank three floats per token: the
largest logit m, l = log sum exp (z - m), and the target's logit. From those of all ranks follow, as blocks are merged
in online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867), M, the largest m, L = log sum exp (m - M + l), the loss
L - (z[target] - M), and its gradient exp((z - M) - L) minus one at the target. M and L stay apart: their sum is as
large as the logits are, and its rounding would be an error of every probability when all logits of a token are far from
zero.

Bytes per local logit in bf16: 2 to read for m and l, 2 to read and 2 to write for the gradient, which takes the logits'
place. The sums are fp32 whatever the logits' dtype. (Megatron's and Liger's vocabulary-parallel versions keep an fp32
buffer of all local logits; flash-attention's is the nearest to this one.)

The PyTorch version goes block of rows by block of rows: the temporaries stay small enough for the processor's caches,
and for the allocator to hand out the same pages again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from smp.kernels.registry import accumulation_dtype, kernels_of, register

BLOCK_ELEMENTS = {"cpu": 1 << 20}
"""Logits in a block of the PyTorch version; on other devices, where a launch costs more than a miss, 2^25: 128 MiB in
fp32."""
LOWEST = -3.4e38
"""A number in place of minus infinity as the largest logit, whose difference to a logit would be NaN."""


def softmax_stats(logits: torch.Tensor, columns: torch.Tensor, valid: int, backend: str = "torch") -> torch.Tensor:
    """(m, l, target's logit) of local logits, fp32 (3, n). The target's logit is 0 where another rank has the target.
    Where no real column is above minus infinity l is that, and m is below all that others have.

    Args:
        logits: (n, v), any floating dtype, columns contiguous; columns from ``valid`` on are padding.
        columns: int64 (n,), the target's column here, outside [0, valid) when another rank has it.
        valid: number of real columns, possibly 0.
        backend: torch, triton, cuda or cpp.
    """
    return _softmax_stats_op(logits, columns, valid, backend)


def combine_stats(stats: torch.Tensor) -> torch.Tensor:
    """Merge the ranks' (p, 3, n) statistics into the whole vocabulary's (M, L, target's logit), (3, n)."""
    peaks, log_sums, targets = stats.unbind(dim=1)
    # The largest over all ranks; differences to it are never above 0, so no exponential overflows.
    peak = peaks.amax(dim=0)
    # Each rank's sum is relative to its own peak.
    log_sum = (peaks - peak + log_sums).logsumexp(dim=0)
    return torch.stack((peak, log_sum, targets.sum(dim=0)))


def logits_to_gradient(
    logits: torch.Tensor,
    stats: torch.Tensor,
    columns: torch.Tensor,
    valid: int,
    weights: torch.Tensor,
    backend: str = "torch",
) -> torch.Tensor:
    """Overwrite ``logits`` with the gradient of sum(weights * loss) by them; zeros in the padding.

    Args:
        logits, columns, valid, backend: as in :func:`softmax_stats`.
        stats: fp32 (3, n), those of the whole vocabulary.
        weights: fp32 (n,), 0 for tokens that do not count.
    """
    _logits_to_gradient_op(logits, stats, columns, valid, weights, backend)
    torch.autograd.graph.increment_version(logits)  # who kept the logits for a backward pass gets an error, not noise
    return logits


def _rows_of_a_block(logits: torch.Tensor) -> int:
    elements = BLOCK_ELEMENTS.get(logits.device.type, 1 << 25)
    return min(max(1, elements // max(logits.shape[1], 1)), max(logits.shape[0], 1))


def _row_blocks(logits: torch.Tensor) -> Iterator[slice]:
    rows = _rows_of_a_block(logits)
    return (slice(i, i + rows) for i in range(0, logits.shape[0], rows))


def _scratch(logits: torch.Tensor, valid: int) -> torch.Tensor:
    # One buffer for all blocks of rows, in the precision of sums.
    rows = _rows_of_a_block(logits)
    return torch.empty(rows, valid, device=logits.device, dtype=accumulation_dtype(logits.dtype))


def _minus(z: torch.Tensor, peak: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``z - peak`` in the precision of ``out``. A CPU would widen ``z`` in memory of its own."""
    if z.dtype != out.dtype and z.device.type == "cpu":
        return out.copy_(z).sub_(peak)
    return torch.sub(z, peak, out=out)


def softmax_stats_reference(logits: torch.Tensor, columns: torch.Tensor, valid: int) -> torch.Tensor:
    """:func:`softmax_stats` in PyTorch."""
    stats = torch.zeros(3, logits.shape[0], device=logits.device, dtype=accumulation_dtype(logits.dtype))
    if valid == 0:
        stats[0], stats[1] = LOWEST, -torch.inf
        return stats
    scratch = _scratch(logits, valid)
    for rows in _row_blocks(logits):
        z = logits[rows, :valid]
        peak = z.amax(dim=1).to(stats.dtype).clamp_(min=LOWEST)  # NaN stays
        total = _minus(z, peak[:, None], scratch[: z.shape[0]]).exp_().sum(dim=1)
        # Kept as a logarithm: ranks' sums are merged by logsumexp.
        stats[0, rows], stats[1, rows] = peak, total.log()
    # Another rank has the target otherwise: 0 here, so that the sum over ranks has it once.
    here = (columns >= 0) & (columns < valid)
    target = logits.gather(1, columns.clamp(0, valid - 1)[:, None])[:, 0]
    stats[2] = torch.where(here, target.to(stats.dtype), 0.0)
    return stats


def logits_to_gradient_reference(
    logits: torch.Tensor, stats: torch.Tensor, columns: torch.Tensor, valid: int, weights: torch.Tensor
) -> None:
    """:func:`logits_to_gradient` in PyTorch."""
    here = (columns >= 0) & (columns < valid)
    # Weights of tokens that do not count are 0, and so is the gradient of their whole row.
    minus, columns = torch.where(here, -weights, 0.0)[:, None], columns.clamp(0, max(valid - 1, 0))[:, None]
    scratch = _scratch(logits, valid)
    for rows in _row_blocks(logits) if valid else ():
        # Written over block by block: the gradient takes the logits' memory.
        z = logits[rows, :valid]
        gradient = z if z.dtype == scratch.dtype else scratch[: z.shape[0]]
        # In two subtractions: M + L in one number would round away the small one.
        _minus(z, stats[0, rows, None], gradient).sub_(stats[1, rows, None]).exp_().mul_(weights[rows, None])
        # One column in each row, so there is nothing whose order could differ.
        gradient.scatter_add_(1, columns[rows], minus[rows].to(gradient.dtype))
        if gradient is not z:
            z.copy_(gradient)
    # The matrix product after this reads the padding too.
    logits[:, valid:] = 0.0


def _softmax_stats(logits: torch.Tensor, columns: torch.Tensor, valid: int, backend: str) -> torch.Tensor:
    if backend == "torch":
        return softmax_stats_reference(logits, columns, valid)
    return kernels_of("cross_entropy", backend).softmax_stats(logits, columns, valid)


def _softmax_stats_fake(logits: torch.Tensor, columns: torch.Tensor, valid: int, backend: str) -> torch.Tensor:
    return logits.new_empty((3, logits.shape[0]), dtype=accumulation_dtype(logits.dtype))


def _logits_to_gradient(
    logits: torch.Tensor,
    stats: torch.Tensor,
    columns: torch.Tensor,
    valid: int,
    weights: torch.Tensor,
    backend: str,
) -> None:
    if backend == "torch":
        return logits_to_gradient_reference(logits, stats, columns, valid, weights)
    return kernels_of("cross_entropy", backend).logits_to_gradient(logits, stats, columns, valid, weights)


def _nothing(*args: object) -> None:
    """The fake version of a kernel that only writes into its arguments."""


_softmax_stats_op = register(
    "softmax_stats(Tensor logits, Tensor columns, SymInt valid, str backend) -> Tensor",
    _softmax_stats,
    _softmax_stats_fake,
)
_logits_to_gradient_op = register(
    "logits_to_gradient_(Tensor(a!) logits, Tensor stats, Tensor columns, SymInt valid, Tensor weights,"
    " str backend) -> ()",
    _logits_to_gradient,
    _nothing,
)
