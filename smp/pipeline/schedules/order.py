"""Orders of computation as words.

A schedule function writes, for each rank, which op runs next on which of its chunks. Which micro-batch that is follows
from counting, because every chunk takes the micro-batches in order:

    F F B F B B        means    F0 F1 B0 F2 B1 B2
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from smp.config import ConfigError
from smp.pipeline.actions import Action, Op, Placement, Schedule

Step = tuple[Op, int]  # what runs next, on which chunk of the rank


def ordered(
    name: str,
    ranks: int,
    micro_batches: int,
    chunks: int,
    order: Callable[[int], Iterable[Step]],
    placement: Placement = "loop",
    forward_only: bool = False,
) -> Schedule:
    """The schedule, computation only, whose rank r runs the steps ``order(r)``."""
    # Without actions at first: sizes and placement alone say which stages a rank has.
    empty = Schedule(name, ranks, micro_batches, chunks, (), placement, forward_only=forward_only)
    return replace(empty, actions=tuple(_count(order(rank), empty.stages_of(rank)) for rank in range(ranks)))


def _count(steps: Iterable[Step], stages: Sequence[int]) -> tuple[Action, ...]:
    """Steps as actions: the n-th time that an op comes on a chunk it takes micro-batch n."""
    counts: defaultdict[Step, int] = defaultdict(int)
    actions = []
    for step in steps:
        op, chunk = step
        actions.append(Action(op, stages[chunk], counts[step]))
        counts[step] += 1
    return tuple(actions)


def one_forward_one_backward(forwards: Sequence[Step], backwards: Sequence[Step], warm_up: int) -> list[Step]:
    """``warm_up`` forwards, then forward and backward in turn, then the backwards that are left."""
    # ``zip`` ends with the forwards: ``warm_up`` of the backwards are left, and follow.
    steady = [step for pair in zip(forwards[warm_up:], backwards, strict=False) for step in pair]
    return [*forwards[:warm_up], *steady, *backwards[len(backwards) - warm_up :]]


def groups(ranks: int, micro_batches: int) -> list[int]:
    """Sizes of equal groups of ``ranks`` or more micro-batches (one smaller group for m < p), the larger ones first."""
    # As many groups as fit with p or more in each: a group that is smaller than p would leave ranks idle.
    count = max(1, micro_batches // ranks)
    size, larger = divmod(micro_batches, count)
    return [size + 1] * larger + [size] * (count - larger)


def grouped(op: Op, ranks: int, micro_batches: int, chunks: Iterable[int]) -> list[Step]:
    """``op`` on all micro-batches: a group passes through all ``chunks`` before the next group begins."""
    order = list(chunks)
    return [(op, chunk) for group in groups(ranks, micro_batches) for chunk in order for _ in range(group)]


def check_sizes(
    name: str, ranks: int, micro_batches: int, chunks: int, least_chunks: int = 1, most_chunks: int | None = None
) -> None:
    """Raise ConfigError, which says what to change, for sizes that a schedule cannot take."""
    if ranks < 1:
        raise ConfigError(f"{name} needs at least 1 pipeline rank: change --pipeline-model-parallel-size from {ranks}")
    if micro_batches < 1:
        raise ConfigError(f"{name} needs at least 1 micro-batch, not {micro_batches}: raise --global-batch-size")
    if chunks < least_chunks or (most_chunks is not None and chunks > most_chunks):
        wanted = f"{least_chunks}" if least_chunks == most_chunks else f"at least {least_chunks}"
        flag = "--num-virtual-stages-per-pipeline-rank"
        raise ConfigError(f"{name} needs {flag} {wanted}, not {chunks}: change it or --pipeline-schedule")
