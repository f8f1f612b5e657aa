"""Cross-entropy over one rank's columns of the logits.

With local logits z (n, v), the softmax over the whole vocabulary needs from each rank only m = max z, s = sum exp(z -
m) and the target's logit: three floats per token. From the ranks' (m, s) follow M = max m and S = sum s exp(m - M), and
the gradient of the loss is exp(z - m) exp(m - M) / S minus one at the target. So exp(z - m) is kept and scaled in
place: the logits are read once and written twice.
"""

from __future__ import annotations

import torch


def softmax_stats(logits: torch.Tensor, columns: torch.Tensor, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(z - m) and (m, s, target logit) of local logits.

    Args:
        logits: (n, v), any floating dtype; columns from ``valid`` on are padding. May be overwritten.
        columns: int64 (n,), the target's column here, outside [0, valid) when another rank has it.
        valid: number of real columns, possibly 0.

    Returns:
        fp32 (n, v) with zeros in the padding, and fp32 (3, n). The target logit is 0 where another rank has the target.
    """
    z = logits.float()
    if valid < z.shape[1]:
        z[:, valid:] = -torch.inf
    here = (columns >= 0) & (columns < valid)
    target = z.gather(1, columns.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
    target = torch.where(here, target, 0.0)
    peak = z.amax(dim=1).clamp_min(torch.finfo(torch.float32).min)  # finite even when every column is padding
    exps = z.sub_(peak[:, None]).exp_()
    return exps, torch.stack((peak, exps.sum(dim=1), target))


def combine_stats(stats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merge the ranks' (p, 3, n) statistics into the whole vocabulary's M, S and target logit, each (n,)."""
    peak = stats[:, 0].amax(dim=0)
    total = (stats[:, 1] * (stats[:, 0] - peak).exp()).sum(dim=0)
    return peak, total, stats[:, 2].sum(dim=0)


def logits_gradient(
    exps: torch.Tensor, factor: torch.Tensor, columns: torch.Tensor, valid: int, weights: torch.Tensor
) -> torch.Tensor:
    """Gradient of sum(weights * loss) by the local logits, written over ``exps``.

    Args:
        exps: fp32 (n, v) from :func:`softmax_stats`.
        factor: fp32 (n,), exp(m - M) / S of this rank.
        columns, valid: as in :func:`softmax_stats`.
        weights: fp32 (n,), 0 for tokens that do not count.
    """
    exps.mul_((factor * weights)[:, None])
    here = (columns >= 0) & (columns < valid)
    minus = torch.where(here, -weights, 0.0)
    return exps.scatter_add_(1, columns.clamp(0, exps.shape[1] - 1)[:, None], minus[:, None])
