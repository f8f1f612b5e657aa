"""The shapes of samples in use, recognised by their keys and brought to two forms.

A :class:`Conversation` goes through the model's chat template; a :class:`Plain` text is taken as it is. Each says which
of its parts are trained. A sample for preference optimization is two of them: answers to one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smp.data.tuning.files import Row
from smp.data.tuning.messages import (
    BadSampleError,
    Conversation,
    content_of,
    conversation,
    from_json,
    role_of,
    text_of,
)

SHAPES = "messages, conversations, prompt/completion, text, instruction/output, prompt/chosen/rejected"
_TURNS = ("messages", "conversations", "conversation")
_OF_CSV = {"true": True, "1": True, "false": False, "0": False}
"""Booleans as .csv files write them: their values are all text."""


@dataclass(frozen=True)
class Plain:
    """Text in pieces: (piece, whether it is trained)."""

    pieces: tuple[tuple[str, bool], ...]


Sample = Conversation | Plain


@dataclass(frozen=True)
class Reading:
    """How rows are read.

    Attributes:
        chat: there is a chat template: instructions in Alpaca's shape become a conversation.
        as_messages: so do a prompt and an answer that are texts.
    """

    chat: bool = False
    as_messages: bool = False


def recognise(record: dict[str, Any], how: Reading, *, labelled: bool = False) -> Sample:
    """A sample from a record of any known shape.

    Args:
        record: what stands in a line.
        how: it is read.
        labelled: its label has been read.

    Raises:
        BadSampleError: none of the shapes, or a broken one.
    """
    # Order matters: records of conversations may also have "prompt" or "text" columns.
    for name in _TURNS:
        if name in record:
            return conversation(record[name], record, name)
    if "prompt" in record and "completion" in record:
        # TRL's KTO data have the same columns: as plain samples the bad answers would be learned.
        if not labelled and str(record.get("label")).lower() in ("true", "false"):  # a .csv file's are text
            raise BadSampleError("its label says whether the answer is desirable: give --objective kto")
        return _answer(record["prompt"], record["completion"], record, how)
    if "instruction" in record and "output" in record:
        return _alpaca(record, record["output"], how.chat)
    if "text" in record:
        return Plain(((text_of(record["text"], "text"), True),))
    if "chosen" in record and "rejected" in record:
        raise BadSampleError("chosen and rejected are a pair of answers: give --objective dpo, orpo or reward")
    hint = _within(record) or _renamed(record)
    raise BadSampleError(f"keys {_keys(record)} are none of the known shapes: {SHAPES}{hint}")


def recognise_pair(record: dict[str, Any], how: Reading) -> tuple[Sample, Sample]:
    """The chosen and the rejected answer of a record, with or without a "prompt".

    Raises:
        BadSampleError: as :func:`recognise`.
    """
    if "chosen" not in record or "rejected" not in record:
        hint = "; samples with a label are for --objective kto" if "label" in record else ""
        raise BadSampleError(f"keys {_keys(record)}: a pair needs chosen and rejected{hint}{_within(record)}")
    chosen, rejected = record["chosen"], record["rejected"]
    if "prompt" in record:
        first, second = (_answer(record["prompt"], answer, record, how) for answer in (chosen, rejected))
        return first, second
    # Without a prompt (TRL's implicit prompts) the common beginning is the prompt.
    shared = _shared(chosen, rejected)
    turns = next((name for name in _TURNS if name in record), None)
    if not shared and turns is not None:
        asked = from_json(record[turns], turns) if isinstance(record[turns], str) else record[turns]
        if not isinstance(asked, list) or not asked or role_of(asked[-1]) == "assistant":
            raise BadSampleError(f"{turns} with chosen and rejected must be what both answer, up to the user's turn")
        return _answer(asked, chosen, record, how), _answer(asked, rejected, record, how)
    # Alpaca's keys with chosen and rejected instead of output.
    if not shared and "instruction" in record:
        return _alpaca(record, chosen, how.chat), _alpaca(record, rejected, how.chat)
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise BadSampleError(
            "chosen and rejected without a prompt must be lists of messages that share their beginning: write what "
            "both answer under prompt"
        )
    if not shared:
        raise BadSampleError("chosen and rejected share no beginning: there is no prompt")
    # A list that is the beginning of the other one has no answer of its own.
    if len(chosen) == shared or len(rejected) == shared:
        raise BadSampleError("chosen and rejected are one the beginning of the other: one of the answers is missing")
    prompt = chosen[:shared]
    return _after(prompt, chosen[shared:], record), _after(prompt, rejected[shared:], record)


def _shared(chosen: Any, rejected: Any) -> int:
    """Number of messages with which both lists begin: the prompt."""
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        return 0
    both = enumerate(zip(chosen, rejected, strict=False))
    return next((i for i, (one, other) in both if one != other), min(len(chosen), len(rejected)))


def recognise_labelled(record: dict[str, Any], how: Reading) -> Sample:
    """The answer of a record with a "label", which says whether it is desirable.

    Raises:
        BadSampleError: as :func:`recognise`, or the prompt is not known apart from the answer.
    """
    label_of(record)
    # KTO needs the prompt by itself, to join it with other answers.
    if not ({"prompt", "completion"} <= record.keys() or {"instruction", "output"} <= record.keys()):
        raise BadSampleError(f"keys {_keys(record)}: with a label there must be prompt and completion")
    return recognise(record, how, labelled=True)


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


def _keys(record: dict[str, Any]) -> str:
    return ", ".join(sorted(map(str, record))) or "none"


def _within(record: dict[str, Any]) -> str:
    """A hint for a file whose samples are a list within one object."""
    for key, value in record.items():
        if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
            return f"; what is under {key!r} may be samples: write that list to a file of its own"
    return ""


_ASKED = ("prompt", "question", "query", "input", "context", "instruction", "source")
_ANSWERED = ("completion", "answer", "response", "output", "target")


def _renamed(record: dict[str, Any]) -> str:
    """A hint for a prompt and its answer under other names."""
    asked, answered = ([name for name in names if name in record] for names in (_ASKED, _ANSWERED))
    if not asked or not answered:
        return ""
    return f"; if {asked[0]} and {answered[0]} are a prompt and its answer, call them prompt and completion"


def _answer(prompt: Any, answer: Any, record: dict[str, Any], how: Reading) -> Sample:
    """A prompt and the answer that is trained after it: both text, or messages."""
    # Plain text: the answer follows the prompt with nothing between them.
    if isinstance(prompt, str) and isinstance(answer, str) and not how.as_messages:
        refuse_with_text(record)
        return Plain(((prompt, False), (answer, True)))
    asked, answered = _messages(prompt, "user"), _messages(answer, "assistant")
    if asked and answered and isinstance(asked[0], str) and isinstance(answered[0], str):
        raise BadSampleError("prompt and answer are lists of texts: each sample must be a row, or a line, of its own")
    if asked is None or answered is None:
        raise BadSampleError("prompt and answer must both be text, or messages")
    if isinstance(prompt, str) and role_of(answered[0]) in ("user", "system"):
        asked = []  # some data sets repeat the prompt within the answer
        if isinstance(record, Row) and prompt.strip() not in [str(content_of(turn)).strip() for turn in answered]:
            record.read.discard("prompt")  # another text, which is in no message
    # Other data sets repeat the prompt's messages in the answer: once is enough.
    elif len(answered) > len(asked) and answered[: len(asked)] == asked:
        answered = answered[len(asked) :]
    return _after(asked, answered, record)


def _after(asked: list[Any], answered: list[Any], record: dict[str, Any]) -> Conversation:
    """The messages as a conversation of which only the answer is trained: a prompt may hold earlier turns of the
    assistant."""
    whole = conversation([*asked, *answered], record)
    # Counted from the end: conversation() may have put a system message in front.
    begin = len(whole.trained) - len(answered)
    trained = tuple(t and i >= begin for i, t in enumerate(whole.trained))
    return Conversation(whole.messages, trained, whole.tools)


def _messages(said: Any, role: str) -> list[Any] | None:
    """A list of messages from a list, a single message, or a text by ``role``; None: none of these."""
    if isinstance(said, str):
        return [{"role": role, "content": said}]
    if isinstance(said, dict):
        return [said]
    return said if isinstance(said, list) and said else None


def refuse_with_text(record: dict[str, Any], where: str = "prompt and answer as texts do not show") -> None:
    """Raise BadSampleError where a record has a system text or tools, which plain texts would not show."""
    for name, what in (("system", "a system text"), ("tools", "tools"), ("functions", "functions")):
        if record.get(name) not in (None, "", "[]", "null", [], {}):
            raise BadSampleError(f"it has {what}, which {where}: write messages")


def _alpaca(record: dict[str, Any], answer: Any, chat: bool) -> Sample:
    """Instruction, optional input, output. Without a chat template under Alpaca's headings."""
    instruction, output = text_of(record["instruction"], "instruction"), text_of(answer, "the answer")
    extra = text_of(record.get("input") or "", "input")
    if record.get("history"):
        raise BadSampleError("there are turns before the instruction (history): write them as messages")
    if chat:
        user = {"role": "user", "content": "\n\n".join(filter(None, (instruction, extra)))}
        return conversation([user, {"role": "assistant", "content": output}], record)
    system = text_of(record.get("system") or "", "system")
    refuse_with_text({key: value for key, value in record.items() if key != "system"})
    # The headings of Stanford Alpaca's prompt, without its introductory sentence.
    parts: Sequence[tuple[str, str]] = (("", system), ("### Instruction:\n", instruction), ("### Input:\n", extra))
    prompt = "".join(f"{heading}{text}\n\n" for heading, text in parts if text)
    return Plain(((f"{prompt}### Response:\n", False), (output, True)))
