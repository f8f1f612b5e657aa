"""From settings to samples: text as a data path, what is said about a blend, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import socket
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from smp.config.blend import data_parts, parse_blend
from smp.config.schema import ConfigError, DataConfig
from smp.data.build import build_datasets
from smp.data.tokenizers.tokenizer import SentencePieceTokenizer
from tests.data.test_gpt_dataset import write

TEXTS = [f"def f{i}(x):\n    return x + {i}\n" for i in range(30)]


def text_config(folder: Path, model: str) -> DataConfig:
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return DataConfig(data_path=str(folder / "corpus.jsonl"), tokenizer_model=model, seq_length=16, split="1,0,0")


def test_text_is_tokenized_once_and_read_like_a_dataset(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config, tokenizer = text_config(tmp_path, model), SentencePieceTokenizer(model)
    first = build_datasets(config, 400, 1).train
    assert "tokenizing" in capsys.readouterr().err
    again = build_datasets(config, 400, 1).train
    assert capsys.readouterr().err == ""
    assert all((first.sample(i).input_ids == again.sample(i).input_ids).all() for i in range(9))
    dataset = first.sources[0].data.dataset  # type: ignore[attr-defined]
    documents = [dataset.document(i).tolist() for i in range(dataset.num_documents)]
    assert documents == [[*tokenizer.encode(text), tokenizer.eod] for text in TEXTS]
    (tmp_path / "corpus.jsonl").write_text('{"text": "other"}\n' * 40)
    assert build_datasets(config, 400, 1).train.sample(0).input_ids.tolist() != first.sample(0).input_ids.tolist()


def test_text_without_a_tokenizer_or_with_a_broken_line_is_refused(tmp_path: Path, model: str) -> None:
    config = text_config(tmp_path, model)
    with pytest.raises(ConfigError, match=r"corpus\.jsonl is text: give --tokenizer-model"):
        build_datasets(replace(config, tokenizer_model=None), 400, 1)
    with (tmp_path / "corpus.jsonl").open("a") as file:
        file.write("{cut\n")
    with pytest.raises(ValueError, match=r"corpus\.jsonl:31: not valid JSON"):
        build_datasets(config, 400, 1)
    assert not list((tmp_path / "cache").glob("corpus*"))


def test_an_index_of_other_data_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "one", [5, 9, 30])
    write(tmp_path / "two", [5, 9, 31])
    shutil.copy(tmp_path / "two.idx", tmp_path / "one.idx")
    with pytest.raises(ValueError, match=r"one\.bin: 176 bytes, one\.idx describes 180"):
        build_datasets(DataConfig(data_path=str(tmp_path / "one"), seq_length=4), 100, 1)


def test_what_is_said_about_a_blend(tmp_path: Path) -> None:
    write(tmp_path / "large", [40] * 20)
    write(tmp_path / "small", [30] * 4)
    paths = f"{tmp_path}/large {tmp_path}/small"
    blend = build_datasets(DataConfig(data_path=paths, seq_length=8, split="9,1,0"), 900, 1)
    assert blend.valid is not None and [source.name for source in blend.valid.sources] == [f"{tmp_path}/large"]
    assert blend.valid.notes == [f"note: {tmp_path}/small is left out of validation: it has less than one sample there"]
    assert blend.train.notes == []
    odd = f"0.3333333333 {tmp_path}/large 0.6666666661 {tmp_path}/small"
    notes = build_datasets(DataConfig(data_path=odd, seq_length=8, split="1,0,0"), 900, 1).train.notes
    assert notes == ["note: weights are rounded to multiples of 1/1048576: 349526, 699050"]
    packed = DataConfig(data_path=f"{tmp_path}/large", seq_length=80, split="1,0,0", packing="best-fit")
    assert build_datasets(packed, 900, 1).train.notes == [
        f"{tmp_path}/large: 10 sequences per epoch, 97.50 % of them filled"
    ]


def test_one_data_set_under_two_names_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "one", [40] * 20)
    for suffix in ("bin", "idx"):
        shutil.copy(tmp_path / f"one.{suffix}", tmp_path / f"copy.{suffix}")
    for other in (f"{tmp_path}/copy", f"{tmp_path}/./one"):
        with pytest.raises(ValueError, match=rf"one and {re.escape(other)} hold the same data: name it once"):
            build_datasets(DataConfig(data_path=f"0.3 {tmp_path}/one 0.7 {other}", seq_length=8), 900, 1)


def test_two_nodes_make_text_in_one_folder(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second node ends while the first one's job stands there, and makes the same files."""
    config = text_config(tmp_path, model)
    first = build_datasets(config, 400, 1).train
    made = sorted(path for path in (tmp_path / "cache").iterdir() if path.name.startswith("corpus"))
    before = [path.read_bytes() for path in made]
    made[1].unlink()  # .idx: the first node is not done yet
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert capsys.readouterr().err.count("into") == 1
    again = build_datasets(config, 400, 1).train
    assert capsys.readouterr().err.count("into") == 1
    assert [path.read_bytes() for path in made] == before
    assert again.sample(5).input_ids.tolist() == first.sample(5).input_ids.tolist()
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".corpus")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.3 a b", "give paths alone, or a number before every path"),
        ("a 0.3 b 0.7", "give paths alone, or a number before every path"),
        ("0 a 1 b", "the weight of a must be above 0"),
        ("1 a 2 a", "a data set is named twice"),
        ("", "it names no data"),
        ("'a", "No closing quotation"),
    ],
)
def test_words_that_name_no_blend(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^--data-path .*{message}"):
        parse_blend("--data-path", text)


def test_words_that_name_one(tmp_path: Path) -> None:
    assert [part.path for part in parse_blend("--data-path", "'with space' b")] == ["with space", "b"]
    assert [part.weight for part in parse_blend("--data-path", "1e-2 a 1/3 b")] == [Fraction(1, 100), Fraction(1, 3)]
    assert [part.path for part in parse_blend("--data-path", "1e999999999 b")] == ["1e999999999", "b"]
    with pytest.raises(ConfigError, match="--data-args-path .*none: "):
        data_parts(DataConfig(data_args_path=str(tmp_path / "none")))
