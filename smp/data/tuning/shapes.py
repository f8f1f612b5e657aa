"""The shapes in which people keep samples, recognised by their keys and brought to two forms.

A :class:`Conversation` goes through the model's chat template; a :class:`Plain` text is taken as it is. Each says which
of its parts are trained. A sample for preference optimization is two of them: answers to one prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}
_SHAREGPT |= {"system": "system", "tool": "tool", "function_response": "tool", "observation": "tool"}
_MARKS = {"train": "true or false", "weight": "1 or 0"}
SHAPES = "messages, conversations, prompt/completion, text, instruction/output, prompt/chosen/rejected"


_OF_CSV = {"true": True, "1": True, "false": False, "0": False}
"""How tables that hold text only say what is true."""


class BadSampleError(ValueError):
    """A sample that cannot be trained on; the message says why."""


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template.

    Attributes:
        messages: each with "role" and "content", and what else its template may know.
        trained: whether a message is trained; only the assistant's can be.
        tools: descriptions of tools for the template, or None.
    """

    messages: tuple[dict[str, Any], ...]
    trained: tuple[bool, ...]
    tools: Any = None


@dataclass(frozen=True)
class Plain:
    """Text in pieces: (piece, whether it is trained)."""

    pieces: tuple[tuple[str, bool], ...]


Sample = Conversation | Plain


def recognise(record: dict[str, Any], *, chat: bool) -> Sample:
    """A sample from a record of any of the known shapes.

    Args:
        record: what stands in a line.
        chat: whether there is a chat template: instructions in Alpaca's shape then become a conversation.

    Raises:
        BadSampleError: none of the shapes, or a broken one.
    """
    if "messages" in record:
        return _conversation(record["messages"], record)
    if "conversations" in record:
        return _conversation(_from_sharegpt(record["conversations"]), record)
    if "prompt" in record and "completion" in record:
        if str(record.get("label")).lower() in ("true", "false"):  # a .csv file's are text
            raise BadSampleError("its label says whether the answer is desirable: give --objective kto")
        return _answer(record["prompt"], record["completion"], record)
    if "instruction" in record and "output" in record:
        return _alpaca(record, chat)
    if "text" in record:
        return Plain(((_text(record["text"], "text"), True),))
    if "chosen" in record and "rejected" in record:
        raise BadSampleError("chosen and rejected are a pair of answers: give --objective dpo, orpo or reward")
    raise BadSampleError(f"keys {', '.join(sorted(record)) or 'none'} are none of the known shapes: {SHAPES}")


def recognise_pair(record: dict[str, Any]) -> tuple[Sample, Sample]:
    """The chosen and the rejected answer of a record with "chosen" and "rejected", and with or without "prompt".

    Raises:
        BadSampleError: as :func:`recognise`.
    """
    if "chosen" not in record or "rejected" not in record:
        hint = "; samples with a label are for --objective kto" if "label" in record else ""
        raise BadSampleError(f"keys {', '.join(sorted(record)) or 'none'}: a pair needs chosen and rejected{hint}")
    chosen, rejected = record["chosen"], record["rejected"]
    if "prompt" in record:
        return _answer(record["prompt"], chosen, record), _answer(record["prompt"], rejected, record)
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise BadSampleError(
            "chosen and rejected without a prompt must be lists of messages that share their beginning"
        )
    common = 0
    # What both have in common is the prompt.
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    if common == 0:
        raise BadSampleError("chosen and rejected share no beginning: there is no prompt")
    prompt = chosen[:common]
    return _answer(prompt, chosen[common:], record), _answer(prompt, rejected[common:], record)


def recognise_labelled(record: dict[str, Any], *, chat: bool) -> Sample:
    """The answer of a record with a "label" that says whether it is desirable.

    Raises:
        BadSampleError: as :func:`recognise`, or the prompt is not known apart from the answer.
    """
    label_of(record)
    rest = {key: value for key, value in record.items() if key != "label"}
    if not ({"prompt", "completion"} <= rest.keys() or {"instruction", "output"} <= rest.keys()):
        raise BadSampleError(f"keys {', '.join(sorted(record))}: beside a label there must be prompt and completion")
    return recognise(rest, chat=chat)


def label_of(record: dict[str, Any]) -> bool:
    """Whether the answer of a record is desirable.

    Raises:
        BadSampleError: it has no label, or one that is neither true nor false (nor 1 or 0).
    """
    if "chosen" in record and "rejected" in record and "label" not in record:
        raise BadSampleError("chosen and rejected are a pair of answers: give --objective dpo, orpo or reward")
    label = record.get("label")
    label = _OF_CSV.get(label.lower(), label) if isinstance(label, str) else label
    if label not in (True, False):
        raise BadSampleError("it has no label" if label is None else f"its label is {label!r}, not true or false")
    return bool(label)


