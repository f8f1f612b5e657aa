"""Messages in the forms in which data sets have them, brought to the form of chat templates."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_NAMES: dict[str, tuple[str, ...]] = {
    "system": (),
    "developer": (),
    "user": ("human", "prompter"),
    "assistant": ("gpt", "chatgpt", "model", "bot", "chatbot", "ai"),
    "tool": ("function", "function_response", "tool_response", "observation", "ipython"),
}
"""Roles and their other names: ShareGPT, Gemma, Cohere, OpenAssistant, OpenAI's older functions, Llama 3."""
ROLES = {name: role for role, names in _NAMES.items() for name in (role, *names)}
# Keys that say whether a message is trained, and their values; "weight" is OpenAI's.
_MARKS = {"train": "true or false", "weight": "1 or 0"}
_OTHER_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Keys with which a message needs no content."""


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


def conversation(messages: Any, record: dict[str, Any], name: str = "messages") -> Conversation:
    """The conversation of the messages under ``name``, with the record's system text and tools.

    Raises:
        BadSampleError: something in them is not as it has to be, or contradicts the rest.
    """
    turns = from_json(messages, name) if isinstance(messages, str) else messages
    if not isinstance(turns, list) or not turns:
        raise BadSampleError(f"{name} are not a list with something in it")
    checked = [checked_message(turn, i) for i, turn in enumerate(turns)]
    # A system text in a column of its own becomes the first message, unless that says the same
    # already.
    if (system := text_of(record.get("system") or "", "system")) and checked[0]["role"] != "system":
        checked = [{"role": "system", "content": system}, *checked]
    elif system and checked[0]["content"].strip() != system.strip():
        raise BadSampleError("it has a system text and a system message that says something else: leave out one")
    # Only the assistant's words can be trained: others are what it answers to.
    trained = tuple(m["role"] == "assistant" and _is_trained(m, i) for i, m in enumerate(checked))
    if record.get("functions"):
        raise BadSampleError("it has functions, which no chat template shows: write them as tools")
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():  # data sets of many sources keep them as JSON
        tools = from_json(tools, "tools")
    # The marks are for this program: a template must not see them.
    said = tuple({key: value for key, value in m.items() if key not in _MARKS} for m in checked)
    return Conversation(said, trained, tools or None)  # templates ask whether there is a list


def role_of(turn: Any) -> str | None:
    """The role of a message as templates name it; None: unknown."""
    name = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    return ROLES.get(name.lower().replace("-", "_")) if isinstance(name, str) else None


def content_of(turn: Any) -> Any:
    """The content of a message, under OpenAI's or ShareGPT's key."""
    return turn.get("content", turn.get("value")) if isinstance(turn, dict) else None


def text_of(value: Any, key: str) -> str:
    """The value, which must be text. Raises BadSampleError otherwise."""
    if not isinstance(value, str):
        raise BadSampleError(f"{key} is not text")
    return value


def from_json(text: str, key: str) -> Any:
    """A list or object from JSON text: tables keep nested values so. Raises BadSampleError when it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        raise BadSampleError(f"{key} is text that is not JSON") from None


def checked_message(turn: Any, number: int) -> dict[str, Any]:
    """A message with "role" and "content" from OpenAI's or ShareGPT's keys. Raises BadSampleError when it is
    malformed."""
    if not isinstance(turn, dict) or not {"role", "from"} & turn.keys():
        raise BadSampleError(f"message {number} is no object with role and content")
    message = {key: value for key, value in turn.items() if value is not None}  # a column that other rows use
    said, role, content = message.get("role", message.get("from")), role_of(message), content_of(message)
    if role is None:
        raise BadSampleError(f"message {number}: unknown role {said!r}; {_hint(said)}")
    if content is None and not any(message.get(name) for name in _OTHER_CONTENT):
        keys = ", ".join(sorted(message))
        raise BadSampleError(f"message {number} ({role}) has no content: it has {keys}")
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        content = _joined(content, f"message {number} ({role})")
    if content is not None and not isinstance(content, str):
        raise BadSampleError(f"message {number} ({role}): content is not text")
    used = {"role" if "role" in message else "from", "content" if "content" in message else "value"}
    rest = {key: value for key, value in message.items() if key not in used}
    # Templates concatenate contents: null would be an error or the word None.
    return {"role": role, "content": content or "", **rest}


def _hint(role: Any) -> str:
    """What to write instead of a role that is not known."""
    if role in ("function_call", "tool_call"):
        return 'a call is a message of the assistant with "tool_calls"'
    known = (f"{name} ({', '.join(others)})" if others else name for name, others in _NAMES.items())
    return f"known are {', '.join(known)}"


def _joined(parts: list[Any], where: str) -> str:
    """The text of OpenAI's content parts, ``{"type": "text", "text": ...}``. Raises BadSampleError for parts of other
    types."""
    for part in parts:
        kind = part.get("type")
        if kind not in ("text", "input_text", "output_text"):
            hint = (
                "; --model-implementation transformers sees images, if the model does" if "image" in str(kind) else ""
            )
            raise BadSampleError(f"{where}: nothing is trained on a content part of type {kind}{hint}")
    return "".join(text_of(part.get("text"), f"a content part of {where}") for part in parts)


def _is_trained(message: dict[str, Any], number: int) -> bool:
    """Whether a message is trained: by "train" (true or false) or "weight" (1 or 0)."""
    for key in _MARKS:
        # 1 == True in Python, so this takes 0 and 1 too, and refuses fractional weights.
        if message.get(key, True) not in (True, False):
            raise BadSampleError(f"message {number}: {key} is {message[key]!r}, not {_MARKS[key]}")
    return all(message.get(key, True) for key in _MARKS)
