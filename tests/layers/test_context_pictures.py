"""The page about context parallelism shows what the code does."""

from __future__ import annotations

from pathlib import Path

from smp.kernels.sequence_cut import cut_sequences
from smp.layers.context_parallel.mask_picture import heads, held, pictures, steps

PAGE = Path(__file__).parents[2] / "docs" / "context-parallelism.md"


def test_the_committed_pictures_are_current() -> None:
    assert pictures() in PAGE.read_text(encoding="utf-8"), "run: python tools/write_docs.py"


def test_what_is_drawn() -> None:
    cut = cut_sequences(1, 8, 2)
    assert held(cut).splitlines()[0] == "0 0 1 1 1 1 0 0"
    assert steps(cut).splitlines()[1:] == [
        "queries of process 0 0 . . .",
        "queries of process 1 1 0 . .",
        "queries of process 1 1 0 0 .",
        "queries of process 0 0 1 1 0",
    ]
    assert steps(cut, window=2).splitlines()[-1] == "queries of process 0 . . 1 0"
    assert heads(cut, 2).splitlines() == ["head 0   0 1 1 0   ->   0 0 0 0", "head 1   0 1 1 0   ->   1 1 1 1"]
