"""Keyed random numbers: nothing here has a state, so nothing can be lost or depend on who asked first.

Philox is counter-based, and its raw output is fixed by its definition (Salmon et al., SC 2011). The distributions on
top of it in numpy may change between numpy versions, so the few that are needed are made here from raw bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def keyed_bits(count: int, seed: int, stream: int, index: int, purpose: int = 0) -> npt.NDArray[np.uint64]:
    """``count`` independent 64-bit words, a function of (seed, stream, index, purpose) alone."""
    # Philox advances the first word of the counter; the other words keep (purpose, index) apart.
    key = np.array([seed % 2**64, stream], dtype=np.uint64)
    counter = np.array([0, 0, purpose, index], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def keyed_uniform(count: int, seed: int, stream: int, index: int) -> npt.NDArray[np.float64]:
    """``count`` numbers in [0, 1) with 53 random bits each."""
    # 53 bits: as many as a double has, so every number is exact.
    words = keyed_bits(count, seed, stream, index) >> np.uint64(11)
    return words.astype(np.float64) * 2.0**-53


def keyed_permutation(count: int, seed: int, stream: int, index: int, purpose: int = 0) -> npt.NDArray[np.int64]:
    """A permutation of 0 .. count - 1: the order of ``count`` random words."""
    # Of two equal words the first goes first, on every platform.
    return np.argsort(keyed_bits(count, seed, stream, index, purpose), kind="stable")
