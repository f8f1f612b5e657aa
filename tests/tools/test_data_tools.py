import contextlib
import importlib
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import smp.data.files.text_files as text_files
from smp.data.files.text_files import Chunk
from smp.data.indexed_dataset import IndexedDataset
from smp.data.job_output import Encoded
from smp.data.preprocess import encode_all
from smp.data.tokenizers.tokenizer import SentencePieceTokenizer
from tools.train_tokenizer import sample


@dataclass(frozen=True)
class Done:
    stdout: str
    stderr: str


def run(tool: str, *args: object, code: int = 0) -> Done:
    """What a tool says, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found = importlib.import_module(f"tools.{tool}").main(list(map(str, args)))
    assert found == code, err.getvalue()
    return Done(out.getvalue(), err.getvalue())


def error_of(tool: str, *args: object) -> str:
    """The one line a user sees; progress bars end in a carriage return."""
    last = run(tool, *args, code=2).stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    return last


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with corpus.jsonl, tok.model and data_text_document.{bin,idx}."""
    folder = tmp_path_factory.mktemp("demo")
    run("demo_corpus", "--output", folder / "corpus.jsonl", "--max-mb", 0.3)
    run("train_tokenizer", "--input", folder / "corpus.jsonl", "--model-prefix", folder / "tok", "--vocab-size", 800)
    tokenize(folder, "data", "--append-eod", "--workers", 1)
    return folder


def tokenize(folder: Path, name: str, *flags: object) -> Done:
    files = ("--input", folder / "corpus.jsonl", "--tokenizer-model", folder / "tok.model")
    return run("preprocess_data", *files, "--output-prefix", folder / name, *flags)


