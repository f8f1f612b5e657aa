"""What is trained, over all kinds of tokenizers, ways to write a template and random texts: the ids are those of
transformers and decode to the text, and the tokens that are trained are those of the answers, no more and no less.

Where the assistant speaks is taken from transformers, which renders the template with generation blocks; the same
template without them has to train the same tokens.
"""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

import pytest

from smp.data.tuning.chat_template import ChatTemplate
from smp.data.tuning.encode import Encoder
from smp.data.tuning.tokenizer import APART, TuningTokenizer, open_tokenizer
from tests.data.tuning.template_lab import TEMPLATES, random_messages, random_text
from tests.data.tuning.tokenizer_lab import KINDS, SPECIAL, Kind, untrimmed

pytest.importorskip("tokenizers")
COUNTS = [2, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
"""Of conversations with each template."""
TRIMMED = ("gpt2-trimmed", "roberta")
"""Kinds whose spans leave out blanks in transformers, so that its masks miss answers that begin with one."""


def rendered(messages: list[dict[str, Any]], marked: str, tokens: dict[str, str]) -> tuple[str, list[tuple[int, int]]]:
    """The text and where the assistant speaks, by transformers."""
    from transformers.utils.chat_template_utils import render_jinja_template

    [text], [spans] = render_jinja_template(
        conversations=[messages], chat_template=marked, return_assistant_tokens_mask=True, **tokens
    )
    return text, spans


def mask_of(encoding: Any, spans: list[tuple[int, int]], length: int) -> list[bool]:
    """transformers' mask, but for answers whose first or last character is in no token, which it gets wrong."""
    mask = [False] * length
    for first, last in spans:
        found = [token for at in range(first, last) if (token := encoding.char_to_token(at)) is not None]
        if found:
            mask[min(found) : max(found) + 1] = [True] * (max(found) + 1 - min(found))
    return mask


def covered(spans: list[tuple[int, int]], chosen: list[bool] | None = None) -> set[int]:
    """Characters of the chosen spans, of all by default."""
    picked = spans if chosen is None else [span for span, wanted in zip(spans, chosen, strict=True) if wanted]
    return {at for first, last in picked for at in range(first, last)}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", KINDS)
def test_conversations(tmp_path: Path, name: str, count: int) -> None:
    transformers = pytest.importorskip("transformers")
    kind, path = KINDS[name], KINDS[name].make(tmp_path)
    tokenizer = open_tokenizer(path)
    theirs = transformers.AutoTokenizer.from_pretrained(path) if path.is_dir() else None
    whole = transformers.AutoTokenizer.from_pretrained(untrimmed(path)) if name in TRIMMED else theirs
    draw = random.Random(name)
    for sources in TEMPLATES.values():
        # A sentencepiece model names no separator.
        marked, bare = (source if theirs else source.replace("sep_token", "eos_token") for source in sources)
        encoders = [Encoder(tokenizer, ChatTemplate(source, tokenizer.template_tokens)) for source in (marked, bare)]
        for _ in range(count):
            messages = random_messages(draw)
            text, said = rendered(messages, marked, tokenizer.template_tokens)
            [(ids, trained)], [(same_ids, same)] = (encoder.sample({"messages": messages}) for encoder in encoders)
            assert ids.tolist() == same_ids.tolist()
            # Where the end of a turn is no special token, a line end behind it may as well be the answer's.
            ends = theirs is not None or "<|im_end|>" not in marked
            assert not ends or trained.tolist() == same.tolist(), text
            if theirs is not None:
                encoding = whole(text, add_special_tokens=False)
                assert ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"], text
                assert trained.tolist() == mask_of(encoding, said, len(ids)), text
                if name not in TRIMMED:
                    check_mask(theirs, messages, marked, trained.tolist(), said, text)
            check_text(kind, tokenizer, text, ids.tolist())
            check_characters(tokenizer, text, trained.tolist(), said)


def check_mask(
    theirs: Any,
    messages: list[dict[str, Any]],
    marked: str,
    trained: list[bool],
    said: list[tuple[int, int]],
    text: str,
) -> None:
    """transformers' own mask, where it finds every answer."""
    out = theirs.apply_chat_template(
        messages, chat_template=marked, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ends = {at for first, last in said for at in (first, last - 1)}
    if all(out.char_to_token(at) is not None for at in ends):
        assert trained == list(map(bool, out["assistant_masks"])), text


def check_text(kind: Kind, tokenizer: TuningTokenizer, text: str, ids: list[int]) -> None:
    """Ids decode to the text, wherever the tokenizer can do so."""
    gives_back = kind.special if any(token in text for token in SPECIAL) else kind.plain
    if gives_back and not text[0].isspace():  # which some kinds take for the mark of the first word
        assert tokenizer.decode(ids) == text


def check_characters(tokenizer: TuningTokenizer, text: str, trained: list[bool], said: list[tuple[int, int]]) -> None:
    """Every character of an answer is in a token that is trained, and every such token has one."""
    _, spans = tokenizer.encode_at(text)
    answers = covered(said)
    assert answers & covered(spans) <= covered(spans, trained), text
    for span, is_trained in zip(spans, trained, strict=True):
        assert not is_trained or span[0] == span[1] or answers & covered([span]), text


@pytest.mark.parametrize("count", [20, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KINDS)
def test_prompts_and_completions(tmp_path: Path, name: str, count: int) -> None:
    kind = KINDS[name]
    tokenizer = open_tokenizer(kind.make(tmp_path))
    encoder, draw = Encoder(tokenizer, None), random.Random(name)
    unknown = {tokenizer.encode(text)[0] for text in ("\u0f00", APART) if tokenizer.encode(text)}
    for _ in range(count):
        prompt, answer = random_text(draw), random_text(draw)
        [(ids, trained)] = encoder.sample({"prompt": prompt, "completion": answer})
        first = trained.tolist().index(True)
        assert ids[:first].tolist() == tokenizer.encode(prompt), "as when the model is asked"
        assert trained[first:].all() and ids[-1] == tokenizer.eos
        whole, told = tokenizer.encode(prompt + answer), tokenizer.decode(ids[:-1].tolist())
        # These cannot write the second half of a word that is cut in two.
        words = name in ("bert-cased", "bert-uncased", "word-end")
        parted = any(sign.isspace() or sign in string.punctuation for sign in (prompt[-1], answer[0]))
        cut = not parted or not unknown.isdisjoint([*whole, *ids.tolist()])
        if not (words and cut):
            assert told == tokenizer.decode(whole), (prompt, answer)
        if kind.plain and not prompt[0].isspace():
            assert told == prompt + answer


def test_a_word_piece_goes_on_within_a_word(tmp_path: Path) -> None:
    """Pieces that begin a word are others than those within one."""
    tokenizer = open_tokenizer(KINDS["bert-cased"].make(tmp_path))
    [(ids, _)] = Encoder(tokenizer, None).sample({"prompt": "the an", "completion": "swer is four"})
    assert tokenizer.decode(ids[:-1].tolist()) == "the answer is four"


def test_a_blank_that_is_dropped_at_the_end_of_a_prompt_still_parts_two_words(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(KINDS["pieces-t5"].make(tmp_path))
    for prompt, answer in (("the answer is ", "four"), ("the answer is", " four")):
        [(ids, _)] = Encoder(tokenizer, None).sample({"prompt": prompt, "completion": answer})
        assert tokenizer.decode(ids[:-1].tolist()) == "the answer is four"


def test_a_blank_of_the_prompt_is_not_trained_where_spans_leave_out_blanks(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(KINDS["gpt2-trimmed"].make(tmp_path))
    source = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}{{ '  ' }}{% endif %}{% endfor %}"
    said = [{"role": "user", "content": "is it"}, {"role": "assistant", "content": "\tfour "}]
    [(ids, trained)] = Encoder(tokenizer, ChatTemplate(source, {})).sample({"messages": said})
    assert tokenizer.decode(ids[trained].tolist()) == "\tfour "
