"""Random collectives have gloo's bits, and a rank that is killed at any moment leaves no hang and nothing behind; a few
of each here, more by ``exchange_cases.py``."""

from __future__ import annotations

import pytest

from tests.distributed import run_distributed
from tests.parallel.exchange_cases import compare, kill


@pytest.mark.parametrize("count", [1000, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world", [2, 3])
def test_random_collectives_have_the_bits_of_gloo(world: int, count: int) -> None:
    """Three ranks add up what is exact in any order: theirs is another one than gloo's."""
    assert min(run_distributed(compare, world, count, count)) >= count


@pytest.mark.parametrize("count", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_the_others_notice_a_killed_rank_and_nothing_is_left(count: int) -> None:
    assert run_distributed(kill, 1, count, 0) == [count]
