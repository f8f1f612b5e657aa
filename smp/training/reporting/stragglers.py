"""Slow ranks: the times of all ranks, compared every few steps.

Ranks that do the same are compared with each other: those of one pipeline stage, and with the same experts where each
set of them is on several ranks. One without such peers is compared with its own past. A rank is slow if the median of
what it takes longer, in three windows of steps in a row, is more than three times the noise and more than a twentieth
of what is usual. Noise is the median absolute deviation of all ranks from their own medians, times 1.4826, over the
last windows: neither a rank that is slow all the time nor a pause of one step raises it. Where ranks are slow for
seconds at a time, each of them now and then, as on a machine with more to do than processors, it also has to be more
than six times the deviation from window to window. "Usual" is the lower median of the peers, which a slow half of them
does not move.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
WINDOW, IN_A_ROW = 5, 3
"""Steps that are looked at together, and number of windows in which a rank has to be slow: it is named within 20
steps."""
SIGMAS, DRIFTS, SHARE = 3.0, 6.0, 0.05
_KEPT = 50
"""Number of windows whose noise is remembered."""
_FEW = 5
"""Below so many windows nothing is known of how windows differ."""
_NORMAL = 1.4826
"""Standard deviation of normal noise, in median absolute deviations."""


@dataclass(frozen=True)
class Finding:
    """A rank that took longer than usual, in seconds per step."""

    rank: int
    seconds: float
    usual: float


def roles_of(stages: Sequence[int], experts: Sequence[int]) -> list[int]:
    """A number for each rank, equal for ranks that do the same: of one pipeline stage, and with the same experts, which
    may get more tokens than others. Experts count only where that leaves no rank without peers."""
    both = list(zip(stages, experts, strict=True))
    if min(Counter(both).values()) == 1:
        return list(stages)
    numbers = {role: number for number, role in enumerate(sorted(set(both)))}
    return [numbers[role] for role in both]


def _usual(times: Numbers) -> Numbers:
    """The lower median of each row, (rows, 1): of two ranks the faster one."""
    # Index (n - 1) // 2 of n sorted values.
    return np.sort(times, axis=1)[:, [(times.shape[1] - 1) // 2]]


def _drift(later: Numbers) -> float:
    """How much the lateness of ranks, (windows, ranks), varies from window to window."""
    return _NORMAL * float(np.median(np.abs(later - np.median(later, axis=0))))


class Detector:
    """Finds slow ranks in windows of times.

    Args:
        roles: of each rank; ranks of one role do the same.
    """

    def __init__(self, roles: Sequence[int]) -> None:
        self._peers = [np.flatnonzero(np.array(roles) == role) for role in sorted(set(roles))]
        self._noise: list[deque[Numbers]] = [deque(maxlen=_KEPT) for _ in self._peers]
        self._past: list[deque[Numbers]] = [deque(maxlen=_KEPT) for _ in self._peers]
        self._row: Counter[int] = Counter()
        """Windows in a row in which a rank was slow."""

    def slow(self, times: Numbers, usual: Numbers | None = None) -> list[Finding]:
        """Ranks that are slow in this window and in those before it. The first window is only learned from: it contains
        what a run does once.

        Args:
            times: seconds (steps, ranks).
            usual: what ``least`` is a share of, (ranks); by default the usual times themselves.
        """
        found: list[Finding] = []
        for peers, noise, past in zip(self._peers, self._noise, self._past, strict=True):
            own = times[:, peers]
            known = len(past) > 0
            found += self._of_peers(peers, own, noise, past, usual) if known else []
            # Deviations from the rank's own median: a rank that is always slow adds no noise.
            noise.append(np.abs(own - np.median(own, axis=0)).ravel())
            past.append(np.median(own, axis=0))
        # Counted anew: a window in which a rank is not slow ends its row.
        self._row = Counter({one.rank: self._row[one.rank] + 1 for one in found})
        lasting = [one for one in found if self._row[one.rank] >= IN_A_ROW]
        return sorted(lasting, key=lambda finding: finding.rank)

    def _of_peers(
        self,
        peers: npt.NDArray[np.int64],
        own: Numbers,
        noise: deque[Numbers],
        past: deque[Numbers],
        scale: Numbers | None,
    ) -> list[Finding]:
        before = np.stack(past)
        # One rank alone: its own past is the reference.
        reference = _usual(own) if len(peers) > 1 else np.full((len(own), 1), np.median(before))
        later = np.median(own - reference, axis=0)
        usual = float(np.median(reference))
        spread = _NORMAL * float(np.median(np.concatenate(noise)))
        whole = np.full(len(peers), usual) if scale is None else scale[peers]
        # The lateness of the windows before, by the same rule.
        later_before = before - (_usual(before) if len(peers) > 1 else np.median(before))
        drift = DRIFTS * _drift(later_before) if len(before) >= _FEW else 0.0
        # All three at once: above the noise, above the drift, and large enough to matter.
        slow = later > np.maximum(max(SIGMAS * spread, drift), SHARE * whole)
        return [Finding(int(peers[i]), usual + float(later[i]), usual) for i in np.flatnonzero(slow)]
