"""Steps of a save or a load that ranks take at the same time: what goes wrong on one of them is raised on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from smp.checkpoint.folders.lock import LockLostError
from smp.checkpoint.format.entries import CheckpointError, DamagedError
from smp.config import ConfigError
from smp.config.command_line.command import DamageError, exit_code, in_one_line
from smp.parallel.agree import on_rank_zero, rank

Part = TypeVar("Part")
Answer = TypeVar("Answer")
_KINDS = {TypeError: TypeError, DamageError: DamagedError, LockLostError: LockLostError}


class _Failure(NamedTuple):
    """An error as rank 0 hears of it. Not the error itself: those of libraries need not be picklable."""

    kind: type[Exception]
    text: str
    code: int


def on_all_ranks(
    prefix: str,
    work: Callable[[], Part],
    finish: Callable[[list[Part]], Answer],
    group: dist.ProcessGroup | None = None,
) -> Answer:
    """Run ``work`` on each rank of ``group`` (by default all) and ``finish`` on rank 0 on their results, in the order
    of the ranks; returns what ``finish`` returns, on all ranks.

    Raises:
        TypeError, DamagedError, LockLostError: all that failed, on any rank or in ``finish``, was of this kind. All
            ranks raise it, in one line that begins with ``prefix``.
        CheckpointError: the same for anything else; also for several kinds, because a loader goes on after damage.
    """
    part, own, failure = None, None, None
    try:
        part = work()
    except Exception as error:  # libraries raise what they like, and the other ranks wait
        own, failure = error, _failure(error)
    # The failures travel with the results, so every rank comes here, whatever happened to it.
    found = _gathered((part, failure), group)
    try:
        return on_rank_zero(lambda: _finished(prefix, found, finish), Exception, group)
    except Exception as error:
        raise error from error.__cause__ or own  # a cause that it has decides the exit code


def _finished(prefix: str, found: list[Any], finish: Callable[[list[Part]], Answer]) -> Answer:
    failures = [failure for _, failure in found if failure is not None]
    if not failures:
        try:
            return finish([part for part, _ in found])
        except Exception as error:
            raise _summary(prefix, [_failure(error)]) from error
    # A failure of storage on one of the ranks decides the exit code of all, 1: it may work at another time.
    failed = next((failure.text for failure in failures if failure.code == 1), None)
    raise _summary(prefix, failures) from (failed and OSError(failed))


def _gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks in their order, on rank 0."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.gather_object(value, values if rank(group) == 0 else None, group=group, group_dst=0)
    return values


def _failure(error: Exception) -> _Failure:
    # Errors of this project name their cause themselves; others get the rank and their type.
    known = isinstance(error, CheckpointError | ConfigError | DamageError | TypeError)
    text = in_one_line(error) if known else f"rank {rank()}: {type(error).__name__}: {error}"
    kind = next((raised for found, raised in _KINDS.items() if isinstance(error, found)), CheckpointError)
    return _Failure(kind, text, exit_code(error))


def _summary(prefix: str, failures: list[_Failure]) -> Exception:
    kinds = {failure.kind for failure in failures}
    # Several kinds at once are no damage: a loader would go on with an older checkpoint.
    kind = kinds.pop() if len(kinds) == 1 else CheckpointError
    # dict.fromkeys: each text once, in order.
    return kind(f"{prefix}{'; '.join(dict.fromkeys(failure.text for failure in failures))}")
