"""gigatoken, a faster library for the same ids: optional, and checked against the tokenizer that it stands for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smp.config.command_line.commands import pip_install
from smp.data.tokenizers.files import HuggingFaceTokenizer, TiktokenTokenizer, tokenizer_file
from smp.data.tokenizers.tokenizer import END_OF_DOCUMENT, Batch, Tokenizer

# gigatoken's names of the splitting rules.
_SCHEMES = {"gpt2": "gpt2", "cl100k": "cl100k", "o200k": "o200k", "llama3": "cl100k"}


class GigatokenTokenizer:
    """``encode_batch`` by gigatoken; everything else is done by ``reference``, the tokenizer of the same file. Raises
    ValueError when gigatoken is not installed, or does not take the file."""

    def __init__(self, reference: Tokenizer, path: str | Path, tiktoken_pattern: str | None) -> None:
        try:
            import awkward
            import gigatoken
        except ImportError:
            raise ValueError(f"--backend gigatoken: not installed: {pip_install('gigatoken', 'awkward')}") from None
        self.reference, self._awkward = reference, awkward
        self.vocab_size, self.eod = reference.vocab_size, reference.eod
        self.encode, self.decode = reference.encode, reference.decode
        path = tokenizer_file(path)
        self._fast: Any
        try:
            if isinstance(reference, HuggingFaceTokenizer):
                settings = json.loads(Path(path).read_text(encoding="utf-8"))
                # control tokens in a text are plain text, so it must not know them
                settings["added_tokens"] = [t for t in settings.get("added_tokens", []) if not t.get("special")]
                self._fast = gigatoken.Tokenizer.from_json(json.dumps(settings))
            elif isinstance(reference, TiktokenTokenizer):
                self._fast = gigatoken.Tokenizer.from_tiktoken(path, _SCHEMES[tiktoken_pattern or ""], {})
            else:
                self._fast = gigatoken.Tokenizer.from_sentencepiece(path)
        except Exception as error:  # whatever the other library makes of the file
            raise ValueError(f"--backend gigatoken does not take {path}: {error}") from None

    @property
    def unk(self) -> int | None:
        return self.reference.unk

    def encode_batch(self, texts: Sequence[str]) -> Batch:
        ids = self._fast.encode_batch(list(texts), parallel=False)
        flat = np.asarray(self._awkward.to_numpy(self._awkward.flatten(ids)))
        return Batch(flat, np.asarray(self._awkward.to_numpy(self._awkward.num(ids)), np.int64))

    def check(self, texts: Sequence[str]) -> str:
        """Compare with the reference on ``texts`` and some difficult ones; returns a line for the user. Raises
        ValueError where ids differ."""
        awkward = ["", " ", "\n\n  \n", END_OF_DOCUMENT, "</s><unk>", "\u2581x", "e\u0301 ﬁ 12345 \U0001f600\0"]
        sample = [*texts, *awkward]
        fast, slow = self.encode_batch(sample), self.reference.encode_batch(sample)
        if not np.array_equal(fast.lengths, slow.lengths) or not np.array_equal(fast.ids, slow.ids):
            differ = (text for text in sample if self.encode_batch([text]).ids.tolist() != self.reference.encode(text))
            bad = next(differ, sample[0])
            raise ValueError(f"--backend gigatoken gives other ids than the tokenizer for {bad[:60]!r}: leave it out")
        return f"gigatoken agrees with the tokenizer on {len(sample)} texts, {len(slow.ids)} tokens"
