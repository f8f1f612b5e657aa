"""Samples of a model whose encoder reads the prompt and whose decoder gives the answer: each is a text of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from smp.data.tuning.chat_template import ChatTemplate
from smp.data.tuning.encode import Encoded, Encoder
from smp.data.tuning.messages import BadSampleError, Conversation
from smp.data.tuning.shapes import Plain, recognise
from smp.data.tuning.tokenizer import TuningTokenizer


class ApartEncoder(Encoder):
    """Turns samples into the token ids of a prompt, and after them those of its answer, the ones that are trained.

    Each begins and ends as the tokenizer's own rules have a text begin and end (T5 ends both with ``</s>``), and the
    answer always with the end token: it teaches the model to stop. In a conversation the chat template writes both, and
    the last message is the answer.

    Args:
        tokenizer, template, as_messages: as of :class:`Encoder`.
        start: the token that the decoder begins with; an answer does not repeat it.
    """

    def __init__(
        self, tokenizer: TuningTokenizer, template: ChatTemplate | None, start: int | None, *, as_messages: bool = False
    ) -> None:
        super().__init__(tokenizer, template, as_messages=as_messages)
        self._start = start

    def sample(self, record: dict[str, Any]) -> list[Encoded]:
        sample = recognise(record, self.reading)
        if isinstance(sample, Plain):
            prompt, answer = self._texts(sample)
            ids, count = prompt + answer, len(prompt)
            trained = [i >= count for i in range(len(ids))]
        else:
            ids, trained = self._turns(sample)
        if trained[:1] == [True]:
            raise BadSampleError("its prompt is empty, and an encoder has to read something")
        return [self._finished(ids, trained, sample, record)]

    def _texts(self, sample: Plain) -> tuple[list[int], list[int]]:
        pieces = [text for text, _ in sample.pieces]
        if len(pieces) < 2 or [train for _, train in sample.pieces] != [False] * (len(pieces) - 1) + [True]:
            raise BadSampleError(
                "an encoder reads a prompt, and its decoder gives the answer: write prompt and completion"
            )
        tokenizer, answer = self.tokenizer, self.tokenizer.begun(pieces[-1])
        if tokenizer.before == [self._start]:
            answer = answer[1:]
        prompt = [*tokenizer.begun("".join(pieces[:-1])), *tokenizer.after]
        ends = answer[-1:] == [tokenizer.eos]  # written out in the text
        return prompt, answer if ends else [*answer, *(tokenizer.after or [tokenizer.eos])]

    def _turns(self, sample: Conversation) -> tuple[list[int], list[bool]]:
        """Up to the end of the one answer."""
        ids, trained = self._conversation(sample)
        positions = np.flatnonzero(trained)
        if len(positions) and positions[-1] - positions[0] + 1 != len(positions):
            raise BadSampleError("it has several answers, and a decoder gives one: write a sample for each")
        end = int(positions[-1]) + 1 if len(positions) else len(ids)
        return ids[:end], trained[:end]
