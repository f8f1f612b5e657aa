"""Every shape in which samples come, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from smp.data.tuning import shapes
from smp.data.tuning.files import Row
from smp.data.tuning.messages import BadSampleError, Conversation
from smp.data.tuning.shapes import Plain, Reading, Sample, label_of


def recognise(record: dict[str, Any], *, chat: bool = True, as_messages: bool = False) -> Sample:
    return shapes.recognise(record, Reading(chat, as_messages))


def recognise_pair(record: dict[str, Any], *, as_messages: bool = False) -> tuple[Sample, Sample]:
    return shapes.recognise_pair(record, Reading(chat=True, as_messages=as_messages))


def recognise_labelled(record: dict[str, Any], *, chat: bool = True) -> Sample:
    return shapes.recognise_labelled(record, Reading(chat))


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
    assert recognise({"system": "be brief ", "messages": [first, USER, ANSWER]}, chat=True) == expected
    with pytest.raises(BadSampleError, match="a system message that says something else"):
        recognise({"system": "other", "messages": [first, USER, ANSWER]}, chat=True)
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
        ({"question": "a", "answer": "b"}, "if question and answer are a prompt and its answer, call them prompt and"),
        ({"prompt": "a", "response": "b"}, "if prompt and response are a prompt and its answer, call them prompt and"),
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
        ({"conversations": [{"from": "alien", "value": "x"}]}, "message 0: unknown role 'alien'; known are system,"),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "message 0: unknown role ['gpt']"),
        ({"messages": [{"role": "function_call", "content": "{}"}]}, 'a message of the assistant with "tool_calls"'),
        ({"messages": [{"role": "user", "text": "hi"}]}, "message 0 (user) has no content: it has role, text"),
        ({"messages": "hi"}, "messages is text that is not JSON"),
        ({"data": [{"prompt": "a"}]}, "what is under 'data' may be samples: write that list to a file"),
        ({"prompt": "a", "completion": "b", "tools": [{"name": "f"}]}, "it has tools, which prompt and answer as"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "message 0: unknown role ['user']"),
        ({"prompt": "a", "completion": 3}, "must both be text"),
        ({"prompt": ["a", "b"], "completion": ["c", "d"]}, "each sample must be a row, or a line, of its own"),
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
        ({"chosen": "b", "rejected": "c"}, "without a prompt must be lists.*write what both answer under prompt"),
        ({"chosen": ANSWER, "rejected": ANSWER}, "without a prompt must be lists"),
        ({"chosen": [USER, ANSWER], "rejected": [USER]}, "one of the answers is missing"),
        ({"prompt": [USER], "chosen": 3, "rejected": "c"}, "must both be text, or messages"),
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
    with pytest.raises(
        BadSampleError, match=r"message 0 \(user\): nothing is trained on a content part of type image_url"
    ):
        recognise({"messages": [USER | {"content": [*parts, image]}, ANSWER]}, chat=True)
    with pytest.raises(BadSampleError, match="is not text"):
        recognise({"messages": [USER | {"content": [{"type": "text"}]}, ANSWER]}, chat=True)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "human", "content": "hi"}, {"role": "gpt", "content": "yo"}],
        [{"role": "User", "content": "hi"}, {"role": "MODEL", "content": "yo"}],
        [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}],
        [{"role": "prompter", "value": "hi"}, {"from": "assistant", "content": "yo"}],
        '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]',
    ],
)
@pytest.mark.parametrize("name", ["messages", "conversations", "conversation"])
def test_messages_in_the_words_of_others(messages: Any, name: str) -> None:
    """Where they can mean one thing only."""
    assert recognise({name: messages}) == CHAT


@pytest.mark.parametrize("role", ["function", "function-response", "observation", "ipython", "tool"])
def test_results_of_tools_in_the_words_of_others(role: str) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    sample = recognise({"messages": [USER, call, {"role": role, "content": "4", "name": "f"}, ANSWER]})
    assert isinstance(sample, Conversation) and sample.trained == (False, True, False, True)
    assert sample.messages[2] == {"role": "tool", "content": "4", "name": "f"} and sample.messages[1]["content"] == ""


def test_no_content_beside_another_thing_that_is_said() -> None:
    for name in ("function_call", "reasoning_content"):
        answer = {"role": "assistant", "content": None, name: "x"}
        sample = recognise({"messages": [USER, answer]})
        assert isinstance(sample, Conversation) and sample.messages[1] == {**answer, "content": ""}
    with pytest.raises(BadSampleError, match="has no content"):
        recognise({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]})


@pytest.mark.parametrize("prompt", ["hi", USER, [USER]])
@pytest.mark.parametrize("answers", [("yo", "no"), (ANSWER, {**ANSWER, "content": "no"})])
def test_answers_as_one_message_or_a_text(prompt: Any, answers: Any) -> None:
    chosen, rejected = answers
    found = recognise_pair({"prompt": prompt, "chosen": chosen, "rejected": rejected}, as_messages=True)
    assert found == (CHAT, Conversation((USER, {**ANSWER, "content": "no"}), (False, True)))
    assert recognise({"prompt": prompt, "completion": chosen}, as_messages=True) == CHAT
    if isinstance(prompt, str) and isinstance(chosen, str):
        assert recognise({"prompt": prompt, "completion": chosen}) == Plain((("hi", False), ("yo", True)))
    else:
        assert recognise({"prompt": prompt, "completion": chosen}) == CHAT


def test_no_tools_in_the_words_of_tables_are_none() -> None:
    for nothing in ("", "[]", "null", []):
        record = {"prompt": "hi ", "completion": "yo", "tools": nothing, "system": ""}
        assert recognise(record) == Plain((("hi ", False), ("yo", True)))
        assert recognise({"messages": [USER, ANSWER], "tools": nothing}) == CHAT


def test_texts_as_messages_have_what_is_said_beside_them() -> None:
    record = {"prompt": "hi", "completion": "yo", "system": "be brief", "tools": [{"name": "f"}]}
    first = {"role": "system", "content": "be brief"}
    expected = Conversation((first, USER, ANSWER), (False, False, True), [{"name": "f"}])
    assert recognise(record, as_messages=True) == expected


@pytest.mark.parametrize("name", ["messages", "conversations"])
def test_a_conversation_may_be_the_prompt_of_a_pair(name: str) -> None:
    """As LLaMA-Factory keeps pairs, of ShareGPT's shape and of Alpaca's."""
    chosen, rejected = {"from": "gpt", "value": "yo"}, {"from": "gpt", "value": "no"}
    record = {name: [{"from": "human", "value": "hi"}], "chosen": chosen, "rejected": rejected}
    expected = (CHAT, Conversation((USER, {**ANSWER, "content": "no"}), (False, True)))
    assert recognise_pair(record) == expected
    assert recognise_pair({"instruction": "hi", "input": "", "chosen": "yo", "rejected": "no"}) == expected
    plain = shapes.recognise_pair({"instruction": "hi", "chosen": "yo", "rejected": "no"}, Reading(chat=False))
    assert plain[1] == Plain((("### Instruction:\nhi\n\n### Response:\n", False), ("no", True)))
    with pytest.raises(BadSampleError, match=f"{name} with chosen and rejected must be what both answer"):
        recognise_pair({name: [USER, ANSWER], "chosen": chosen, "rejected": rejected})
    whole = Row({name: [USER, ANSWER], "chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "no"}]})
    assert recognise_pair(whole) == expected and whole.unread() == [name], "the answers say all of it"


def test_a_prompt_that_answers_repeat_is_there_once() -> None:
    chosen, rejected = [USER, ANSWER], [USER, {**ANSWER, "content": "no"}]
    pair = recognise_pair({"prompt": [USER], "chosen": chosen, "rejected": rejected})
    assert pair == recognise_pair({"chosen": chosen, "rejected": rejected})
    assert recognise({"prompt": [USER], "completion": [USER, ANSWER]}) == CHAT


def test_a_row_knows_what_nobody_read() -> None:
    row = Row({"id": 7, "note": "", "messages": [USER, ANSWER], "system": "", "score": 0.5, "text": "x"})
    assert recognise(row) == CHAT and row.unread() == ["id", "score", "text"]
    row = Row({"prompt": "another", "chosen": [USER, ANSWER], "rejected": [USER, ANSWER], "margin": 1})
    recognise_pair(row)
    assert row.unread() == ["prompt", "margin"], "the answers' messages do not say it"
    row = Row({"prompt": "hi", "chosen": [USER, ANSWER], "rejected": [USER, ANSWER]})
    recognise_pair(row)
    assert row.unread() == []
