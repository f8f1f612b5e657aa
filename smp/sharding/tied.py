"""Tied embeddings in a pipeline: the first and the last stage both have a copy of the matrix."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from smp.models.protocol import StagedModel
from smp.parallel.links import Links


class TiedMatrix:
    """The embedding's matrix, which a tied output layer uses on another pipeline rank.

    Both copies begin with the same bits and get the same gradient, the sum of what each end computed; so they stay
    equal without ever being sent.

    Args:
        model: this rank's parts, after ``parallelize``.
        links: with channels between the two ends, in both directions.
        ends: pipeline ranks of the first and the last stage, which differ.
    """

    def __init__(self, model: StagedModel, links: Links, ends: tuple[int, int]) -> None:
        self._links, self._weight, self._other = links, None, -1
        if links.rank in ends:
            # Whichever of the two ends this rank is, the other one is their sum minus it.
            self._weight, self._other = model.embedding_matrix(), ends[0] + ends[1] - links.rank

    @property
    def copies(self) -> dict[torch.Tensor, int]:
        """The matrix and its number of copies, on ranks that have one of them; else empty."""
        return {} if self._weight is None else {self._weight: 2}

    def sum_gradients(self) -> None:
        """Add up the two gradients, once per step, after both are reduced over the data-parallel ranks."""
        if self._weight is None:
            return
        assert isinstance(self._weight.grad, DTensor), "every step uses both ends"
        own = self._weight.grad.to_local()
        other = torch.empty_like(own)
        # Both are posted before either is waited for, and what is sent is waited for last: the ends would block each
        # other otherwise.
        sent = self._links.send(own, self._other)
        self._links.receive(other, self._other).wait()
        sent.wait()
        # a + b and b + a have the same bits, so both ends have the same gradient, and stay equal.
        own.add_(other)
