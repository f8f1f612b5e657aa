"""Best-fit-decreasing packing: an oracle of a few lines, the properties it promises, and how near the optimum it is."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp.data.packing import Packing, pack_best_fit


def naive_rooms(lengths: list[int], capacity: int) -> list[int]:
    """Room left in each sequence, document by document: the definition."""
    rooms: list[int] = []
    for length in sorted(filter(None, lengths), reverse=True):
        fits = [s for s, room in enumerate(rooms) if room >= length]
        if fits:
            best = min(fits, key=lambda s: rooms[s])
            rooms[best] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


def rooms_of(packing: Packing, lengths: np.ndarray, capacity: int) -> list[int]:
    return sorted(capacity - int(lengths[packing[s]].sum()) for s in range(len(packing)))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 40).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(0, c), max_size=120))))
def test_every_document_once_and_as_best_fit_decreasing_does(case: tuple[int, list[int]]) -> None:
    capacity, documents = case
    lengths = np.array(documents, np.int64)
    packing = pack_best_fit(lengths, capacity)
    assert sorted(packing.order.tolist()) == np.flatnonzero(lengths).tolist()
    assert (np.diff(packing.offsets) > 0).all()
    assert packing.offsets[0] == 0 and packing.offsets[-1] == len(packing.order)
    assert rooms_of(packing, lengths, capacity) == naive_rooms(documents, capacity)


@pytest.mark.parametrize("capacity", [512, 2048, 8192, 100_000])
def test_lognormal_lengths_need_a_thousandth_more_than_the_optimum_at_most(capacity: int) -> None:
    draw = np.random.default_rng(0).normal(np.log(1200) - 0.72, 1.2, 100_000)
    lengths = np.clip(np.exp(draw).astype(np.int64), 1, capacity)
    packing = pack_best_fit(lengths, capacity)
    filled = np.add.reduceat(lengths[packing.order], packing.offsets[:-1])
    assert filled.max() <= capacity and filled.sum() == lengths.sum()
    assert len(packing) <= 1.001 * math.ceil(lengths.sum() / capacity)


def test_a_function_of_the_lengths() -> None:
    lengths = np.random.default_rng(1).integers(0, 3000, 5000)
    first, second = pack_best_fit(lengths.astype(np.int32), 4096), pack_best_fit(lengths.tolist(), 4096)
    assert np.array_equal(first.order, second.order) and np.array_equal(first.offsets, second.offsets)


def test_room_beyond_sixteen_bits() -> None:
    lengths = np.array([70_000, 1, 65_536, 65_535, 70_001])
    packing = pack_best_fit(lengths, 140_000)
    assert rooms_of(packing, lengths, 140_000) == naive_rooms(lengths.tolist(), 140_000)


def test_nothing_to_pack() -> None:
    for lengths in ([], [0, 0]):
        packing = pack_best_fit(np.array(lengths, np.int64), 8)
        assert len(packing) == 0 and packing.offsets.tolist() == [0]
        with pytest.raises(IndexError, match="sequence 0 of 0"):
            packing[0]


@pytest.mark.parametrize(
    ("lengths", "capacity", "message"),
    [
        ([3, 9, 4], 8, "document 1 has 9 tokens, a sequence holds 0 to 8"),
        ([3, -1], 8, "document 1 has -1 tokens"),
        ([1.5], 8, "packing takes integers in one dimension"),
        ([[1]], 8, "packing takes integers in one dimension"),
        ([1], 0, "a sequence of 0 tokens holds nothing"),
    ],
)
def test_what_cannot_be_packed_is_refused(lengths: list[int], capacity: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_best_fit(np.array(lengths), capacity)