def records(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_demo_corpus_is_deterministic_and_real(demo: Path, tmp_path: Path) -> None:
    run("demo_corpus", "--output", tmp_path / "again.jsonl", "--max-mb", 0.3)
    assert (tmp_path / "again.jsonl").read_bytes() == (demo / "corpus.jsonl").read_bytes()
    documents = records(demo / "corpus.jsonl")
    assert 2e5 < sum(len(document["text"].encode()) for document in documents) <= 3e5
    paths = [document["path"] for document in documents]
    assert len(set(paths)) == len(paths) and paths != sorted(paths)
    assert not any({"test", "tests", "site-packages"} & set(path.split("/")) for path in paths)
    run("demo_corpus", "--output", tmp_path / "other.jsonl", "--max-mb", 0.3, "--seed", 1)
    assert [document["path"] for document in records(tmp_path / "other.jsonl")] != paths


def test_tokens_decode_to_the_documents(demo: Path) -> None:
    tokenizer = SentencePieceTokenizer(demo / "tok.model")
    dataset = IndexedDataset(demo / "data_text_document")
    texts = [document["text"] for document in records(demo / "corpus.jsonl")]
    assert dataset.num_documents == len(dataset) == len(texts) and dataset.dtype == np.uint16
    for index, text in enumerate(texts):
        ids = dataset.document(index).tolist()
        assert ids[-1] == tokenizer.eod and tokenizer.decode(ids) == text


def test_any_number_of_workers_writes_the_same_bytes(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 20_000)  # so that there are more chunks than workers
    report = tokenize(demo, "three", "--append-eod", "--workers", 3).stdout
    for suffix in ("bin", "idx"):
        one, three = (demo / f"{name}_text_document.{suffix}" for name in ("data", "three"))
        assert one.read_bytes() == three.read_bytes()
    dataset = IndexedDataset(demo / "data_text_document")
    assert f"{dataset.num_documents} documents, {dataset.num_tokens} tokens, " in report


def test_keys_empty_texts_and_several_files(demo: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "one", "a": ""}\n{"q": "", "a": "two  \\n"}\n')
    (tmp_path / "b.jsonl").write_text('{"q": "three", "a": "four"}')
    files = ("--input", tmp_path / "b.jsonl", tmp_path / "[a].jsonl", "--json-keys", "q", "a", "--workers", 1)
    model = ("--tokenizer-model", demo / "tok.model")
    done = run("preprocess_data", *files, *model, "--output-prefix", tmp_path / "out")
    tokenizer = SentencePieceTokenizer(demo / "tok.model")
    for key, texts in (("q", ["three", "one", ""]), ("a", ["four", "", "two  \n"])):
        dataset = IndexedDataset(tmp_path / f"out_{key}_document")
        assert [tokenizer.decode(dataset.document(i).tolist()) for i in range(3)] == texts
        assert len(dataset) == 2  # the empty document has no sequence
        assert f"out_{key}_document: 3 documents, {dataset.num_tokens} tokens" in done.stdout


def test_tokens_that_the_vocabulary_cannot_spell_are_counted_and_many_are_warned_of(tmp_path: Path) -> None:
    words = {"<unk>": 0, "<|endoftext|>": 1, "a": 2}
    model = tokenizers.models.WordLevel(words, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    def told(text: str) -> Done:
        (tmp_path / "x.txt").write_text(text)
        for path in tmp_path.glob("out*"):
            path.unlink()
        flags = ("--input", tmp_path / "x.txt", "--tokenizer-model", tmp_path / "tokenizer.json", "--workers", 1)
        return run("preprocess_data", *flags, "--output-prefix", tmp_path / "out")

    assert "<unk>" not in told("a " * 100).stdout
    few = told("a " * 199 + "b")
    assert few.stdout.endswith("0 dropped, 1 <unk> (0.50 % of the tokens)\n") and "WARNING" not in few.stderr
    many = told("a b c a")
    assert "2 <unk> (50.00 % of the tokens)" in many.stdout
    assert "out_text_document: 50.00 % of the tokens are <unk>: the tokenizer cannot spell much" in many.stderr


def test_megatrons_partitions_are_taken_with_a_note(demo: Path, tmp_path: Path) -> None:
    flags = ("--input", demo / "corpus.jsonl", "--tokenizer-model", demo / "tok.model", "--workers", 1)
    plain = run("preprocess_data", *flags, "--output-prefix", tmp_path / "a")
    parts = run("preprocess_data", *flags, "--output-prefix", tmp_path / "b", "--partitions", 4)
    assert "--partitions" not in plain.stdout
    assert "note: --partitions 4 has no effect: the 1 --workers share each file" in parts.stdout
    first, second = ((tmp_path / f"{name}_text_document.bin").read_bytes() for name in "ab")
    assert first == second


@pytest.mark.parametrize("workers", [1, 2])
def test_a_broken_line_is_named_and_nothing_is_left(demo: Path, tmp_path: Path, workers: int) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "ok"}\n' * 4 + '{"text": "cut\n')
    files = ("--input", tmp_path / "bad.jsonl", "--tokenizer-model", demo / "tok.model")
    flags = ("--output-prefix", tmp_path / "out", "--workers", workers)
    assert "bad.jsonl:5: not valid JSON" in error_of("preprocess_data", *files, *flags)
    (tmp_path / "bad.jsonl").write_text('{"text": "ok"}\n{"text": "\\ud800"}\n')
    assert "bad.jsonl:2: character 0 of the text is a lone surrogate" in error_of("preprocess_data", *files, *flags)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_bad_arguments_are_one_line(demo: Path, tmp_path: Path) -> None:
    corpus, model = demo / "corpus.jsonl", demo / "tok.model"
    output = ("--output-prefix", tmp_path / "x")
    assert "no such file" in error_of("preprocess_data", "--input", "nothing", "--tokenizer-model", model, *output)
    no_model = ("--tokenizer-model", tmp_path / "no.model")
    assert "no such tokenizer model" in error_of("preprocess_data", "--input", corpus, *no_model, *output)
    files = ("--input", corpus, "--tokenizer-model", model)
    assert "--workers 0" in error_of("preprocess_data", *files, *output, "--workers", 0)
    train = ("--input", corpus, "--model-prefix", tmp_path / "t", "--vocab-size")
    assert "--vocab-size 10: bytes and characters of the text alone are" in error_of("train_tokenizer", *train, 10)
    assert "--vocab-size 0 must be above 0" in error_of("train_tokenizer", *train, 0)
    assert "--vocab-size: invalid int value: 'x'" in error_of("train_tokenizer", *train, "x")
    assert "are required: --input" in error_of("train_tokenizer", "--vocab-size", 5)
    assert "string under 'x'" in error_of("train_tokenizer", *train, 500, "--json-key", "x")
    assert "--max-mb" in error_of("demo_corpus", "--output", tmp_path / "c.jsonl", "--max-mb", 0)
    assert "no such file" in error_of("bigram_baseline", "--data-path", tmp_path / "x", "--vocab-size", 9)
    data = ("--data-path", demo / "data_text_document")
    assert "outside a vocabulary of 9" in error_of("bigram_baseline", *data, "--vocab-size", 9)
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    """Found before anything is read: there is no input."""
    for name in ("tok.model", "corpus.jsonl"):
        (tmp_path / name).write_text("mine")
    train = ("--input", tmp_path / "gone.jsonl", "--vocab-size", 500, "--model-prefix", tmp_path / "tok")
    for path, error in (
        (tmp_path / "tok.model", error_of("train_tokenizer", *train)),
        (tmp_path / "corpus.jsonl", error_of("demo_corpus", "--output", tmp_path / "corpus.jsonl")),
    ):
        assert error == f"error: {path}: exists already: give another name or remove it" and path.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


def test_train_tokenizer_is_deterministic(demo: Path, tmp_path: Path) -> None:
    flags = ("--input", demo / "corpus.jsonl", "--vocab-size", 800, "--model-prefix")
    run("train_tokenizer", *flags, tmp_path / "again")
    assert (tmp_path / "again.model").read_bytes() == (demo / "tok.model").read_bytes()
    for name in ("one", "two"):
        run("train_tokenizer", *flags, tmp_path / name, "--model-type", "unigram", "--input-sentence-size", 2000)
    assert (tmp_path / "one.model").read_bytes() == (tmp_path / "two.model").read_bytes()
    run("train_tokenizer", *flags, tmp_path / "all", "--model-type", "unigram")
    assert (tmp_path / "one.model").read_bytes() != (tmp_path / "all.model").read_bytes()


def test_a_sample_of_lines_is_fair_and_in_order() -> None:
    lines = [str(number) for number in range(1000)]
    chosen = [int(line) for line in sample(lines, 100)]
    assert chosen == sorted(set(chosen)) and len(chosen) == 100
    assert 400 < sum(chosen) / 100 < 600
    assert list(sample(lines, 2000)) == lines


class Killed:
    """Stands in for an encoder whose process the system kills."""

    def __call__(self, chunk: Chunk) -> Encoded:
        os._exit(9)


def test_a_killed_worker_is_an_error_and_no_hang() -> None:
    with pytest.raises(ChildProcessError, match="worker process was killed"):
        list(encode_all(Killed(), [Chunk("f", 1, [b"{}"], 2)] * 20, workers=2))


def test_bigram_baseline(demo: Path) -> None:
    data = ("--data-path", demo / "data_text_document", "--split", "9,1")
    with_tokenizer = run("bigram_baseline", *data, "--tokenizer-model", demo / "tok.model").stdout
    nats = float(with_tokenizer.split()[1])
    assert 2.0 < nats < np.log(800) - 1
    assert "bits per byte" in with_tokenizer
    plain = run("bigram_baseline", *data, "--vocab-size", 800).stdout
    assert float(plain.split()[1]) == nats and "bits per byte" not in plain
    bits = run("bigram_baseline", *data, "--vocab-size", 800, "--bytes-per-token", 2).stdout
    assert f"{nats / np.log(2) / 2:.3f}" in bits


def test_a_corpus_too_small_for_its_vocabulary_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world")
    (tmp_path / "none.jsonl").write_text("")
    flags = ("--model-prefix", tmp_path / "t", "--vocab-size", 4096)
    for kind, most in (("bpe", 285), ("unigram", 267)):
        error = error_of("train_tokenizer", "--input", tmp_path / "a.txt", *flags, "--model-type", kind)
        assert f"--vocab-size 4096: the text gives {most} pieces at most; ask for fewer" in error
    assert error_of("train_tokenizer", "--input", tmp_path / "none.jsonl", *flags) == "error: --input holds no text"


def test_a_dataset_that_is_there_is_not_overwritten(demo: Path, tmp_path: Path) -> None:
    """Only a job that was killed while it gave names to several goes on."""
    (tmp_path / "x_text_document.idx").write_text("old")
    files = ("--input", demo / "corpus.jsonl", "--tokenizer-model", demo / "tok.model", "--workers", 1)
    error = error_of("preprocess_data", *files, "--output-prefix", tmp_path / "x")
    assert error == f"error: {tmp_path}/x_text_document.idx: exists already: give another name or remove it"
    assert [path.name for path in tmp_path.iterdir()] == ["x_text_document.idx"]
