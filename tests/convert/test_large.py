"""A checkpoint of a 7B model's shape goes through in the memory of its two largest tensors and 1 GB."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.convert import convert, layers_that_fit, make_checkpoint
from tests.convert.test_hf import assert_same_files


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_seven_billion_parameters_need_little_memory(tmp_path: Path) -> None:
    layers = layers_that_fit(tmp_path, 32)
    if layers < 32:
        pytest.skip("the disk has no room for three checkpoints of 13.5 GB")
    largest = make_checkpoint(tmp_path / "hf", layers)
    bound = 2 * largest + 10**9
    for source, target, kind in (("hf", "smp", "smp"), ("smp", "back", "hf")):
        _, peak = convert(tmp_path / source, tmp_path / target, kind)
        assert peak <= bound, f"{source} -> {kind}: {peak / 1e6:.0f} MB"
    assert_same_files(tmp_path / "hf", tmp_path / "back")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["smp", "megatron"])
def test_memory_does_not_grow_with_the_model(kind: str, tmp_path: Path) -> None:
    """Two layers and the vocabulary's two matrices, 1.3 GB, where a program that loads them all needs 1.3 GB more."""
    largest = make_checkpoint(tmp_path / "hf", 2)
    _, peak = convert(tmp_path / "hf", tmp_path / "target", kind, "--workers", "2")
    assert peak <= 2 * largest + 10**9
