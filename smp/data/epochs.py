"""Endless samples from documents. The order of an epoch is made once per node where it is large, and ahead of its
epoch."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from smp.data.cache import NodeCache
from smp.data.indexed_dataset import IndexedDataset

LARGE = 1 << 15
"""Size of an order in integers from which on it is kept in a file. A smaller one takes milliseconds, and a small data
set may be read for thousands of epochs, which would be as many files."""

Order = TypeVar("Order")


@dataclass(eq=False)
class DocumentSamples(ABC, Generic[Order]):
    """Endless, shuffled samples from a range of documents.

    Args:
        dataset: the tokens.
        document_range: documents of this split.
        seq_length: tokens that a model sees at once.
        seed: key of the order.
        cache: where large orders are kept, with ``key``, which stands for the contents of ``dataset``. Without one
            each process makes its own.
    """

    packing: ClassVar[str]
    needs: ClassVar[str]
    """What is missing in a range of documents that holds no sample, for the message."""

    dataset: IndexedDataset
    document_range: range
    seq_length: int
    seed: int
    _: KW_ONLY
    cache: NodeCache | None = None
    key: str = ""

    def __post_init__(self) -> None:
        first, stop = self.document_range.start, self.document_range.stop
        assert self.seq_length > 0 and 0 <= first <= stop <= self.dataset.num_documents
        self.num_tokens = int(self.dataset.document_offsets[stop] - self.dataset.document_offsets[first])
        self._large = self._size() >= LARGE
        self._orders: dict[int, Order] = {}
        self._opening = threading.Lock()
        self._ahead = -1

    @property
    @abstractmethod
    def samples_per_epoch(self) -> int:
        """Samples before a token repeats; 0 when the split is too small for one."""

    @abstractmethod
    def _size(self) -> int:
        """Approximate number of integers in the order of an epoch."""

    @abstractmethod
    def _shuffle(self, epoch: int) -> npt.NDArray[np.int64]:
        """The order of an epoch, with its arrays concatenated."""

    @abstractmethod
    def _parse(self, packed: npt.NDArray[np.int64]) -> Order:
        """The arrays of ``_shuffle``'s result, as views."""

    @property
    def order_key(self) -> str:
        """Everything that the meaning of sample numbers depends on, other than the tokens."""
        first, stop = self.document_range.start, self.document_range.stop
        return f"{self.packing} documents {first} to {stop} length {self.seq_length} seed {self.seed}"

    def check_not_empty(self) -> None:
        """Raises ValueError when the split has too few tokens for one sample."""
        if self.samples_per_epoch == 0:
            first, stop = self.document_range.start, self.document_range.stop
            needs = self.needs.format(tokens=self.num_tokens, least=self.seq_length + 1)
            raise ValueError(f"{self.dataset.bin_path}: documents {first} to {stop} hold {needs}")

    def _locate(self, index: int) -> tuple[Order, int]:
        """The order that sample ``index`` >= 0 is in, and its position there. Raises as ``check_not_empty``."""
        assert index >= 0
        self.check_not_empty()
        epoch, position = divmod(index, self.samples_per_epoch)
        order = self._order(epoch)
        # In the second half of an epoch there is time to make the next one's order.
        if 2 * position >= self.samples_per_epoch:
            self._prepare(epoch + 1)
        return order, position

    def _order(self, epoch: int) -> Order:
        """The order of an epoch. The two latest are kept: around the end of an epoch several readers are in both."""
        if epoch in (orders := self._orders):
            return orders[epoch]
        # One thread makes an order; readers that come meanwhile wait for it and do not make it again.
        with self._opening:
            if epoch not in self._orders:
                order = self._parse(self._integers(epoch))
                # A new dictionary and not a change of the old one: readers look into it without the lock.
                self._orders = dict([*self._orders.items(), (epoch, order)][-2:])
            return self._orders[epoch]

    def _integers(self, epoch: int) -> npt.NDArray[np.int64]:
        if self.cache is None or not self._large:
            return self._shuffle(epoch)
        # The key has everything that the order depends on.
        name = f"{self.key}-{self.order_key.replace(' ', '_')}-epoch_{epoch}.npy"
        return self.cache.array(name, lambda: self._shuffle(epoch))

    def _prepare(self, epoch: int) -> None:
        """Make a large order in the background."""
        if self._large and epoch != self._ahead and epoch not in self._orders:
            # Set before the thread starts: other readers start no second one.
            self._ahead = epoch
            threading.Thread(target=self._make_ahead, args=(epoch,), name="next-epoch", daemon=True).start()

    def _make_ahead(self, epoch: int) -> None:
        with suppress(ValueError, OSError):  # the reader of that epoch meets it again, where it can be reported
            self._order(epoch)
