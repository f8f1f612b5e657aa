"""Chat templates: conversations to text, and which spans of it the assistant says.

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
from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from smp.data.tuning.messages import BadSampleError, Conversation, checked_message

_BEGIN, _END = "\ufdd0", "\ufdd1"  # noncharacters of Unicode: text that holds them is refused
# Marks around a message's content, to see whether the template shows its beginning and end.
_FRONT, _BACK = "\ufdd2", "\ufdd3"
"""Put around a message's content, to see whether a template shows it."""
_TAG = re.compile(r"</\w|<\|")
"""Where a template may cut a message, such as the end of its reasoning (``</think>``) or a special token."""
_SAID = "\ufdd4"
"""Stands for what the assistant said in ``ChatTemplate.reply``."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning; transformers passes it to templates under the first two."""
_MEANINGFUL = ("tools", "tool_calls", "function_call", *_REASONING)
"""Keys that carry meaning apart from the content of messages: dropping one in silence would train on another
conversation."""
Span = tuple[int, int]


class _Generation(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}``, transformers' block around what the assistant says: puts marks
    around its text."""

    tags = {"generation"}  # noqa: RUF012  (Jinja reads it from the class)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # The block's body becomes a macro, which _mark gets as ``caller``.
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class ChatTemplate:
    """One template: a Jinja program, and names and texts of special tokens that it may use, such as ``eos_token``.
    Raises ValueError when it is not valid Jinja.

    Args:
        image_mark: stands for an image within a message: the template gets what a message says as content parts then.

    Attributes:
        marks_assistant: it has generation blocks.
        empty_tokens: special tokens that it names and the tokenizer does not have: nothing stands in their place.
    """

    # As transformers compiles templates: the same whitespace control, loop controls, filters and
    # globals, so that a template gives the same text here.
    def __init__(self, source: str, tokens: dict[str, str], image_mark: str | None = None) -> None:
        self.image_mark = image_mark
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
        # Names that the template reads and never sets. Of these the *_token ones are passed by
        # transformers.
        named = meta.find_undeclared_variables(tree)
        self.empty_tokens = sorted(name for name in named - tokens.keys() if name.endswith("_token"))
        # All words of the source: a key that is none of them counts as never read.
        self._words = set(re.findall(r"\w+", source))
        self._shown: set[tuple[str, bool]] = set()  # roles that it shows, of the first message and of others
        # Any use of the extension in the syntax tree, also one in a branch that is not taken.
        calls = tree.find_all(nodes.ExtensionAttribute)
        self.marks_assistant = any(call.name == "_mark" for call in calls)

    def render(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """The text, and the spans of characters in it that are trained.

        Raises:
            BadSampleError: the template refuses the conversation, or what the assistant says cannot be found.
        """
        messages = conversation.messages
        # Marks in the data would be taken for those that are put in below.
        _refuse_marks(messages)
        self._check_read(conversation)
        marked = self._render(messages, conversation.tools, ask=False)
        text, blocks = _unmark(marked)
        self._check_shown(conversation, text, ask=False)
        wanted = [i for i, trained in enumerate(conversation.trained) if trained]
        if not self.marks_assistant:
            # Without generation blocks each trained message costs two more renderings.
            return text, [self._span(conversation, i, text) for i in wanted]
        speakers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        # A block in a loop that skips a turn would shift all later ones: refused, not guessed.
        if len(blocks) != len(speakers):
            raise BadSampleError(f"the chat template marks {len(blocks)} turns of {len(speakers)} by the assistant")
        return text, [block for i, block in zip(speakers, blocks, strict=True) if i in wanted]

    def prompt(self, messages: Sequence[dict[str, Any]], tools: Any = None) -> str:
        """The text after which the assistant's next message follows.

        Raises:
            BadSampleError: the template refuses the messages.
        """
        conversation = Conversation(tuple(messages), (False,) * len(messages), tools)
        self._check_read(conversation)
        text = _unmark(self._render(messages, tools, ask=True))[0]
        self._check_shown(conversation, text, ask=True)
        return text

    def reply(self, messages: Sequence[dict[str, Any]], tools: Any = None) -> str:
        """The text from the end of what the assistant said to where it speaks again, with ``messages`` of others in
        between.

        Raises:
            BadSampleError: the messages are none, or the template refuses them.
        """
        others = [checked_message(message, i) for i, message in enumerate(messages)]
        _refuse_marks(others)
        self._check_read(Conversation(tuple(others), (False,) * len(others)))
        said = [{"role": "user", "content": "."}, {"role": "assistant", "content": _SAID}, *others]
        # rpartition: a template may show the assistant's text twice, and the reply follows the last
        # one.
        _, found, after = _unmark(self._render(said, tools, ask=True))[0].rpartition(_SAID)
        if not found:
            raise BadSampleError("the chat template does not show what the assistant said before an answer to it")
        return after

    def unnamed(self, conversation: Conversation) -> set[str]:
        """Keys of the messages that the template does not name; those that are refused when not shown are left out."""
        keys = {key for message in conversation.messages for key, value in message.items() if value not in ("", [], {})}
        return keys - self._words - {"role", "content", *_MEANINGFUL}

    def shows_in_part(self, conversation: Conversation) -> bool:
        """Whether the template leaves out the beginning or the end of a message's content, or the reasoning of some
        messages: reasoning models' templates often drop that of all turns but the last."""
        messages = conversation.messages
        # Only contents with a tag are rendered again: each costs a rendering of the whole
        # conversation.
        tagged = (i for i, message in enumerate(messages) if _TAG.search(_content(message)))
        if any(self._ends_shown(conversation, i) in ((True, False), (False, True)) for i in tagged):
            return True
        if not any(message.get(name) for message in messages for name in _REASONING):
            return False
        text = _unmark(self._render(messages, conversation.tools, ask=False))[0]
        return self._first_untold(conversation, _REASONING, text, ask=False) is not None

    def _check_shown(self, conversation: Conversation, text: str, *, ask: bool) -> None:
        """Raise BadSampleError unless ``text`` shows every message's content, and tools and tool calls: a template may
        ignore a role."""
        if conversation.tools and not self._tells(conversation, None, (), text, ask=ask):
            raise _not_shown("it has tools")
        for name in ("tool_calls", "function_call"):
            if (untold := self._first_untold(conversation, (name,), text, ask=ask)) is not None:
                raise _not_shown(f"message {untold} has {name}")
        for i, message in enumerate(conversation.messages):
            content, kind = _content(message).strip(), (str(message["role"]), i == 0)
            # The quick test: a role that was shown once, and the content as it stands in the text.
            # Else the marks decide, since templates may strip or rewrite a content.
            if not content or (kind in self._shown and content in text):
                continue
            if self._ends_shown(conversation, i) == (False, False):
                raise BadSampleError(
                    f"message {i} ({message['role']}) says something, which the chat template does not show: give "
                    "--chat-template one that does"
                )
            self._shown.add(kind)

    def _first_untold(self, conversation: Conversation, names: Sequence[str], text: str, *, ask: bool) -> int | None:
        """The first message with something under ``names`` that ``text`` does not show; None: all are shown.

        One rendering answers for all messages whose marks it shows; the others are asked one by one, as each asks for
        a rendering of the whole conversation.
        """
        having = [i for i, message in enumerate(conversation.messages) if any(message.get(name) for name in names)]
        shown = self._with_marks_shown(conversation, having, names, ask=ask) if len(having) > 1 else set()
        rest = (i for i in having if i not in shown)
        return next((i for i in rest if not self._tells(conversation, i, names, text, ask=ask)), None)

    def _with_marks_shown(
        self, conversation: Conversation, numbers: Sequence[int], names: Sequence[str], *, ask: bool
    ) -> set[int]:
        """Messages among ``numbers`` whose values under the keys ``names`` the template renders: a mark put there comes
        out in the text."""
        marks = {i: f"{_FRONT}{i}{_BACK}" for i in numbers}
        messages = list(conversation.messages)
        # Each message has a mark of its own number, so that one rendering tells them apart.
        for i, mark in marks.items():
            messages[i] = {k: _with_mark(value, mark) if k in names else value for k, value in messages[i].items()}
        try:
            text = self._render(messages, conversation.tools, ask=ask)
        except BadSampleError:  # it looks at names
            return set()
        # A template may write arguments with tojson, which escapes the marks.
        return {i for i, mark in marks.items() if mark in text or json.dumps(mark)[1:-1] in text}

    def _tells(self, conversation: Conversation, i: int | None, names: Sequence[str], text: str, *, ask: bool) -> bool:
        """Whether ``text`` changes when message ``i`` loses ``names`` (or the conversation its tools)."""
        messages, tools = list(conversation.messages), conversation.tools
        if i is None:
            tools = None
        else:
            messages[i] = {key: value for key, value in messages[i].items() if key not in names}
        try:
            return _unmark(self._render(messages, tools, ask=ask))[0] != text
        except BadSampleError:  # something else refers to it
            return True

    def _ends_shown(self, conversation: Conversation, i: int) -> tuple[bool, bool]:
        """Whether the text has the beginning and the end of message ``i``'s content; (True, True) where that cannot be
        told."""
        messages = list(conversation.messages)
        messages[i] = {**messages[i], "content": f"{_FRONT}{_content(messages[i])}{_BACK}"}
        try:
            text = self._render(messages, conversation.tools, ask=False)
        except BadSampleError:  # it looks at how a message begins
            return True, True
        front, back = (mark in text or json.dumps(mark)[1:-1] in text for mark in (_FRONT, _BACK))
        return front, back

    def _check_read(self, conversation: Conversation) -> None:
        """Raise BadSampleError for tools, calls or reasoning that the template's source never names."""
        for name in _MEANINGFUL:
            # A template may read reasoning under either of transformers' two names.
            if not self._words.isdisjoint((name, *_REASONING[:2]) if name in _REASONING else (name,)):
                continue
            if name == "tools":
                where = "it has tools" if conversation.tools else None
            else:
                found = [i for i, message in enumerate(conversation.messages) if message.get(name)]
                where = f"message {found[0]} has {name}" if found else None
            if where:
                raise _not_shown(where, 'write it as "tool_calls", or ' if name == "function_call" else "")

    def _span(self, conversation: Conversation, i: int, text: str) -> Span:
        """The span that message ``i`` adds after the heading of its turn."""
        messages, tools = conversation.messages, conversation.tools
        # ask=True ends with the heading of the assistant's turn (add_generation_prompt), which the
        # model is given and does not write.
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
            said = [_with_reasoning(message) for message in messages]
            # Vision templates test for content parts of type image.
            if self.image_mark is not None:
                said = [{**message, "content": _parts(_content(message), self.image_mark)} for message in said]
            return self._template.render(messages=said, tools=tools, add_generation_prompt=ask, **self.tokens)
        except jinja2.TemplateError as error:
            raise BadSampleError(f"the chat template refuses it: {error}") from None
        except Exception as error:  # whatever the program in the template does wrong
            raise BadSampleError(f"the chat template fails: {type(error).__name__}: {error}") from None


