"""The memory formula on random layouts of random presets: see formula_sample.py."""

from __future__ import annotations

import statistics

import pytest

from smp.planner.search import FREE, FREE_IN_PIPELINE
from tests.planner.formula_sample import sample


def test_samples_are_functions_of_their_numbers() -> None:
    one, again = sample(3), sample(3)
    assert (one.world, one.flags) == (again.world, again.flags) != (sample(5).world, sample(5).flags)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_formula_on_random_layouts() -> None:
    """No plan that is called fitting needs more than there is: what stays free is more than what the formula lacks."""
    samples = {number: sample(number) for number in (0, 1, 3, 5, 6, 7, 8, 13, 15, 21)}
    errors = {number: one.error()[0] for number, one in samples.items()}
    print(errors)
    assert statistics.median(map(abs, errors.values())) < 0.015
    assert all(
        error > -(FREE_IN_PIPELINE if samples[number].layout.pp > 1 else FREE) for number, error in errors.items()
    )
