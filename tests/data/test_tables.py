"""The same records from files of every kind, and from folders."""

from __future__ import annotations

import csv
import gzip
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from smp.data.files.text_files import expand_paths, read_chunks, read_texts
from smp.data.indexed_dataset import dataset_paths
from smp.data.tokenizers.files import load_tokenizer, tokenizer_key
from smp.data.tuning.files import parse, read_records
from tests.training.tiny_hf import write_tokenizer
from tools.preprocess_data import main as preprocess

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("tokenizers")

ROWS = [{"text": f'{n}: one, "two"\nthree é', "other": str(n)} for n in range(2500)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """By the name of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name.removesuffix(".gz")
    if name.endswith(".arrow"):
        import pyarrow.ipc

        table = pyarrow.Table.from_pylist(rows)
        new = pyarrow.ipc.new_file if "file" in name else pyarrow.ipc.new_stream
        with new(str(path), table.schema) as out:
            out.write_table(table, 700)
    elif name.endswith(".csv"):
        with path.open("w", encoding="utf-8-sig" if "mark" in name else "utf-8", newline="") as file:
            out = csv.DictWriter(file, list(rows[0]))
            out.writeheader()
            out.writerows(rows)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        whole = json.dumps(rows, indent=1) if name == "array.json" else lines
        path.write_bytes(gzip.compress(whole.encode()) if path.suffix == ".gz" else whole.encode())
    return path


NAMES = (
    "lines.jsonl",
    "lines.json",
    "array.json",
    "array.json.gz",
    "plain.csv",
    "mark.csv",
    "stream.arrow",
    "file.arrow",
)


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_file_gives_the_same_records(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, ROWS)
    found = list(read_records([str(path)]))
    assert [parse(record) for _, record in found] == ROWS
    assert [where for where, _ in found][::1000] == [f"{path}:{n}" for n in (1, 1001, 2001)]
    assert list(read_texts([path], "text")) == [row["text"] for row in ROWS]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[1]", "a.json:1: not a JSON object"),
        ("a.json", '[{"text": "x"} {"text": "y"}]', "not a JSON array that can be read .no comma"),
        ("a.json", '[{"text": "x"}', "not a JSON array that can be read"),
        ("a.json", '[{"text": "x", "text": "y"}]', "a.json: not a JSON array .*the key 'text' is there twice"),
        ("a.json", '[{"text": "x"}] \n[{"text": "y"}]', "not a JSON array .*more after .* at character 17"),
        ("a.json", '[{"text": "x"}]}', "more after the array, at character 15"),
        ("a.json", '[{"text": "x"},\n]', "no element after the comma, at character 16"),
        ("a.json", '"text"', "neither a JSON array nor a JSON object on each line"),
        ("a.csv", "text\na,b\n", "row 1 has more fields than the 1 of the first line"),
        ("a.csv", 'text\n"a', "not a .csv file that can be read, after row 0"),
        ("a.arrow", "text", "not a arrow file"),
        ("a.xlsx", "text", "neither .parquet nor .arrow"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        list(read_texts([tmp_path / name], "text"))


def test_blanks_around_the_names_of_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt, completion \nhello, four\n")
    [(_, row)] = read_records([f"{tmp_path}/a.csv"])
    assert row == {"prompt": "hello", "completion": " four"}


def test_folders(tmp_path: Path) -> None:
    write(tmp_path / "many" / "b.jsonl", ROWS[2:4])
    write(tmp_path / "many" / "a" / "x.csv", ROWS[:2])
    write(tmp_path / "many" / ".cache" / "y.csv", ROWS[:2])
    for name in ("README.md", "README.txt", "LICENSE.txt", "a/LICENSE-2.txt.gz"):
        (tmp_path / "many" / name).write_text("no data")
    assert [parse(record) for _, record in read_records([f"{tmp_path}/many"])] == ROWS[:4]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: no file of data in this folder"):
        expand_paths([f"{tmp_path}/empty"])
    write(tmp_path / "parts" / "train-0.jsonl", ROWS[:1])
    assert len(expand_paths([f"{tmp_path}/parts"])) == 1
    write(tmp_path / "parts" / "test-0.jsonl", ROWS[:1])
    with pytest.raises(
        ValueError, match="parts holds files of test, train: name those to train on, as .*parts/train.$"
    ):
        expand_paths([f"{tmp_path}/parts"])
    assert len(expand_paths([f"{tmp_path}/parts/train*"])) == 1
    for part in ("train", "Validation"):
        write(tmp_path / "folders" / "en" / part / "0.jsonl", ROWS[:1])
    with pytest.raises(ValueError, match="folders holds files of train, validation: .* as .*folders/en/train$"):
        expand_paths([f"{tmp_path}/folders"])
    assert len(expand_paths([f"{tmp_path}/folders/en/train"])) == 1


def test_what_save_to_disk_leaves(tmp_path: Path) -> None:
    """As the library datasets writes it: files by the order of state.json, which is not that of their names."""
    folder = tmp_path / "saved" / "train"
    write(folder / "data-1.arrow", ROWS[2:5])
    write(folder / "data-2.arrow", ROWS[:2])
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": f"data-{n}.arrow"} for n in (2, 1)]}))
    assert [parse(record) for _, record in read_records([str(folder)])] == ROWS[:5]
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match="saved holds the data sets train, test: name one"):
        expand_paths([f"{tmp_path}/saved"])
    for damaged in ("{}", "[", '{"splits": []}', '{"splits": [1]}', '{"splits": null}'):
        (tmp_path / "saved" / "dataset_dict.json").write_text(damaged)
        with pytest.raises(ValueError, match="dataset_dict.json: not what save_to_disk writes"):
            expand_paths([f"{tmp_path}/saved"])


def test_preprocessing_is_the_same_from_all_of_them_and_a_folder_is_a_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "model")
    assert tokenizer_key(tmp_path / "model") == tokenizer_key(tmp_path / "model" / "tokenizer.json")
    assert load_tokenizer(tmp_path / "model").vocab_size == 300
    made = []
    for name in ("lines.jsonl", "array.json", "plain.csv", "stream.arrow"):
        folder = write(tmp_path / name.split(".")[0] / name, ROWS[:40]).parent
        words = (
            f"--input {folder} --tokenizer-model {tmp_path}/model --output-prefix {folder}/out --workers 1 --append-eod"
        )
        assert preprocess(shlex.split(words)) == 0
        made.append([path.read_bytes() for path in dataset_paths(f"{folder}/out_text_document")])
    assert all(each == made[0] for each in made)
    with pytest.raises(ValueError, match="neither tokenizer.json nor tokenizer.model in this folder"):
        load_tokenizer(tmp_path)


def test_what_the_library_datasets_saves_itself(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"document {i}"} for i in range(5)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    chunks = read_chunks(expand_paths([str(tmp_path / "saved")]))
    assert [record for chunk in chunks for record in chunk.records] == rows
