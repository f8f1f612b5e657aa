"""Preprocessing: input that is no text is one line that names it, and nothing half-written."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path

import pytest

import smp.data.preprocess as preprocess_module
from smp.data.indexed_dataset import IndexedDataset
from smp.data.preprocess import Encoder, preprocess
from smp.data.tokenizers.tokenizer import Batch, SentencePieceTokenizer
from tests.data.text_jobs import KINDS, TEXTS, lines, run, texts_in, write

pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.usefixtures("small_chunks")


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
