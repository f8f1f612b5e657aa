"""Random numbers that depend on their keys alone, and look random."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smp.kernels.dropout import keyed_dropout, keyed_keep_mask
from smp.parallel import rng
from smp.parallel.region import Region
from smp.parallel.rng import dropout_keys, keyed_normal, stable_hash

CPU = torch.device("cpu")
LARGE = (1 << 18) // 64 * 3  # rows of 64 columns: three blocks


def whole(seed: int, name: str, *shape: int, std: float = 1.0) -> torch.Tensor:
    return keyed_normal(seed, name, shape, Region((0,) * len(shape), shape), std)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """In standard errors: N(0, 1) for independent numbers."""
    return torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1].item() * a.numel() ** 0.5


@st.composite
def regions(draw: Any) -> tuple[tuple[int, ...], Region]:
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    sizes = tuple(draw(st.integers(0, size - start)) for size, start in zip(shape, offsets, strict=True))
    return shape, Region(offsets, sizes)


@settings(deadline=None)
@given(regions(), st.sampled_from([1, 7, 16, 64]))
def test_a_region_holds_the_bits_of_the_whole(case: tuple[tuple[int, ...], Region], block_elements: int) -> None:
    shape, region = case
    with pytest.MonkeyPatch.context() as patch:  # blocks of a few rows, so that regions begin and end within them
        patch.setattr(rng, "_BLOCK_ELEMENTS", block_elements)
        want = whole(5, "w", *shape)
        for dim, (start, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
            want = want.narrow(dim, start, size)
        assert torch.equal(keyed_normal(5, "w", shape, region, 1.0), want)


def test_more_rows_leave_the_first_as_they_are() -> None:
    """The padding of a vocabulary differs between layouts. (torch draws the last 16 of 300 numbers in another way.)"""
    assert torch.equal(whole(5, "w", 100, 3), whole(5, "w", 128, 3)[:100])


def test_only_blocks_that_are_needed_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    original = rng._normal_block
    monkeypatch.setattr(rng, "_normal_block", lambda *key: drawn.append(key[:3]) or original(*key))
    keyed_normal(5, "w", (LARGE, 64), Region((4095, 0), (2, 64)), 1.0)
    assert drawn == [(5, "w", 0), (5, "w", 1)]


def test_fewer_numbers_of_a_block_are_its_first() -> None:
    """What makes it enough to draw a block as far as it is needed."""
    block = rng._normal_block(5, "w", 0, 1 << 18)
    assert all(torch.equal(rng._normal_block(5, "w", 0, few), block[:few]) for few in (1, 18, 4095, 200_001))


def test_blocks_differ_by_all_of_the_seed() -> None:
    """torch's CPU generator would take 5 and 5 + 2^40 for the same."""
    assert not torch.equal(whole(5, "w", 8, 3), whole(5 + (1 << 40), "w", 8, 3))


def test_normal_numbers_have_the_moments_of_a_normal_distribution() -> None:
    x = whole(5, "w", LARGE, 64, std=0.25).double() / 0.25
    n = x.numel()
    assert abs(x.mean()) < 4 / n**0.5
    assert abs(x.square().mean() - 1) < 4 * (2 / n) ** 0.5
    assert abs((x**3).mean()) < 4 * (15 / n) ** 0.5
    assert abs((x**4).mean() - 3) < 4 * (96 / n) ** 0.5


def test_numbers_of_different_keys_are_independent() -> None:
    block = (1 << 18) // 64
    first = whole(5, "layers.0.mlp.up.weight", 2 * block, 64)
    others = [whole(5, "layers.1.mlp.up.weight", block, 64), whole(6, "layers.0.mlp.up.weight", block, 64)]
    for a, b in itertools.combinations([first[:block], first[block:], *others], 2):
        assert abs(correlation(a, b)) < 4


