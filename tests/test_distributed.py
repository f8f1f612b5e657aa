"""What tests on several ranks say when a rank does not answer, and that they say it before pytest ends them."""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import signal
import time
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import AT_EXIT, PATIENCE, TO_WRITE, run_distributed


def some_stop(rank: int, world: int) -> int:
    if rank == 1:
        asleep()
    if rank == 2:
        ctypes.PyDLL(None).sleep(100)  # which keeps the interpreter lock
    return rank


def asleep() -> None:
    time.sleep(100)


def test_silent_ranks_say_where_they_stand() -> None:
    run_distributed(first_is_quick, 2)  # the server that ranks are forked from is ready then
    with pytest.raises(RuntimeError) as caught:
        run_distributed(some_stop, 3, timeout=8.0)  # time to begin, on a busy machine
    head, one, two = re.split(r"rank \d stands at:\n", str(caught.value))
    assert head == "ranks without an answer: [1, 2]\n"
    assert re.search(r'test_distributed.py", line \d+ in asleep\n', one) and "some_stop" in one
    assert re.search(r'test_distributed.py", line \d+ in some_stop\n', two) and "asleep" not in two


def one_is_killed(rank: int, world: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def test_a_lost_rank_is_told_by_its_exit_code() -> None:
    with pytest.raises(RuntimeError, match="ranks without an answer: \\[1\\]\nrank 1 ended with exit code -9$"):
        run_distributed(one_is_killed, 2, timeout=60.0)


def one_aborts(rank: int, world: int) -> int:
    if rank == 1:
        os.write(2, b"terminate called for a reason\n")
        os.abort()
    return rank


def test_a_crash_in_native_code_is_told_with_its_reason() -> None:
    reason = "rank 1 ended with exit code -6, at:\nterminate called for a reason\nFatal Python error: Aborted\n"
    with pytest.raises(RuntimeError, match=reason):
        run_distributed(one_aborts, 2, timeout=60.0)


def first_is_quick(rank: int, world: int) -> int:
    """Rank 0 has nothing to do; rank 1 uses their connection, which fails when the other end is closed."""
    if rank == 1:
        time.sleep(0.5)
        dist.isend(torch.zeros(1), 0)
    return rank


def test_a_rank_that_is_through_stays_until_all_have_answered() -> None:
    assert run_distributed(first_is_quick, 2, timeout=60.0) == [0, 1]


def timeouts(rank: int, world: int) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh

    groups = dist.group.WORLD, dist.new_group(), init_device_mesh("cpu", (1, world)).get_group(0)
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_all_groups_give_up_before_the_ranks_are_killed() -> None:
    ours = PATIENCE.total_seconds()
    assert run_distributed(timeouts, 2) == [[ours] * 3] * 2
    until_killed = inspect.signature(run_distributed).parameters["timeout"].default
    pytests = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert 2 * ours < until_killed and until_killed + TO_WRITE + AT_EXIT < pytests["timeout"] - 10
