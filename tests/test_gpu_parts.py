"""``make gpu`` in the minutes that there are: which parts run, what a cut one leaves, that the next call goes on."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import PARTS, Part, Session, known, run_part

THREE = [Part("short", ("a",), 10), Part("long", ("b",), 100), Part("middle", ("c",), 30)]


class Fake:
    """Runs parts without taking time; ``ends`` are those that do not pass."""

    def __init__(self, **ends: str) -> None:
        self.ends, self.ran = ends, list[str]()

    def __call__(self, words: Sequence[str], limit: float | None, results: Path) -> tuple[str, list[str]]:
        self.ran.append(words[0])
        end = self.ends.get(words[0], "passed")
        return end, ["tests.one::test"] if end == "fell" else []


def session(folder: Path, minutes: float | None, run: Fake) -> Session:
    return Session(THREE, minutes, "card", folder, run)


def test_only_what_there_is_time_for_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Fake()
    assert session(tmp_path, 1, run).run() == 0
    assert run.ran == ["a", "c"]  # 100 s do not fit into 50
    rows = {line[:30].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert "passed (card" in rows["short"] and re.search("not run: [45][0-9] s were left", rows["long"])


def test_the_next_call_goes_on_and_begins_with_what_did_not_run(tmp_path: Path) -> None:
    session(tmp_path, 1, Fake(c="fell")).run()
    run = Fake()
    last = session(tmp_path, 10, run)
    assert last.run() == 0
    assert run.ran == ["b", "c"] and last.said["short"] == "passed before, on this code"
    again = Fake()
    assert session(tmp_path, 10, again).run() == 0
    assert again.ran == []
    assert session(tmp_path, None, again).run() == 0
    assert again.ran == ["a", "b", "c"]


def test_other_code_runs_all_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session(tmp_path, 10, Fake()).run()
    monkeypatch.setattr(gpu, "code_of_sources", lambda: "other")
    run = Fake()
    session(tmp_path, 10, run).run()
    assert run.ran == ["a", "b", "c"]


def test_what_fell_is_said_with_its_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert session(tmp_path, None, Fake(b="fell")).run() == 1
    assert "    fell: tests.one::test" in capsys.readouterr().out.splitlines()
    assert known(tmp_path)["long"].fallen == ("tests.one::test",) and known(tmp_path)["short"].end == "passed"


def test_a_part_takes_what_it_took_the_last_time(tmp_path: Path) -> None:
    session(tmp_path, None, Fake()).run()
    outcomes = known(tmp_path)
    assert gpu.needed(THREE[1], outcomes) < 1 and gpu.needed(THREE[1], {}) == 100


WRITES = "import os, pathlib; pathlib.Path(os.environ['SMP_BENCHMARK_RESULTS'], 'table.txt').write_text('{0}'); {1}"


def test_only_what_ended_well_replaces_a_table(tmp_path: Path) -> None:
    table, fallen = tmp_path / "table.txt", tmp_path / "fallen" / "table.txt"
    assert run_part(["-c", WRITES.format("first", "pass")], 60, tmp_path) == ("passed", [])
    assert table.read_text() == "first"
    assert run_part(["-c", WRITES.format("second", "raise SystemExit(1)")], 60, tmp_path)[0] == "fell"
    assert (table.read_text(), fallen.read_text()) == ("first", "second")
    started = time.monotonic()
    # And what it started ends with it.
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    assert run_part(["-c", WRITES.format("third", child)], 2, tmp_path)[0] == "cut"
    assert time.monotonic() - started < 50 and table.read_text() == "first"
    assert {path.name for path in tmp_path.iterdir()} == {"table.txt", "fallen"}


def test_tests_that_failed_have_names(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    bad = '<testcase classname="tests.a" name="test_b[c]"><failure/></testcase>'
    report.write_text(f'<testsuites><testsuite><testcase classname="tests.a" name="x"/>{bad}</testsuite></testsuites>')
    assert gpu.failed_tests(report) == ["tests.a::test_b[c]"]


def test_every_part_is_of_files_that_are_there_and_has_a_check() -> None:
    for part in PARTS:
        for word in (*part.words, *part.check):
            if word.startswith(("tests/", "benchmarks/")):
                assert (gpu.ROOT / word.split("::")[0]).exists(), word
    unchecked = {part.name for part in PARTS if not part.check and not part.name.startswith("tests: ")}
    assert unchecked == {"CUDA C++ kernels", "table: training, 1B shape", "compute-sanitizer"}


def test_every_test_with_the_marker_is_in_one_part_and_is_collected() -> None:
    paths = [path for path in (gpu.ROOT / "tests").rglob("test_*.py") if gpu.MARKER in path.read_text()]
    marked = {str(path.relative_to(gpu.ROOT)) for path in paths} - {"tests/gpu/test_parity.py"}  # make gpu-multi's
    assert len(marked) > 10
    files = [word for part in PARTS if part.name.startswith("tests: ") for word in part.words if word in marked]
    assert sorted(files) == sorted(marked)
    collected = gpu.checks(PARTS)[0].words
    assert marked <= set(collected) and gpu._FEATURES + gpu._EXPERTS in collected
