"""Files to arrays: bad samples counted and named, texts cut, and laid into sequences."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from smp.data.loader import BatchLoader
from smp.data.sample import IGNORE_INDEX
from smp.data.tuning.batches import PairBatch, TuningDataset
from smp.data.tuning.encode import Encoded
from smp.data.tuning.files import parse, read_records
from smp.data.tuning.messages import BadSampleError
from smp.data.tuning.samples import Samples, collect
from smp.data.tuning.sequences import lay_out, split_samples

ROWS = [{"text": f"line {i}", "n": i} for i in range(5)]
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def write(path: Path) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(LINES))
    elif path.suffix == ".zst":
        path.write_bytes(pytest.importorskip("pyarrow").compress(LINES, "zstd", asbytes=True))
    elif path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        path.write_bytes(LINES)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_every_kind_of_file_gives_its_records(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    records = list(read_records([str(path)]))
    assert [parse(record) for _, record in records] == ROWS
    assert [where for where, _ in records] == [f"{path}:{i + 1}" for i in range(5)]


def test_columns_that_a_row_does_not_have_are_absent(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"text": ["a", None], "prompt": [None, "b"]}
    parquet.write_table(pyarrow.Table.from_pydict(columns), tmp_path / "a.parquet")
    found = [parse(record) for _, record in read_records([str(tmp_path / "a.parquet")])]
    assert found == [{"text": "a"}, {"prompt": "b"}]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.xlsx", b"x", "neither .parquet nor"),
        ("a.txt", b"x", "samples come in .jsonl, .json, .csv"),
        ("a.jsonl.gz", b"no gzip", "damaged after 0 records"),
        ("a.parquet", b"no parquet", "not a parquet file that can be read"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=why) as error:
        list(read_records([str(tmp_path / name)]))
    assert str(tmp_path / name) in str(error.value)


def encode(record: dict[str, Any]) -> list[Encoded]:
    """As many tokens as the record says, the second half trained."""
    if "n" not in record:
        raise BadSampleError("no n")
    ids = np.arange(record["n"], dtype=np.int32)
    return [(ids, ids >= record["n"] // 2)]


def test_bad_samples_are_counted_and_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 4}\n\n{"m": 4}\nnot json\n[1]\n{"n": 30}\n{"n": 12}\n')
    options: dict[str, Any] = {"seq_length": 10, "vocab_size": 99}
    samples, report = collect(read_records([str(path)]), encode, threshold=0.8, **options)
    assert report.records == 6 and report.used == 2 and report.truncated == 1
    assert [where.rpartition(":")[2] for where, _ in report.bad] == ["3", "4", "5", "6"]
    assert "not valid JSON" in report.bad[1][1] and "nothing in its first 11 tokens" in report.bad[3][1]
    assert samples.lengths.tolist() == [4, 11] and report.tokens == 15 and report.supervised == 2 + 5
    assert any(f"dropped {path}:3: no n" in line for line in report.lines())
    with pytest.raises(ValueError, match="4 of 6 samples cannot be used.*allows 50 %.*:3: no n"):
        collect(read_records([str(path)]), encode, threshold=0.5, **options)
    with pytest.raises(ValueError, match="vocabulary has 5"):
        collect(read_records([str(path)]), encode, threshold=0.8, seq_length=10, vocab_size=5)
    path.write_text("\n")
    with pytest.raises(ValueError, match="names files without a single sample"):
        collect(read_records([str(path)]), encode, threshold=1.0, **options)


def test_pairs_of_equal_answers_are_counted() -> None:
    def pair(record: dict[str, Any]) -> list[Encoded]:
        return [*encode({"n": record["a"]}), *encode({"n": record["b"]})]

    records = [(f"a.jsonl:{i}", {"a": a, "b": b}) for i, (a, b) in enumerate([(4, 5), (6, 6), (4, 4)])]
    _, report = collect(records, pair, seq_length=10, vocab_size=99, threshold=0.0)
    assert report.used == 3 and report.equal == 2
    assert "note: 2 pairs have two equal answers: nothing is learned by comparing them" in report.lines()
    _, report = collect(records, pair, seq_length=3, vocab_size=99, threshold=0.0)
    assert report.equal == 3, "where they differ is cut off"


def test_null_is_what_a_sample_does_not_have() -> None:
    """In a line as in a row of a table: data sets of several shapes are written so."""
    assert parse(b'{"messages": null, "text": "a"}') == parse({"messages": None, "text": "a"}) == {"text": "a"}


def test_what_rows_say_and_nothing_uses_is_named() -> None:
    def read(row: dict[str, Any]) -> list[Encoded]:
        if row.get("text") == "chat":
            row.hidden.add("mood")  # type: ignore[attr-defined]
        row.as_text = row["text"] == "plain"  # type: ignore[attr-defined]
        return encode({"n": 4})

    rows: list[dict[str, Any]] = [
        {"text": "chat", "id": 1, "a b": 2},
        {"text": "plain", "id": 2, "empty": ""},
        {"text": "x", "id": 3},
    ]
    _, report = collect([("f", row) for row in rows], read, seq_length=10, vocab_size=99, threshold=0.0)
    assert "note: rows also have id (3), 'a b' (1): not used" in report.lines()
    assert "note: messages also have mood (1): the chat template does not name them" in report.lines()
    [line] = [line for line in report.lines() if "--apply-chat-template" in line]
    assert line.startswith("note: 1 samples have a prompt and an answer as text")


OVER_LINES = '{\n  "text": "a",\n  "n": 1\n}\n\n{\n  "text": "b"\n}\n'


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("front", ["", "\ufeff", "\n \n"])
def test_an_object_over_several_lines_is_one_record(tmp_path: Path, name: str, front: str) -> None:
    path, content = tmp_path / name, (front + OVER_LINES).encode()
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    found = [(where.rpartition(":")[2], parse(record)) for where, record in read_records([str(path)])]
    skipped = front.count("\n")
    assert found == [(str(1 + skipped), {"text": "a", "n": 1}), (str(6 + skipped), {"text": "b"})]


def test_a_damaged_first_line_is_one_bad_record(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", \n{"text": "b"}\n')
    records = [record for _, record in read_records([str(tmp_path / "a.jsonl")])]
    with pytest.raises(ValueError, match="not valid JSON"):
        parse(records[0])
    assert parse(records[1]) == {"text": "b"} and len(records) == 2


@pytest.mark.parametrize("sign", [",", ";", "\t", "|"])
def test_columns_of_a_csv_file_are_parted_by_one_sign(tmp_path: Path, sign: str) -> None:
    rows = f'prompt{sign}completion\r\n"a{sign}b"{sign}c\r\n\r\nd{sign}"e\nf"\r\n'
    for front in ("", "\ufeff", f"sep={sign}\r\n"):
        (tmp_path / "a.csv").write_text(front + rows, encoding="utf-8", newline="")
        found = [parse(record) for _, record in read_records([str(tmp_path / "a.csv")])]
        assert found == [{"prompt": f"a{sign}b", "completion": "c"}, {"prompt": "d", "completion": "e\nf"}]


def test_one_column_and_a_comma_before_other_signs(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\na;b\n")
    assert [parse(record) for _, record in read_records([str(tmp_path / "a.csv")])] == [{"text": "a;b"}]
    (tmp_path / "a.csv").write_text("text,more;x\na,b;c\n")
    assert [parse(r) for _, r in read_records([str(tmp_path / "a.csv")])] == [{"text": "a", "more;x": "b;c"}]


def made(lengths: list[int]) -> Samples:
    """Texts with tokens 100 x text + place, the first two of each not trained."""
    tokens = np.concatenate([100 * i + np.arange(n) for i, n in enumerate(lengths)]).astype(np.int32)
    trained = np.concatenate([np.arange(n) >= 2 for n in lengths])
    return Samples(tokens, trained, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def test_every_text_is_in_one_sequence_whole() -> None:
    samples = made([5, 3, 9, 4, 2, 7, 3])
    dataset = TuningDataset(samples, lay_out(samples, np.arange(7), 8, "best-fit"), seed=3)
    batch = dataset.batch(np.arange(len(dataset.sequences)).reshape(1, -1))
    assert batch.document_ids is not None and batch.position_ids is not None
    found = {}
    for row in range(batch.input_ids.shape[1]):
        for number in range(int(batch.document_ids[0, row].max()) + 1):
            mine = batch.document_ids[0, row] == number
            tokens, labels = batch.input_ids[0, row][mine], batch.labels[0, row][mine]
            text = int(tokens[0]) // 100
            assert batch.position_ids[0, row][mine].tolist() == list(range(len(tokens)))
            expected = [t if t % 100 >= 2 else IGNORE_INDEX for t in (tokens + 1).tolist()]
            assert labels.tolist() == expected
            found[text] = len(tokens) + 1
        padding = batch.document_ids[0, row] == -1
        assert (batch.labels[0, row][padding] == IGNORE_INDEX).all()
    assert found == dict(enumerate([5, 3, 9, 4, 2, 7, 3]))
    assert batch.num_tokens == sum(n - 1 for n in found.values()) and len(dataset.sequences) == 4
    assert dataset.sequences.efficiency == batch.num_tokens / 32


def test_order_is_a_function_of_seed_and_number_alone() -> None:
    samples = made([4] * 12)
    sequences = lay_out(samples, np.arange(12), 8, "off")
    texts = lambda seed, numbers: TuningDataset(samples, sequences, seed=seed).batch(numbers).input_ids[..., 0] // 100  # noqa: E731
    whole = texts(1, np.arange(36).reshape(3, 12))
    assert all(sorted(epoch.tolist()) == list(range(12)) for epoch in whole), "each once per epoch"
    assert len({tuple(epoch.tolist()) for epoch in whole}) == 3, "in another order"
    assert texts(1, np.array([[29, 3]])).tolist() == [[whole[2, 5].item(), whole[0, 3].item()]]
    assert texts(2, np.arange(36).reshape(3, 12)).tolist() != whole.tolist()


def test_a_resumed_loader_of_any_layout_goes_on() -> None:
    samples = made([4] * 12)
    dataset = TuningDataset(samples, lay_out(samples, np.arange(12), 8, "off"), seed=1)

    def read(ranks: int, start: int, steps: int) -> list[list[int]]:
        shares = [
            BatchLoader(
                dataset,  # type: ignore[arg-type]
                micro_batch_size=1,
                batch_size=4,
                dp_rank=r,
                dp_size=ranks,
                start_sample=start,
                read=dataset.batch,
            )
            for r in range(ranks)
        ]
        out = []
        for _ in range(steps):
            parts = torch.stack([next(loader).sample_index for loader in shares], 1)
            out.append(parts.flatten().tolist())
        for loader in shares:
            loader.close()
        return out

    assert read(1, 0, 5)[2:] == read(2, 8, 3) == read(4, 8, 3)


def test_trimmed_columns_hold_nothing() -> None:
    samples = made([4, 6, 3, 9])
    dataset = TuningDataset(samples, lay_out(samples, np.arange(4), 16, "off"), seed=None, trim=True)
    batch = dataset.batch(np.array([[0, 1], [2, 3]]))
    assert batch.lengths == (5, 8) and batch.document_ids is None and batch.num_tokens == 3 + 5 + 2 + 8
    assert (batch.labels[0, :, 5:] == IGNORE_INDEX).all() and batch.num_valid() == 2 + 4 + 1 + 7


def test_texts_know_how_long_attention_is() -> None:
    samples = made([4, 6, 3, 9])
    for packing, length in (("off", 16), ("best-fit", 8)):
        dataset = TuningDataset(samples, lay_out(samples, np.arange(4), length, packing), seed=None)  # type: ignore[arg-type]
        batch = dataset.batch(np.arange(8).reshape(1, 8))  # more than there are
        assert batch.attended_lengths is not None and sorted(batch.attended_lengths) == [2, 3, 5, 8]
        assert batch.num_tokens == 18


def test_validation_ends_with_its_last_sample_and_pairs_stay_together() -> None:
    samples = made([4, 6, 3, 9, 5, 5])
    dataset = TuningDataset(samples, lay_out(samples, np.arange(6), 8, "off"), seed=None, pairs=True)
    batch = dataset.batch(np.arange(4).reshape(2, 2))
    assert isinstance(batch, PairBatch) and batch.input_ids.shape == (2, 4, 8)
    assert batch.texts is not None and batch.texts.tolist() == [[0, 1, 2, 3], [4, 5, -1, -1]]
    assert (batch.input_ids[..., 0] // 100).tolist() == [[0, 1, 2, 3], [4, 5, 0, 0]]
    assert batch.num_valid() == 3 and dataset.samples_per_epoch == 3


def test_the_split_is_drawn_by_the_seed() -> None:
    train, valid = split_samples(100, (0.9, 0.1, 0.0), seed=1)
    assert len(train) == 90 and len(valid) == 10 and sorted([*train, *valid]) == list(range(100))
    assert sorted(valid) == valid.tolist() and valid.tolist() != list(range(90, 100))
    assert split_samples(100, (0.9, 0.1, 0.0), seed=2)[1].tolist() != valid.tolist()
