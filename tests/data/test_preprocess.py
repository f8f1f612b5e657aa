"""Preprocessing: every kind of file, any number of workers, a kill at any moment, and input that is no text."""

from __future__ import annotations

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import smp.data.job_output as job_output
import smp.data.text_files as text_files
from smp.data.indexed_dataset import IndexedDataset
from smp.data.job_output import Output
from smp.data.preprocess import Encoder, Report, preprocess
from smp.data.text_files import Chunk
from smp.data.tokenizer import SentencePieceTokenizer
from tools.train_tokenizer import train

pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

TEXTS = [f"document {i}: " + "x = y\n" * (i % 7) + ("é😀" if i % 3 else "") for i in range(60)] + [""]
TOOL = Path(__file__).parents[2] / "tools" / "preprocess_data.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    path.write_bytes(train([Path(__file__).read_text()], 400, "bpe", 0))
    return str(path)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 200)


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def run(folder: Path, model: str, inputs: list[Path], workers: int = 1, name: str = "out", **options: bool) -> Report:
    encoder = Encoder(model, ("text",), append_eod=True, **options)  # type: ignore[arg-type]
    return preprocess(inputs, str(folder / name), [str(folder / name)], encoder, workers)


def texts_in(folder: Path, model: str, name: str = "out") -> list[str]:
    dataset, tokenizer = IndexedDataset(folder / name), SentencePieceTokenizer(model)
    return [tokenizer.decode(dataset.document(i).tolist()) for i in range(dataset.num_documents)]


def bytes_of(folder: Path, name: str = "out") -> list[bytes]:
    return [(folder / f"{name}.{suffix}").read_bytes() for suffix in ("bin", "idx")]


def write(path: Path, texts: list[str]) -> Path:
    data = lines(texts)
    if path.suffix == ".gz":
        data = gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :])
    elif path.suffix == ".zst":
        compress = zstandard.ZstdCompressor().compress
        data = compress(data[: len(data) // 2]) + compress(data[len(data) // 2 :])
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"n": range(len(texts)), "text": texts}), path, row_group_size=7)
        return path
    path.write_bytes(data)
    return path


KINDS = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file(tmp_path: Path, model: str, name: str) -> None:
    report = run(tmp_path, model, [write(tmp_path / name, TEXTS)])
    assert texts_in(tmp_path, model) == TEXTS
    (total,) = report.totals
    dataset = IndexedDataset(tmp_path / "out")
    lengths = np.diff(dataset.document_offsets)
    assert (total.documents, total.tokens, total.empty) == (len(TEXTS), dataset.num_tokens, 1)
    assert total.longest == lengths.max() and total.text_bytes == sum(len(text.encode()) for text in TEXTS)
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


class Killed(BaseException):
    """Stands for the end of the process: nothing handles it."""


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("after", [1, 4, 9])
def test_a_job_goes_on_where_it_was_killed(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, name: str, after: int
) -> None:
    inputs = [write(tmp_path / name, TEXTS), write(tmp_path / f"b{name}", TEXTS[::-1])]
    run(tmp_path, model, inputs, name="whole")
    add, count, written = Output.add, iter(range(100)), []

    def dying(self: Output, encoded: job_output.Encoded) -> None:
        if next(count) == after:
            self._tokens[0].write(b"rubbish")  # was on its way when the process died
            raise Killed
        add(self, encoded)
        written.append(encoded)

    with monkeypatch.context() as patch:
        patch.setattr(job_output, "_JOURNAL_SECONDS", 0.0)
        patch.setattr(Output, "add", dying)
        with pytest.raises(Killed):
            run(tmp_path, model, inputs)
    assert not (tmp_path / "out.bin").exists() and (tmp_path / "out.partial").exists()
    said: list[str] = []
    encoder = Encoder(model, ("text",), append_eod=True)
    report = preprocess(inputs, str(tmp_path / "out"), [str(tmp_path / "out")], encoder, 1, said.append)
    assert bytes_of(tmp_path) == bytes_of(tmp_path, "whole")
    assert report.resumed_at > 0 and said[0].startswith(f"going on after {report.resumed_at} documents")
    assert report.totals[0].documents == 2 * len(TEXTS)


