"""Copies between the memory of a device and that of the host, while the device computes.

Events order copies and the device's work: a copy begins when all work issued before it has ended, and work issued after
:meth:`Copier.wait` begins when the copy has ended. The host waits for neither.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

Event = Any
"""The completion of a copy, for :meth:`Copier.wait`; only the copier that made it looks inside."""


class Copier(ABC):
    """Copies of one device.

    Attributes:
        bytes_out, bytes_back: copied to the host and back so far.
    """

    def __init__(self) -> None:
        self.bytes_out, self.bytes_back = 0, 0

    def out(self, source: torch.Tensor, target: torch.Tensor, after: Event = None) -> Event:
        """Begin to copy ``source`` on the device to ``target`` on the host, both contiguous, not before the event
        ``after``. Until the returned event, ``source`` must not be written to, and both must stay alive."""
        self.bytes_out += source.nbytes
        return self._copy("out", source, target, after)

    def back(self, source: torch.Tensor, target: torch.Tensor, after: Event = None) -> Event:
        """Begin to copy ``source`` on the host to ``target`` on the device, otherwise as :meth:`out`. ``target`` was
        allocated in the order of the device's work."""
        self.bytes_back += source.nbytes
        return self._copy("back", source, target, after)

    @abstractmethod
    def host(self, nbytes: int, *, copied: bool = True) -> torch.Tensor:
        """Host memory, uint8 (nbytes,). It is pinned if it is ``copied`` to or from a device; pinning takes time, and
        the memory cannot be swapped out."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let the device begin what is issued from now on after ``event``."""

    @abstractmethod
    def host_wait(self, event: Event) -> None:
        """Wait on the host for ``event``."""

    @abstractmethod
    def _copy(self, way: str, source: torch.Tensor, target: torch.Tensor, after: Event) -> Event: ...


class HostCopier(Copier):
    """Copier of a CPU, whose memory is the host's: copies are made where they are asked for, and nothing is ever waited
    for. It saves no memory, and shows that a program with copies computes what it computes without."""

    def host(self, nbytes: int, *, copied: bool = True) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def wait(self, event: Event) -> None:
        pass

    def host_wait(self, event: Event) -> None:
        pass

    @torch.no_grad()
    def _copy(self, way: str, source: torch.Tensor, target: torch.Tensor, after: Event) -> Event:
        target.copy_(source)


class CudaCopier(Copier):
    """Copier of a GPU: one stream for each direction, which the link has both, and pinned memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        # One for each direction: the link carries both at the same time.
        self._streams = {"out": torch.cuda.Stream(device), "back": torch.cuda.Stream(device)}

    def host(self, nbytes: int, *, copied: bool = True) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=copied)

    def wait(self, event: Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def host_wait(self, event: Event) -> None:
        event.synchronize()

    @torch.no_grad()
    def _copy(self, way: str, source: torch.Tensor, target: torch.Tensor, after: Event) -> Event:
        # The current stream is asked for each time: FSDP2 and autograd change it.
        stream, event = self._streams[way], torch.cuda.Event()
        # Copies begin after what has been issued, or they would read what is not computed yet.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event.record(stream)
        return event


def copier_of(device: torch.device) -> Copier:
    """The copier of ``device``."""
    return CudaCopier(device) if device.type == "cuda" else HostCopier()


class HostPool:
    """A pool of host buffers: it grows to the largest number in use at once. Pinned memory is slow to allocate, and the
    allocation makes the device wait.

    Attributes:
        nbytes: of all buffers.
    """

    def __init__(self, copier: Copier) -> None:
        self.copier, self.nbytes = copier, 0
        self._free: list[tuple[torch.Tensor, Event]] = []

    def take(self, nbytes: int) -> tuple[torch.Tensor, Event]:
        """(a buffer of at least ``nbytes``, the event after which it may be written)."""
        fitting = [i for i, (buffer, _) in enumerate(self._free) if buffer.nbytes >= nbytes]
        if fitting:
            # The smallest that fits: large buffers stay for what needs them.
            return self._free.pop(min(fitting, key=lambda i: self._free[i][0].nbytes))
        if self._free:  # a larger one replaces one that is too small, so that their number does not grow
            # The largest of those that are too small: with it most memory is given back.
            small = max(range(len(self._free)), key=lambda i: self._free[i][0].nbytes)
            self.nbytes -= self._free.pop(small)[0].nbytes
        # No event: nothing has used this memory before.
        buffer = self.copier.host(_rounded(nbytes))
        self.nbytes += buffer.nbytes
        return buffer, None

    def give(self, buffer: torch.Tensor, after: Event) -> None:
        """Put a buffer back, to be written after ``after``."""
        # The next user waits for the event on the device, not on the host.
        self._free.append((buffer, after))


def _rounded(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of an eighth of a power of two, so that similar lengths share buffers."""
    step = max(16, 1 << max(nbytes.bit_length() - 4, 0))
    return -(-nbytes // step) * step
