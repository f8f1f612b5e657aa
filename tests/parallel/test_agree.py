"""Ranks agree on flags, values and errors."""

from __future__ import annotations

import errno
import os

import pytest
import torch.distributed as dist

from smp.config import ConfigError
from smp.config.command_line.command import exit_code
from smp.parallel.agree import any_rank, every_rank, gather, on_all_or_none, on_rank_zero, rank
from tests.distributed import run_distributed


class OddError(Exception):
    """Cannot be made again from its text alone, so a pickle of it cannot be read."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def fail(error: Exception) -> int:
    raise error


FULL = OSError(errno.ENOSPC, "no space")


def caught(action: object) -> tuple[str, str, int]:
    try:
        action()  # type: ignore[operator]
    except Exception as error:
        return type(error).__name__, str(error), exit_code(error)
    return "", "", 0


def agreements(me: int, world_size: int) -> list[object]:
    assert rank() == me == dist.get_rank()
    found: list[object] = [any_rank(me == 1), any_rank(False), every_rank(me == 1), every_rank(True), gather(me)]
    found.append(on_rank_zero(lambda: me + 7, ConfigError))
    found += [caught(lambda e=e: on_rank_zero(lambda: fail(e), ConfigError)) for e in (ConfigError("x"), FULL)]
    found.append(caught(lambda: on_rank_zero(lambda: fail(OddError("odd", 3)), ConfigError)))
    for failing in (0, 1):
        for error in (ConfigError("x"), FULL):
            action = (lambda: fail(error)) if me == failing else (lambda: 0)  # noqa: B023
            found.append(caught(lambda: on_all_or_none(action, ConfigError, "--flag x")))  # noqa: B023
    assert on_all_or_none(lambda: me, ConfigError, "") == me
    return found


def test_all_ranks_get_the_same() -> None:
    first, second = run_distributed(agreements, 2)
    full = ("ConfigError", "--flag x: [Errno 28] no space", 1)
    assert first == second
    assert first[:6] == [True, False, False, True, [0, 1], 7]
    assert first[6:9] == [
        ("ConfigError", "x", 2),
        ("ConfigError", "OSError: [Errno 28] no space", 1),
        ("ConfigError", "OddError: odd", 2),
    ]
    assert first[9:] == [("ConfigError", "x", 2), full] * 2


def test_a_process_alone_agrees_with_itself() -> None:
    assert rank() == 0 and gather(3) == [3] and any_rank(True) and not every_rank(False)
    assert on_rank_zero(os.getpid, ConfigError) == os.getpid()
    with pytest.raises(ConfigError, match="--flag x: .*no space"):
        on_all_or_none(lambda: fail(FULL), ConfigError, "--flag x")
