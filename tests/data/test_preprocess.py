"""Preprocessing: every kind of file, any number of workers, a kill at any moment, and input that is no text."""

from __future__ import annotations

import base64
import errno
import fcntl
import gzip
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import smp.data.job_output as job_output
import smp.data.preprocess as preprocess_module
import smp.data.text_files as text_files
from smp.data.indexed_dataset import IndexedDataset
from smp.data.job_output import Output
from smp.data.preprocess import Encoder, Report, preprocess
from smp.data.text_files import Chunk
from smp.data.tokenizer import Batch, SentencePieceTokenizer
from smp.data.tokenizer_files import load_tokenizer, tokenizer_key
from tools.train_tokenizer import train

TEXTS = [f"document {i}: " + "x = y\n" * (i % 7) + ("é😀" if i % 3 else "") for i in range(60)] + [""]


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


def children_of(process: int) -> list[int]:
    """Its workers, and the helper that multiprocessing starts beside them."""
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def runs(process: int) -> bool:
    """Whether it is there, and not only its exit code."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_killed_process_is_gone_on_with(tmp_path: Path, model: str) -> None:
    """With a real kill of a job of two workers, which end with it."""
    source = write(tmp_path / "a.jsonl", TEXTS * 60)
    words = ["--input", source, "--tokenizer-model", model, "--output-prefix", tmp_path / "out", "--workers", "2"]
    code = f"""
import sys
import smp.data.job_output as p, smp.data.text_files as t
from tools.preprocess_data import main
if __name__ == "__main__":
    p._JOURNAL_SECONDS, t.CHUNK_BYTES = 0.0, 2000
    main({list(map(str, words))!r})
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not (tmp_path / "out.partial" / "journal.json").exists():
        assert process.poll() is None
        time.sleep(0.005)
    workers = children_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list(tmp_path.glob("out_*")) and len(workers) >= 2
    prefix, name = str(tmp_path / "out"), str(tmp_path / "out_text_document")
    report = preprocess([source], prefix, [name], Encoder(model, ("text",), append_eod=False), 1)
    assert report.resumed_at > 0
    preprocess([source], str(tmp_path / "w"), [str(tmp_path / "w")], Encoder(model, ("text",), append_eod=False), 1)
    assert bytes_of(tmp_path, "out_text_document") == bytes_of(tmp_path, "w")
    while any(map(runs, workers)):  # the test's timeout is the limit
        time.sleep(0.05)


