"""What a folder of --logits-save-dir was computed from, and whether it fits a run; see ``stored``. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp.config import ConfigError
from smp.data.tuning.samples import Samples

MANIFEST, VERSION = "manifest.json", 1


@dataclass(frozen=True)
class Meaning:
    """What the log-probabilities in a folder were computed from.

    Attributes:
        samples: fingerprint of all texts.
        vocab_size: token ids of the teacher.
        temperature: its logits were divided by it.
        top_k, dtype: how many log-probabilities there are of each label, and their precision.
    """

    samples: str
    vocab_size: int
    temperature: float
    top_k: int
    dtype: str


def read_meaning(path: str) -> tuple[Meaning, list[dict[str, Any]]]:
    """Read a folder's description of itself, and the names of its files.

    Raises:
        ConfigError: there is no such folder, or it is not whole, or another program's.
    """
    try:
        content = json.loads((Path(path) / MANIFEST).read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            raise ConfigError(
                f"--logits-load-dir {path} has version {content['version']}, this program reads {VERSION}"
            )
        meaning = Meaning(**{name: content[name] for name in Meaning.__dataclass_fields__})
        return meaning, list(content["parts"])
    except FileNotFoundError:
        raise ConfigError(
            f"--logits-load-dir {path} has no {MANIFEST}: nothing was written there with --logits-save-dir, or not all"
        ) from None
    # A manifest of another program, or a damaged one.
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ConfigError(f"--logits-load-dir {path}: {MANIFEST} cannot be read: {error}") from None


def check_stored(path: str, samples: Samples) -> Meaning:
    """The description of a folder that was written for these samples.

    Raises:
        ConfigError: it is of other samples.
    """
    meaning, _ = read_meaning(path)
    if meaning.samples != samples.fingerprint():
        raise ConfigError(
            f"--logits-load-dir {path} was written for other samples: data, tokenizer, chat template, --seq-length or "
            "--no-mask-prompt differ from those of --logits-save-dir"
        )
    return meaning
