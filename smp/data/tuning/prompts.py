"""Prompts for reinforcement learning and the columns that rewards read. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from smp.data.keyed_random import keyed_permutation
from smp.data.tuning.encode import Encoder
from smp.data.tuning.files import Record, Row, parse
from smp.data.tuning.messages import BadSampleError, Conversation, conversation, role_of, text_of
from smp.data.tuning.samples import Report, check_report, fingerprint
from smp.data.tuning.shapes import Reading, refuse_with_text

_PROMPTS = ("prompt", "messages", "conversations", "conversation", "question", "problem", "instruction")
"""Keys of a prompt; the first one in a record is used."""
_TAKEN = ("prompts", "completions", "completion_ids")
"""Arguments of reward functions other than the columns."""


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        ids: its tokens, with the heading of the assistant's turn if it is a conversation.
        said: as rewards get it: a text or a list of messages.
        columns: what else stands in its row.
        tools: descriptions of tools for the chat template.
    """

    ids: list[int]
    said: Any
    columns: dict[str, Any]
    tools: Any = None

    @property
    def is_chat(self) -> bool:
        """Whether completions are messages."""
        return not isinstance(self.said, str)


def read_prompts(
    records: Iterable[tuple[str, Record]], encoder: Encoder, *, longest: int, vocab_size: int, threshold: float
) -> tuple[list[Prompt], Report]:
    """Encode every record.

    Args:
        records: with where each stands.
        encoder: of the model.
        longest: tokens that a prompt may have; longer ones are dropped, never cut.
        vocab_size: token ids from here on are refused.
        threshold: largest fraction of records that may be dropped.

    Raises:
        ValueError: no prompt is left, or more than ``threshold`` were dropped; the message names some.
    """
    report, prompts = Report(), list[Prompt]()
    for where, record in records:
        report.records += 1
        try:
            # The row keeps notes for the report, so it is needed after encoding.
            prompt = _encoded(row := parse(record), encoder)
            # Cutting a prompt would change the question that rewards judge: dropped.
            if len(prompt.ids) > longest:
                raise BadSampleError(
                    f"its prompt has {len(prompt.ids)} tokens, and with --max-completion-length there is room for "
                    f"{longest}"
                )
            if max(prompt.ids) >= vocab_size:
                raise BadSampleError(
                    f"the tokenizer gave id {max(prompt.ids)}, the model's vocabulary has {vocab_size}"
                )
        except ValueError as error:
            report.bad.append((where, str(error)))
            continue
        report.used += 1
        report.tokens += len(prompt.ids)
        report.hidden.update(row.hidden)
        report.in_part += row.in_part
        report.as_text += row.as_text
        prompts.append(prompt)
    check_report(report, threshold)
    return prompts, report


def _encoded(row: Row, encoder: Encoder) -> Prompt:
    sample, columns = recognise_prompt(row, encoder.reading)
    if taken := [name for name in _TAKEN if name in columns]:
        raise BadSampleError(f"key {taken[0]}: reward functions get something else by this name; rename it")
    encoder.note(sample, row)
    ids = encoder.prompt(sample)
    if not ids:
        raise BadSampleError("its prompt is empty")
    said: Any = list(sample.messages) if isinstance(sample, Conversation) else sample
    return Prompt(ids, said, columns, sample.tools if isinstance(sample, Conversation) else None)


