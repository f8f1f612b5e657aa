"""Cross-entropy over one rank's columns of the logits.

With local logits z (n, v), the softmax over the whole vocabulary needs from each rank only m = max z, s = sum exp(z -
m) and the target's logit: three floats per token. From the ranks' (m, s) follow M = max m, S = sum s exp(m - M), the
loss M + log S - z[target], and its gradient exp(z - M - log S) minus one at the target.

Both passes go block of rows by block of rows, in fp32 whatever the logits' dtype: the temporaries stay small enough for
the processor's caches, and for the allocator to hand out the same pages again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK_ELEMENTS = 1 << 20


def _row_blocks(logits: torch.Tensor) -> Iterator[slice]:
    rows = max(1, BLOCK_ELEMENTS // logits.shape[1])
    return (slice(i, i + rows) for i in range(0, logits.shape[0], rows))


def _scratch(logits: torch.Tensor, valid: int) -> torch.Tensor:
    return torch.empty(max(1, BLOCK_ELEMENTS // logits.shape[1]), valid, device=logits.device)


def softmax_stats(logits: torch.Tensor, columns: torch.Tensor, valid: int) -> torch.Tensor:
    """(m, s, target logit) of local logits, fp32 (3, n). The target logit is 0 where another rank has the target.

    Args:
        logits: (n, v), any floating dtype; columns from ``valid`` on are padding.
        columns: int64 (n,), the target's column here, outside [0, valid) when another rank has it.
        valid: number of real columns, possibly 0.
    """
    stats = torch.zeros(3, logits.shape[0], device=logits.device)
    if valid == 0:
        stats[0] = torch.finfo(torch.float32).min
        return stats
    scratch = _scratch(logits, valid)
    for rows in _row_blocks(logits):
        z = logits[rows, :valid]
        peak = stats[0, rows] = z.amax(dim=1).float()
        stats[1, rows] = torch.sub(z, peak[:, None], out=scratch[: z.shape[0]]).exp_().sum(dim=1)
    here = (columns >= 0) & (columns < valid)
    target = logits.gather(1, columns.clamp(0, valid - 1)[:, None])[:, 0]
    stats[2] = torch.where(here, target.float(), 0.0)
    return stats


def combine_stats(stats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the ranks' (p, 3, n) statistics into the whole vocabulary's M + log S and target logit, each (n,)."""
    peak = stats[:, 0].amax(dim=0)
    total = (stats[:, 1] * (stats[:, 0] - peak).exp()).sum(dim=0)
    return peak + total.log(), stats[:, 2].sum(dim=0)


def logits_to_gradient(
    logits: torch.Tensor, log_total: torch.Tensor, columns: torch.Tensor, valid: int, weights: torch.Tensor
) -> torch.Tensor:
    """Overwrite ``logits`` with the gradient of sum(weights * loss) by them; zeros in the padding.

    Args:
        logits, columns, valid: as in :func:`softmax_stats`.
        log_total: fp32 (n,), M + log S.
        weights: fp32 (n,), 0 for tokens that do not count.
    """
    here = (columns >= 0) & (columns < valid)
    minus, columns = torch.where(here, -weights, 0.0)[:, None], columns.clamp(0, max(valid - 1, 0))[:, None]
    scratch = _scratch(logits, valid)
    for rows in _row_blocks(logits) if valid else ():
        z = logits[rows, :valid]
        gradient = z if z.dtype == torch.float32 else scratch[: z.shape[0]]
        torch.sub(z, log_total[rows, None], out=gradient).exp_().mul_(weights[rows, None])
        gradient.scatter_add_(1, columns[rows], minus[rows])
        if gradient is not z:
            z.copy_(gradient)
    logits[:, valid:] = 0.0
    return logits
