"""The loop around a run that continues in the same process after others were lost."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from smp.config.parallel import ParallelConfig
from smp.training.inprocess.link import REPLACE
from smp.training.inprocess.meeting import GaveUpError, Meeting, RunEndedError
from smp.training.process import Process

_GRACE = 2.0
"""Seconds in which others may report that this generation is lost; an error here may be a consequence of that."""
_LEAVING = 30.0
"""Seconds for the last messages of a process that is replaced."""


class LostRunError(BaseException):
    """The run is lost because another process is, and continues in the next generation. It is a BaseException: not an
    error of this process, and no ``except Exception`` may handle it.

    Attributes:
        noticed: when, in seconds since 1970.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.noticed = time.time()


class Alone:
    """The only try of a process that nobody restarts. Methods as in :class:`Generation`."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def guarded(self, lost_contact: tuple[type[Exception], ...]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def let_go(self) -> None:
        pass

    def began(self, iteration: int) -> None:
        pass

    def close(self, run: Callable[[], None]) -> None:
        run()


class Generation:
    """One try to run.

    Attributes:
        process: this one, and since when this try counts.
        number: which try.

    Args:
        times: when a part of the way to this one was done, in seconds since 1970.
    """

    def __init__(self, meeting: Meeting, process: Process, number: int, times: dict[str, float]) -> None:
        self._meeting, self.process, self.number, self._times = meeting, process, number, times
        self._lost = False

    @contextlib.contextmanager
    def guarded(self, lost_contact: tuple[type[Exception], ...]) -> Iterator[None]:
        """Context of the run. An error that says that another process is lost, or that comes when that is known,
        becomes :class:`LostRunError`; any other one passes.

        Args:
            lost_contact: errors that say so by themselves.
        """
        try:
            yield
        # A requested end is never a lost run.
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            first = str(error).splitlines() or [type(error).__name__]
            lost = LostRunError(first[0])
            if not self._is_lost(isinstance(error, lost_contact)):
                raise
            self._lost = True
            raise lost from None

    def _is_lost(self, by_itself: bool) -> bool:
        # This process may fail before the one at fault is noticed: others get a moment to say so.
        deadline = time.monotonic() + _GRACE
        try:
            if by_itself:
                self._meeting.lose()
                return True
            while not (broken := self._meeting.broken) and time.monotonic() < deadline:
                time.sleep(0.1)
            return broken
        except dist.DistError:  # no store, no next generation
            return False

    def let_go(self) -> None:
        """Release groups and connections: before anything else, as other ranks may wait for this process."""
        self._meeting.let_go()
        if dist.is_initialized():
            dist.destroy_process_group()

    def close(self, run: Callable[[], None]) -> None:
        """Close the run; when it is lost more errors may follow, which are ignored."""
        with contextlib.suppress(Exception) if self._lost else contextlib.nullcontext():
            run()

    def began(self, iteration: int) -> None:
        """Note that all is built, and that the next step is the one after ``iteration``."""
        if self.process.rank == 0:
            self._meeting.began(iteration)
        if self.number:
            self._times["state"] = time.time()
            first, *later = self._times.items()
            told = ", ".join(f"{what} {when - first[1]:.2f} s" for what, when in later)
            print(f"rank {self.process.rank}: restart {self.number} in process: after {first[0]} {told}", flush=True)
        if self.process.link is not None:
            # From now on the keeper holds another process ready.
            self.process.link.trains()


def run_again(
    settings: ParallelConfig, process: Process, stopped: Callable[[], bool], run: Callable[[Generation], int]
) -> int:
    """Run until it ends by itself; returns its exit code. A process that fails in a way of its own is replaced.

    Args:
        run: one try; raises LostRunError when it is lost.
        stopped: whether the launcher wants an end.
    """
    link = process.link
    assert link is not None
    meeting = Meeting.of(settings, process, stopped)
    try:
        times = {"its start": time.time()}
        number = meeting.meet(link.replaces)
        while True:
            times["all there"] = time.time()
            try:
                code = run(Generation(meeting, replace(process, restarts=number), number, times))
                break
            except LostRunError as error:
                times = {"the loss": error.noticed}
                print(f"rank {process.rank}: another process is lost: {error}", flush=True)
            # After the ``except`` block, whose error holds the frames of the lost run.
            _forget()
            times["let go"] = time.time()
            # Goodput counts the time since the loss as recovery.
            process = replace(process, started=times["the loss"])
            number = meeting.meet()
        with contextlib.suppress(dist.DistError):  # it is gone, and so is who would wait
            if code or process.rank == 0:
                meeting.end(code)
            else:  # rank 0 may have work left, such as --save-hf: where it is lost in that, another start does it
                meeting.leave()
        return code
    except RunEndedError as error:
        return error.code
    except (GaveUpError, dist.DistError) as error:
        print(f"rank {process.rank}: no in-process restart: {error}", file=sys.stderr, flush=True)
        return 1
    except Exception:  # of this process alone: a new one may do better
        _leave(meeting)
    finally:
        meeting.close()


def _forget() -> None:
    """Clear what torch caches about groups that are gone, and collect the lost run's reference cycles."""
    _clear_sharding_prop_cache()
    gc.collect()


def _leave(meeting: Meeting) -> NoReturn:
    """Say what has failed and end, to be replaced. Called where the error is handled."""
    # Printing or the store may block: the timer ends the process then.
    limit = threading.Timer(_LEAVING, os._exit, (REPLACE,))
    limit.daemon = True
    limit.start()
    with contextlib.suppress(Exception):
        meeting.lose()
    with contextlib.suppress(Exception):
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(REPLACE)
