"""Chat templates: conversations to text, and which stretches of it the assistant says.

A template is a Jinja program that comes with a model, so it runs in Jinja's sandbox and cannot change what it gets.
Where the assistant speaks is found in one of two ways. A template may mark it with ``{% generation %}`` blocks. Else
the conversation is rendered up to each of the assistant's messages and up to its end: the difference is what it says,
with the token that ends its turn and without the heading of the turn, exactly what the model writes when it is asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from smp.data.tuning.shapes import BadSampleError, Conversation

_BEGIN, _END = "\ufdd0", "\ufdd1"  # noncharacters of Unicode: text that holds them is refused
_MEANINGFUL = ("tools", "tool_calls", "reasoning_content", "thinking")
"""What a conversation may say beside its messages' content."""
Span = tuple[int, int]


class _Generation(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}`` puts marks around what is inside."""

    tags = {"generation"}  # noqa: RUF012  (Jinja reads it from the class)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class ChatTemplate:
    """One template: a Jinja program, and names and texts of special tokens that it may use, such as ``eos_token``.
    Raises ValueError when it is not valid Jinja."""

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not valid: {error}") from None
        self.tokens = tokens
        self._unread = tuple(name for name in _MEANINGFUL if not re.search(rf"\b{name}\b", source))
        calls = tree.find_all(nodes.ExtensionAttribute)
        self.marks_assistant = any(call.name == "_mark" for call in calls)

    def render(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """The text, and the spans of characters in it that are trained.

        Raises:
            BadSampleError: the template refuses the conversation, or what the assistant says cannot be found.
        """
        messages = conversation.messages
        # In any of its texts, at any depth.
        if any(mark in json.dumps(messages, ensure_ascii=False, default=str) for mark in (_BEGIN, _END)):
            raise BadSampleError("it holds U+FDD0 or U+FDD1, which are no characters of any text")
        self._check_read(conversation)
        marked = self._render(messages, conversation.tools, ask=False)
        text, blocks = _unmark(marked)
        wanted = [i for i, trained in enumerate(conversation.trained) if trained]
        if not self.marks_assistant:
            return text, [self._span(conversation, i, text) for i in wanted]
        speakers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(blocks) != len(speakers):
            raise BadSampleError(f"the chat template marks {len(blocks)} turns of {len(speakers)} by the assistant")
        return text, [block for i, block in zip(speakers, blocks, strict=True) if i in wanted]

    def prompt(self, messages: Sequence[dict[str, Any]]) -> str:
        """The text after which the assistant's next message follows.

        Raises:
            BadSampleError: the template refuses the messages.
        """
        return _unmark(self._render(messages, None, ask=True))[0]

    def _check_read(self, conversation: Conversation) -> None:
        """What is said beside the content is in the text: a template that never names it would leave it out."""
        for name in self._unread:
            if name == "tools":
                where = "it has tools" if conversation.tools else None
            else:
                found = [i for i, message in enumerate(conversation.messages) if message.get(name)]
                where = f"message {found[0]} has {name}" if found else None
            if where:
                raise BadSampleError(
                    f"{where}, which the chat template does not show: give --chat-template one that does"
                )

    def _span(self, conversation: Conversation, i: int, text: str) -> Span:
        """What message ``i`` adds after the heading of its turn."""
        messages, tools = conversation.messages, conversation.tools
        before = _unmark(self._render(messages[:i], tools, ask=True))[0]
        after = _unmark(self._render(messages[: i + 1], tools, ask=False))[0]
        # A template may show earlier messages in another way when later ones follow: then the
        # difference is not what was said.
        if not (text.startswith(before) and text.startswith(after) and len(before) < len(after)):
            raise BadSampleError(
                f"the chat template shows message {i} differently when others follow, so it cannot be told what is "
                "trained: use a template with generation blocks"
            )
        return len(before), len(after)

    def _render(self, messages: Sequence[dict[str, Any]], tools: Any, *, ask: bool) -> str:
        try:
            return self._template.render(messages=list(messages), tools=tools, add_generation_prompt=ask, **self.tokens)
        except jinja2.TemplateError as error:
            raise BadSampleError(f"the chat template refuses it: {error}") from None
        except Exception as error:  # whatever the program in the template does wrong
            raise BadSampleError(f"the chat template fails: {type(error).__name__}: {error}") from None


def _unmark(marked: str) -> tuple[str, list[Span]]:
    """Text without marks, and the spans that they enclosed."""
    text, spans = "", []
    for i, piece in enumerate(marked.replace(_END, _BEGIN).split(_BEGIN)):
        if i % 2:
            spans.append((len(text), len(text) + len(piece)))
        text += piece
    return text, spans


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
