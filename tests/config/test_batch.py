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


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 300), st.integers(0, 500))
def test_steps_are_counted_without_walking_them(
    start: int, increment: int, count: int, ramp: int, samples: int
) -> None:
    sizes = BatchSizes(start + increment * count, start, increment, ramp)
    assert sizes.steps(samples) == len(walk(sizes, samples))
    found = [sizes(consumed) for consumed in range(ramp + 5)]
    assert found == sorted(found) and set(found) <= set(sizes.sizes)
    assert found[0] == start and found[ramp] == sizes.final


def test_a_long_ramp_is_counted_at_once() -> None:
    """A batch of one for 10^12 samples, then of two."""
    assert BatchSizes(2, 1, 1, 10**12).steps(10**12 + 10) == 10**12 + 5


def test_the_sizes_are_megatrons() -> None:
    """int(consumed / (samples / n)) increments, worked out by hand where no rounding is involved."""
    sizes = BatchSizes.of(DataConfig(global_batch_size=64, rampup_batch_size="16 16 1200"))
    assert [sizes(c) for c in (0, 399, 400, 799, 800, 1199, 1200, 10**9)] == [16, 16, 32, 32, 48, 48, 64, 64]


def test_against_megatron_core() -> None:
    module = pytest.importorskip(
        "megatron.core.num_microbatches_calculator", reason="megatron-core has no wheel for this platform"
    )
    theirs = module.RampupBatchsizeNumMicroBatchesCalculator(64, 1, 1, False, 0, 8, 8, 7000)
    sizes = BatchSizes.of(DataConfig(global_batch_size=64, rampup_batch_size="8 8 7000"))
    for consumed in range(0, 8000, 8):
        theirs.update(consumed, consistency_check=True)
        assert sizes(consumed) == theirs.get_current_global_batch_size(), consumed


@pytest.mark.parametrize("text", ["8 8", "8 8 x", "0 8 100", "64 8 100", "8 9 100", "8 8 100 1"])
def test_what_leads_nowhere_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--rampup-batch-size"):
        BatchSizes.of(DataConfig(global_batch_size=64, rampup_batch_size=text))
