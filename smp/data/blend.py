"""Blends: which sample of which source is sample i.

Weights are integers w_d with sum M. The sources take turns in a sequence of M slots that repeats, in which source d
has w_d slots, spread so that after any n samples it had less than one more or less than n w_d / M. Such a sequence
always exists and the rule "of the jobs that have begun, the one with the earliest deadline" finds it (Baruah et al.,
Algorithmica 1996; Tijdeman 1980): job j of source d may take slots from floor(j M / w_d) on and must be done before
ceil((j + 1) M / w_d).

So sample i needs no history: source and number of its sample follow from i div M and i mod M. A run that changes its
blend begins a new phase; every source goes on in it after the samples that it had given, whatever blend they were for.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from smp.data.cache import NodeCache
from smp.data.sample import Sample, SampleDataset

MAX_PERIOD = 1 << 20
"""Largest sum of the integer weights. Simple numbers are exact, others are rounded to multiples of 1 / MAX_PERIOD."""
# A source is a uint16 in the order of turns.
_MAX_SOURCES = 1 << 16

Manifest = list[dict[str, Any]]


def integer_weights(shares: Sequence[Fraction]) -> list[int]:
    """Integers in the proportion of ``shares`` (all above 0): exactly if their sum is then at most MAX_PERIOD, else
    rounded to a sum of MAX_PERIOD, with at least 1 for each."""
    # Fractions, so that 0.1 and 0.2 are in the proportion 1 to 2 exactly.
    # All shares times the least common multiple of their denominators are integers.
    scale = lcm(*(share.denominator for share in shares))
    exact = [int(share * scale) for share in shares]
    divisor = gcd(*exact)
    exact = [weight // divisor for weight in exact]
    total = sum(exact)
    if total <= MAX_PERIOD:
        return exact
    free = MAX_PERIOD - len(exact)  # one for each first
    rounded = [weight * free // total for weight in exact]
    # Negative remainder first: largest remainder first.
    largest = sorted(range(len(exact)), key=lambda d: (-(exact[d] * free % total), d))
    # What rounding down left over goes to the largest remainders; of equal ones to the first.
    for d in largest[: free - sum(rounded)]:
        rounded[d] += 1
    return [weight + 1 for weight in rounded]


def interleave(weights: Sequence[int]) -> npt.NDArray[np.uint16]:
    """The source of each slot of a period, uint16 (sum of weights,)."""
    assert len(weights) <= _MAX_SOURCES and min(weights) > 0
    period, shares = sum(weights), np.array(weights, np.int64)
    # (period,): the source of each job
    source = np.repeat(np.arange(len(shares)), shares)
    # For each job its number within its source, all sources one after the other.
    job = np.arange(period) - np.repeat(np.cumsum(shares) - shares, shares)
    # Integer arithmetic: floor and, as -(-a // b), ceil.
    begin, deadline = job * period // shares[source], -(-(job + 1) * period // shares[source])
    # All jobs in the order in which they begin; a key is the deadline and, for equal ones, the source.
    # One integer to compare: deadline first, then source.
    jobs = (deadline * _MAX_SOURCES + source)[np.argsort(begin, kind="stable")].tolist()
    begun = np.cumsum(np.bincount(begin, minlength=period)).tolist()  # jobs that have begun at each slot
    waiting: list[int] = []
    chosen, at = [], 0
    # Earliest deadline first, over the jobs that have begun: the schedule that the note above proves to exist.
    # At every slot some job has begun and is not done, or the schedule would not exist.
    for stop in begun:
        while at < stop:
            heapq.heappush(waiting, jobs[at])
            at += 1
        chosen.append(heapq.heappop(waiting))
    return (np.array(chosen) % _MAX_SOURCES).astype(np.uint16)


class Turns:
    """The order in which sources give samples, for one set of weights."""

    def __init__(self, weights: Sequence[int], cache: NodeCache | None = None) -> None:
        self.weights = list(weights)
        self.period = sum(weights)
        # A short one is made faster than a file is read.
        if cache is None or self.period <= 4096:
            self._order = interleave(weights)
        else:
            key = xxhash.xxh3_128_hexdigest(np.array(weights, np.int64).tobytes())
            self._order = cache.array(f"turns-{key}.npy", lambda: interleave(weights))
        by_source = np.argsort(self._order, kind="stable")
        # Slots sorted by source stand after each other in their order; their place among
        # these is how many came before.
        self._given = np.empty(self.period, np.int64)  # slots of the same source before each slot
        first = np.cumsum([0, *self.weights[:-1]])
        self._given[by_source] = np.arange(self.period) - np.repeat(first, self.weights)

    def turn(self, index: int) -> tuple[int, int]:
        """Source of turn ``index`` >= 0, and how many turns it had before."""
        periods, slot = divmod(index, self.period)
        source = int(self._order[slot])
        # Whole periods first, then the turns within this one.
        return source, periods * self.weights[source] + int(self._given[slot])

    def counts(self, turns: int) -> list[int]:
        """Turns of each source among the first ``turns``."""
        periods, rest = divmod(turns, self.period)
        within = np.bincount(self._order[:rest], minlength=len(self.weights)).tolist()
        return [periods * weight + more for weight, more in zip(self.weights, within, strict=True)]


@dataclass(frozen=True)
class Source:
    """One data set of a blend.

    Attributes:
        name: what the user calls it.
        key: what its sample numbers mean: contents, split, length, seed and packing.
        data: its samples.
    """

    name: str
    key: str
    data: SampleDataset


class BlendedDataset:
    """Samples of several sources in turns, or those of a single source.

    Args:
        sources: of the blend.
        weights: an integer for each.
        cache: where long sequences of turns are kept.
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[int], cache: NodeCache | None = None) -> None:
        assert len(sources) == len(weights) > 0
        self.sources, self.weights = list(sources), list(weights)
        self.seq_length = sources[0].data.seq_length
        self._turns = Turns(weights, cache)
        self._cache = cache
        self.notes: list[str] = []
        """What the user should know about how the blend was made."""
        self.manifest: Manifest = [self._phase(0, {})]

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples of all sources before a token repeats; None: some source never repeats."""
        sizes = [source.data.samples_per_epoch for source in self.sources]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def sample(self, index: int) -> Sample:
        """Sample ``index``, at or after the start of the last phase. Raises what the source does."""
        source, number = self.locate(index)
        return self.sources[source].data.sample(number)

    def locate(self, index: int) -> tuple[int, int]:
        """The source of sample ``index``, and its number there."""
        phase = self.manifest[-1]
        # Data-order state is only (manifest, consumed samples): earlier phases need no index.
        assert index >= phase["start"], "a run never goes back before the phase that it is in"
        source, turn = self._turns.turn(index - phase["start"])
        return source, phase["sources"][source]["offset"] + turn

    def resume(self, manifest: Manifest | None, consumed: int) -> list[str]:
        """Go on after ``consumed`` samples that were read as ``manifest`` says; returns notes for the user.

        The same blend goes on as if nothing had happened. With another, a phase begins: sources that were there before
        continue after their last sample, new ones begin at their first.
        """
        if manifest is None or consumed == 0:  # a run that did not write one read this blend from its start
            return []
        last = manifest[-1]
        # Names and folders may change; what was read under the same key is the same data.
        if [(s["key"], s["weight"]) for s in last["sources"]] == [
            (source.key, weight) for source, weight in zip(self.sources, self.weights, strict=True)
        ]:
            self.manifest = manifest
            return []
        given = self._given(manifest, consumed)
        # A phase of which nothing was read is dropped.
        kept = [phase for phase in manifest if phase["start"] < consumed]
        self.manifest = [*kept, self._phase(consumed, given)]
        before = {s["key"] for s in last["sources"]}
        lines = [f"note: the blend changes at sample {consumed}; what was read before continues after its last sample"]
        for source in self.sources:
            if source.key not in before and source.key not in given:
                lines.append(f"note: {source.name} was not read before in this form: it begins at its first sample")
        return lines

    def read_again(self, samples: int) -> list[str]:
        """A line for each source that the first ``samples`` samples, from the start, read more than once."""
        lines = []
        for source, count in zip(self.sources, self._turns.counts(samples), strict=True):
            size = source.data.samples_per_epoch
            if size is not None and count > size:
                lines.append(f"{source.name} has {size} and is read {count / size:.2f} times")
        return lines

    def _phase(self, start: int, given: dict[str, int]) -> dict[str, Any]:
        return {
            "start": start,
            "sources": [
                {"name": source.name, "key": source.key, "weight": weight, "offset": given.get(source.key, 0)}
                for source, weight in zip(self.sources, self.weights, strict=True)
            ],
        }

    def _given(self, manifest: Manifest, consumed: int) -> dict[str, int]:
        """Samples of each source, by its key, among the first ``consumed``."""
        starts = [phase["start"] for phase in manifest]
        given: dict[str, int] = {}
        for phase, end in zip(manifest, [*starts[1:], consumed], strict=True):
            turns = Turns([s["weight"] for s in phase["sources"]], self._cache)
            # Only what was consumed of a phase counts.
            counts = turns.counts(max(0, min(end, consumed) - phase["start"]))
            for source, count in zip(phase["sources"], counts, strict=True):
                # A source that one phase leaves out keeps its place for a later one.
                given[source["key"]] = max(given.get(source["key"], 0), source["offset"] + count)
        return given
