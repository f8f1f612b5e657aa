"""Batch ramp-up is Megatron's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp.config.batch import BatchSizes
from smp.config.schema import ConfigError, DataConfig


def walk(sizes: BatchSizes, samples: int) -> list[int]:
    """The size of each step until so many samples are consumed."""
    steps: list[int] = []
    while sum(steps) < samples:
        steps.append(sizes(sum(steps)))
    return steps


def ramp(final: int, text: str) -> BatchSizes:
    return BatchSizes.of(DataConfig(global_batch_size=final, rampup_batch_size=text))


def scheduled(text: str, batch: int, seq_length: int = 1) -> BatchSizes:
    data = DataConfig(global_batch_size=batch, step_batch_size_schedule=text, seq_length=seq_length)
    return BatchSizes.of(data)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 300), st.integers(0, 500))
def test_steps_are_counted_without_walking_them(
    start: int, increment: int, count: int, length: int, samples: int
) -> None:
    sizes = ramp(start + increment * count, f"{start} {increment} {length}")
    steps = walk(sizes, samples)
    assert sizes.steps(samples) == len(steps) and sizes.samples(len(steps)) == sum(steps)
    found = [sizes(consumed) for consumed in range(length + 5)]
    assert found == sorted(found) and set(found) <= set(sizes.ahead())
    assert found[0] == start and found[length] == sizes.largest
    assert found[length:] == [sizes.largest] * 5 and sizes.ahead(length) == [sizes.largest]


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 9)), max_size=6), st.integers(0, 500))
def test_any_table_is_counted_without_walking_it(gaps: list[tuple[int, int]], samples: int) -> None:
    parts = [(0, 3), *((sum(gap for gap, _ in gaps[: i + 1]), size) for i, (_, size) in enumerate(gaps))]
    text = " ".join(f"{start}:{size}" for start, size in parts)
    sizes = scheduled(text, max(size for _, size in parts))
    steps = walk(sizes, samples)
    assert sizes.steps(samples) == len(steps) and sizes.samples(len(steps)) == sum(steps)
    assert sizes.ahead(samples) == list(dict.fromkeys(sizes(c) for c in range(samples, parts[-1][0] + samples + 1)))


def test_a_long_ramp_is_counted_at_once() -> None:
    """A batch of one for 10^12 samples, then of two."""
    sizes = ramp(2, f"1 1 {10**12}")
    assert sizes.steps(10**12 + 10) == 10**12 + 5 and sizes.samples(10**12 + 5) == 10**12 + 10


def test_the_sizes_are_megatrons() -> None:
    """int(consumed / (samples / n)) increments, worked out by hand where no rounding is involved."""
    sizes = ramp(64, "16 16 1200")
    assert [sizes(c) for c in (0, 399, 400, 799, 800, 1199, 1200, 10**9)] == [16, 16, 32, 32, 48, 48, 64, 64]


PUBLIC = "0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536"
"""Of Megatron's example of 175 billion parameters, with 2048 tokens in a sample."""


def test_a_schedule_of_tokens_is_megatrons() -> None:
    sizes = scheduled(PUBLIC, 1536, 2048)
    assert sizes.parts[:2] == ((0, 16), (1171875, 320)) and sizes.parts[-1] == (5859375, 1536)
    assert [sizes(c) for c in (0, 1171874, 1171875, 5859374, 5859375)] == [16, 16, 320, 1232, 1536]
    assert scheduled("1k:2,0:1", 2, 100).parts == ((0, 1), (10, 2))  # in any order, with commas
    assert sizes.describe() == [
        "global batch size: 16 from sample 0 on, 320 from sample 1,171,875 on, 624 from sample 2,343,750 on, "
        "928 from sample 3,515,625 on, 1232 from sample 4,687,500 on, 1536 from sample 5,859,375 on"
    ]
    assert "(122 more), 1024 from sample 300,000 on" in ramp(1024, "8 8 300000").describe()[0]


def test_a_ramp_up_is_a_schedule() -> None:
    assert ramp(6, "2 2 8") == scheduled("0:2 4:4 8:6", 6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8", "give pairs"),
        ("0:8 5", "give pairs"),
        ("10:8", "the first pair must be 0:SIZE"),
        (",", "the first pair must be 0:SIZE"),
        ("0:8 15:4 19:2", "two pairs begin at one sample"),
        ("0:0 20:8", "at least one sample"),
        ("0:x", "'x' is no number"),
        ("0:8 infB:4", "'infB' is no number"),
        ("0:8 20:9", "its largest batch is 9; leave --global-batch-size out"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scheduled(text, 8, 10)


def test_two_schedules_are_refused() -> None:
    with pytest.raises(ConfigError, match="are both given"):
        BatchSizes.of(DataConfig(global_batch_size=6, rampup_batch_size="2 2 8", step_batch_size_schedule="0:6"))


def test_against_megatron_core() -> None:
    module = pytest.importorskip(
        "megatron.core.num_microbatches_calculator", reason="megatron-core has no wheel for this platform"
    )
    theirs = module.RampupBatchsizeNumMicroBatchesCalculator(64, 1, 1, False, 0, 8, 8, 7000)
    sizes = ramp(64, "8 8 7000")
    for consumed in range(0, 8000, 8):
        theirs.update(consumed, consistency_check=True)
        assert sizes(consumed) == theirs.get_current_global_batch_size(), consumed


@pytest.mark.parametrize("text", ["8 8", "8 8 x", "0 8 100", "64 8 100", "8 9 100", "8 8 100 1"])
def test_what_leads_nowhere_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--rampup-batch-size"):
        ramp(64, text)
