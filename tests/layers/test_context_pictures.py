"""The page about context parallelism shows what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from smp.kernels.sequence_cut import cut_sequences
from smp.layers.context_parallel.docs import PAGE, heads, held, main, steps, with_pictures

ROOT = Path(__file__).parents[2]


def test_the_committed_pictures_are_current() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert with_pictures(page) == page, "run: python -m smp.layers.context_parallel.docs"


def test_a_stale_picture_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    PAGE.write_text(page.replace("process of keys", "stale"), encoding="utf-8")
    main()
    assert PAGE.read_text(encoding="utf-8") == page


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
