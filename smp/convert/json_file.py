"""JSON files that lie beside the weights in other programs' folders. No torch here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from smp.config import ConfigError
from smp.config.command import DamageError


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        DamageError: it is no JSON, as after a download that was cut off.
        ConfigError: it cannot be read; its cause is the system's error, which decides the exit code.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{path} is damaged or cut off: it is no JSON ({error})") from None