def test_hash_is_the_same_for_ever() -> None:
    """A resumed run and another machine must agree. The values are this function's on the day it was written."""
    assert stable_hash(1234, "embedding.weight", 0) == 2948213805799743944
    assert dropout_keys(7, 3, CPU).tolist() == [1863069437, 2808165992, 1373393413]
    mask = keyed_keep_mask(torch.tensor(99), torch.tensor([0, 1, 1 << 40]), 16, 0.5)
    assert ["".join(str(int(bit)) for bit in row) for row in mask] == [
        "1101001111100000",
        "0011101000010101",
        "1000001101001101",
    ]


def test_hash_parts_are_kept_apart() -> None:
    assert len({stable_hash(1, 23), stable_hash(12, 3), stable_hash(123), stable_hash(1, 2, 3)}) == 4
    assert all(0 <= stable_hash(i) < 1 << 63 for i in range(100))


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**50), min_size=1, max_size=20), st.integers(1, 40))
@settings(deadline=None)
def test_mask_is_a_function_of_key_token_and_channel(key: int, numbers: list[int], channels: int) -> None:
    tokens = torch.tensor(numbers)
    mask = keyed_keep_mask(torch.tensor(key), tokens, 40, 0.5)
    assert torch.equal(keyed_keep_mask(torch.tensor(key), tokens.flip(0), channels, 0.5), mask.flip(0)[:, :channels])
    alone = torch.cat([keyed_keep_mask(torch.tensor(key), token[None], 40, 0.5) for token in tokens])
    assert torch.equal(alone, mask)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_a_fraction_p_and_keeps_the_mean(p: float) -> None:
    key = dropout_keys(0, 1, CPU)[0]
    out = keyed_dropout(torch.ones(2000, 500), key, torch.arange(2000), p)
    assert set(out.unique().tolist()) == {0.0, (torch.ones(()) / (1.0 - p)).item()}
    error = (p * (1 - p)) ** 0.5  # of one element, in units of 1 - p
    kept = (out != 0).double()
    assert abs(kept.mean() - (1 - p)) < 4 * error / 1000
    for dim, size in ((0, 2000), (1, 500)):  # no row or column is favoured
        deviations = (kept.mean(dim) - (1 - p)) / (error / size**0.5)
        assert deviations.abs().max() < 5.5
        assert 0.9 < deviations.std() < 1.1


def test_no_dropout_changes_nothing() -> None:
    x = torch.ones(3, 4)
    assert keyed_dropout(x, torch.tensor(1), torch.arange(3), 0.0) is x


def test_dropped_elements_have_no_gradient_and_nan_is_dropped_too() -> None:
    x = torch.full((50, 8), float("nan"), requires_grad=True)
    out = keyed_dropout(x, torch.tensor(1), torch.arange(50), 0.5)
    kept = keyed_keep_mask(torch.tensor(1), torch.arange(50), 8, 0.5)
    assert torch.equal(out == 0, ~kept)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, kept * 2.0)


def test_masks_of_neighbours_are_independent() -> None:
    """Keys, tokens and channels that differ in one bit, and tokens that differ above 32 bits."""
    key, tokens = 12345, torch.arange(1000)
    mask = keyed_keep_mask(torch.tensor(key), tokens, 400, 0.5).float()
    others = {f"key bit {b}": keyed_keep_mask(torch.tensor(key ^ (1 << b)), tokens, 400, 0.5) for b in range(32)}
    others |= {f"token bit {b}": keyed_keep_mask(torch.tensor(key), tokens ^ (1 << b), 400, 0.5) for b in range(48)}
    others |= {f"{s} tokens on": keyed_keep_mask(torch.tensor(key), tokens + s, 400, 0.5) for s in (3, 1000, 65536)}
    others |= {f"channel bit {b}": mask[:, torch.arange(400) ^ (1 << b)] for b in range(4)}
    far = {name: c for name, other in others.items() if abs(c := correlation(mask, other.float())) > 4.5}
    assert far == {}


def test_sites_and_seeds_have_their_own_keys() -> None:
    keys = torch.cat([dropout_keys(seed, 100, CPU) for seed in range(20)])
    assert len(keys.unique()) == 2000
    assert ((keys >= 0) & (keys < 1 << 32)).all()
