"""Blends: exact weights at every moment, an order without history, and changes that never repeat a sample."""

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp.data.blend import MAX_PERIOD, BlendedDataset, Source, Turns, integer_weights, interleave
from smp.data.cache import NodeCache
from smp.data.mock_dataset import MockDataset

weights = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def errors(order: np.ndarray, shares: list[int]) -> np.ndarray:
    """Samples that each source had too many, after each place: (places, sources)."""
    counts = np.cumsum(order[:, None] == np.arange(len(shares)), axis=0)
    return counts - np.arange(1, len(order) + 1)[:, None] * np.array(shares) / sum(shares)


@settings(deadline=None)
@given(weights)
def test_each_source_is_within_one_sample_of_its_share_at_every_moment(shares: list[int]) -> None:
    assert np.abs(errors(np.tile(interleave(shares), 2), shares)).max() < 1


def by_definition(shares: list[int]) -> list[int]:
    """Of the jobs that have begun and are not done, the one with the earliest deadline."""
    period, given, order = sum(shares), [0] * len(shares), []
    for place in range(period):
        begun = [d for d, w in enumerate(shares) if given[d] < w and given[d] * period // w <= place]
        order.append(min(begun, key=lambda d: (-(-(given[d] + 1) * period // shares[d]), d)))
        given[order[-1]] += 1
    return order


@settings(deadline=None, max_examples=60)
@given(weights)
def test_turns_are_those_of_the_definition(shares: list[int]) -> None:
    assert interleave(shares).tolist() == by_definition(shares)


def test_many_small_sources_beside_a_large_one() -> None:
    shares = [5000, *([100] * 50)]  # in order of (j + 1/2) / w the small ones would all come at once
    assert np.abs(errors(interleave(shares), shares)).max() < 1


@settings(deadline=None)
@given(weights, st.integers(0, 500))
def test_a_turn_needs_no_history(shares: list[int], index: int) -> None:
    turns, order = Turns(shares), np.resize(interleave(shares), 501)
    assert turns.turn(index) == (order[index], int((order[:index] == order[index]).sum()))
    assert turns.counts(index) == np.bincount(order[:index], minlength=len(shares)).tolist()


@pytest.mark.parametrize(
    ("shares", "expected"),
    [(["0.3", "0.7"], [3, 7]), (["1", "2", "3.5"], [2, 4, 7]), (["5"], [1]), (["1/3", "1/6"], [2, 1])],
)
def test_weights_are_exact(shares: list[str], expected: list[int]) -> None:
    assert integer_weights([Fraction(share) for share in shares]) == expected


@given(st.lists(st.integers(1, 10**13), min_size=2, max_size=30))
def test_odd_weights_are_rounded_to_a_period_that_is_at_hand(sizes: list[int]) -> None:
    found = integer_weights([Fraction(size) for size in sizes])
    assert min(found) >= 1 and sum(found) <= MAX_PERIOD
    for weight, size in zip(found, sizes, strict=True):
        assert abs(weight / sum(found) - size / sum(sizes)) <= (len(sizes) + 1) / MAX_PERIOD


def test_a_long_period_is_made_once(tmp_path: Path) -> None:
    shares = [4999, 1]
    first = Turns(shares, NodeCache(tmp_path))
    assert len([path for path in tmp_path.iterdir() if path.suffix == ".npy"]) == 1
    again = Turns(shares, NodeCache(tmp_path))
    assert [again.turn(i) for i in range(0, 12000, 7)] == [first.turn(i) for i in range(0, 12000, 7)]
    assert Turns([1, 4999], NodeCache(tmp_path)).turn(4998) != first.turn(4998)


def blend(**shares: int) -> BlendedDataset:
    """A source for each name; sample j of it is sample j of a stream of its own."""
    sources = [Source(name, f"contents of {name}", MockDataset(9, 4, seed=0, stream=ord(name))) for name in shares]
    return BlendedDataset(sources, list(shares.values()))


def read(data: BlendedDataset, start: int, stop: int) -> list[tuple[str, int]]:
    found = [data.locate(i) for i in range(start, stop)]
    return [(data.sources[source].name, number) for source, number in found]


def test_samples_of_a_source_come_in_their_order() -> None:
    seen = read(blend(a=3, b=5), 0, 80)
    assert Counter(name for name, _ in seen) == {"a": 30, "b": 50}
    for name in "ab":
        assert [number for which, number in seen if which == name] == list(range(30 if name == "a" else 50))
    data = blend(a=3, b=5)
    source, number = data.locate(17)
    assert np.array_equal(data.sample(17).input_ids, data.sources[source].data.sample(number).input_ids)


def test_the_same_blend_goes_on() -> None:
    first = blend(a=3, b=5)
    resumed = blend(a=3, b=5)
    assert resumed.resume(first.manifest, 21) == []
    assert read(first, 21, 60) == read(resumed, 21, 60)
    assert blend(a=3, b=5).resume(None, 21) == []  # a checkpoint of before there were manifests


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1), st.integers(1, 90)),
        min_size=2,
        max_size=5,
    )
)
def test_changes_of_the_blend_never_repeat_a_sample(phases: list[tuple[dict[str, int], int]]) -> None:
    seen: list[tuple[str, int]] = []
    manifest, consumed = None, 0
    for shares, steps in phases:
        data = blend(**shares)
        data.resume(manifest, consumed)
        seen += read(data, consumed, consumed + steps)
        manifest, consumed = data.manifest, consumed + steps
    assert len(set(seen)) == len(seen)
    for name in "abcd":  # and none is left out either
        numbers = [number for which, number in seen if which == name]
        assert numbers == list(range(len(numbers)))


def test_what_changes_is_said() -> None:
    first, second = blend(a=1, b=1), blend(b=1, c=1)
    lines = second.resume(first.manifest, 10)
    assert lines[0] == "note: the blend changes at sample 10; what was read before continues after its last sample"
    assert lines[1:] == ["note: c was not read before in this form: it begins at its first sample"]
    assert [s["offset"] for s in second.manifest[-1]["sources"]] == [5, 0]


class Sized(MockDataset):
    """Samples that repeat after ten."""

    samples_per_epoch = 10  # type: ignore[assignment]


def test_what_is_read_more_than_once_is_known() -> None:
    data = BlendedDataset([Source(name, name, Sized(9, 4, 0)) for name in "ab"], [1, 3])
    assert data.read_again(13) == []
    assert data.read_again(14) == ["b has 10 and is read 1.10 times"]
    assert data.read_again(80) == ["a has 10 and is read 2.00 times", "b has 10 and is read 6.00 times"]
    assert blend(a=1).read_again(10**9) == []
