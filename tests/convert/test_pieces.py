"""Memory that the writers of a conversion share."""

from __future__ import annotations

import threading

import pytest

from smp.convert.pieces import Room


def test_blocks_are_used_again_within_the_limit() -> None:
    room = Room(100)
    with room.block(60) as first, room.block(40) as second:
        places = {first.data_ptr(), second.data_ptr()}
        assert (first.numel(), second.numel()) == (60, 40) and len(places) == 2
    with room.block(50) as again:
        assert again.data_ptr() == first.data_ptr() and again.numel() == 50
    with room.block(90) as other:  # what was kept made way: 90 + 60 and 90 + 40 are too much
        assert other.numel() == 90
    assert [block.numel() for block in room._kept] == [90]
    with room.block(300) as large:  # more than all of it, alone
        assert large.numel() == 300
    with room.block(10) as small:
        assert small.numel() == 10
    assert sum(block.numel() for block in room._kept) <= 300


@pytest.mark.timeout(60)
def test_who_finds_no_room_waits_for_it() -> None:
    room, order = Room(100), []

    def other() -> None:
        with room.block(60):
            order.append("other")

    with room.block(60):
        waiting = threading.Thread(target=other)
        waiting.start()
        waiting.join(timeout=0.2)
        order.append("first")
    waiting.join()
    assert order == ["first", "other"]
