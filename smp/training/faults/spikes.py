"""Loss spikes: a loss or gradient norm far above those of the last steps, decided on the device before the update.

A step is a spike if its loss or its gradient norm is more than ``threshold`` standard deviations above the mean of the
last ``window`` steps (OLMo's SkipStepOptimizer has 6 and 128). Nothing is one before half of the window is filled. What
the policy drops does not enter the window: later decisions are those of a run that never had the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smp.config import TrainingConfig

Kept = list[list[float]]
"""Losses and gradient norms of the window, oldest first: two lists."""


class Spikes:
    """The window, on the device: no step waits for the host.

    Args:
        config: policy, window and threshold.
        kept: of the run that is resumed.
    """

    def __init__(self, config: TrainingConfig, device: torch.device, kept: Kept | None = None) -> None:
        assert config.spike_policy is not None
        self.drops, self._threshold = config.spike_policy != "warn", config.spike_threshold
        self._least = max(2, config.spike_window // 2)
        # Sums over thousands of steps are not needed: mean and deviation are computed from the window itself, in fp64.
        self._values = torch.zeros(2, config.spike_window, dtype=torch.float64, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        if kept is not None:
            self.restore(kept)

    def scores(self, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """Standard deviations above the mean of the window, fp64 (2,); 0 as long as it is too short."""
        window = self._values.shape[1]
        # The window fills from its end: the newest value is the last.
        there = torch.arange(window, device=self._values.device) >= window - self._count
        count = self._count.clamp(min=2)
        # Two passes, and divided by n - 1: no cancellation, an unbiased variance.
        mean = (self._values * there).sum(1) / count
        deviation = (((self._values - mean[:, None]) * there).square().sum(1) / (count - 1)).sqrt()
        # Where all values are equal the deviation is 0, and any larger value would be a spike.
        deviation = torch.maximum(deviation, 1e-6 * mean.abs()).clamp(min=1e-30)
        scores = (torch.stack((loss, norm)).double() - mean) / deviation
        return torch.where(self._count >= self._least, scores, torch.zeros_like(scores))

    def accepts(self, scores: torch.Tensor) -> torch.Tensor:
        """Whether the step is no spike, bool 0-dim. A score that is NaN is another fault, and accepted here."""
        return ~(scores > self._threshold).any()

    def note(self, loss: torch.Tensor, norm: torch.Tensor, enters: torch.Tensor) -> None:
        """Note a step that has been decided on; it enters the window if it is finite and not dropped."""
        # Decided on the device: no branch on the host.
        pair = torch.stack((loss, norm)).double()
        moved = torch.cat((self._values[:, 1:], pair[:, None]), dim=1)
        self._values = torch.where(enters, moved, self._values)
        self._count = torch.where(enters, (self._count + 1).clamp(max=self._values.shape[1]), self._count)

    def state(self) -> Kept:
        """The window, for a checkpoint; waits for the device."""
        count = int(self._count)
        return self._values[:, self._values.shape[1] - count :].tolist()

    def restore(self, kept: Sequence[Sequence[float]]) -> None:
        """Go on from :meth:`state`; if it is of a longer window, from its newest part."""
        window = self._values.shape[1]
        values = torch.tensor([list(one)[-window:] for one in kept], dtype=torch.float64).view(2, -1)
        self._values.zero_()
        if count := values.shape[1]:
            self._values[:, window - count :] = values.to(self._values.device)
        self._count.fill_(count)
