"""Rates of a cluster's links, for clusters of equal nodes. Imports no torch.

    domain   GPUs that NVLink connects: a node of 8, a rack of 72
    rails    each GPU has a network card; the i-th cards of all domains are on rail i
    leaf     GPUs below one set of leaf switches, all rails together
    spine    between leaves, ``oversubscription`` times too narrow for all cards at once

A ring over ranks that are ``stride`` apart has ``lanes`` of its ranks in a domain, and so many cards for its way out.
Rings of other ranks leave the same leaf: one way out for each ``stride`` GPUs below it. What crosses the spine
shares it with other jobs, which take all except 1 / ``contention`` of it.
"""

from __future__ import annotations

from dataclasses import dataclass


def ring(ranks: int, size: float, rate: float, latencies: float) -> float:
    """Seconds of an all-gather or a reduce-scatter round a ring, whose links each carry all pieces but one.

    Args:
        size: bytes of the whole buffer.
        rate: bytes/s of the slowest link.
        latencies: seconds of all steps' messages without bytes.
    """
    return latencies + (ranks - 1) / ranks * size / rate


@dataclass(frozen=True)
class Fabric:
    """A cluster's links.

    Attributes:
        domain: GPUs that ``local`` connects.
        local, card: bytes/s of a GPU to others of its domain, and of its network card.
        latency: seconds of a message, also of each step of a ring.
        leaf: GPUs below a leaf, on all rails; 0: all of the cluster.
        oversubscription, contention: of what crosses the spine.
    """

    domain: int
    local: float
    card: float
    latency: float
    leaf: int = 0
    oversubscription: float = 1.0
    contention: float = 1.0

    def rate(self, ranks: int, stride: int) -> float:
        """Bytes/s of the slowest link of a ring."""
        lanes = max(1, self.domain // stride)
        # The whole ring is inside of one domain.
        if ranks <= lanes:
            return self.local
        # Across domains a ring has the cards of all its ranks in one for its way out.
        rate = min(self.local, self.card * lanes)
        below = max(1, self.leaf // stride) if self.leaf else ranks
        # It leaves its leaf: the spine is shared by all rings of the leaf, and by other jobs.
        if ranks > below:
            rate = min(rate, self.card * below / (self.oversubscription * self.contention))
        return rate

    def ring(self, size: float, ranks: int, stride: int) -> float:
        """Seconds of an all-gather or a reduce-scatter of ``size`` bytes in all."""
        return ring(ranks, size, self.rate(ranks, stride), self.latency * (ranks - 1)) if ranks > 1 else 0.0

    def all_to_all(self, size: float, ranks: int, stride: int) -> float:
        """Seconds in which every rank sends ``size`` bytes in equal parts to all, itself included."""
        if ranks == 1:
            return 0.0
        lanes = min(ranks, max(1, self.domain // stride))
        below = min(ranks, max(1, self.leaf // stride)) if self.leaf else ranks
        # The slowest of three levels: inside of the domain, over the cards, over the spine.
        narrow = self.oversubscription * self.contention
        times = (
            (lanes - 1) / ranks * size / self.local,
            (ranks - lanes) / ranks * size / self.card,
            (ranks - below) / ranks * size * narrow / self.card,
        )
        return max(times) + self.latency * (ranks - 1)

    def message(self, size: float, ranks: int, stride: int) -> float:
        """Seconds between neighbours of a pipeline, the slowest pair of ``ranks``: a GPU's message has one card."""
        rate = self.local
        if ranks * stride > self.domain:
            rate = min(rate, self.card)
        if self.leaf and ranks * stride > self.leaf:
            # Of a leaf's GPUs those of one stage send into the spine, and share it.
            senders = min(1.0, stride / self.leaf)
            rate = min(rate, self.card / (senders * self.oversubscription * self.contention))
        return self.latency + size / rate
