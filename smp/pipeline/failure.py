"""Error messages for a rank that loses contact with another one.

No rank can know which one is lost: it sees that a message or a collective fails, and the rank at the other end may have
ended only because it lost contact too. So each rank reports where it was, and the rank without a report is the lost
one. If all ranks report, a link between them failed.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from smp.parallel.shared_memory import AbsentRankError

_GROUPS = ("backend", "node_group", "shared_memory", "shared_numbers", "mailboxes")
"""Modules of ``smp.parallel`` that are process groups: their functions do not say where a run stands."""
LOST = "lost is the rank that says nothing, or a link if every rank says this"


class PipelineError(RuntimeError):
    """A message or a collective of a run with a pipeline failed, because another rank is gone or late. The text names
    what failed and the stage, of a message also the stage and the rank at its other end."""


def lost_contact(error: RuntimeError) -> bool:
    """Whether communication failed: torch's own types, a rank that does not come to memory that is shared, or gloo's
    plain RuntimeError, which names a file of gloo."""
    # ``type(...) is``: torch's own errors are subclasses of RuntimeError, and each means something else.
    return isinstance(error, (dist.DistError, AbsentRankError)) or (
        type(error) is RuntimeError and "gloo/" in reason(error)
    )


def reason(error: RuntimeError) -> str:
    """The first line of an error's message, without gloo's advice."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return first.partition(". This is typically caused by")[0]


@contextmanager
def naming(where: str, *, function: bool = True, wrap: type[RuntimeError] = PipelineError) -> Iterator[None]:
    """Context manager around collective work: turns a failure of communication into a ``wrap`` whose message begins
    with ``where`` and, with ``function``, names the function of this package that failed. Other errors are not
    changed."""
    try:
        yield
    except RuntimeError as error:
        if not lost_contact(error):
            raise
        what = f"{where}: {_function(error)}" if function else where
        raise wrap(f"{what} failed: {reason(error)}; {LOST}") from error


def _function(error: RuntimeError) -> str:
    """The innermost function of this package, such as clip_gradients."""
    # A traceback goes from the outermost to the innermost frame: the last one inside of this package is wanted.
    return list(of_this_package(traceback.walk_tb(error.__traceback__)))[-1]


def function_of_thread(ident: int) -> str:
    """The innermost function of this package that a thread is in just now."""
    return next(of_this_package(traceback.walk_stack(sys._current_frames()[ident])), "a function of another package")


def of_this_package(stack: Iterable[tuple[FrameType, int]]) -> Iterator[str]:
    """Functions of this package in a stack, but not of its process groups: who called them is what says where a run
    stands."""
    package = Path(__file__).parents[1]
    groups = {str(package / "parallel" / f"{name}.py") for name in _GROUPS}
    names = (
        frame.f_code.co_qualname
        for frame, _ in stack
        if (file := frame.f_code.co_filename).startswith(str(package)) and file not in groups
    )
    return (name.partition(".<locals>")[0] for name in names)  # not a comprehension in it