@pytest.mark.parametrize("call", range(8))
def test_a_kill_while_files_get_their_names(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Two keys, so eight calls: the journal, index and tokens of each, and the folder that is removed."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"q": text, "a": text[::-1]}) + "\n" for text in TEXTS))
    encoder, inputs = Encoder(model, ("q", "a"), append_eod=True), [tmp_path / "a.jsonl"]
    whole = [str(tmp_path / f"whole_{key}") for key in "qa"]
    preprocess(inputs, str(tmp_path / "whole"), whole, encoder, 1)
    done = []

    def dying(plain: Callable[..., object], after: bool) -> Callable[..., object]:
        def called(*arguments: object, **options: object) -> object:
            done.append(plain)
            if len(done) == call + 1 and not after:
                raise Killed
            result = plain(*arguments, **options)
            if len(done) == call + 1:
                raise Killed
            return result

        return called

    names = [str(tmp_path / f"out_{key}") for key in "qa"]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", dying(Path.replace, after=call % 2 == 1))
        patch.setattr(job_output, "write_index", dying(job_output.write_index, after=call % 2 == 1))
        patch.setattr(shutil, "rmtree", dying(shutil.rmtree, after=False))
        with pytest.raises(Killed):
            preprocess(inputs, str(tmp_path / "out"), names, encoder, 1)
    report = preprocess(inputs, str(tmp_path / "out"), names, encoder, 1)
    assert [total.documents for total in report.totals] == [len(TEXTS)] * 2
    for key in "qa":
        assert bytes_of(tmp_path, f"out_{key}") == bytes_of(tmp_path, f"whole_{key}")
    assert not (tmp_path / "out.partial").exists()


def test_a_killed_worker_loses_nothing(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)
    run(tmp_path, model, [source], name="whole")
    add, count = Output.add, iter(range(100))

    def killed(self: Output, encoded: job_output.Encoded) -> None:
        if next(count) == 5:
            raise ChildProcessError("a worker process was killed (out of memory?): try fewer --workers")
        add(self, encoded)

    with monkeypatch.context() as patch:
        patch.setattr(job_output, "_JOURNAL_SECONDS", 0.0)
        patch.setattr(Output, "add", killed)
        with pytest.raises(OSError, match="a worker process was killed"):
            run(tmp_path, model, [source])
    assert run(tmp_path, model, [source]).resumed_at > 0
    assert bytes_of(tmp_path) == bytes_of(tmp_path, "whole")


def test_bad_input_after_hours_is_gone_on_from(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that has a journal keeps what came before the bad record; whoever skips it goes on there."""
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS) + b"{cut\n" + lines(TEXTS))
    said: list[str] = []
    out = str(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(job_output, "_JOURNAL_SECONDS", 0.0)
        with pytest.raises(ValueError, match=r"a\.jsonl:62: not valid JSON"):
            preprocess([tmp_path / "a.jsonl"], out, [out], Encoder(model, ("text",), True), 1, said.append)
    documents = job_output.Journal.read(tmp_path / "out.partial" / "journal.json").totals[0].documents
    assert documents > 50
    assert said == [f"{out}.partial keeps {documents} documents: the same command with --on-error skip goes on"]
    report = run(tmp_path, model, [tmp_path / "a.jsonl"], skip_bad=True)
    assert report.resumed_at == documents and report.dropped == 1
    assert texts_in(tmp_path, model) == TEXTS * 2


def test_another_end_of_a_document_is_another_job(tmp_path: Path) -> None:
    """Which token ends a document stands in a file of its own, beside the tokenizer."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1, "<e>": 2}, "a"))
    made.save(str(tmp_path / "tokenizer.json"))
    before = tokenizer_key(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<e>"}')
    assert tokenizer_key(tmp_path / "tokenizer.json") != before
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: not the settings of a tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")


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


def test_a_folder_that_its_job_takes_away_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other job ends between the opening of the lock and the attempt to take it."""
    folder, flock, removed = tmp_path / "out.partial", fcntl.flock, []

    def late(*arguments: object) -> None:
        if not removed:
            removed.append(1)
            shutil.rmtree(folder)
        flock(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(KeyboardInterrupt), Output(str(tmp_path / "out"), ["n"], np.dtype("<u2"), "one"):
        assert (folder / "lock").exists()
        raise KeyboardInterrupt


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


def test_no_room_for_the_tokens_is_one_line(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system itself refuses: files of this process may not grow beyond 16 KB."""
    source = write(tmp_path / "a.jsonl", TEXTS * 8)
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 2000)
    run(tmp_path, model, [source], name="whole")
    assert (tmp_path / "whole.bin").stat().st_size > 1 << 14
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:
        patch.setattr(job_output, "_JOURNAL_SECONDS", 0.0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limits[1]))
        try:
            with pytest.raises(OSError, match=r"File too large; the same command goes on from there: '.*out\.partial'"):
                run(tmp_path, model, [source])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.glob("out*")] == ["out.partial"]
    assert run(tmp_path, model, [source]).resumed_at > 0
    assert bytes_of(tmp_path) == bytes_of(tmp_path, "whole")


