"""The shared library of ``smp.kernels.cuda.build``, through ctypes."""

from __future__ import annotations

import ctypes
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
    loaded.smp_softmax_stats.argtypes = [*[_POINTER] * 4, *[_LONG] * 3, ctypes.c_int, _POINTER]
    loaded.smp_logits_to_gradient.argtypes = [*[_POINTER] * 4, *[_LONG] * 4, ctypes.c_int, _POINTER]
    loaded.smp_error_string.argtypes = [ctypes.c_int]
    loaded.smp_error_string.restype = ctypes.c_char_p
    return loaded


def why_unusable(device: torch.device) -> str | None:
    """Why the library, which is there, does not run on ``device``, or None if it does."""
    try:
        usable = library().smp_usable
        with torch.cuda.device(device):
            error = usable()
    except (OSError, AttributeError) as problem:  # for another machine; from older sources
        return str(problem)
    except (RuntimeError, AssertionError) as problem:  # torch has no such device
        return str(problem).splitlines()[0]
    return library().smp_error_string(error).decode() if error else None


def check(error: int, name: str) -> None:
    """Raise RuntimeError for what a launch returned, unless it is 0."""
    if error:
        raise RuntimeError(f"{name}: {library().smp_error_string(error).decode()} (CUDA error {error})")


def stream(tensor: torch.Tensor) -> int:
    """The handle of the current stream of the tensor's device."""
    return torch.cuda.current_stream(tensor.device).cuda_stream
