"""pytest, with each tensor of a C++ kernel beside a page that may not be touched: who reads past it is killed.

    python -m tests.kernels.guarded before tests/kernels/test_cpp_properties.py

``before``: the page lies in front of a tensor, ``behind``: after its last byte. Tensors are copied there for each call,
and back. Loads of which the mask leaves out what is not there touch nothing, as on every page.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from smp.kernels.cpp.library import library

PAGE = mmap.PAGESIZE
_C = ctypes.CDLL(None)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_C.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_C.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass
class Copy:
    """A tensor's bytes, from its first element to its last, between two such pages."""

    tensor: torch.Tensor
    behind: bool

    def __enter__(self) -> int:
        steps = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in steps)
        self.bytes = (last + 1) * self.tensor.element_size() if self.tensor.numel() else 0
        room = -(-self.bytes // PAGE) * PAGE
        self.size = room + 2 * PAGE
        self.start = _C.mmap(None, self.size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANON, -1, 0)
        for page in (self.start, self.start + PAGE + room):
            assert _C.mprotect(page, PAGE, 0) == 0
        self.at: int = self.start + PAGE + (room - self.bytes if self.behind else 0)
        if self.bytes:
            ctypes.memmove(self.at, self.tensor.data_ptr(), self.bytes)
        return self.at

    def __exit__(self, *_: object) -> None:
        if self.bytes:
            ctypes.memmove(self.tensor.data_ptr(), self.at, self.bytes)
        _C.munmap(self.start, self.size)


@dataclass
class Library:
    """The library, whose functions get copies; ``calls`` counts the tensors."""

    behind: bool
    calls: int = 0

    def pointers(self, *tensors: torch.Tensor | None) -> list[Copy | None]:
        """In place of the launchers' own."""
        return [None if tensor is None else Copy(tensor, self.behind) for tensor in tensors]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(library(), name)

        def call(*arguments: Any) -> Any:
            copies = [given for given in arguments if isinstance(given, Copy)]
            self.calls += len(copies)
            given = [each.__enter__() if isinstance(each, Copy) else each for each in arguments]
            result = function(*given)
            for copy in copies:
                copy.__exit__()
            return result

        return call


def main(side: str, *files: str) -> int:
    """Run the tests of ``files``."""
    guarded = Library(side == "behind")
    for name in ("attention", "cross_entropy", "norm", "rope", "swiglu"):
        launcher: Any = importlib.import_module(f"smp.kernels.cpp.{name}")
        launcher.pointers, launcher.library = guarded.pointers, lambda: guarded
    code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *files])
    print(f"{guarded.calls} tensors")
    return int(code) if guarded.calls else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
