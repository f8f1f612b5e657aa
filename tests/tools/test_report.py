"""The page about a run: what is on it comes from the run's own files, and nothing is loaded from elsewhere."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from smp.training.reporting.sinks import read_curves
from tests.training.flag_runs import Run, Runs
from tools.report import data_shares, main, page, settings_table

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Runs(tmp_path_factory.mktemp("report"))(
        "--train-iters 4 --eval-interval 2 --eval-iters 1 --weight-decay 0.25"
    )


class Text(HTMLParser):
    """Words outside of pictures, tags left open, ids and addresses."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words, self.open, self.ids, self.addresses, self._skip = list[str](), list[str](), list[str](), [], 0
        self.pictures = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value]
        if tag not in ("meta", "br") and "/" not in given:
            self.open.append(tag)
        self._skip += tag in ("svg", "style")
        self.pictures += tag == "svg"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, [*attrs, ("/", None)])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._skip -= tag in ("svg", "style")

    def handle_data(self, data: str) -> None:
        if not self._skip and data.strip():
            self.words.append(data.strip())


def test_the_unit_of_the_loss_is_that_of_the_objective(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """And records are read once for all pictures."""
    logs, units = run.folder / "logs", []
    monkeypatch.setattr("tools.report._chart", lambda title, unit, curves: units.append(unit))
    monkeypatch.setattr("tools.report._svg", lambda figure: "<svg></svg>")
    reads = []
    monkeypatch.setattr("tools.report.read_curves", lambda path: reads.append(path) or read_curves(path))
    page(logs)
    starts = [json.loads(line) for line in (logs / "starts.jsonl").read_text().splitlines()]
    starts[-1]["settings"]["objective"] = "dpo"
    monkeypatch.setattr("tools.report.read_starts", lambda folder: starts)
    page(logs)
    assert (units[0], units[len(units) // 2]) == ("nats per token", "nats per pair") and len(reads) == 2


def test_the_page_shows_the_run_and_loads_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    logs = run.folder / "logs"
    assert main([str(logs)]) == 0
    assert capsys.readouterr().out == f"wrote {logs / 'report.html'}\n"
    html = (logs / "report.html").read_text()
    page = Text(html)
    assert page.open == [] and len(page.ids) == len(set(page.ids))
    assert all(address.startswith("#") for address in page.addresses)
    assert re.findall(r"url\((?!#)", html) == [] and "@import" not in html and "<script" not in html
    records = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
    last = [record["lm loss"] for record in records if "lm loss" in record][-1]
    best = min(record["validation loss"] for record in records if "validation loss" in record)
    for shown in (f"{last:.4f}", f"{best:.4f}", "--weight-decay", "0.25", "done: 4 iterations trained"):
        assert shown in page.words
    assert page.pictures == 8  # all but MFU, which a CPU has not
    spent = json.loads((logs / "goodput.json").read_text())["seconds"]
    assert {name for name, seconds in spent.items() if seconds} <= set(page.words)
    assert any(word.startswith("goodput ") and "(1 start)" in word for word in page.words)
    assert "<title>Run logs</title>" in html


def test_slow_ranks_are_a_section(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run.folder / "logs/stragglers.jsonl"
    assert "Slow ranks" not in Text(page(path.parent)).words
    found = {"iteration": 40, "rank": 2, "host": "n2", "what": "own computation", "seconds": 0.2219, "usual": 0.0212}
    path.write_text(json.dumps(found) + "\n")
    words = Text(page(path.parent)).words
    path.unlink()
    assert {"Slow ranks", "40", "2", "n2", "own computation", "221.9 ms", "21.2 ms"} <= set(words)


def test_completions_of_the_first_and_last_generation_are_a_section(run: Run) -> None:
    path = run.folder / "logs/completions.jsonl"
    rows = [
        {"iteration": i, "prompt": f"p{i}", "completion": f"<b>{i}", "reward": i / 3, "truncated": i == 3}
        for i in (1, 2, 3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = Text(page(path.parent)).words
    path.unlink()
    assert {"Completions", "p1", "<b>1", "0.3333", "p3", "<b>3 …", "1"} <= set(words) and "p2" not in words


def test_a_start_is_recorded_with_all_that_repeats_it(run: Run) -> None:
    (start,) = map(json.loads, (run.folder / "logs/starts.jsonl").read_text().splitlines())
    assert start["iteration"] == 0 and start["processes"] == 1
    assert start["settings"]["weight_decay"] == 0.25 and start["settings"]["train_iters"] == 4
    assert set(start["versions"]) == {"smp", "python", "torch"}
    assert start["git"] is None or re.fullmatch("[0-9a-f]{40}", start["git"]["commit"])


def test_a_folder_without_a_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} is no --log-dir of a run: it has no starts.jsonl\n"


def test_shares_of_a_blend_and_settings_that_differ() -> None:
    assert data_shares("3 a 1 b") == [("a", 0.75), ("b", 0.25)]
    assert data_shares("a b") == [("a", None), ("b", None)] and data_shares(None) == []
    assert settings_table({"lr": 0.5}) == [("--lr", "0.5", "0.0003")]
