"""Memory that a trainer copies its state into and a writer process reads, without a further copy.

It is kept from save to save, because its first use costs more than the copy: the system has to find and clear the
pages. With CUDA it is page-locked, so that the copy from the device runs at the speed of the bus.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping

import torch

from smp.checkpoint.format.tensor_bytes import DTYPES, lay_out
from smp.checkpoint.format.tensor_file import FileLayout, Slot


class StagingBuffer:
    """Shared memory without a name: not in /dev/shm, whose size containers limit, and with nothing to clean up after a
    crash.

    Where the system has no such memory, a file without a name takes its place; its pages are memory all the same.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self.generation = 0  # grows when it becomes another memory
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def _reserve(self, size: int, pinned: bool) -> None:
        """Make the memory at least ``size`` bytes large, page-locked if ``pinned``."""
        # Page-locked memory serves for any copy; ordinary memory does not serve a GPU.
        # bool compares as int: pinned memory also serves requests for ordinary one.
        if size <= len(self._memory) and pinned <= self._pinned:
            return
        # Given back first, or for a moment there would be twice the state in the host's memory.
        self.close()
        # The writer maps the memory anew when this number changed.
        self.generation += 1
        self.descriptor = _nameless_file()
        os.ftruncate(self.descriptor, size)
        self._memory = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
        if pinned:
            _check(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), size, 0))
            self._pinned = True

    @property
    def size(self) -> int:
        return len(self._memory)

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, torch.Tensor]) -> FileLayout:
        """Copy all tensors, each to its slot of the layout of a file; they are there when this returns."""
        layout = lay_out(tensors)
        self._reserve(max(layout.data_size, 1), pinned=any(tensor.is_cuda for tensor in tensors.values()))
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        for slot in layout.slots:
            # A typed view of the file's layout: the bytes are written as they lie here.
            slice_ = self._memory[slot.start : slot.start + slot.size].view(DTYPES[slot.dtype]).view(slot.shape)
            # Does not wait: copies from a GPU follow each other, and there is one wait at the end.
            slice_.copy_(tensors[slot.key], non_blocking=True)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return layout

    def view(self, slot: Slot) -> memoryview:
        """The bytes of a slot, as they were filled in."""
        return memoryview(self._memory[slot.start : slot.start + slot.size].numpy())  # type: ignore[arg-type]

    def close(self) -> None:
        """Free the memory."""
        if self._pinned:
            # While the memory is still there: CUDA unlocks pages by their address.
            _check(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))
            self._pinned = False
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor, self._memory = -1, torch.empty(0, dtype=torch.uint8)


def _nameless_file() -> int:
    """A descriptor of an empty file without a name, which can grow and be shared."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("checkpoint", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _check(code: object) -> None:
    if int(code) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"cannot lock or unlock the staging memory: CUDA error {code}")
