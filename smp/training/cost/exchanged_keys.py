"""Bytes of attention where context parallelism exchanges keys and values, or heads, by formula; symbols as in
:mod:`smp.training.cost.memory`."""

from __future__ import annotations

from smp.config import Config, Layout
from smp.config.rules.context_parallel import exchange_sizes


def of_exchange(config: Config, q: int, k: int, groups: int, recompute: str) -> int:
    """Elements per token that attention keeps in addition where context parallelism splits sequences.

    none: where heads are exchanged, its output after the exchange, and key/value heads repeated as often as ranks need
    one. selective: partial results before they are merged, for half of the own tokens with each other rank's keys."""
    kind, heads_group, ring = _exchange(config)
    if recompute == "selective":
        return 0 if ring == 1 else q * (1 if kind == "all_gather" else ring) // 2
    # -(-a // b) rounds up: copies of each key/value head, so that every rank of the group has one.
    return 0 if heads_group == 1 else q + 2 * k * (-(-heads_group // groups) - 1 if heads_group > groups else 0)


def _exchange(config: Config) -> tuple[str, int, int]:
    """(kind of exchange, processes that exchange heads, processes that exchange keys)."""
    parallel = config.parallel
    if parallel.cp_comm_type != "auto":
        return parallel.cp_comm_type, *exchange_sizes(parallel)
    from smp.training.exchange import exchange_of  # which brings torch

    chosen = exchange_of(config, "cuda")
    return chosen.kind, chosen.heads_group, parallel.context_parallel_size // chosen.heads_group


def others_keys(config: Config, layout: Layout, b: int, heads: int, groups: int, width: int) -> int:
    """Bytes per token of attention's backward pass where keys and values are exchanged, for heads of this ``width``; 0:
    they are not exchanged."""
    kind, heads_group, ring = _exchange(config) if layout.cp > 1 else ("", 1, 1)
    if kind == "all_gather":
        return _gathered_keys(config, layout, b, heads, groups, width)
    # Where heads are exchanged, too, key/value heads are repeated until each rank of that group has
    # one.
    return _ring_keys(b, heads * width, 2 * max(groups, heads_group) * width, ring) if ring > 1 else 0


def _gathered_keys(config: Config, layout: Layout, b: int, heads: int, groups: int, width: int) -> int:
    """Bytes per token where keys and values are gathered, for some key/value heads at a time, w elements of all ranks'
    keys and values.

    The sum of: these and, if there are more heads, the next ones; gradients of these and of their queries, in fp32; and
    for the later half of the queries, which sees all keys but those of the last chunk: keys and values taken out, their
    gradients, and these summed over query heads; queries, outputs and gradients of outputs taken out, and gradients of
    queries, as a kernel gives them and in order."""
    from smp.layers.context_parallel.auto import heads_at_once  # which brings torch

    data = config.data
    assert data.seq_length is not None, "resolved before"
    sequences = config.rows_per_micro_batch
    at_once = heads_at_once(groups, 2 * sequences * data.seq_length * width * b)
    w, own = 2 * at_once * width * layout.cp, at_once * (heads // groups) * width
    # Sequences are split into 2 cp chunks, of which a rank has r and 2 cp - 1 - r.
    chunks = 2 * layout.cp
    calls = 3 * w * (chunks - 1) // chunks + 5 * own // 2
    return b * (w * (1 + (at_once < groups)) + calls) + 4 * (w + own)


def _ring_keys(b: int, q: int, w: int, ring: int) -> int:
    """Bytes per token where another rank's w elements of keys and values arrive in a ring.

    The sum of: these and, while the ring runs, the next ones; fp32 sums of the own gradients, those of these keys and
    of the last ones, the last ones' joined, and what arrived from others; and for half of the queries as in
    :func:`_gathered_keys`, with all of these keys, but none taken out."""
    return b * (w * (1 + (ring > 3)) + 2 * w + 2 * q) + 4 * (q + w + w * (4 if ring > 2 else 3))