BAD = {
    "a.jsonl": (lines(TEXTS[:4]) + b'{"text": "cut\n' + lines(TEXTS[4:8]), r"a\.jsonl:5: not valid JSON"),
    "b.jsonl": (lines(TEXTS[:4]) + b'{"txt": "x"}\n' + lines(TEXTS[4:8]), r"b\.jsonl:5: .* a string under 'text'"),
    "c.jsonl": (
        lines(TEXTS[:4]) + b'{"text": "\\ud800"}\n' + lines(TEXTS[4:8]),
        r"c\.jsonl:5: character 0 .* surrogate",
    ),
    "d.jsonl": (
        lines(TEXTS[:4]) + b'{"a": ' + b"[" * 200_000 + b"\n" + lines(TEXTS[4:8]),
        r"d\.jsonl:5: not valid JSON",
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


def test_a_page_that_cannot_be_decoded(tmp_path: Path, model: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": TEXTS}), path, compression="snappy")
    data = bytearray(path.read_bytes())
    data[40:300] = bytes(255 - byte for byte in data[40:300])
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.parquet: not a parquet file that can be read \("):
        run(tmp_path, model, [path])
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_compressed_file_of_no_bytes(tmp_path: Path, model: str, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=rf"{name}: damaged \(0 bytes\)"):
        run(tmp_path, model, [tmp_path / name])


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("a.jsonl", ("text", "text"), "^--json-keys text text: text named twice"),
        ("a.jsonl", ("x/y",), "^--json-keys x/y: x/y cannot be part of a file's name"),
        ("a.txt", ("q", "a"), r"a\.txt: a \.txt file holds one text, --json-keys q a wants 2"),
    ],
)
def test_keys_that_cannot_work(tmp_path: Path, model: str, name: str, keys: tuple[str, ...], message: str) -> None:
    (tmp_path / name).write_text("x")
    names = [str(tmp_path / key) for key in keys]
    with pytest.raises(ValueError, match=message):
        preprocess([tmp_path / name], str(tmp_path / "out"), names, Encoder(model, keys, True), 1)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_document_that_does_not_fit_an_index(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, long = write(tmp_path / "a.jsonl", [*TEXTS, "x" * 300, "y"]), 150
    monkeypatch.setattr(preprocess_module, "_LONGEST", long)
    with pytest.raises(ValueError, match=rf"a\.jsonl:62: a document of \d+ tokens; an index holds {long} at most"):
        run(tmp_path, model, [source])
    report = run(tmp_path, model, [source], skip_bad=True)
    assert texts_in(tmp_path, model) == [*TEXTS, "y"] and report.dropped == 1 and "a.jsonl:62: " in report.named[0]


def test_an_id_that_the_tokenizer_does_not_have(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SentencePieceTokenizer, "encode_batch", lambda self, texts: Batch.of_lists([[400]]))
    with pytest.raises(ValueError, match=r"a\.jsonl:1: .*small\.model gives id 400 and has 400"):
        run(tmp_path, model, [write(tmp_path / "a.jsonl", TEXTS)])


def test_a_text_that_the_tokenizer_refuses(tmp_path: Path) -> None:
    """tiktoken gives up on millions of spaces in a row, and does not say which text they are in."""
    merges = [base64.b64encode(bytes([b])) + b" %d" % b for b in range(256)]
    (tmp_path / "bytes.tiktoken").write_bytes(b"\n".join(merges))
    source = write(tmp_path / "a.jsonl", ["one", " " * 2_500_000, "two"])
    encoder = Encoder(str(tmp_path / "bytes.tiktoken"), ("text",), False, "gpt2")
    out = str(tmp_path / "out")
    with pytest.raises(ValueError, match=r"a\.jsonl:2: .*Max stack size exceeded"):
        preprocess([source], out, [out], encoder, 1)
    report = preprocess([source], out, [out], replace(encoder, skip_bad=True), 1)
    assert report.dropped == 1 and IndexedDataset(out).num_documents == 2


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


@pytest.mark.parametrize("name", KINDS)
def test_progress_adds_up_to_the_size_of_the_files(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, TEXTS)
    sizes = [chunk.size for chunk in chunks(path)]
    assert sum(sizes) == pytest.approx(2 * path.stat().st_size, abs=len(sizes))  # rows are rounded down
