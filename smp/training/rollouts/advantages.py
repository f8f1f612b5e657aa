"""From rewards to advantages, in fp64, over the completions of a whole generation.

Standard deviations are those of a sample (divided by n - 1), as in TRL.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

LEAST = 1e-4
"""Added to a standard deviation, as in TRL: a prompt whose rewards are nearly equal counts little."""


def total_rewards(rewards: Numbers, weights: Numbers) -> Numbers:
    """Weighted sum over functions of (completions, functions) -> (completions,). A function that does not apply (NaN)
    adds nothing; where none applies the sum is NaN."""
    # nansum gives 0 where all are NaN, so these are set apart.
    total = np.nansum(rewards * weights, axis=1)
    return np.where(np.isnan(rewards).all(axis=1), np.nan, total)


def overlong_penalty(lengths: npt.NDArray[np.int64], longest: int, buffer: int) -> Numbers:
    """DAPO's soft punishment (arXiv 2503.14476, equation 13): 0 up to longest - buffer tokens, then linear to -1."""
    if buffer == 0:
        return np.zeros(len(lengths))
    return -np.clip((lengths - (longest - buffer)) / buffer, 0.0, 1.0)


def spreads(rewards: Numbers, group: int) -> npt.NDArray[np.bool_]:
    """Whether each prompt's completions were rewarded differently, by more than a reward model's rounding error."""
    of = rewards.reshape(-1, group)
    known = ~np.isnan(of)
    largest = np.where(known, of, -np.inf).max(axis=1)
    least = np.where(known, of, np.inf).min(axis=1)
    # Relative to the largest reward: scores of a bf16 reward model round in proportion.
    scale = np.maximum(np.abs(np.where(known, of, 0.0)).max(axis=1), 1.0)
    return known.any(axis=1) & (largest - least > 1e-6 * scale)


def advantages(rewards: Numbers, group: int, estimator: str, scale: str) -> Numbers:
    """Advantage of each completion; 0 where it has no reward.

    Args:
        rewards: (completions,), those of a prompt after each other; NaN: none.
        group: completions of a prompt.
        estimator: of --advantage-estimator.
        scale: of --scale-rewards.
    """
    of = rewards.reshape(-1, group)
    known = ~np.isnan(of)
    count = known.sum(axis=1, keepdims=True)
    # Mean over the completions that have a reward.
    mean = np.where(known, of, 0.0).sum(axis=1, keepdims=True) / np.maximum(count, 1)
    apart = np.where(known, of - mean, 0.0)
    match estimator:
        case "rloo":
            # Leave-one-out (RLOO): r - mean of the others = n / (n - 1) (r - mean of all).
            found = apart * np.where(count > 1, count / np.maximum(count - 1, 1), 0.0)
        case "reinforce++":
            # REINFORCE++ has no mean of the prompt, only one of the batch.
            found = _standardized(np.where(known, of, 0.0), known)
        case "reinforce++-baseline":
            found = _standardized(apart, known)
        case _:
            found = apart
            if scale == "group":
                # GRPO (arXiv 2402.03300); scale "none" is Dr. GRPO's (2503.20783).
                found = apart / (np.sqrt((apart**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1)) + LEAST)
            # Batch: one deviation for all prompts, of their rewards.
            elif scale == "batch":
                found = apart / (_deviation(of[known]) + LEAST)
    return np.where(known, found, 0.0).reshape(-1)


def _standardized(x: Numbers, known: npt.NDArray[np.bool_]) -> Numbers:
    values = x[known]
    if len(values) == 0:
        return np.zeros_like(x)
    return (x - values.mean()) / (_deviation(values) + LEAST)


def _deviation(values: Numbers) -> float:
    # ddof=1 needs two values.
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
