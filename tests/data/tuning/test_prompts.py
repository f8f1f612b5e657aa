"""Prompts for reinforcement learning: nothing that a row says beside its prompt is lost without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smp.data.tuning.chat_template import ChatTemplate
from smp.data.tuning.encode import Encoder
from smp.data.tuning.prompts import Prompt, read_prompts
from smp.data.tuning.samples import Report
from smp.data.tuning.tokenizer import FolderTokenizer
from tests.training.tiny_hf import TEMPLATE, write_tokenizer

pytest.importorskip("tokenizers")
ASKED = [{"role": "user", "content": "what is it?"}]


def read(folder: Path, *rows: dict[str, Any], **how: Any) -> tuple[list[Prompt], Report]:
    write_tokenizer(folder)
    encoder = Encoder(FolderTokenizer(folder), ChatTemplate(TEMPLATE, {}), **how)
    records = [(f"a.jsonl:{i}", row) for i, row in enumerate(rows, start=1)]
    return read_prompts(records, encoder, longest=99, vocab_size=999, threshold=0.0)


def test_what_the_template_does_not_show_is_refused_or_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a.jsonl:2: it has tools, which the chat template does not show"):
        read(tmp_path, {"prompt": ASKED}, {"prompt": ASKED, "tools": [{"name": "f"}]})
    earlier = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    with pytest.raises(ValueError, match="message 1 has tool_calls, which the chat template does not show"):
        read(tmp_path, {"prompt": [*ASKED, earlier, {"role": "tool", "content": "4"}]})
    _, report = read(tmp_path, {"prompt": [{**ASKED[0], "mood": "good"}], "answer": "4"})
    [line] = report.template_notes("prompts are texts")
    assert line == "note: messages also have mood (1): the chat template does not name them"


def test_texts_beside_a_template_are_told_or_rendered(tmp_path: Path) -> None:
    [prompt], report = read(tmp_path, {"prompt": "what is it?"})
    assert not prompt.is_chat and report.template_notes("prompts are texts")[0].startswith("note: 1 prompts are texts")
    for beside in ({"system": "be brief"}, {"tools": [{"name": "f"}]}):  # as in fine-tuning: no text shows it
        with pytest.raises(ValueError, match=f"{next(iter(beside))}.* a prompt as text does not show: write messages"):
            read(tmp_path, {"prompt": "what is it?", **beside})
    [prompt], report = read(tmp_path, {"prompt": "what is it?"}, as_messages=True)
    assert prompt.is_chat and not report.template_notes("prompts are texts")