def test_a_killed_process_is_gone_on_with(tmp_path: Path, model: str) -> None:
    source = write(tmp_path / "a.jsonl", [text * 40 for text in TEXTS] * 60)
    words = ["--input", source, "--tokenizer-model", model, "--output-prefix", tmp_path / "out", "--workers", "1"]
    code = f"""
import runpy, sys
import smp.data.job_output as p, smp.data.text_files as t
p._JOURNAL_SECONDS, t.CHUNK_BYTES = 0.0, 2000
sys.argv = ["tool", *{list(map(str, words))!r}]
runpy.run_path({str(TOOL)!r}, run_name="__main__")
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not (tmp_path / "out.partial" / "journal.json").exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list(tmp_path.glob("out_*"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "going on after" in done.stdout, done.stderr
    encoder = Encoder(model, ("text",), append_eod=False)
    preprocess([source], str(tmp_path / "w"), [str(tmp_path / "w")], encoder, 1)
    assert bytes_of(tmp_path, "out_text_document") == bytes_of(tmp_path, "w")


def test_another_job_does_not_go_on_from_there(tmp_path: Path, model: str) -> None:
    with pytest.raises(KeyboardInterrupt), Output(str(tmp_path / "out"), ["n"], np.dtype("<u2"), "one") as output:
        output.journal.write(output.folder / "journal.json")
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match=r"out\.partial: left by a job with other input or settings; delete it"):
        Output(str(tmp_path / "out"), ["n"], np.dtype("<u2"), "two")


def test_two_builders_at_once(tmp_path: Path, model: str) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(KeyboardInterrupt), Output(str(tmp_path / "out"), ["n"], np.dtype("<u2"), "one"):
        with pytest.raises(ValueError, match=r"out\.partial: another process is writing"):
            run(tmp_path, model, [source])
        raise KeyboardInterrupt
    assert (tmp_path / "out.partial").exists()  # the refused one removed nothing


def test_a_full_disk_leaves_what_can_be_gone_on_with(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "0.idx")

    with monkeypatch.context() as patch:
        patch.setattr(job_output, "write_index", full)
        with pytest.raises(OSError, match="No space left on device"):
            run(tmp_path, model, [source])
    assert not list(tmp_path.glob("out.bin")) and (tmp_path / "out.partial").exists()
    (tmp_path / "out.partial" / "journal.json").unlink(missing_ok=True)
    run(tmp_path, model, [source])
    assert texts_in(tmp_path, model) == TEXTS


BAD = {
    "a.jsonl": (lines(TEXTS[:4]) + b'{"text": "cut\n' + lines(TEXTS[4:8]), r"a\.jsonl:5: not valid JSON"),
    "b.jsonl": (lines(TEXTS[:4]) + b'{"txt": "x"}\n' + lines(TEXTS[4:8]), r"b\.jsonl:5: .* a string under 'text'"),
    "c.jsonl": (
        lines(TEXTS[:4]) + b'{"text": "\\ud800"}\n' + lines(TEXTS[4:8]),
        r"c\.jsonl:5: character 0 .* surrogate",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_record_that_is_no_text(tmp_path: Path, model: str, name: str) -> None:
    data, message = BAD[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        run(tmp_path, model, [tmp_path / name])
    assert [path.name for path in tmp_path.iterdir()] == [name]
    report = run(tmp_path, model, [tmp_path / name], skip_bad=True)
    assert texts_in(tmp_path, model) == TEXTS[:8]
    assert report.dropped == 1 and len(report.named) == 1 and f"{name}:5" in report.named[0]


def test_a_row_without_text(tmp_path: Path, model: str) -> None:
    pq.write_table(pa.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: row 2 has no text under 'text'"):
        run(tmp_path, model, [tmp_path / "a.parquet"])
    assert run(tmp_path, model, [tmp_path / "a.parquet"], skip_bad=True).dropped == 1
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet: has no column text, but body"):
        run(tmp_path, model, [tmp_path / "b.parquet"])


@pytest.mark.parametrize("name", KINDS[1:])
def test_a_file_that_ends_too_early(tmp_path: Path, model: str, name: str) -> None:
    path = write(tmp_path / name, TEXTS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=rf"{name}: "):
        run(tmp_path, model, [path], skip_bad=True)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def chunks(path: Path, start: tuple[int, int, int] = (0, 0, 1)) -> Iterator[Chunk]:
    return text_files.read_chunks([path, path], ["text"], start)


@pytest.mark.parametrize("name", KINDS)
def test_reading_begins_at_any_chunk(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, TEXTS)
    whole = list(chunks(path))
    assert len(whole) > 10
    for i, chunk in enumerate(whole):
        rest = list(chunks(path, (chunk.file, chunk.end, chunk.first + len(chunk.records))))
        assert [(c.first, c.records) for c in rest] == [(c.first, c.records) for c in whole[i + 1 :]]