def _answer(prompt: Any, answer: Any, record: dict[str, Any]) -> Sample:
    """A prompt and what is trained after it: both text, or messages."""
    if isinstance(prompt, str) and isinstance(answer, str):
        return Plain(((prompt, False), (answer, True)))
    if isinstance(prompt, str) and isinstance(answer, list):  # some data sets repeat the prompt within the answer
        first = answer[0] if answer and isinstance(answer[0], dict) else {}
        prompt = [] if first.get("role") in ("user", "system") else [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not isinstance(answer, list):
        raise BadSampleError("prompt and answer must both be text, or lists of messages")
    whole = _conversation([*prompt, *answer], record)
    begin = len(whole.trained) - len(answer)
    # Of the answer only: a prompt may hold earlier turns of the assistant.
    trained = tuple(t and i >= begin for i, t in enumerate(whole.trained))
    return Conversation(whole.messages, trained, whole.tools)


def _conversation(messages: Any, record: dict[str, Any]) -> Conversation:
    if not isinstance(messages, list) or not messages:
        raise BadSampleError("messages are not a list with something in it")
    system = _text(record.get("system") or "", "system")  # of ShareGPT, beside the turns
    if system and not (isinstance(messages[0], dict) and messages[0].get("role") == "system"):
        messages = [{"role": "system", "content": system}, *messages]
    checked = tuple(_message(m, i) for i, m in enumerate(messages))
    trained = tuple(m["role"] == "assistant" and _is_trained(m, i) for i, m in enumerate(checked))
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():  # data sets of many sources keep them as JSON
        try:
            tools = json.loads(tools)
        except ValueError:
            raise BadSampleError("tools is text that is not JSON") from None
    # The marks are for this program: a template must not see them.
    said = tuple({key: value for key, value in m.items() if key not in _MARKS} for m in checked)
    return Conversation(said, trained, tools)


def _message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, dict) or "role" not in message:
        raise BadSampleError(f"message {number} is no object with role and content")
    message = {key: value for key, value in message.items() if value is not None}  # a column that other rows use
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise BadSampleError(f"message {number}: unknown role {role!r}; known are {', '.join(ROLES)}")
    if content is None and not message.get("tool_calls"):
        raise BadSampleError(f"message {number} ({role}) has no content")
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        content = _joined(content, f"message {number} ({role})")
    if content is not None and not isinstance(content, str):
        raise BadSampleError(f"message {number} ({role}): content is not text")
    return {**message, "content": content or ""}


def _joined(parts: list[Any], where: str) -> str:
    """The text of OpenAI's content parts, {"type": "text", "text": ...}."""
    for part in parts:
        kind = part.get("type")
        if kind not in ("text", "input_text", "output_text"):
            raise BadSampleError(f"{where}: a content part of type {kind}, where only text is trained on")
    return "".join(_text(part.get("text"), f"a content part of {where}") for part in parts)


def _is_trained(message: dict[str, Any], number: int) -> bool:
    """As "train" says, true or false, or as others write it "weight", 1 or 0."""
    for key in _MARKS:
        if message.get(key, True) not in (True, False):
            raise BadSampleError(f"message {number}: {key} is {message[key]!r}, not {_MARKS[key]}")
    return all(message.get(key, True) for key in _MARKS)


def _from_sharegpt(turns: Any) -> list[Any]:
    """ShareGPT's from/value; turns that say role and content stay as they are."""
    if not isinstance(turns, list):
        raise BadSampleError("conversations are not a list")
    out = []
    for number, turn in enumerate(turns):
        if isinstance(turn, dict) and "from" in turn:
            if not isinstance(turn["from"], str) or turn["from"] not in _SHAREGPT:
                raise BadSampleError(f"turn {number}: unknown role {turn['from']!r}; known are {', '.join(_SHAREGPT)}")
            rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
            turn = {"role": _SHAREGPT[turn["from"]], "content": turn.get("value"), **rest}
        out.append(turn)
    return out


def _alpaca(record: dict[str, Any], chat: bool) -> Sample:
    """Instruction, optional input, output. Without a chat template under headings, as most models of this kind know."""
    instruction, output = _text(record["instruction"], "instruction"), _text(record["output"], "output")
    extra = _text(record.get("input") or "", "input")
    system = _text(record.get("system") or "", "system")
    if record.get("history"):
        raise BadSampleError("there are turns before the instruction (history): write them as messages")
    if chat:
        user = {"role": "user", "content": "\n\n".join(filter(None, (instruction, extra)))}
        return _conversation([user, {"role": "assistant", "content": output}], record)
    parts: Sequence[tuple[str, str]] = (("", system), ("### Instruction:\n", instruction), ("### Input:\n", extra))
    prompt = "".join(f"{heading}{text}\n\n" for heading, text in parts if text)
    return Plain(((f"{prompt}### Response:\n", False), (output, True)))


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise BadSampleError(f"{key} is not text")
    return value
