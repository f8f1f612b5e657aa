"""Which rank hangs: ranks that make no progress report their position to each other through torch's store.

All ranks wait for the one at fault, so the :class:`smp.training.runtime.Watchdog` of every rank sees no progress.
Each rank writes to the store whether its main thread is in a collective, and in which. The lowest rank that still
responds reads all of it and prints the collective, the ranks that are not in it, and their stacks.
"""

from __future__ import annotations

import json
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from smp.pipeline.failure import of_this_package

_TORCHS = ("distributed_c10d.py", "_functional_collectives.py", "_fsdp_collectives.py", "_fsdp_param_group.py")
"""Files of torch whose functions are collectives or wait for them."""
_MESSAGE = "a message"
"""What the runner of a pipeline waits for, instead of a collective's name."""
_FRAMES = 12
"""Innermost ones of a stack that is told."""


@dataclass(frozen=True)
class Word:
    """A rank's report of its position.

    Attributes:
        collective: the one that it is in; empty: none.
        function: innermost function of this package, or of the script if there is none.
        stack: innermost frames, the last one innermost.
    """

    host: str
    collective: str
    function: str
    stack: str


def word_of_thread(ident: int) -> Word:
    """What a thread of this process is executing now."""
    frames = list(traceback.walk_stack(sys._current_frames()[ident]))  # innermost first
    stack = "".join(traceback.StackSummary.extract(iter(frames[:_FRAMES][::-1])).format())
    # The innermost frame outside of smp.parallel is what called the collective.
    callers = [one for one in frames if not _is_ours(one[0])]
    caller = next(iter(of_this_package(callers)), callers[0][0].f_code.co_qualname)
    # What was called is the outermost function of torch; without one it is one of this package.
    waits = [frame.f_code.co_name for frame, _ in frames if _is_torchs(frame)]
    waits = waits or [frame.f_code.co_name for frame, _ in frames if _is_ours(frame)]
    # The runner of a pipeline waits in its own Python code, not in a function of torch.
    waits = waits or [_MESSAGE for frame, _ in frames[:2] if frame.f_code.co_qualname == "_Step._wait"]
    collective = f"{waits[-1]} of {caller}" if waits else ""
    innermost, line = frames[0]
    function = f"{innermost.f_code.co_qualname} ({Path(innermost.f_code.co_filename).name}:{line})"
    return Word(socket.gethostname(), collective, function, stack)


def _is_torchs(frame: FrameType) -> bool:
    """Whether a frame is in a collective of torch; its decorators' wrappers, which all have one name, do not count."""
    return Path(frame.f_code.co_filename).name in _TORCHS and frame.f_code.co_name != "wrapper"


def _is_ours(frame: FrameType) -> bool:
    """Whether a frame is in :mod:`smp.parallel`."""
    return "smp/parallel/" in Path(frame.f_code.co_filename).as_posix()


class Hang:
    """Asks the other ranks where they stand, when this one makes no progress. One object for each standstill.

    Ranks need not have stood still equally often: one may go on just before it would leave word. So each has one place
    for its word, and what was left there before this standstill is not read.

    Args:
        since: when this rank finished something last, in seconds since 1970. Clocks of hosts may differ by less than a
            rank waits before it asks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, since: float) -> None:
        self._store, self._rank, self._size = dist.PrefixStore("hang", store), rank, size
        self._since = since

    def report(self, word: Word, patience: float) -> str:
        """Leave word and wait so many seconds for those of others. What is to be said by this rank: nothing, if a lower
        one says it."""
        # Wall-clock time: it is compared with that of other hosts.
        self._store.set(str(self._rank), json.dumps({"left": time.time(), **asdict(word)}))
        deadline = time.monotonic() + patience
        words = {self._rank: word}
        # ``check`` does not block: ``get`` would wait for a rank that never leaves word.
        while len(words) < self._size and time.monotonic() < deadline:
            words |= {rank: found for rank in range(self._size) if rank not in words and (found := self._word_of(rank))}
            if len(words) < self._size:
                time.sleep(min(0.1, patience / 10))
        # The lowest rank that has left word speaks for all.
        return describe(dict(sorted(words.items())), self._size) if min(words) == self._rank else ""

    def _word_of(self, rank: int) -> Word | None:
        """The word of a rank; None: it has left none since this standstill began."""
        if not self._store.check([str(rank)]):
            return None
        found = json.loads(self._store.get(str(rank)))
        # An older entry is of a hang that has resolved itself.
        return Word(**found) if found.pop("left") >= self._since else None


def describe(words: Mapping[int, Word], size: int) -> str:
    """The report of a hang: the collective, the ranks that have not arrived, and their stacks."""
    # Where most ranks wait is the collective; the others are the ones at fault.
    waiting = Counter(word.collective for word in words.values() if word.collective)
    collective, _ = waiting.most_common(1)[0] if waiting else ("", 0)
    there = [rank for rank, word in words.items() if word.collective == collective != ""]
    absent = [rank for rank in words if rank not in there]
    silent = [rank for rank in range(size) if rank not in words]
    lines = [f"hang: {_ranks(there)} in {collective}" if there else "hang: no rank is in a collective"]
    for rank in absent:
        word = words[rank]
        instead = f"it is in {word.collective}, another one" if word.collective else f"it is in {word.function}"
        lines.append(f"hang: rank {rank} on {word.host} has not arrived: {instead}; its stack:\n{word.stack.rstrip()}")
    if silent:
        lines.append(f"hang: {_ranks(silent)} silent: stopped, gone, or in code that holds the interpreter")
    if there and not absent and not silent:
        lines.append("hang: all ranks have arrived: a link between them is cut, or a device has not finished")
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3 is`` or ``ranks 0-2, 5 are``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    told = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {told} is" if len(ranks) == 1 else f"ranks {told} are"
