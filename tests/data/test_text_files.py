from pathlib import Path

import pytest

from smp.data.text_files import expand_paths, read_texts, texts_of


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
