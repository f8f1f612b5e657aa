"""Documents per second of best-fit-decreasing packing on one core, and how close it is to the fewest sequences.

Lengths are lognormal, cut at the capacity, as those of chats and of web pages are. No packing needs fewer sequences
than the sum of all lengths over the capacity, rounded up; the optimum lies between that and what is found.

    python benchmarks/packing.py --documents 1000000 --rounds 5
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from smp.data.packing import pack_best_fit

CAPACITIES = (2048, 8192, 32768)


def measure(documents: int, capacity: int, rounds: int) -> str:
    """One line of the table."""
    drawn = np.random.default_rng(0).lognormal(mean=6.0, sigma=1.2, size=documents)
    lengths = np.clip(drawn, 1, capacity).astype(np.int64)
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        packed = pack_best_fit(lengths, capacity)
        seconds.append(time.perf_counter() - started)
    sums = np.add.reduceat(lengths[packed.order], packed.offsets[:-1])
    assert sums.max() <= capacity and len(packed.order) == documents
    bound = -(-int(lengths.sum()) // capacity)
    above = 100 * (len(packed) / bound - 1)
    median = statistics.median(seconds)
    spread = 100 * (max(seconds) - min(seconds)) / median
    return (
        f"{capacity:>10,} {lengths.mean():>13,.1f} {documents / median:>14,.0f} {spread:>9.0f} % {len(packed):>11,} "
        f"{bound:>11,} {above:>8.4f} % {100 * lengths.sum() / (len(packed) * capacity):>8.3f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000, help="default: a million")
    parser.add_argument("--rounds", type=int, default=5, help="the median counts (default: 5)")
    args = parser.parse_args()
    print(f"best-fit decreasing of {args.documents:,} lognormal lengths, one thread, median of {args.rounds}\n")
    print("  capacity   mean length    documents/s    spread   sequences  lower bound    above      full")
    for capacity in CAPACITIES:
        print(measure(args.documents, capacity, args.rounds), flush=True)


if __name__ == "__main__":
    main()
