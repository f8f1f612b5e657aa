"""Small preprocessing jobs: texts, files of every kind, and what a job wrote."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from smp.data.indexed_dataset import IndexedDataset
from smp.data.job_output import Report
from smp.data.preprocess import Encoder, preprocess
from smp.data.tokenizers.tokenizer import SentencePieceTokenizer

pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

TEXTS = [f"document {i}: " + "x = y\n" * (i % 7) + ("é😀" if i % 3 else "") for i in range(60)] + [""]


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
        frames = (data[: len(data) // 2], data[len(data) // 2 :])
        data = b"".join(pa.compress(frame, "zstd", asbytes=True) for frame in frames)
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"n": range(len(texts)), "text": texts}), path, row_group_size=7)
        return path
    path.write_bytes(data)
    return path


KINDS = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"]