def recognise_prompt(record: dict[str, Any], how: Reading) -> tuple[Conversation | str, dict[str, Any]]:
    """(the prompt, the other columns of a record). The prompt is "prompt" (text or messages); or "messages" or
    "conversations" up to the last answer; or the text of "question", "problem" or "instruction", which becomes a user's
    message where there is a chat template.

    Raises:
        BadSampleError: it has none, or a broken one.
    """
    if "chosen" in record and "rejected" in record:
        # A pair would lose both answers in silence.
        raise BadSampleError("chosen and rejected are a pair of answers: give --objective dpo, orpo or reward")
    key = next((key for key in _PROMPTS if key in record), None)
    if key is None:
        raise BadSampleError(f"keys {', '.join(sorted(record)) or 'none'}: a prompt is under {', '.join(_PROMPTS)}")
    said, columns = record[key], {name: x for name, x in record.items() if name != key}
    if isinstance(said, str) and key in ("prompt", "question", "problem", "instruction"):
        # "prompt" as text stays text unless --apply-chat-template asks for messages: base models
        # complete it.
        if not (how.as_messages or (how.chat and key != "prompt")):
            refuse_with_text(record, "a prompt as text does not show")
            return said, columns
        said = [{"role": "user", "content": text_of(said, key)}]
    turns = [said] if isinstance(said, dict) else said
    if key != "prompt" and isinstance(turns, list) and turns and role_of(turns[-1]) == "assistant":
        # An answer that already exists is what rewards may compare with.
        columns.setdefault("answer", turns[-1].get("content", turns[-1].get("value")))
        turns = turns[:-1]
    whole = conversation(turns, record, key)
    # Generation continues after the heading of a new assistant turn.
    if whole.messages[-1]["role"] == "assistant":
        raise BadSampleError("its prompt ends with the assistant: there is nothing to answer")
    # The tools are in the conversation: they are no column for rewards.
    columns.pop("tools", None)
    return Conversation(whole.messages, whole.trained, whole.tools), columns


class PromptDataset:
    """Prompts in the order in which they are drawn, endlessly.

    Draw number n is of epoch n // prompts; the order within an epoch is a function of (seed, epoch).

    Args:
        prompts: all of them.
        chosen: numbers of those of this part.
        seed: of the order; None: as they are.
        each: samples that one prompt makes: completions x how often each is trained on.
        notes: what the user should hear.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        chosen: npt.NDArray[np.int64],
        *,
        seed: int | None,
        each: int = 1,
        notes: Sequence[str] = (),
    ) -> None:
        self.prompts, self.chosen, self.seed, self.each, self.notes = prompts, chosen, seed, each, notes
        self._order: tuple[int, npt.NDArray[np.int64]] = (-1, chosen)

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def samples_per_epoch(self) -> int:
        """Completions, counted as often as each is trained on."""
        return len(self.chosen) * self.each

    def drawn(self, number: int) -> Prompt:
        """The prompt of draw ``number``."""
        epoch, position = divmod(number, len(self.chosen))
        if self.seed is not None:
            if self._order[0] != epoch:
                # One permutation is kept: draws ask for an epoch's prompts in ascending order.
                order = keyed_permutation(len(self.chosen), self.seed, 1, epoch)
                self._order = epoch, self.chosen[order]
            return self.prompts[int(self._order[1][position])]
        return self.prompts[int(self.chosen[position])]

    @property
    def manifest(self) -> list[dict[str, str]]:
        """What the order depends on, other than the seed; goes into checkpoints."""
        return [{"prompts": prompts_fingerprint(self.prompts), "chosen": fingerprint(self.chosen)}]

    def resume(self, manifest: list[dict[str, str]] | None, consumed: int) -> list[str]:
        """Notes for the user when a run resumes that has trained ``consumed`` samples of ``manifest``."""
        if manifest is None or consumed == 0 or manifest == self.manifest:
            return []
        return ["note: these are not the prompts of the checkpoint: the order of what follows is another"]


def prompts_fingerprint(prompts: Sequence[Prompt]) -> str:
    """A hash of the prompts' tokens and columns."""
    digest = xxhash.xxh3_64()
    for prompt in prompts:
        digest.update(np.array(prompt.ids, np.int32).tobytes())
        # default=str: columns of tables may hold dates or numbers that JSON lacks.
        digest.update(json.dumps(prompt.columns, sort_keys=True, default=str).encode())
    return digest.hexdigest()
