"""Samples to token ids and a mask of those that are trained."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import chain, groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from smp.data.tuning.chat_template import ChatTemplate, Span
from smp.data.tuning.files import Row
from smp.data.tuning.messages import BadSampleError, Conversation
from smp.data.tuning.shapes import Plain, Reading, Sample, recognise, recognise_labelled, recognise_pair
from smp.data.tuning.tokenizer import APART, TuningTokenizer

_COLOURS = {True: ("\x1b[1;32m", "\x1b[0m"), False: ("\x1b[2m", "\x1b[0m")}
_BRACKETS = {True: ("⟦", "⟧"), False: ("", "")}
"""Brackets around trained and untrained stretches, where a terminal has no colours."""

Encoded = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]
"""Token ids (n,), and for each whether the model is trained to say it."""


class Encoder:
    """Turns samples into token ids.

    Args:
        tokenizer: of the model.
        template: None: conversations are refused; so is what would be one, where the tokenizer has a template that it
            does not read.
        mask_prompt: train only what the assistant says, or the completion. False: all tokens but the first.
        as_messages: a prompt and an answer that are texts become messages for the template.

    Attributes:
        reading: how rows are read.
    """

    def __init__(
        self,
        tokenizer: TuningTokenizer,
        template: ChatTemplate | None,
        *,
        mask_prompt: bool = True,
        as_messages: bool = False,
    ) -> None:
        self.tokenizer, self.template, self.mask_prompt = tokenizer, template, mask_prompt
        self.reading = Reading(template is not None or tokenizer.unread_template is not None, as_messages)

    def sample(self, record: dict[str, Any]) -> list[Encoded]:
        """The single text of a record. Raises ValueError when it is broken or nothing in it is trained."""
        return [self._encode(recognise(record, self.reading), record)]

    def labelled(self, record: dict[str, Any]) -> list[Encoded]:
        """The single text of a record with a label. Raises ValueError as ``sample``."""
        return [self._encode(recognise_labelled(record, self.reading), record)]

    def pair(self, record: dict[str, Any]) -> list[Encoded]:
        """The two texts of a preference: chosen, rejected. Raises ValueError as ``sample``."""
        return [self._encode(answer, record) for answer in recognise_pair(record, self.reading)]

    def prompt(self, sample: Conversation | str) -> list[int]:
        """Token ids of a prompt: a text, or a conversation with the heading of the assistant's turn. Raises ValueError
        when the template refuses it."""
        if isinstance(sample, str):
            return self.tokenizer.begun(sample)
        return self.tokenizer.encode_at(self._template().prompt(sample.messages, sample.tools))[0]

    def reply(self, messages: Sequence[dict[str, Any]], ends: Collection[int], tools: Any = None) -> list[int]:
        """Token ids that follow the assistant's turn, whose end it has written itself: what closes it, ``messages`` of
        others, and the heading of its next turn. Raises ValueError when the template refuses them.

        Args:
            ends: ids that end a turn; the template writes one of them as well.
            tools: descriptions of tools, of the prompt.
        """
        ids = self.tokenizer.encode_at(self._template().reply(messages, tools))[0]
        # The model has written the end of its turn itself: not twice.
        return ids[1:] if ids and ids[0] in ends else ids

    def _encode(self, sample: Sample, record: dict[str, Any]) -> Encoded:
        ids, trained = self._plain(sample) if isinstance(sample, Plain) else self._conversation(sample)
        return self._finished(ids, trained, sample, record)

    def _finished(
        self, ids: list[int], trained: list[bool], sample: Sample, record: dict[str, Any], never: Sequence[bool] = ()
    ) -> Encoded:
        """Arrays of the sample. ``never``: tokens that are not trained even without the prompt mask, such as those of
        images."""
        if isinstance(record, Row):
            # The note for the user depends on the mask before --no-mask-prompt replaces it.
            self.note(sample, record)
            last = _last_trained(ids, trained)
            # Turns before the last one may end otherwise (GPT-OSS's, with a token that is also within an answer).
            record.ends |= {*last[-1:]} & self.tokenizer.special
            if isinstance(sample, Conversation):
                record.unended = record.unended or not self.tokenizer.special.issuperset(last)
        if not self.mask_prompt:
            trained = [True] * len(ids)
        if never:
            trained = [train and not left for train, left in zip(trained, never, strict=True)]
        if not any(trained[1:]):  # the first token is never predicted
            raise BadSampleError("nothing in it is trained")
        return np.array(ids, np.int32), np.array(trained, np.bool_)

    def note(self, sample: Sample | str, row: Row) -> None:
        """Record in ``row`` what its user may not expect: keys the template ignores, reasoning it drops, text taken
        without the template."""
        if isinstance(sample, Conversation):
            if self.template is not None:
                row.hidden |= self.template.unnamed(sample)
                row.in_part = row.in_part or self.template.shows_in_part(sample)
        else:
            row.as_text = self.reading.chat and "prompt" in row.read

    def _plain(self, sample: Plain) -> tuple[list[int], list[bool]]:
        """Token ids and mask of a text in pieces. Each piece is encoded by itself, as it is when the model completes a
        prompt; the result must decode to the same text as all pieces in one. The end token is trained."""
        ids, trained, said = list[int](), list[bool](), ""
        for text, train in sample.pieces:
            if said:
                piece = self._going_on(ids, said, text)
                ids, trained = ids + piece, trained + [train] * len(piece)
            else:  # what it begins with is not trained
                ids = self.tokenizer.begun(text)
                # A beginning of text token is given, never predicted.
                trained = [train and i >= len(self.tokenizer.before) for i in range(len(ids))]
            said += text
        if ids and ids[-1] == self.tokenizer.eos and trained[-1]:  # written out in the text
            return ids, trained
        return [*ids, self.tokenizer.eos], [*trained, True]

    def _going_on(self, ids: list[int], said: str, text: str) -> list[int]:
        """Token ids of ``text`` after ``ids`` (the ids of ``said``): the first of several ways to encode it that
        decodes, together with ``ids``, to the same text as the whole in one piece."""
        whole = self.tokenizer.decode(self.tokenizer.begun(said + text))
        # One that tokenizers do not join with others; or the end of what was said, which some must see, such as
        # WordPiece, whose tokens within a word are others than those that begin one.
        after = (self.tokenizer.continued(before, text) for before in (APART, said[-1:], said))
        alone = self.tokenizer.encode(text)
        for found in chain([alone], after):
            if self.tokenizer.decode([*ids, *found]) == whole:
                return found
        return alone  # a word of one token, cut in two by a tokenizer without pieces of it

    def _conversation(self, sample: Conversation) -> tuple[list[int], list[bool]]:
        text, spans = self._template().render(sample)
        # Rendered templates write their special tokens out: no begin token is added here, as
        # transformers tokenizes with add_special_tokens=False.
        ids, offsets = self.tokenizer.encode_at(text)
        return ids, without_line_ends(self.tokenizer, ids, within(offsets, spans))

    def _template(self) -> ChatTemplate:
        if self.template is None and (file := self.tokenizer.unread_template) is not None:
            first = "write it to a file of its own and " if file.suffix == ".json" else ""
            raise BadSampleError(
                f"it is a conversation, and the chat template in {file} is not read with a sentencepiece model: "
                f"{first}give it by --chat-template FILE"
            )
        if self.template is None:
            raise BadSampleError("it is a conversation, and there is no chat template: give --chat-template")
        return self.template


def within(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Whether each token has a character in one of the spans, which must be in order. A token that begins in the
    prompt's last white space and holds the answer's first characters counts, as in transformers' assistant mask."""
    # A binary search for each token: conversations have thousands of tokens and tens of spans.
    starts = [first for first, _ in spans]
    # The last span that begins before the token's end; a token without characters stands before the next one.
    hits = [bisect_left(starts, max(last, first + 1)) - 1 for first, last in offsets]
    return [hit >= 0 and first < spans[hit][1] for (first, _), hit in zip(offsets, hits, strict=True)]


