"""What tensors take on the CPU at most at one time."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """Bytes of tensors on the CPU that were made while it is entered, at most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if type(out) is torch.Tensor and out.device.type == "cpu":
            storage = out.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.seen:
                self.seen.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._freed, key, size)
        return out

    def _freed(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live -= size
