"""Where a job's time goes, over restarts: every second has one cause, and what is lost is counted as lost."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smp.training.reporting import goodput
from smp.training.reporting.goodput import FILE, Account, Goodput, describe, read_account, summary
from tests.training.flag_runs import Run, Watched, run_here


class Clock:
    """Both clocks, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return 1e9 + self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(goodput, "time", SimpleNamespace(time=made.time, monotonic=made.monotonic))
    return made


def start(path: Path | None, clock: Clock, iteration: int, save: str | None = "ck", seconds: float = 20.0) -> Goodput:
    """A start that takes so long to its first step."""
    began = clock.time()
    clock.now += seconds
    made = Goodput(path, began, save, print)
    made.alive()
    made.begin(iteration)
    made.turn_to("productive")
    return made


def steps(account: Goodput, clock: Clock, numbers: range, lost: bool = False) -> None:
    """Of ten seconds each, one of which they wait for data."""
    for i in numbers:
        clock.now += 10
        account.step(i, 9.0, 1.0, lost)


def test_every_second_has_one_cause_over_restarts(tmp_path: Path, clock: Clock) -> None:
    """20 s to start; 6 steps of 10 s; a save behind the fourth; killed; 100 s nothing; 30 s to recover; 2 steps."""
    path = tmp_path / FILE
    first = start(path, clock, 0)
    steps(first, clock, range(1, 5))
    with first.during("save"):
        clock.now += 5
    first.saved(4)
    with first.during("evaluation"):
        clock.now += 7
    steps(first, clock, range(5, 7))  # and is killed
    clock.now += 100
    second = start(path, clock, 4, seconds=30)
    steps(second, clock, range(5, 7))
    second.end("done")
    account = read_account(path)
    assert account is not None and account.starts == 2 and account.status == "done"
    expected = {"productive": 54, "start": 20, "data": 8, "save": 5, "recovery": 30, "rerun": 18, "evaluation": 7}
    assert account.seconds == pytest.approx({**expected, "rollout": 0, "idle": 100})
    assert sum(account.seconds.values()) == pytest.approx(clock.time() - account.first_start)
    assert summary(account)["goodput"] == pytest.approx(54 / 242, abs=1e-4)
    began = "goodput 22.3 % of 0:04:02 (2 starts): idle 41.3 %, recovery 12.4 %, start 8.3 %, rerun 7.4 %"
    assert describe(account).startswith(began)


def test_skipped_steps_are_lost(tmp_path: Path, clock: Clock) -> None:
    account = start(tmp_path / FILE, clock, 0)
    steps(account, clock, range(1, 3), lost=True)
    steps(account, clock, range(3, 4))
    assert account.seconds()["rerun"] == pytest.approx(18) and account.seconds()["productive"] == pytest.approx(9)


@pytest.mark.parametrize(
    ("iteration", "save", "status", "same"),
    [
        (4, "ck", "failed", True),
        (4, "ck", "done", False),  # more iterations than were asked for at first are a job of their own
        (4, "other", "failed", False),  # goes on from any checkpoint, maybe of another job
        (4, None, "failed", False),
        (0, "ck", "failed", True),  # was killed before its first checkpoint
        (0, "ck", "done", False),
        (0, "other", "failed", False),
        (0, None, "failed", False),  # nothing could go on
    ],
)
def test_what_is_the_same_job(
    tmp_path: Path, clock: Clock, iteration: int, save: str | None, status: str, same: bool
) -> None:
    first = start(tmp_path / FILE, clock, 0, None if save is None else "ck")
    steps(first, clock, range(1, 5))
    first.saved(4)
    first.end(status)
    second = start(tmp_path / FILE, clock, iteration, save)
    assert second.account.starts == (2 if same else 1)


