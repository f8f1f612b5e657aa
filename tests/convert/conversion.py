"""A conversion as the tool makes it, for tests of every format: this file skips nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smp.convert.convert import write
from smp.convert.formats import make_target, open_checkpoint


def convert(source: Path, target: Path, kind: Any, reference: Path | None = None, **options: Any) -> Path:
    opened = open_checkpoint(source, reference=reference)
    with opened.weights as weights:
        write(weights, make_target(kind, opened, **options), target, options={}, workers=2)
    return target
