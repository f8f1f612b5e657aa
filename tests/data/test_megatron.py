"""Our files are byte for byte those of megatron-core's builder, and each reads the other's."""

from __future__ import annotations

import base64
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smp.config.blend import parse_split
from smp.data.gpt_dataset import split_documents
from smp.data.indexed_dataset import DTYPES, IndexedDataset, IndexedDatasetWriter, dtype_for_vocab
from smp.data.preprocess import Encoder, preprocess
from smp.data.tokenizers.files import load_tokenizer
from smp.data.tokenizers.tokenizer import SentencePieceTokenizer
from tests.data.test_gpt_dataset import splits
from tools.data import main as data_tool

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about accelerators that are not installed
    megatron = pytest.importorskip(
        "megatron.core.datasets.indexed_dataset", reason="megatron-core has no wheel for this platform"
    )

Documents = list[list[list[int]]]


def by_megatron(prefix: Path, dtype: np.dtype, documents: Documents) -> None:
    """As Megatron's tools do it: sequences, then the end of the document."""
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype.type)
    for sequences in documents:
        flat = [token for sequence in sequences for token in sequence]
        builder.add_document(torch.from_numpy(np.array(flat, dtype.type).astype(np.int64)), list(map(len, sequences)))
    builder.finalize(f"{prefix}.idx")


def by_us(prefix: Path, dtype: np.dtype, documents: Documents) -> None:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for sequences in documents:
            writer.add_document(
                np.array([token for sequence in sequences for token in sequence], dtype), list(map(len, sequences))
            )


def bytes_of(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}.{suffix}").read_bytes() for suffix in ("bin", "idx")]


CORPORA: dict[str, Documents] = {
    "documents": [[[1, 2, 3], [4]], [[5, 6]], [[7]]],
    "empty ones": [[], [[1]], [], [], [[2, 3]], []],
    "one": [[[1, 2]]],
    "none": [],
}


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("name", CORPORA)
def test_equal_bytes_and_both_read_both(tmp_path: Path, code: int, name: str) -> None:
    dtype, documents = DTYPES[code], CORPORA[name]
    by_megatron(tmp_path / "theirs", dtype, documents)
    by_us(tmp_path / "ours", dtype, documents)
    assert bytes_of(tmp_path / "ours") == bytes_of(tmp_path / "theirs")
    read = IndexedDataset(tmp_path / "theirs")
    assert read.dtype == dtype and read.num_documents == len(documents)
    sequences = [sequence for document in documents for sequence in document]
    assert [read[i].tolist() for i in range(len(read))] == sequences
    if sequences:  # theirs cannot map an empty file
        theirs = megatron.IndexedDataset(str(tmp_path / "ours"))
        assert [theirs[i].tolist() for i in range(len(theirs))] == sequences
        assert theirs.document_indices.tolist() == read.document_indices.tolist()


def test_the_type_of_a_vocabulary_is_theirs() -> None:
    for size in (255, 256, 65_499, 65_500, 65_536, 128_256):
        assert dtype_for_vocab(size) == megatron.DType.optimal_dtype(size)


texts = st.text() | st.sampled_from(["", "é 😀 ﬁ", "def f(x):\n    return 1\n", "\u2581 \0"])


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=st.lists(texts.filter(lambda t: not any("\ud800" <= c <= "\udfff" for c in t)), max_size=12),
    eod=st.booleans(),
)
def test_preprocessed_text_is_what_their_builder_writes(
    model: str, tmp_path_factory: pytest.TempPathFactory, documents: list[str], eod: bool
) -> None:
    folder, tokenizer = tmp_path_factory.mktemp("text"), SentencePieceTokenizer(model)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    preprocess([folder / "a.jsonl"], str(folder / "a"), [str(folder / "ours")], Encoder(model, ("text",), eod), 1)
    ids = [tokenizer.encode(text) for text in documents]
    by_megatron(
        folder / "theirs",
        np.dtype(np.uint16),
        [[[*document, *([tokenizer.eod] if eod else [])]] if document else [] for document in ids],
    )
    assert bytes_of(folder / "ours") == bytes_of(folder / "theirs")


def test_a_large_vocabulary(tmp_path: Path) -> None:
    """All single bytes and all pairs of bytes: 65,793 ids with the end of a document, so four bytes for each."""
    merges = [bytes([a]) for a in range(256)] + [bytes([a, b]) for a in range(256) for b in range(256)]
    lines = [base64.b64encode(merge) + b" %d" % i for i, merge in enumerate(merges)]
    (tmp_path / "pairs.tiktoken").write_bytes(b"\n".join(lines))
    texts = ["def f(x):\n    return x", "", "é 😀 \uffff", "a"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    encoder = Encoder(str(tmp_path / "pairs.tiktoken"), ("text",), True, "gpt2")
    preprocess([tmp_path / "a.jsonl"], str(tmp_path / "a"), [str(tmp_path / "ours")], encoder, 1)
    tokenizer = load_tokenizer(tmp_path / "pairs.tiktoken", "gpt2")
    dtype = np.dtype(megatron.DType.optimal_dtype(tokenizer.vocab_size))
    assert dtype == np.int32 and tokenizer.eod == 65_792
    by_megatron(
        tmp_path / "theirs", dtype, [[[*tokenizer.encode(text), tokenizer.eod]] if text else [] for text in texts]
    )
    assert bytes_of(tmp_path / "ours") == bytes_of(tmp_path / "theirs")


def test_merging_is_theirs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dtype = np.dtype("<i4")
    for name in ("documents", "one"):
        by_us(tmp_path / name, dtype, CORPORA[name])
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    for name in ("documents", "one"):
        builder.add_index(str(tmp_path / name))
    builder.finalize(str(tmp_path / "theirs.idx"))
    words = ["merge", str(tmp_path / "ours"), *(str(tmp_path / name) for name in ("documents", "one"))]
    assert data_tool(words) == 0, capsys.readouterr().err
    assert bytes_of(tmp_path / "ours") == bytes_of(tmp_path / "theirs")


@given(st.integers(0, 10**5), splits)
def test_documents_are_split_as_theirs(count: int, split: str) -> None:
    config = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config")
    ends = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(split))
    theirs = [range(0) if part is None else range(*(round(end * float(count)) for end in part)) for part in ends]
    ours = split_documents(count, parse_split(split))
    assert [list(part) for part in ours] == [list(part) for part in theirs]
