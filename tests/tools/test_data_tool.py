"""tools/data.py: listing, showing, checking, merging and splitting."""

import resource
from pathlib import Path

import numpy as np
import pytest

from smp.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from tools.data import main
from tools.train_tokenizer import train

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6], [7, 8, 9, 10]]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return make(tmp_path / "data", DOCUMENTS)


def make(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> Path:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def documents(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset.document(i).tolist() for i in range(dataset.num_documents)]


def said(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert main(list(map(str, words))) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_ls_of_a_prefix_and_of_a_folder(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{prefix}: 5 documents, 4 sequences, 10 tokens, uint16, mean 2.0, longest 4, 1 empty\n"
    assert said(capsys, "ls", prefix) == said(capsys, "ls", prefix.parent) == line
    (prefix.parent / "none").mkdir()
    assert "none: holds no .idx file" in said(capsys, "ls", prefix.parent / "none", code=2)


def test_head(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "head", prefix, "--start", 3, "--count", 9, "--tokens", 2)
    assert out == "document 3, 2 tokens: [5, 6]\ndocument 4, 4 tokens: [7, 8] ... 2 more\n"


def test_what_head_cannot_show(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "head", prefix, "--start", 5, code=2) == f"error: --start 5: {prefix} has 5 documents\n"
    for flag in ("--start", "--count", "--tokens"):
        assert said(capsys, "head", prefix, flag, "-1", code=2) == f"error: {flag}: -1 is not 0 or above\n"
    floats = make(tmp_path / "floats", [[1, 2]], np.float32)
    assert said(capsys, "head", floats) == "document 0, 2 tokens: [1.0, 2.0]\n"
    (tmp_path / "t.model").write_bytes(train([Path(__file__).read_text()], 400, "bpe", 0))
    error = said(capsys, "head", floats, "--tokenizer-model", tmp_path / "t.model", code=2)
    assert error == f"error: {floats}.bin: holds float32, token ids are integers\n"


def test_verify(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "verify", prefix, "--vocab-size", 11, "--data-cache-path", tmp_path / "cache")
    assert "ids 1 to 10, contents " in out and list((tmp_path / "cache").glob("contents-*.npy"))
    error = said(capsys, "verify", prefix, "--vocab-size", 10, code=2)
    assert error == f"error: {prefix}.bin: token id 10 in document 4 at offset 3, the vocabulary has 10\n"
    Path(f"{prefix}.bin").write_bytes(Path(f"{prefix}.bin").read_bytes()[:-1])
    assert said(capsys, "verify", prefix, code=1) == f"error: {prefix}.bin: 19 bytes, data.idx describes 20\n"


def test_merge(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = make(tmp_path / "other", [[], [11]])
    said(capsys, "merge", tmp_path / "all", prefix, other, prefix)
    assert documents(tmp_path / "all") == [*DOCUMENTS, [], [11], *DOCUMENTS]
    assert "all.bin: exists already" in said(capsys, "merge", tmp_path / "all", prefix, code=2)
    wide = make(tmp_path / "wide", [[1]], np.int32)
    assert "token types differ" in said(capsys, "merge", tmp_path / "mixed", prefix, wide, code=2)
    assert not list(tmp_path.glob("mixed*"))


def test_no_room_for_a_merge_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The system itself refuses: files of this process may not grow beyond 16 KB."""
    large = make(tmp_path / "large", [[7] * 5000] * 3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limits[1]))
    try:
        error = said(capsys, "merge", tmp_path / "all", large, code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error == f"error: {tmp_path}/all.bin: File too large\n"
    assert not list(tmp_path.glob("all*"))


def test_split(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "split", prefix, "--parts", 2)
    assert documents(tmp_path / "data_00000") + documents(tmp_path / "data_00001") == DOCUMENTS
    said(capsys, "split", prefix, "--fractions", "3,2,0", "--output", tmp_path / "part")
    assert documents(tmp_path / "part_train") == DOCUMENTS[:3] and documents(tmp_path / "part_valid") == DOCUMENTS[3:]
    out = said(capsys, "split", prefix, "--fractions", "3,2", "--output", tmp_path / "again")
    assert f"{tmp_path}/again_test: not written, it would have no documents" in out
    assert not list(tmp_path.glob("*_test*"))
    make(tmp_path / "late_valid", [[1]])
    assert "late_valid.bin: exists already" in said(
        capsys, "split", prefix, "--fractions", "3,2", "--output", tmp_path / "late", code=2
    )
    assert not list(tmp_path.glob("late_train*"))
    assert "--fractions '1,x' is not one to three" in said(capsys, "split", prefix, "--fractions", "1,x", code=2)
    assert "--parts 9: there are 5 documents" in said(capsys, "split", prefix, "--parts", 9, code=2)


def test_what_was_split_is_merged_to_the_same_bytes(prefix: Path, tmp_path: Path) -> None:
    assert main(["split", str(prefix), "--parts", "3"]) == 0
    assert main(["merge", str(tmp_path / "again"), *(str(tmp_path / f"data_0000{i}") for i in range(3))]) == 0
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"again.{suffix}").read_bytes() == Path(f"{prefix}.{suffix}").read_bytes()
