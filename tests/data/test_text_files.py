import gzip
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from smp.data.files.text_files import expand_paths, parse_record, read_chunks, read_texts, texts_of
from smp.data.preprocess import Encoder
from smp.data.tuning.files import parse, read_records
from tests.training.tiny_hf import write_pieces
from tools.generate import read_prompts


def test_expand_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.jsonl", "[x].txt"):
        (tmp_path / name).touch()
    found = expand_paths([f"{tmp_path}/c.jsonl", f"{tmp_path}/[ab].txt", f"{tmp_path}/[x].txt"])
    assert [path.name for path in found] == ["c.jsonl", "a.txt", "b.txt", "[x].txt"]
    with pytest.raises(ValueError, match="nothing.*: no such file"):
        expand_paths([f"{tmp_path}/nothing*"])
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    for patterns in ([f"{tmp_path}/a.txt", f"{tmp_path}/[ab].txt"], [f"{tmp_path}/a.txt", f"{tmp_path}/link.txt"]):
        with pytest.raises(ValueError, match=r"\.txt: named twice"):
            expand_paths(patterns)


def test_read_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"t": "three"}\n{"t": ""}\n')
    assert list(read_texts([tmp_path / "a.txt", tmp_path / "b.jsonl"], "t")) == ["one\r\ntwo\n", "three", ""]
    (tmp_path / "a.txt").write_bytes(b"ok \xff")
    for name, message in (("a.txt", "not UTF-8 at byte 3"), ("b.xlsx", "neither .parquet nor .arrow")):
        with pytest.raises(ValueError, match=f"{name}: {message}"):
            list(read_texts([tmp_path / name], "t"))
    with pytest.raises(ValueError, match=r"b.jsonl:1: not a JSON object with a string under 'x'"):
        list(read_texts([tmp_path / "b.jsonl"], "x"))


@pytest.mark.parametrize(
    "line", [b"{", b"\n", b"[1]", b'"text"', b'{"a": 1, "b": ""}', b'{"a": "x"}', b'{"a": "\xff", "b": ""}']
)
def test_bad_record(line: bytes) -> None:
    with pytest.raises(ValueError, match="^f.jsonl:7: not ") as caught:
        texts_of(line, "f.jsonl", 7, ["a", "b"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        (b'{"a": 1},', "; a comma stands after the object"),
        (b'{"a": 1} {"a": 2}', "; a line of .jsonl has one object"),
        (b'{"a": "x", "b": [{"c": 1, "c": 2}]}', "the key 'c' is there twice"),
        ('{"a": 1}'.encode("utf-16") + b"\n", "; it looks like UTF-16: write the file in UTF-8"),
        ('{"a": "é"}'.encode("latin-1"), "; write the file in UTF-8"),
        (b'[{"role": "user", "content": "x"}]', 'but a list of messages: write {"messages": [...]}'),
        (b'[{"prompt": "x"}]', "but a list of them: write one on each line, or call the file .json"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_with_what_to_do(line: bytes, hint: str) -> None:
    with pytest.raises(ValueError, match="^not ") as caught:
        parse_record(line)
    assert hint in str(caught.value) and "\n" not in str(caught.value)


def of_preprocessing(path: Path) -> list[str]:
    """What tools/preprocess_data.py encodes."""
    model = path.parent / "tokenizer.model"
    write_pieces(model)
    encoder = Encoder(str(model), ("text",), append_eod=True)
    out = []
    for chunk in read_chunks([path], ["text"]):
        [batch] = encoder(chunk).columns
        ends = [0, *batch.lengths.cumsum().tolist()]
        out += [encoder.tokenizer.decode(batch.ids[a:b].tolist()) for a, b in pairwise(ends)]
    return out


READERS: dict[str, Callable[[Path], list[Any]]] = {
    "tools/train_tokenizer.py, evaluate.py": lambda path: list(read_texts([path], "text")),
    "tools/preprocess_data.py": of_preprocessing,
    "finetune.py": lambda path: [parse(record)["text"] for _, record in read_records([str(path)])],
    "tools/generate.py": lambda path: read_prompts(path, "text"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.csv"])
def test_every_reader_passes_over_empty_lines(tmp_path: Path, reader: str, name: str) -> None:
    """At the beginning, within and at the end, with white space and with a byte order mark."""
    rows = ["text", "one", "two"] if name == "a.csv" else [json.dumps({"text": text}) for text in ("one", "two")]
    for empty in ("\n", "\r\n", "\n \t\n\n") if name != "a.csv" else ("\n", "\r\n"):
        for front in ("", empty, "\ufeff", f"\ufeff{empty}") if name != "a.csv" else ("", "\ufeff"):
            content = (front + "".join(row + "\n" + empty for row in rows)).encode()
            (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
            assert READERS[reader](tmp_path / name) == ["one", "two"], (front, empty)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo", encoding="utf-8-sig")
    assert list(read_texts([tmp_path / "a.txt"], "text")) == ["one\ntwo"]
    assert of_preprocessing(tmp_path / "a.txt") == ["one\ntwo"]
    assert read_prompts(tmp_path / "a.txt", "text") == ["one", "two"]
