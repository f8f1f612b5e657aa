"""A sample as the model sees it, for people."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from smp.data.tuning.encode import Encoded

_COLOURS = {True: ("\x1b[1;32m", "\x1b[0m"), False: ("\x1b[2m", "\x1b[0m")}
_BRACKETS = {True: ("⟦", "⟧"), False: ("", "")}
"""Around what is trained and what is not."""


def marked(tokenizer: Any, text: Encoded, colours: bool) -> str:
    """Decoded text: what is trained bold and green, what is only read dim; without colours the former in ⟦ ⟧."""
    ids, trained = text
    marks = _COLOURS if colours else _BRACKETS
    parts = []
    for is_trained, group in groupby(zip(ids.tolist(), trained.tolist(), strict=True), key=lambda pair: pair[1]):
        decoded = tokenizer.decode([number for number, _ in group])
        parts.append(decoded.join(marks[bool(is_trained)]))
    return "".join(parts)
