"""The memory formula on random layouts of random presets: see formula_sample.py."""

from __future__ import annotations

import statistics

import pytest

from smp.planner.search import FREE
from tests.planner.formula_sample import sample


def test_samples_are_functions_of_their_numbers() -> None:
    one, again = sample(3), sample(3)
    assert (one.world, one.flags) == (again.world, again.flags) != (sample(5).world, sample(5).flags)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_formula_on_random_layouts() -> None:
    """No plan that is called fitting may need more than there is: of the memory, FREE stays free."""
    errors = {number: sample(number).error()[0] for number in (0, 1, 3, 5, 6, 7, 8, 13, 15)}
    print(errors)
    assert statistics.median(map(abs, errors.values())) < 0.015
    assert min(errors.values()) > -FREE
