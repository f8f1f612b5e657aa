"""Share flags, numbers, values and errors between the ranks of a process group, so that all ranks take the same branch.

The group is by default that of all ranks; without torch.distributed a process is the only rank. An error on one rank
must end all of them, or the others wait in the next collective for ever, so errors are sent to the other ranks: one of
the type ``wrap``, which the caller expects, as an object, any other one as text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from smp.config.command_line.command import exit_code

Answer = TypeVar("Answer")


def rank(group: dist.ProcessGroup | None = None) -> int:
    """The rank of this process in ``group``; 0 when it is alone."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def _device(group: dist.ProcessGroup | None = None) -> str:
    """Device of small messages: the CPU where the group has gloo, else (NCCL alone) the GPU."""
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether ``flag`` is set on some rank."""
    if not dist.is_initialized():
        return flag
    found = torch.tensor(int(flag), device=_device(group))
    # The largest of 0 and 1: NCCL has no logical or.
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return bool(found.item())


def every_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether ``flag`` is set on all ranks."""
    return not any_rank(not flag, group)


def sum_over_ranks(*numbers: int) -> list[int]:
    """The sum of each number over all ranks."""
    if not dist.is_initialized():
        return list(numbers)
    # int64: counts of tokens exceed 2^31.
    sums = torch.tensor(numbers, dtype=torch.int64, device=_device())
    dist.all_reduce(sums)
    return sums.tolist()


def gather(value: Answer, group: dist.ProcessGroup | None = None) -> list[Answer]:
    """The values of all ranks, in their order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    # Objects go as pickled bytes between the ranks of this run, never from a file.
    dist.all_gather_object(values, value, group)
    return values


def on_rank_zero(action: Callable[[], Answer], wrap: type[Exception], group: dist.ProcessGroup | None = None) -> Answer:
    """Run ``action`` on rank 0 and return its result on all ranks.

    Raises:
        wrap: ``action`` failed; all ranks raise the same error, with the same exit code.
    """
    if not dist.is_initialized():
        return action()
    answer: list[Any] = [None, None, 0]  # value, error, exit code
    if dist.get_rank(group) == 0:
        try:
            answer[0] = action()
        except Exception as error:  # libraries raise what they like, and the other ranks wait
            answer[1] = _wrapped(error, wrap, type(error).__name__)
            answer[2] = exit_code(error)
    # Rank 0 comes here whatever happened to it, or the others would wait for ever.
    # ``group_src`` is a rank of the group: with ``src`` a group without the run's rank 0 would fail.
    dist.broadcast_object_list(answer, group=group, group_src=0)
    _raise(answer[1], answer[2])
    return answer[0]


def on_all_or_none(action: Callable[[], Answer], wrap: type[Exception], what: str) -> Answer:
    """Run ``action`` on every rank and return this rank's result, if it succeeds on all of them.

    Args:
        action: run on every rank.
        wrap: the type of expected errors; they and OSError are raised on all ranks. Others are bugs and are not caught.
        what: stands before the text of an OSError, such as the flag that names the file.

    Raises:
        wrap: the error of the first rank that failed, on all ranks, with the same exit code.
    """
    # A list, because an answer may be None.
    made: list[Answer] = []
    problem: tuple[Exception | None, int] = (None, 0)
    try:
        made.append(action())
    # Any other error is a fault of the program: it ends this process, and the launcher ends the others.
    except (wrap, OSError) as error:
        problem = _wrapped(error, wrap, what), exit_code(error)
    # In the order of the ranks, so that all raise the same one.
    for error_of_rank, code in gather(problem):
        _raise(error_of_rank, code)
    return made[0]


def _wrapped(error: Exception, wrap: type[Exception], what: str) -> Exception:
    if isinstance(error, wrap):
        return error
    wrapped = wrap(f"{what}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _raise(error: Exception | None, code: int) -> None:
    if error is None:
        return
    if error.__cause__ is None and code == 1:
        error.__cause__ = OSError("on another rank")  # pickles lose the cause, which decides the exit code
    raise error