def _last_trained(ids: list[int], trained: list[bool]) -> list[int]:
    """The tokens that end stretches of what is trained, in order. One that is not special ends nothing: the template
    has none, or writes it in the heading of the next message."""
    return [ids[i] for i in range(len(ids)) if trained[i] and not (i + 1 < len(ids) and trained[i + 1])]


def without_line_ends(tokenizer: TuningTokenizer, ids: list[int], trained: list[bool]) -> list[bool]:
    """The mask without line ends after the token that ends a turn: templates write them, but the model has stopped
    before and never produces them."""
    out = list(trained)
    for i in range(1, len(ids)):
        if trained[i] and ids[i - 1] in tokenizer.special and ids[i] not in tokenizer.special:
            # more than white space up to the end of this stretch is part of what is said
            end = next((j for j in range(i, len(ids)) if not trained[j]), len(ids))
            if not tokenizer.decode(ids[i:end]).strip():
                out[i:end] = [False] * (end - i)
    return out


def marked(tokenizer: TuningTokenizer, text: Encoded, colours: bool) -> str:
    """Decoded text for people: trained parts bold and green and the rest dim, or without colours the trained parts in ⟦
    ⟧."""
    ids, trained = text
    marks = _COLOURS if colours else _BRACKETS
    parts = []
    for is_trained, group in groupby(zip(ids.tolist(), trained.tolist(), strict=True), key=lambda pair: pair[1]):
        decoded = tokenizer.decode([token for token, _ in group])
        parts.append(decoded.join(marks[is_trained]))
    return "".join(parts)
