"""What the ``extra`` of a checkpoint says of the training run that saved it. Anybody may have written it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from smp.checkpoint import CheckpointError
from smp.training.trainer import Progress


@dataclass(frozen=True)
class SavedRun:
    """As far as it is there.

    Attributes:
        config: settings by name; empty when there are none.
        progress: counters.
        optimizer_steps: by the parameter's name.
    """

    config: Mapping[str, Any]
    progress: Progress | None
    optimizer_steps: Mapping[str, float] | None

    @staticmethod
    def of(extra: Mapping[str, Any], where: object) -> SavedRun:
        """Read ``extra``.

        Raises:
            CheckpointError: something has another form than a run gives it; in one line that begins with ``where``.
        """
        config, steps = extra.get("config", {}), extra.get("optimizer_steps")
        _require(isinstance(config, dict), where, "'config' is not an object")
        _require(
            steps is None or (isinstance(steps, dict) and all(type(n) in (int, float) for n in steps.values())),
            where,
            "'optimizer_steps' is not an object of numbers",
        )
        return SavedRun(config, _progress(extra.get("progress"), where), steps)

    @staticmethod
    def for_weights(extra: Mapping[str, Any]) -> SavedRun:
        """What of ``extra`` helps whoever takes only the weights; nothing is required of it."""
        try:
            return SavedRun.of(extra, "")
        except CheckpointError:
            return SavedRun({}, None, None)


def _progress(saved: Any, where: object) -> Progress | None:
    if saved is None:
        return None
    names = {field.name for field in fields(Progress)}
    counts = isinstance(saved, dict) and all(type(n) is int and n >= 0 for n in saved.values())
    _require(counts and "iteration" in saved and set(saved) <= names, where, "'progress' is not that of a run")
    return Progress(**saved)


def _require(condition: bool, where: object, problem: str) -> None:
    if not condition:
        raise CheckpointError(f"{where}: {problem}: only the weights can be loaded, with --finetune")
