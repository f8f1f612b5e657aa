"""A sample as the model sees it, for people."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from smp.data.tuning.encode import Encoded

_TRAINED, _SEEN, _END = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"


def coloured(tokenizer: Any, text: Encoded) -> str:
    """Decoded text: what is trained bold and green, what is only read dim."""
    ids, trained = text
    parts = []
    for is_trained, group in groupby(zip(ids.tolist(), trained.tolist(), strict=True), key=lambda pair: pair[1]):
        decoded = tokenizer.decode([number for number, _ in group])
        parts.append(f"{_TRAINED if is_trained else _SEEN}{decoded}{_END}")
    return "".join(parts)
