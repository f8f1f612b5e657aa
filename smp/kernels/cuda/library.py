"""The shared library of ``smp.kernels.cuda.build``, through ctypes."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import torch

from smp.kernels.cuda.build import LIBRARY, SOURCES

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


def library_path() -> Path:
    """Where the library is, or would be."""
    return SOURCES / LIBRARY


@cache
def library() -> ctypes.CDLL:
    """The library, loaded once. Its functions are those at the end of ``csrc/cross_entropy.cu``."""
    loaded = ctypes.CDLL(str(library_path()))
    # Without argtypes ctypes would pass pointers as 32-bit integers.
    loaded.smp_cross_entropy_stats.argtypes = [*[_POINTER] * 3, *[_LONG] * 3, ctypes.c_int, _POINTER]
    loaded.smp_cross_entropy_gradient.argtypes = [*[_POINTER] * 4, *[_LONG] * 4, ctypes.c_int, _POINTER]
    loaded.smp_error_string.argtypes = [ctypes.c_int]
    loaded.smp_error_string.restype = ctypes.c_char_p
    return loaded


def why_unusable(device: torch.device) -> str | None:
    """Why the library, which is there, does not run on ``device``, or None if it does."""
    try:
        usable = library().smp_usable
    except (OSError, AttributeError) as problem:  # built for another machine, or from older sources
        return str(problem)
    with torch.cuda.device(device) if torch.cuda.is_available() else nullcontext():
        error = usable()
    return library().smp_error_string(error).decode() if error else None


def check(error: int, name: str) -> None:
    """Raise RuntimeError for what a launch returned, unless it is 0."""
    if error:
        raise RuntimeError(f"{name}: {library().smp_error_string(error).decode()} (CUDA error {error})")


def stream(tensor: torch.Tensor) -> int:
    """The handle of the current stream of the tensor's device."""
    return torch.cuda.current_stream(tensor.device).cuda_stream
