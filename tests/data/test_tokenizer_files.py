"""Tokenizers from files: kinds told apart, text that is only text, and gigatoken checked against them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smp.data.tokenizers.files import HuggingFaceTokenizer, TiktokenTokenizer, load_tokenizer
from smp.data.tokenizers.tokenizer import END_OF_DOCUMENT, Batch, SentencePieceTokenizer, Tokenizer
from tools.train_tokenizer import train

SOURCE = Path(__file__).read_text()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str | None]]:
    """A tokenizer of each kind, with its pattern."""
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "sp.model").write_bytes(train([SOURCE], 400, "bpe", 0))
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420, special_tokens=[END_OF_DOCUMENT, "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([SOURCE], trainer)
    made.enable_truncation(3)
    made.enable_padding(length=50)
    made.save(str(folder / "tokenizer.json"))
    merges = [bytes([b]) for b in range(256)] + [b"  ", b"in", b"de", b"def", b" d", b"12", b"123"]
    ranks = b"".join(base64.b64encode(m) + b" %d\n" % i for i, m in enumerate(merges))
    (folder / "merges.tiktoken").write_bytes(ranks)
    return {
        "sentencepiece": (folder / "sp.model", None),
        "tokenizer.json": (folder / "tokenizer.json", None),
        "tiktoken": (folder / "merges.tiktoken", "gpt2"),
    }


KINDS = {"sentencepiece": SentencePieceTokenizer, "tokenizer.json": HuggingFaceTokenizer, "tiktoken": TiktokenTokenizer}
texts = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]))
    | st.sampled_from(["", END_OF_DOCUMENT, "<pad>", "def f(12345):\n    in", "\u2581"]),
    max_size=6,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents=texts)
def test_text_comes_back_and_a_batch_is_one_after_the_other(
    files: dict[str, tuple[Path, str | None]], kind: str, documents: list[str]
) -> None:
    tokenizer: Tokenizer = load_tokenizer(*files[kind])
    assert type(tokenizer) is KINDS[kind]
    alone = [tokenizer.encode(text) for text in documents]
    for text, ids in zip(documents, alone, strict=True):
        assert tokenizer.decode(ids) == text and tokenizer.eod not in ids
    batch = tokenizer.encode_batch(documents)
    assert batch.ids.tolist() == [token for ids in alone for token in ids]
    assert batch.lengths.tolist() == list(map(len, alone))


@pytest.mark.parametrize("kind", KINDS)
def test_ends_and_refusals(files: dict[str, tuple[Path, str | None]], kind: str) -> None:
    tokenizer = load_tokenizer(*files[kind])
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.decode([*tokenizer.encode("de"), tokenizer.eod]) == "de"
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode("x\ud800")
    with pytest.raises(ValueError, match="outside a vocabulary"):
        tokenizer.decode([tokenizer.vocab_size])


def test_an_end_behind_every_text_but_the_empty_ones() -> None:
    batch = Batch(np.array([1, 2, 3]), np.array([2, 0, 1])).with_ends(9)
    assert batch.ids.tolist() == [1, 2, 9, 3, 9] and batch.lengths.tolist() == [3, 0, 2]


def test_the_end_that_the_configuration_names(files: dict[str, tuple[Path, str | None]], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(files["tokenizer.json"][0].read_bytes())
    assert load_tokenizer(tmp_path / "tokenizer.json").eod == 0
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<pad>"}}))
    assert load_tokenizer(tmp_path / "tokenizer.json").eod == 1
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<none>"}))
    with pytest.raises(ValueError, match="has no end-of-document token"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_what_stands_for_the_unknown(files: dict[str, tuple[Path, str | None]], tmp_path: Path) -> None:
    models = tokenizers.models
    pieces = [("<u>", 0.0), ("<|endoftext|>", 0.0), ("a", -1.0)]
    kinds = (
        models.Unigram(pieces, unk_id=0),
        models.BPE({t: i for i, (t, _) in enumerate(pieces)}, [], unk_token="<u>"),
    )
    for model in kinds:
        tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
        found = load_tokenizer(tmp_path / "tokenizer.json")
        assert (found.unk, found.encode("ab")[-1]) == (0, 0)
    same = models.BPE({"<|endoftext|>": 0}, [], unk_token="<|endoftext|>")  # GPT-2's
    tokenizers.Tokenizer(same).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json").unk is None
    unknown = {kind: load_tokenizer(path, pattern).unk for kind, (path, pattern) in files.items()}
    assert {kind for kind, token in unknown.items() if token is not None} == {"sentencepiece"}


def test_what_is_no_tokenizer(files: dict[str, tuple[Path, str | None]], tmp_path: Path) -> None:
    merges, _ = files["tiktoken"]
    with pytest.raises(ValueError, match=r"a tiktoken file needs --tiktoken-pattern \(gpt2, cl100k, o200k, llama3\)"):
        load_tokenizer(merges)
    with pytest.raises(ValueError, match="--tiktoken-pattern is not for it"):
        load_tokenizer(files["sentencepiece"][0], "gpt2")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer.json"):
        load_tokenizer(tmp_path / "broken.json")
    (tmp_path / "gap.tiktoken").write_bytes(merges.read_bytes() + b"YWJjZA== 300\n")
    with pytest.raises(ValueError, match="ids are not 0 to 263"):
        load_tokenizer(tmp_path / "gap.tiktoken", "gpt2")
    (tmp_path / "cut.tiktoken").write_bytes(merges.read_bytes() + b"YWJj\n")
    with pytest.raises(ValueError, match=r"cut\.tiktoken:264: not a merge and its id"):
        load_tokenizer(tmp_path / "cut.tiktoken", "gpt2")


@pytest.mark.parametrize("pattern", ["gpt2", "cl100k", "o200k", "llama3"])
def test_patterns_cut_text_without_loss(files: dict[str, tuple[Path, str | None]], pattern: str) -> None:
    tokenizer = load_tokenizer(files["tiktoken"][0], pattern)
    for text in ("I'LL don't 12345678", "  a\n\n b\t\r\n", "élan ÉLAN naïve's", SOURCE):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    digits = tokenizer.encode("1231231")
    assert digits == ([262, 262, ord("1")] if pattern != "gpt2" else tokenizer.encode("123") * 2 + [ord("1")])


@pytest.mark.parametrize("kind", ["tokenizer.json", "tiktoken"])
def test_gigatoken_gives_the_same_ids_or_is_refused(files: dict[str, tuple[Path, str | None]], kind: str) -> None:
    pytest.importorskip("gigatoken", reason="gigatoken is optional: pip install gigatoken")
    from smp.data.tokenizers.gigatoken_backend import GigatokenTokenizer

    path, pattern = files[kind]
    fast = GigatokenTokenizer(load_tokenizer(path, pattern), path, pattern)
    assert fast.check([SOURCE, *SOURCE.splitlines()]).startswith("gigatoken agrees with the tokenizer on ")
    other = tokenizers.Tokenizer.from_file(str(files["tokenizer.json"][0]))
    other.add_tokens(["import"])
    wrong = path.with_name("other.json")
    other.save(str(wrong))
    mixed = GigatokenTokenizer(load_tokenizer(files["tokenizer.json"][0]), wrong, None)
    with pytest.raises(ValueError, match="--backend gigatoken gives other ids than the tokenizer for"):
        mixed.check([SOURCE])
