import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp.data.indexed_dataset import DTYPES, IndexedDataset, IndexedDatasetWriter, dtype_for_vocab

# The index Megatron's preprocess_data.py writes for three documents of 6, 3 and 4 uint16 tokens, field by field.
MEGATRON_IDX = bytes.fromhex(
    "4d4d494449445800000100000000000000080300000000000000"
    "0400000000000000"
    "060000000300000004000000"
    "00000000000000000c000000000000001200000000000000"
    "0000000000000000010000000000000002000000000000000300000000000000"
)
DOCUMENTS = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 65535]]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    path = tmp_path / "three.documents"
    with IndexedDatasetWriter(path, np.uint16) as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    return path


def test_bytes_are_megatrons(prefix: Path) -> None:
    assert len(MEGATRON_IDX) == 102
    assert Path(f"{prefix}.idx").read_bytes() == MEGATRON_IDX
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack(
        "<13H", *(token for document in DOCUMENTS for token in document)
    )
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["three.documents.bin", "three.documents.idx"]


def test_reads_back(prefix: Path) -> None:
    dataset = IndexedDataset(prefix)
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (3, 3, 13)
    assert [dataset[i].tolist() for i in range(3)] == DOCUMENTS
    assert dataset.document_offsets.tolist() == [0, 6, 9, 13]
    with pytest.raises(IndexError):
        dataset[3]
    with pytest.raises(IndexError):
        dataset.document(-1)
    with pytest.raises(ValueError, match="read-only"):
        dataset[0][0] = 0


@st.composite
def corpora(draw: st.DrawFn) -> tuple[np.dtype, list[list[list[int]]]]:
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    info = np.iinfo(dtype) if dtype.kind in "iu" else np.iinfo(np.int8)
    sequence = st.lists(st.integers(int(info.min), int(info.max)), max_size=5)
    return dtype, draw(st.lists(st.lists(sequence, max_size=3), max_size=5))


@given(corpora())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[np.dtype, list[list[list[int]]]]) -> None:
    dtype, documents = corpus
    prefix = tmp_path_factory.mktemp("corpus") / "data"
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for sequences in documents:
            flat = np.array([token for sequence in sequences for token in sequence], dtype=dtype)
            writer.add_document(flat, [len(sequence) for sequence in sequences])
    dataset = IndexedDataset(prefix)
    assert dataset.dtype == dtype
    assert [s.tolist() for s in map(dataset.__getitem__, range(len(dataset)))] == [s for d in documents for s in d]
    assert dataset.num_documents == len(documents)
    for index, sequences in enumerate(documents):
        assert dataset.document(index).tolist() == [token for sequence in sequences for token in sequence]


def test_an_empty_document_has_no_sequence(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "data", np.int32) as writer:
        for document in ([], [5], []):
            writer.add_document(document)
    dataset = IndexedDataset(tmp_path / "data")
    assert dataset.document_indices.tolist() == [0, 0, 1, 1]
    assert dataset.document(1).tolist() == [5] and len(dataset.document(2)) == 0


def test_dtype_for_vocab() -> None:
    assert [dtype_for_vocab(size).str for size in (256, 65499, 65500, 200_000)] == ["<u2", "<u2", "<i4", "<i4"]


@pytest.mark.parametrize("token", [-1, 65536, 1.5])
def test_writer_refuses_tokens_that_do_not_fit(tmp_path: Path, token: float) -> None:
    with pytest.raises(ValueError, match="token of document 1 is not a uint16"):
        with IndexedDatasetWriter(tmp_path / "data", np.uint16) as writer:
            writer.add_document([1])
            writer.add_document([2, token])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lengths", [[1], [3, -1], [2, 1]])
def test_writer_refuses_sequences_that_are_not_the_document(tmp_path: Path, lengths: list[int]) -> None:
    with IndexedDatasetWriter(tmp_path / "data", np.uint16) as writer:
        with pytest.raises(ValueError, match="in a document of 2"):
            writer.add_document([1, 2], lengths)


def test_a_failed_rewrite_keeps_the_old_dataset(prefix: Path) -> None:
    with pytest.raises(RuntimeError, match="killed"), IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_document([42])
        raise RuntimeError("killed")
    assert IndexedDataset(prefix).num_tokens == 13
    assert len(list(prefix.parent.iterdir())) == 2


def test_a_crash_between_the_renames_leaves_no_mixed_dataset(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.replace

    def crash_on_index(self: Path, target: Path) -> Path:
        if target.suffix == ".idx":
            raise OSError("no space left")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", crash_on_index)
    with pytest.raises(OSError, match="no space"), IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_document(list(range(13)))
    with pytest.raises(ValueError, match="idx: no such file"):
        IndexedDataset(prefix)


def _patched(offset: int, value: bytes) -> bytes:
    return MEGATRON_IDX[:offset] + value + MEGATRON_IDX[offset + len(value) :]


@pytest.mark.parametrize(
    ("idx", "message"),
    [
        (b"", "bad magic"),
        (MEGATRON_IDX[:20], "bad magic"),
        (_patched(0, b"TNTIDX"), "bad magic"),
        (_patched(9, b"\x02"), "version 2"),
        (_patched(17, b"\x09"), "token type 9"),
        (MEGATRON_IDX[:-1], "101 bytes, its header says 102 .truncated"),
        (MEGATRON_IDX + bytes(3), "multimodal"),
        (_patched(18, b"\xff" * 8), "its header says"),
        (_patched(34, b"\x05"), "sequence offsets do not follow"),
        (_patched(34, struct.pack("<i", -6)), "sequence offsets do not follow"),
        (_patched(54, b"\x0d"), "sequence offsets do not follow"),
        (_patched(70, b"\x01"), "document boundaries"),
        (_patched(78, b"\x03"), "document boundaries"),
        (_patched(94, b"\x02"), "document boundaries"),
        (
            _patched(17, b"\x04")[:46] + struct.pack("<3q", 0, 24, 36) + MEGATRON_IDX[70:],
            "three.documents.idx describes 52",
        ),
    ],
)
def test_damaged_index(prefix: Path, idx: bytes, message: str) -> None:
    Path(f"{prefix}.idx").write_bytes(idx)
    with pytest.raises(ValueError, match=message) as caught:
        IndexedDataset(prefix)
    assert str(prefix) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 25, 28])
def test_tokens_and_index_must_belong_together(prefix: Path, size: int) -> None:
    Path(f"{prefix}.bin").write_bytes(bytes(size))
    with pytest.raises(ValueError, match=rf"bin: {size} bytes, three.documents.idx describes 26"):
        IndexedDataset(prefix)


def test_missing_file_says_what_a_prefix_is(prefix: Path) -> None:
    with pytest.raises(ValueError, match="without .bin or .idx"):
        IndexedDataset(f"{prefix}.bin")


def test_preprocessing_does_not_import_torch() -> None:
    names = (
        "indexed_dataset",
        "tokenizers.tokenizer",
        "gpt_dataset",
        "mock_dataset",
        "files.text_files",
        "preprocess",
        "build",
    )
    lines = [f"import smp.data.{name}; assert 'torch' not in sys.modules, {name!r}" for name in names]
    subprocess.run([sys.executable, "-c", "\n".join(["import sys", *lines])], check=True)
