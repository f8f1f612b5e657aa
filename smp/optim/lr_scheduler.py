"""The learning rate as a pure function of the iteration, or of the samples consumed: there is no state to
checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from smp.config import OptimizerConfig
from smp.config.lr_schedule import Lengths, lengths


def learning_rate(optim: OptimizerConfig, iteration: int, consumed: int = 0) -> float:
    """The rate of the step that makes iteration ``iteration``; the first is 1.

    Step i takes the rate after i - 1 iterations, as in Megatron and transformers: the last step is not one at
    ``min_lr``, which may be 0, and the first of a warm-up is one at ``lr_warmup_init``, which is 0 by default. Linear
    warm-up over w iterations: (i - 1) / w of the way to ``lr`` at the i-th. The next n = ``lr_decay_iters`` - w
    iterations go down towards ``min_lr``, which is kept after them; at the i-th of these the fraction of the decay that
    is done is p = (i - 1) / n:

    - cosine: (1 + cos(pi p)) / 2 of the way back up to ``lr`` (Loshchilov & Hutter 2017).
    - linear: 1 - p.
    - WSD (Hu et al. 2024, arXiv 2404.06395): ``lr`` until ``lr_wsd_decay_iters`` before the end, then with p counted
      over these by ``lr_wsd_decay_style``: exponential 2 x 0.5^p - 1, linear 1 - p, cosine as above, minus_sqrt
      1 - sqrt(p) (Hagele et al. 2024, arXiv 2405.18392).
    - constant: ``lr`` for ever.

    Where lengths are in samples, ``consumed`` replaces i - 1 iterations.

    Args:
        optim: resolved.
        iteration: at least 1.
        consumed: samples of all steps before it.
    """
    assert iteration >= 1, "iterations count from 1"
    parts = lengths(optim)
    done = iteration - 1 if parts.unit == "iters" else consumed
    if parts.warmup and done <= parts.warmup:
        return optim.lr_warmup_init + (optim.lr - optim.lr_warmup_init) * (done / parts.warmup)
    if optim.lr_decay_style == "constant":
        return optim.lr
    assert parts.decay is not None, "resolved before"
    if done >= parts.decay:
        return optim.min_lr
    return optim.min_lr + (optim.lr - optim.min_lr) * _height(optim, parts, parts.decay, done)


def decoupled_learning_rate(optim: OptimizerConfig, iteration: int, consumed: int = 0) -> float:
    """The rate of the embedding and of the output matrix: the same schedule, between --decoupled-lr and
    --decoupled-min-lr."""
    if optim.decoupled_lr is None:
        return learning_rate(optim, iteration, consumed)
    least = optim.min_lr if optim.decoupled_min_lr is None else optim.decoupled_min_lr
    return learning_rate(replace(optim, lr=optim.decoupled_lr, min_lr=least), iteration, consumed)


def _height(optim: OptimizerConfig, parts: Lengths, end: int, done: int) -> float:
    """Where between ``min_lr`` (0) and ``lr`` (1) the rate is, after the warm-up and before the end."""
    style: str = optim.lr_decay_style
    share = (done - parts.warmup) / (end - parts.warmup)
    if style == "WSD":
        assert parts.final is not None, "resolved before"
        # Negative before the last stretch begins, where the rate is still the full one.
        style, share = optim.lr_wsd_decay_style, max(0.0, 1 - (end - done) / parts.final)
    return _SHAPES[style](share)


_SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
    "linear": lambda share: 1 - share,
    "exponential": lambda share: 2 * math.pow(0.5, share) - 1,
    "minus_sqrt": lambda share: 1 - math.sqrt(share),
}
"""By the share of the way down that is done."""
