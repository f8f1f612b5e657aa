"""Every shape in which samples come, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from smp.data.tuning.shapes import (
    BadSampleError,
    Conversation,
    Plain,
    label_of,
    recognise,
    recognise_labelled,
    recognise_pair,
)

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
CHAT = Conversation((USER, ANSWER), (False, True))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": [USER, ANSWER]}, CHAT),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, CHAT),
        ({"conversations": [USER, ANSWER]}, CHAT),
        ({"prompt": [USER], "completion": [ANSWER]}, CHAT),
        ({"prompt": "hi ", "completion": "yo"}, Plain((("hi ", False), ("yo", True)))),
        ({"text": "hi yo"}, Plain((("hi yo", True),))),
        ({"instruction": "hi", "output": "yo"}, CHAT),
        (
            {"instruction": "a", "input": "b", "output": "yo"},
            Conversation(({**USER, "content": "a\n\nb"}, ANSWER), (False, True)),
        ),
    ],
)
def test_shapes_are_recognised(record: dict[str, Any], expected: Any) -> None:
    assert recognise(record, chat=True) == expected


def test_alpaca_without_a_template_stands_under_headings() -> None:
    sample = recognise({"instruction": "a", "input": "b", "output": "c"}, chat=False)
    assert sample == Plain((("### Instruction:\na\n\n### Input:\nb\n\n### Response:\n", False), ("c", True)))


def test_turns_can_be_left_out_of_training_and_earlier_ones_of_a_prompt_are() -> None:
    silent = {**ANSWER, "train": False}
    sample = recognise({"messages": [USER, silent, USER, ANSWER], "tools": [{"name": "f"}]}, chat=True)
    assert sample == Conversation((USER, ANSWER, USER, ANSWER), (False, False, False, True), [{"name": "f"}])
    weighed = {"messages": [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}], "tools": [{"name": "f"}]}
    assert recognise(weighed, chat=True) == sample
    sample = recognise({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, chat=True)
    assert isinstance(sample, Conversation) and sample.trained == (False, False, False, True)


def test_tool_calls_need_no_content() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    sample = recognise({"messages": [USER, call, {"role": "tool", "content": "4"}, ANSWER]}, chat=True)
    assert isinstance(sample, Conversation) and sample.trained == (False, True, False, True)
    assert sample.messages[1]["content"] == ""


def test_a_system_prompt_beside_the_turns_comes_first() -> None:
    first = {"role": "system", "content": "be brief"}
    beside = {"system": "be brief", "instruction": "hi", "output": "yo", "history": []}
    expected = Conversation((first, USER, ANSWER), (False, False, True))
    assert recognise({"system": "be brief", "conversations": [USER, ANSWER]}, chat=True) == expected
    assert recognise({"system": "other", "messages": [first, USER, ANSWER]}, chat=True) == expected
    assert recognise(beside, chat=True) == expected
    continued = {"system": "be brief", "prompt": [USER, ANSWER, USER], "completion": [ANSWER]}
    found = recognise(continued, chat=True)
    assert isinstance(found, Conversation) and found.trained == (False,) * 4 + (True,)


def test_what_a_message_does_not_have_may_be_null() -> None:
    """In a parquet file every message has the keys of all."""
    empty = {"train": None, "tool_calls": None, "name": None}
    assert recognise({"messages": [{**USER, **empty}, {**ANSWER, **empty}]}, chat=True) == CHAT


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"question": "a", "answer": "b"}, "keys answer, question are none of the known shapes"),
        ({}, "keys none"),
        ({"messages": []}, "not a list with something"),
        ({"messages": [USER, {"role": "narrator", "content": "x"}]}, "message 1: unknown role 'narrator'"),
        ({"messages": [USER, {"role": "assistant"}]}, "message 1 (assistant) has no content"),
        ({"messages": [USER, {**ANSWER, "content": ["x"]}]}, "content is not text"),
        ({"messages": [USER, {**ANSWER, "content": []}]}, "message 1 (assistant): content is not text"),
        ({"messages": [USER, {**ANSWER, "train": "yes"}]}, "train is 'yes'"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "weight is 0.5, not 1 or 0"),
        ({"instruction": "a", "output": "b", "history": [["q", "a"]]}, "turns before the instruction"),
        ({"messages": [USER, "yo"]}, "message 1 is no object"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "turn 0: unknown role 'alien'"),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "turn 0: unknown role ['gpt']"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "message 0: unknown role ['user']"),
        ({"prompt": "a", "completion": 3}, "must both be text"),
        ({"text": 3}, "text is not text"),
    ],
)
def test_broken_samples_say_why(record: dict[str, Any], why: str) -> None:
    with pytest.raises(BadSampleError) as error:
        recognise(record, chat=True)
    assert why in str(error.value)


def test_pairs_in_every_shape() -> None:
    other = {"role": "assistant", "content": "no"}
    explicit = recognise_pair({"prompt": [USER], "chosen": [ANSWER], "rejected": [other]})
    implicit = recognise_pair({"chosen": [USER, ANSWER], "rejected": [USER, other]})
    repeated = recognise_pair({"prompt": "hi", "chosen": [USER, ANSWER], "rejected": [USER, other]})
    assert explicit == (CHAT, Conversation((USER, other), (False, True)))
    assert implicit == explicit and repeated == explicit
    _, rejected = recognise_pair({"prompt": "a ", "chosen": "b", "rejected": "c"})
    assert rejected == Plain((("a ", False), ("c", True)))


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"prompt": "a", "chosen": "b"}, "a pair needs chosen and rejected"),
        ({"chosen": "b", "rejected": "c"}, "without a prompt must be lists"),
        ({"chosen": [USER], "rejected": [ANSWER]}, "share no beginning"),
    ],
)
def test_broken_pairs_say_why(record: dict[str, Any], why: str) -> None:
    with pytest.raises(BadSampleError, match=why):
        recognise_pair(record)


def test_labels_and_pairs_ask_for_their_objective() -> None:
    labelled = {"prompt": "a", "completion": "b", "label": True}
    for label in (True, False, "True", "false"):  # the last two are a .csv file's
        with pytest.raises(BadSampleError, match="give --objective kto"):
            recognise(labelled | {"label": label}, chat=False)
    recognise(labelled | {"label": "positive"}, chat=False)
    with pytest.raises(BadSampleError, match="give --objective dpo, orpo or reward"):
        recognise({"prompt": "a", "chosen": "b", "rejected": "c"}, chat=False)
    with pytest.raises(BadSampleError, match="samples with a label are for --objective kto"):
        recognise_pair(labelled)
    with pytest.raises(BadSampleError, match="give --objective dpo"):
        label_of({"prompt": "a", "chosen": "b", "rejected": "c"})
    beside = {"messages": [USER, ANSWER], "chosen": "b", "rejected": "c", "label": True}
    assert recognise(beside, chat=True) == CHAT, "what is known is trained on"
    assert recognise({"text": "a", "label": 3}, chat=False) == Plain((("a", True),)), "a class, which is noted"


def test_labels_are_true_or_false() -> None:
    labelled = {"prompt": "a", "completion": "b", "label": 0}
    assert recognise_labelled(labelled, chat=False) == Plain((("a", False), ("b", True))) and not label_of(labelled)
    assert label_of(labelled | {"label": True})
    for label, said in ((None, "it has no label"), (2, "its label is 2"), ("yes", "its label is 'yes'")):
        with pytest.raises(BadSampleError, match=said):
            recognise_labelled({**labelled, "label": label}, chat=False)
    with pytest.raises(BadSampleError, match="there must be prompt and completion"):
        recognise_labelled({"text": "a", "label": True}, chat=False)


def test_content_parts_are_text_or_refused() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert recognise({"messages": [USER | {"content": parts}, ANSWER]}, chat=True) == CHAT
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(BadSampleError, match=r"message 0 \(user\): a content part of type image_url"):
        recognise({"messages": [USER | {"content": [*parts, image]}, ANSWER]}, chat=True)
    with pytest.raises(BadSampleError, match="is not text"):
        recognise({"messages": [USER | {"content": [{"type": "text"}]}, ANSWER]}, chat=True)
