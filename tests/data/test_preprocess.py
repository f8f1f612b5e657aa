"""Preprocessing: every kind of file, and any number of workers."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import smp.data.files.text_files as text_files
from tests.data.text_jobs import KINDS, TEXTS, bytes_of, run, texts_in, write

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file(tmp_path: Path, model: str, name: str) -> None:
    report = run(tmp_path, model, [write(tmp_path / name, TEXTS)])
    assert texts_in(tmp_path, model) == TEXTS
    assert report.text_bytes == [sum(len(text.encode()) for text in TEXTS)]
    assert not (tmp_path / "out.partial").exists()


def test_a_text_file_is_one_document(tmp_path: Path, model: str) -> None:
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"line {i}\nnext\n")
    (tmp_path / "3.txt.gz").write_bytes(gzip.compress(b"packed\n"))
    run(tmp_path, model, [tmp_path / f"{i}.txt" for i in (2, 0, 1)] + [tmp_path / "3.txt.gz"])
    assert texts_in(tmp_path, model) == ["line 2\nnext\n", "line 0\nnext\n", "line 1\nnext\n", "packed\n"]


@settings(deadline=None, max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=40), st.integers(2, 4))
def test_workers_change_nothing(
    model: str, tmp_path_factory: pytest.TempPathFactory, texts: list[str], workers: int
) -> None:
    folder = tmp_path_factory.mktemp("workers")
    source = write(folder / "a.jsonl", texts)
    run(folder, model, [source])
    run(folder, model, [source], workers, "several")
    assert bytes_of(folder) == bytes_of(folder, "several")


@pytest.mark.parametrize("name", KINDS)
def test_records_are_numbered_and_progress_adds_up_to_the_size_of_the_files(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, TEXTS)
    chunks = list(text_files.read_chunks([path, path], ["text"]))
    assert len(chunks) > 10
    numbers = [chunk.first + i for chunk in chunks for i in range(len(chunk.records))]
    assert numbers == [*range(1, len(TEXTS) + 1)] * 2
    sizes = [chunk.size for chunk in chunks]
    assert sum(sizes) == pytest.approx(2 * path.stat().st_size, abs=len(sizes))  # rows are rounded down
