"""The orders of epochs: made once per node when they are large, and before anyone waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from smp.data.cache import NodeCache

LARGE = 1 << 15
"""Numbers in an order from which on it is worth a file. A smaller one takes milliseconds, and a small data set may be
read thousands of times, which would be as many files."""

Order = TypeVar("Order")


class Epochs(Generic[Order]):
    """Orders by number of epoch. The two latest are at hand: readers ahead and behind the end of an epoch take turns.

    Args:
        make: all numbers of an order, as a function of the epoch.
        parse: what they mean; makes views.
        numbers: how many there are, about.
        cache: where large orders are kept, in files that are named by ``name``. Without one each process makes its own.
    """

    def __init__(
        self,
        make: Callable[[int], npt.NDArray[np.int64]],
        parse: Callable[[npt.NDArray[np.int64]], Order],
        *,
        numbers: int,
        cache: NodeCache | None,
        name: str,
    ) -> None:
        self._make, self._parse, self._name = make, parse, name
        self._large = numbers >= LARGE
        self._cache = cache if self._large else None
        self._orders: dict[int, Order] = {}
        self._opening = threading.Lock()
        self._ahead = -1

    def order(self, epoch: int) -> Order:
        """Of one epoch."""
        order = self._orders.get(epoch)
        if order is None:
            with self._opening:
                order = self._orders.get(epoch)
                if order is None:
                    order = self._parse(self._numbers(epoch))
                    self._orders = dict([*self._orders.items(), (epoch, order)][-2:])
        return order

    def _numbers(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._cache is None:
            return self._make(epoch)
        return self._cache.array(f"{self._name}-epoch_{epoch}.npy", lambda: self._make(epoch))

    def prepare(self, epoch: int) -> None:
        """Make a large order in the background."""
        if self._large and epoch != self._ahead and epoch not in self._orders:
            self._ahead = epoch
            threading.Thread(target=self._prepare, args=(epoch,), name="next-epoch", daemon=True).start()

    def _prepare(self, epoch: int) -> None:
        with suppress(ValueError, OSError):  # whoever reads that epoch meets it again, where it can be reported
            self.order(epoch)