def _not_shown(what: str, hint: str = "") -> BadSampleError:
    return BadSampleError(f"{what}, which the chat template does not show: {hint}give --chat-template one that does")


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _with_mark(value: Any, mark: str) -> Any:
    """A text with a mark in front. In tool calls only the names of functions get one: arguments must stay what they
    are."""
    if isinstance(value, str):
        return mark + value
    if isinstance(value, list):
        return [_with_mark(item, mark) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _with_mark(item, mark) if key in ("function", "name") else item for key, item in value.items()}


def _parts(content: str, image_mark: str) -> list[dict[str, str]]:
    """A message's content as content parts; ``image_mark`` in it becomes an image part."""
    parts: list[dict[str, str]] = []
    for i, text in enumerate(content.split(image_mark)):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts or [{"type": "text", "text": ""}]


def _refuse_marks(messages: Sequence[dict[str, Any]]) -> None:
    """Raise BadSampleError when any text of the messages, at any depth, holds a mark."""
    texts = json.dumps(messages, ensure_ascii=False, default=str)
    if any(mark in texts for mark in (_BEGIN, _END, _FRONT, _BACK, _SAID)):
        raise BadSampleError("it holds one of U+FDD0 to U+FDD4, which are no characters of any text")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under both names that transformers gives to templates."""
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _unmark(marked: str) -> tuple[str, list[Span]]:
    """The text without marks, and the spans that they enclosed."""
    text, spans = "", []
    for i, piece in enumerate(marked.replace(_END, _BEGIN).split(_BEGIN)):
        # Marks alternate, as blocks do not nest: every second piece was inside one.
        if i % 2:
            spans.append((len(text), len(text) + len(piece)))
        text += piece
    return text, spans


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Plain JSON, as transformers' filter: Jinja's own escapes <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
