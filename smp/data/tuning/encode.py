"""Samples to token ids, and which of them are trained."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from smp.data.tuning.chat_template import ChatTemplate, Span
from smp.data.tuning.shapes import (
    BadSampleError,
    Conversation,
    Plain,
    Sample,
    recognise,
    recognise_labelled,
    recognise_pair,
)
from smp.data.tuning.tokenizer import TuningTokenizer

_COLOURS = {True: ("\x1b[1;32m", "\x1b[0m"), False: ("\x1b[2m", "\x1b[0m")}
_BRACKETS = {True: ("⟦", "⟧"), False: ("", "")}
"""Around what is trained and what is not."""

Encoded = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]
"""Token ids (n,), and for each whether the model is trained to say it."""


class Encoder:
    """Turns samples into token ids.

    Args:
        tokenizer: of the model.
        template: None: conversations are refused; so is what would be one, where the tokenizer has a template that it
            does not read.
        mask_prompt: train only what the assistant says, or the completion. False: all tokens but the first.
    """

    def __init__(self, tokenizer: TuningTokenizer, template: ChatTemplate | None, *, mask_prompt: bool = True) -> None:
        self.tokenizer, self.template, self.mask_prompt = tokenizer, template, mask_prompt
        self._chat = template is not None or tokenizer.unread_template is not None

    def sample(self, record: dict[str, Any]) -> list[Encoded]:
        """The one text of a record. Raises ValueError when it is broken, or nothing in it is trained."""
        return [self._encode(recognise(record, chat=self._chat))]

    def labelled(self, record: dict[str, Any]) -> list[Encoded]:
        """The one text of a record with a label. Raises ValueError as ``sample``."""
        return [self._encode(recognise_labelled(record, chat=self._chat))]

    def pair(self, record: dict[str, Any]) -> list[Encoded]:
        """The two texts of a preference: chosen, rejected. Raises ValueError as ``sample``."""
        return [self._encode(answer) for answer in recognise_pair(record)]

    def _encode(self, sample: Sample) -> Encoded:
        ids, trained = self._plain(sample) if isinstance(sample, Plain) else self._conversation(sample)
        if not self.mask_prompt:
            trained = [True] * len(ids)
        if not any(trained[1:]):  # the first token is never predicted
            raise BadSampleError("nothing in it is trained")
        return np.array(ids, np.int32), np.array(trained, np.bool_)

    def _plain(self, sample: Plain) -> tuple[list[int], list[bool]]:
        """Pieces are encoded apart, as they are when the model is asked to go on after a prompt. The end is trained."""
        ids = list(self.tokenizer.before)
        trained = [False] * len(ids)
        for text, train in sample.pieces:
            piece = self.tokenizer.encode(text)
            ids += piece
            trained += [train] * len(piece)
        if ids and ids[-1] == self.tokenizer.eos and trained[-1]:  # written out in the text
            return ids, trained
        return [*ids, self.tokenizer.eos], [*trained, True]

    def _conversation(self, sample: Conversation) -> tuple[list[int], list[bool]]:
        if self.template is None and (file := self.tokenizer.unread_template) is not None:
            first = "write it to a file of its own and " if file.suffix == ".json" else ""
            raise BadSampleError(
                f"it is a conversation, and the chat template in {file} is not read beside a sentencepiece model: "
                f"{first}give it by --chat-template FILE"
            )
        if self.template is None:
            raise BadSampleError("it is a conversation, and there is no chat template: give --chat-template")
        text, spans = self.template.render(sample)
        ids, offsets = self.tokenizer.encode_at(text, [edge for span in spans for edge in span])
        return ids, _without_line_ends(self.tokenizer, ids, _within(offsets, spans))


def _within(offsets: Sequence[int], spans: Sequence[Span]) -> list[bool]:
    """Whether each offset lies in one of the spans, which are in order."""
    starts = [first for first, _ in spans]
    # The last span that begins at or before the offset.
    hits = (bisect_right(starts, offset) - 1 for offset in offsets)
    return [hit >= 0 and offset < spans[hit][1] for offset, hit in zip(offsets, hits, strict=True)]


def _without_line_ends(tokenizer: TuningTokenizer, ids: list[int], trained: list[bool]) -> list[bool]:
    """Templates write a line end after the token that ends a turn. The model never gets to write it: it has stopped."""
    out = list(trained)
    for i in range(1, len(ids)):
        follows_end = ids[i - 1] in tokenizer.special or (trained[i - 1] and not out[i - 1])
        if out[i] and follows_end and ids[i] not in tokenizer.special:
            # more than white space up to the end of this stretch is part of what is said
            end = next((j for j in range(i, len(ids)) if not trained[j]), len(ids))
            out[i] = bool(tokenizer.decode(ids[i:end]).strip())
    return out


def marked(tokenizer: TuningTokenizer, text: Encoded, colours: bool) -> str:
    """Decoded text for people: what is trained bold and green, what is only read dim; without colours the former in
    ⟦ ⟧."""
    ids, trained = text
    marks = _COLOURS if colours else _BRACKETS
    parts = []
    for is_trained, group in groupby(zip(ids.tolist(), trained.tolist(), strict=True), key=lambda pair: pair[1]):
        decoded = tokenizer.decode([token for token, _ in group])
        parts.append(decoded.join(marks[is_trained]))
    return "".join(parts)
