"""Goodput: the share of a job's time, since its first start, in which steps were computed that the model keeps.

Rank 0 keeps the account, in ``goodput.json`` next to the other logs, over all starts of a job. Every second since the
first start belongs to one of these:

==========  ===================================================================================================
productive  steps whose result the model has
start       the first start: from the command to its first step
data        nothing to compute, because the batch was not there yet
rollout     the model writes what it is trained on
save        training stands still for a checkpoint
recovery    later starts, to their first step
rerun       steps that are lost: a restart or a rewind took them back, or they were skipped; and what is computed only
            to compare
evaluation  validation and test data
idle        no process: from the last sign of life to the next start; and what a run does after its last step
==========  ===================================================================================================
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

FILE = "goodput.json"
"""Name of the account in --log-dir."""
CAUSES = ("productive", "start", "data", "rollout", "save", "recovery", "rerun", "evaluation", "idle")
EVERY = 5.0
"""Seconds between two writes of the file, except after events that must not be lost."""
_MARKS = 1000
"""Number of iterations that the file remembers; above it some of the older half are forgotten."""


@dataclass
class Account:
    """The contents of the file.

    Attributes:
        first_start, updated: seconds since 1970.
        save: --save of the job.
        status: how the last start ended, or "running".
        seconds: by cause.
        marks: productive seconds up to the iterations that were saved, which a restart goes back to; the first is where
            the job began.
    """

    first_start: float
    updated: float
    save: str | None = None
    status: str = "running"
    starts: int = 1
    iteration: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    marks: dict[int, float] = field(default_factory=dict)

    def productive_at(self, iteration: int) -> float:
        """Productive seconds up to an iteration; if it has no mark of its own, those of the last mark before it, or the
        fewest that are known."""
        if iteration >= self.iteration:
            return self.seconds["productive"]
        before = max((i for i in self.marks if i <= iteration), default=None)
        if before is not None:
            return self.marks[before]
        return min(self.marks.values(), default=0.0) if iteration > 0 else 0.0

    def back_to(self, iteration: int, kept: float | None = None) -> None:
        """Count the steps after ``iteration`` as lost. ``kept``: productive seconds up to it; None: what the marks
        say."""
        kept = self.productive_at(iteration) if kept is None else kept
        self.seconds["rerun"] += self.seconds["productive"] - kept
        self.seconds["productive"] = kept
        self.marks = {i: seconds for i, seconds in self.marks.items() if i <= iteration}
        self.iteration = iteration


def read_account(path: Path) -> Account | None:
    """The account in a file; None: there is none, or a crash of the machine left half of one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        marks = {int(iteration): seconds for iteration, seconds in found.pop("marks").items()}
        account = Account(**found, marks=marks)
        account.seconds = {**dict.fromkeys(CAUSES, 0.0), **account.seconds}  # a cause may be newer than the file
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    # A file with causes that this program does not know cannot add up.
    return account if set(account.seconds) == set(CAUSES) else None


def summary(account: Account) -> dict[str, Any]:
    """What status files and the records of a run say: the share that was productive, and seconds by cause."""
    total = sum(account.seconds.values())
    return {
        "goodput": round(account.seconds["productive"] / total, 4) if total else 0.0,
        "seconds": {name: round(seconds, 1) for name, seconds in account.seconds.items()},
        "starts": account.starts,
    }


def describe(account: Account) -> str:
    """One line: the productive share, of which time, and where the rest went, largest first."""
    total = sum(account.seconds.values()) or 1.0
    shares = sorted(((s / total, name) for name, s in account.seconds.items() if name != "productive"), reverse=True)
    rest = ", ".join(f"{name} {100 * share:.1f} %" for share, name in shares if share >= 0.0005)
    starts = f"{account.starts} starts" if account.starts > 1 else "1 start"
    since = timedelta(seconds=round(total))
    return (
        f"goodput {100 * account.seconds['productive'] / total:.1f} % of {since} ({starts}): {rest or 'nothing else'}"
    )