def test_the_next_try_of_torchrun_is_of_the_same_job(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(start(tmp_path / FILE, clock, 0, None), clock, range(1, 5))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert start(tmp_path / FILE, clock, 0, None).account.starts == 2


def test_steps_behind_an_iteration_without_a_mark_go_to_the_mark_before() -> None:
    account = Account(0.0, 0.0, iteration=10, marks={3: 30.0, 6: 60.0})
    account.seconds["productive"] = 100.0
    account.back_to(8)
    assert account.seconds["productive"] == 60 and account.seconds["rerun"] == 40


def test_what_is_older_than_all_marks_has_the_fewest_seconds_that_are_known() -> None:
    account = Account(0.0, 0.0, iteration=10, marks={3: 30.0, 6: 60.0})
    account.seconds["productive"] = 100.0
    assert account.productive_at(2) == 30 and account.productive_at(0) == 0


def test_many_checkpoints_and_rewinds_leave_marks_of_all_that_a_restart_is_likely_to_go_back_to(clock: Clock) -> None:
    account = start(None, clock, 0)
    for i in range(1, 2001):
        steps(account, clock, range(i, i + 1))
        account.snapshot()
        account.saved(i)
    marks = account.account.marks
    assert len(marks) <= 1000 and marks[0] == 0 and set(range(1501, 2001)) <= set(marks)
    clock.now += 10
    account.step(2001, 9.0, 1.0, lost=True)
    account.rewound(2000, 2001)
    assert account.account.marks == marks and account.account.iteration == 2001
    assert account.account.seconds["productive"] == pytest.approx(2000 * 9)


def test_a_start_that_dies_while_it_loads_is_in_the_account(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / FILE
    for died in (True, False):
        began = clock.time()
        clock.now += 20
        made = Goodput(path, began, "ck", print)
        made.alive()
        clock.now += 40  # loads
        made.alive()
        if not died:
            made.begin(100)
            break
        clock.now += 100  # nobody sees how
    assert made.account.starts == 2 and made.account.iteration == 100
    seconds = {"start": 60.0, "idle": 100.0, "recovery": 60.0}
    assert {cause: s for cause, s in made.account.seconds.items() if s} == pytest.approx(seconds)


def test_a_first_start_that_is_refused_leaves_what_was_there(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "a" / "b" / FILE
    made = Goodput(path, clock.time(), "ck", print)
    made.alive()
    assert path.exists()
    made.refused()
    assert not (tmp_path / "a").exists()
    other = start(tmp_path / FILE, clock, 0, "other")
    other.end("done")
    before = (tmp_path / FILE).read_bytes()
    made = Goodput(tmp_path / FILE, clock.time(), "ck", print)
    made.alive()
    assert (tmp_path / FILE).read_bytes() != before
    made.refused()
    assert (tmp_path / FILE).read_bytes() == before


def test_repeated_passes_and_completions_are_not_productive(tmp_path: Path, clock: Clock) -> None:
    account = start(tmp_path / FILE, clock, 0)
    account.waits_for = "rollout"
    clock.now += 30
    account.step(1, 20.0, 10.0, lost=False, repeated=8.0)
    seconds = account.seconds()
    assert (seconds["rollout"], seconds["rerun"], seconds["productive"], seconds["data"]) == (10, 8, 12, 0)
    clock.now += 30
    account.step(2, 20.0, 10.0, lost=True, repeated=8.0)
    assert account.seconds()["rerun"] == 28


def test_a_file_without_a_newer_cause_is_read(tmp_path: Path, clock: Clock) -> None:
    start(tmp_path / FILE, clock, 0)
    kept = json.loads((tmp_path / FILE).read_text())
    del kept["seconds"]["rollout"]
    (tmp_path / FILE).write_text(json.dumps(kept))
    assert start(tmp_path / FILE, clock, 0).account.starts == 2


def test_a_damaged_file_is_none_and_one_that_cannot_be_written_is_said(tmp_path: Path, clock: Clock) -> None:
    for text in ("{", "[]", '{"marks": {}}', ""):
        (tmp_path / FILE).write_text(text)
        assert read_account(tmp_path / FILE) is None
    said: list[str] = []
    (tmp_path / "nowhere").write_text("a file, and no folder")
    account = Goodput(tmp_path / "nowhere" / FILE, clock.time(), None, said.append)
    account.alive()
    account.end("done")
    assert len(said) == 1 and said[0].startswith("WARNING: ") and "goodput is not kept" in said[0]


def spent(run: Run) -> dict[str, Any]:
    return json.loads((run.folder / "logs" / FILE).read_text())


def nap(seconds: float, *iterations: int) -> Any:
    """Before these iterations; the third sleep is in the first micro-batch only."""

    def hook(run: Watched) -> None:
        if run.trainer.progress.iteration + 1 in iterations:
            time.sleep(seconds / 2)  # two micro-batches

    return hook


def test_a_run_and_its_restart_tell_where_their_time_went(tmp_path: Path) -> None:
    """Two steps behind the last checkpoint sleep a second in all, and are made again by the restart."""
    flags = "--train-iters 6 --save ck --save-interval 3 --eval-interval 3 --eval-iters 1 "

    def stop(run: Watched) -> None:
        nap(0.5, 4, 5)(run)
        if run.trainer.progress.iteration + 1 == 6:
            raise RuntimeError("pulled")

    with pytest.raises(RuntimeError, match="pulled"):
        run_here(tmp_path, flags, each_step=stop)
    before = json.loads((tmp_path / "logs" / FILE).read_text())
    assert before["status"] == "failed" and before["seconds"]["productive"] >= 1.0
    run = run_here(tmp_path, flags + "--load auto")
    now = spent(run)
    lost = before["seconds"]["productive"] - before["marks"]["3"]
    assert now["starts"] == 2 and now["status"] == "done" and lost >= 1.0
    assert now["seconds"]["rerun"] == pytest.approx(before["seconds"]["rerun"] + lost)
    for cause in ("start", "recovery", "save", "evaluation"):
        assert now["seconds"][cause] > 0, cause
    # Two clocks, which a busy machine does not read at the same time.
    assert sum(now["seconds"].values()) == pytest.approx(now["updated"] - now["first_start"], rel=0.1, abs=1.0)
    (line,) = [line for line in run.out.splitlines() if line.startswith("goodput ")]
    assert "(2 starts): " in line and "rerun " in line
    status = json.loads((tmp_path / "logs/status.json").read_text())
    assert status["starts"] == 2 and 0 < status["goodput"] < 1 and 0 < run.records("goodput")[-1] < 1
    assert "goodput: 0." in run_here(tmp_path / "b", "--log-format megatron").out
