import io
import keyword
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from smp.data.tokenizers.tokenizer import END_OF_DOCUMENT, SentencePieceTokenizer
from tools.train_tokenizer import train

SOURCE = Path(__file__).read_text() + "".join(f"x{i} = {word!r}  # {i * i}\n" for i, word in enumerate(keyword.kwlist))


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    path = tmp_path_factory.mktemp(request.param) / "small.model"
    path.write_bytes(train([SOURCE], 420, request.param, 0))
    return SentencePieceTokenizer(path)


code_fragments = st.sampled_from(
    [
        "\n",
        "\t",
        "    ",
        "\r\n",
        " ",
        "\u2581",
        "\0",
        "def f(x):",
        END_OF_DOCUMENT,
        "<unk>",
        "<0x41>",
        "\ufeff",
        "\u2028",
        "é",
        "😀",
    ]
)
texts = st.lists(st.text() | code_fragments).map("".join)


@given(texts)
def test_lossless(tokenizer: SentencePieceTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod not in ids and all(0 <= token < tokenizer.vocab_size for token in ids)


def test_lossless_on_source_and_shorter_than_bytes(tokenizer: SentencePieceTokenizer) -> None:
    ids = tokenizer.encode(SOURCE)
    assert tokenizer.decode(ids) == SOURCE
    assert len(ids) < 0.7 * len(SOURCE.encode())
    assert tokenizer.vocab_size == 420 and tokenizer.eod == 1


def test_indentation_is_one_token_and_a_newline_is_one(tokenizer: SentencePieceTokenizer) -> None:
    assert len(tokenizer.encode("\n")) == 1
    assert len(tokenizer.encode("    ")) == 1


def test_end_of_document_decodes_to_nothing(tokenizer: SentencePieceTokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eod]) == "a"


def test_bad_ids_and_text(tokenizer: SentencePieceTokenizer) -> None:
    for ids in ([-1], [0, 420]):
        with pytest.raises(ValueError, match="outside a vocabulary of 420"):
            tokenizer.decode(ids)
    with pytest.raises(ValueError, match="character 2 of the text is a lone surrogate"):
        tokenizer.encode("ab\ud800")


def other_model(path: Path, **options: object) -> Path:
    model = io.BytesIO()
    settings = {"vocab_size": 60, "model_type": "bpe", "minloglevel": 2, "hard_vocab_limit": False, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some words to learn from", "and some more of them"]), model_writer=model, **settings
    )
    path.write_bytes(model.getvalue())
    return path


def test_models_of_other_origin(tmp_path: Path) -> None:
    plain = SentencePieceTokenizer(other_model(tmp_path / "plain.model"))
    assert plain.eod == 2 and plain.decode(plain.encode("some words")) == "some words"
    defined = other_model(tmp_path / "defined.model", eos_id=-1, user_defined_symbols=[END_OF_DOCUMENT])
    tokenizer = SentencePieceTokenizer(defined)
    assert tokenizer.encode(END_OF_DOCUMENT)[-1] == tokenizer.eod
    with pytest.raises(ValueError, match="neither an end-of-sentence piece nor"):
        SentencePieceTokenizer(other_model(tmp_path / "none.model", eos_id=-1))


def test_a_literal_meta_space_does_not_break_models_that_add_a_space(tmp_path: Path) -> None:
    """Splitting the text would make such a model add a space to every part."""
    tokenizer = SentencePieceTokenizer(other_model(tmp_path / "dummy.model", byte_fallback=True, vocab_size=300))
    assert tokenizer.decode(tokenizer.encode("some\u2581words")) == "some words"


def test_missing_or_foreign_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such tokenizer model"):
        SentencePieceTokenizer(tmp_path / "nothing.model")
    (tmp_path / "junk.model").write_text("junk" * 100)
    with pytest.raises(ValueError, match="junk.model: not a sentencepiece model"):
        SentencePieceTokenizer(tmp_path / "junk.model")


def test_digits_are_tokens_of_their_own(tokenizer: SentencePieceTokenizer) -> None:
    assert len(tokenizer.encode("x = 1999")) >= 5 and len(tokenizer.encode("1999")) == 4