class Goodput:
    """Keeps the account of this start. Every moment has one cause, so that the seconds add up to all there were.

    Args:
        path: the file; None on ranks other than 0, where nothing is written.
        started: when this process began, seconds since 1970.
        save: --save. An earlier account is of the same job if that has not ended, and this start has the same --save or
            is torchrun's next try, or that of the same processes (``again``).
        say: tells the user a line.

    Attributes:
        waits_for: cause of the time before a step in which its batch does not exist.
    """

    def __init__(
        self, path: Path | None, started: float, save: str | None, say: Callable[[str], None], *, again: bool = False
    ) -> None:
        self.path, self._say, self.waits_for = path, say, "data"
        self._snapshot = 0.0  # productive seconds up to it
        found = read_account(path) if path is not None else None
        self._before = path.read_bytes() if path is not None and path.is_file() else None
        self._made: list[Path] = []  # folders, the innermost first
        if found is not None and _is_of_same_job(found, save, again):
            self.account, self._cause = found, "recovery"
            found.seconds["idle"] += max(0.0, started - found.updated)
            found.starts += 1
            found.save, found.status = save, "running"
        else:
            self.account, self._cause = Account(started, started, save), "start"
        # The time before this process measured itself is known by the system's clock alone; from
        # here on a monotonic one counts.
        self.account.seconds[self._cause] += max(0.0, time.time() - started)
        self._since = self._written = time.monotonic()
        if self._cause == "recovery":
            self.write()

    def alive(self) -> None:
        """Note that this start has come so far, before a checkpoint is loaded: if it dies, this much of it is known."""
        if self.path is not None:
            with suppress(OSError):  # which is said when the folder is needed
                self._made += [folder for folder in self.path.parents if not folder.exists()]
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.write()

    def refused(self) -> None:
        """Undo: this start was refused. A first one leaves no trace."""
        if self.path is None or self._cause == "recovery":
            return
        with suppress(OSError):
            if self._before is None:
                self.path.unlink(missing_ok=True)
            else:
                self.path.write_bytes(self._before)
            # Innermost first; a folder in which something else was written is left.
            for folder in self._made:
                folder.rmdir()

    def begin(self, iteration: int) -> None:
        """Note that all is loaded. Steps of earlier starts after ``iteration`` are lost."""
        self.account.back_to(iteration)
        self.mark(iteration)
        self.write()

    def seconds(self) -> dict[str, float]:
        """Seconds by cause, up to now."""
        now = time.monotonic()
        self.account.seconds[self._cause] += now - self._since
        self._since = now
        return self.account.seconds

    @property
    def share(self) -> float:
        """Productive seconds over all, up to now."""
        seconds = self.seconds()
        return seconds["productive"] / (sum(seconds.values()) or 1.0)

    def turn_to(self, cause: str) -> str:
        """Count time for ``cause`` from here on. Returns the cause before."""
        self.seconds()
        before, self._cause = self._cause, cause
        return before

    @contextmanager
    def during(self, cause: str) -> Iterator[None]:
        """Context in which time counts for ``cause``."""
        before = self.turn_to(cause)
        try:
            yield
        finally:
            self.turn_to(before)

    def step(self, iteration: int, seconds: float, waited: float, lost: bool, repeated: float = 0.0) -> None:
        """Note the end of a step. From its productive time, move the time in which it waited for its batch, and the
        seconds in which it was ``repeated`` to compare, or all of it if it was skipped."""
        known = self.seconds()
        for cause, spent in ((self.waits_for, waited), ("rerun", seconds if lost else repeated)):
            spent = min(spent, known["productive"])  # rounding
            known[cause] += spent
            known["productive"] -= spent
        self.account.iteration = iteration
        if time.monotonic() - self._written >= EVERY:
            self.write()

    def saved(self, iteration: int) -> None:
        """Note a checkpoint of this iteration, which a restart may go back to."""
        self.mark(iteration)
        if len(self.account.marks) > _MARKS:
            # Every other one of the older half, but not the first: where the job began is needed.
            for old in list(self.account.marks)[1 : _MARKS // 2 : 2]:
                del self.account.marks[old]
        self.write()

    def mark(self, iteration: int) -> None:
        """Remember the productive seconds up to this iteration, for a restart that goes back to it."""
        self.account.marks[iteration] = self.seconds()["productive"]

    def snapshot(self) -> None:
        """Remember the productive seconds up to here, for a rewind. There is one snapshot at a time; a restart does not
        have it."""
        self._snapshot = self.seconds()["productive"]

    def rewound(self, back: int, iteration: int) -> None:
        """Count the steps after the snapshot, of iteration ``back``, as lost; iterations go on from ``iteration``."""
        self.seconds()
        self.account.back_to(back, self._snapshot)
        self.account.iteration = iteration

    def end(self, status: str) -> None:
        """Note how this start has ended."""
        self.account.status = status
        self.write()

    def write(self) -> None:
        """Replace the file. A failure is said once: the run is worth more than its account."""
        self._written = time.monotonic()
        if self.path is None:
            return
        self.account.updated = time.time()
        temporary = self.path.with_name(f"{self.path.name}.tmp")
        try:
            self.seconds()
            temporary.write_text(json.dumps(asdict(self.account)) + "\n", encoding="utf-8")
            os.replace(temporary, self.path)
        except OSError as error:
            self._say(f"WARNING: {self.path}: {error}; goodput is not kept over the next restart")
            # Only once: from here on nothing is written.
            self.path = None


def _is_of_same_job(found: Account, save: str | None, again: bool) -> bool:
    # torchrun counts how often it has started its workers again.
    again |= os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return found.status != "done" and (again or (save is not None and found.save == save))
