"""When to save by the clock: Young's formula, and what stands in its way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from smp.config import CheckpointConfig
from smp.training.stopping import SaveClock


def test_time_between_saves_follows_from_their_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 s and an hour between failures make sqrt(2 x 8 x 3600) = 240 s; 2 s make half of that."""
    now = 1000.0
    monkeypatch.setattr("smp.training.stopping.time", SimpleNamespace(monotonic=lambda: now))
    clock = SaveClock(CheckpointConfig(save_mtbf_hours=1.0))
    assert clock.due(1, busy=False), "nothing is known of the cost"
    clock.saved(8.0)
    now += 239.9
    assert not clock.due(2, busy=False)
    now += 0.2
    assert not clock.due(3, busy=True) and clock.due(4, busy=False)
    clock.saved(2.0)
    now += 119.9
    assert not clock.due(5, busy=False)
    now += 0.2
    assert clock.due(6, busy=False)


def test_without_it_the_iteration_says() -> None:
    clock = SaveClock(CheckpointConfig(save_interval=3))
    assert [i for i in range(1, 10) if clock.due(i, busy=i == 6)] == [3, 6, 9]
    never = SaveClock(CheckpointConfig())
    assert not any(never.due(i, busy=False) for i in range(1, 10))
