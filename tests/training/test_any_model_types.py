"""48 types of transformers through ``finetune.py`` beside a plain loop, and the table of the docs that says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parity.result import TOLERANCE
from tests.training.any_model_table import BEGIN, CHUNK, END, PAGE, TYPES, chunks, measure

pytest.importorskip("transformers")


def rows() -> dict[str, list[str]]:
    """Cells of the table by type."""
    written = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    lines = [line.strip("| \n").split(" | ") for line in written.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines[1:]}


def test_the_table_has_every_type_and_no_number_above_the_tolerance() -> None:
    found = rows()
    assert tuple(found) == TYPES
    numbers = [float(cell) for cells in found.values() for cell in cells if re.fullmatch(r"\d+e[-+]\d+", cell)]
    assert len(numbers) > 2 * len(TYPES) and max(numbers) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("some", [*chunks(TYPES)], ids=[f"{i * CHUNK}" for i, _ in enumerate(chunks(TYPES))])
def test_types_are_as_the_table_says(some: tuple[str, ...], tmp_path: Path) -> None:
    written = rows()
    for kind, cells in measure(some, tmp_path).items():
        for cell, said in zip(cells.values(), written[kind], strict=True):
            assert isinstance(cell, float) == said[0].isdigit(), (kind, cell, said)
            assert not isinstance(cell, float) or cell <= TOLERANCE, (kind, cell)
