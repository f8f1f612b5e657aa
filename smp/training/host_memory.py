"""Memory of a process that trains on a CPU stays the process's.

glibc gives what a step frees back to the system, and the next step's first touch of each page waits for the system to
clear it: up to 20,000 page faults a step of a model of 9 million parameters, and 3 to 5 % of its time where
micro-batches are small (docs/planning.md). A GPU's allocator keeps what it has; here the same is asked of glibc.

Blocks of more than 32 MiB, as gradients of an output layer are, it would map and unmap each time, whatever its
thresholds are; so it maps none. (58M Llama in bf16, 2,048 tokens: 0.95 s a step, and 0.89 without these; the most
memory at once is 0.99 to 1.05 of what it was. docs/measurements/kernels.md)
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Numbers of malloc.h."""


def keep_freed_memory() -> bool:
    """Have the C library keep what is freed, unless the environment sets its allocator.

    Returns:
        Whether it does; others than glibc are left as they are.
    """
    # The user's own choice of allocator (jemalloc, tcmalloc) or of its settings wins.
    told = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if told or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # A trim threshold of -1 is: never.
    return mallopt is not None and bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, -1))
