"""The training run's own record in the ``extra`` of a checkpoint. It is checked: the file may come from any program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from smp.checkpoint import CheckpointError
from smp.training.trainer import Progress


@dataclass(frozen=True)
class SavedRun:
    """The training run's record in a checkpoint; parts that are missing are empty or None.

    Attributes:
        config: settings by name; empty when there are none.
        progress: counters.
        optimizer_steps: by the parameter's name.
        adapters: alpha / rank of each adapter by the name of its layer; empty when the model itself was trained.
    """

    config: Mapping[str, Any]
    progress: Progress | None
    optimizer_steps: Mapping[str, float] | None
    adapters: Mapping[str, float]

    @staticmethod
    def of(extra: Mapping[str, Any], where: object) -> SavedRun:
        """Read ``extra``.

        Raises:
            CheckpointError: something has another form than a run gives it; in one line that begins with ``where``.
        """
        config, steps, adapters = (extra.get(name) for name in ("config", "optimizer_steps", "adapters"))
        _require(config is None or isinstance(config, dict), where, "'config'")
        _require(steps is None or _are_numbers(steps), where, "'optimizer_steps'")
        _require(adapters is None or _are_numbers(adapters), where, "'adapters'")
        return SavedRun(config or {}, _progress(extra.get("progress"), where), steps, adapters or {})

    @staticmethod
    def for_weights(extra: Mapping[str, Any]) -> SavedRun:
        """The record as far as it is readable, for a caller that takes only the weights; nothing in it is required."""
        try:
            return SavedRun.of(extra, "")
        except CheckpointError:
            return SavedRun({}, None, None, {})


def _progress(saved: Any, where: object) -> Progress | None:
    if saved is None:
        return None
    # Known names only: an older program must not drop a counter of a newer one in silence.
    names = {field.name for field in fields(Progress)}
    known = isinstance(saved, dict) and "iteration" in saved and set(saved) <= names
    counts = [n for name, n in saved.items() if name not in ("data", "spikes")] if known else []
    _require(known and all(map(_is_count, counts)), where, "'progress'")
    spikes = saved.get("spikes")
    _require(spikes is None or _is_window(spikes), where, "'spikes' of 'progress'")
    data = saved.get("data")
    _require(data is None or _is_blend(data) or _is_tuning(data), where, "'data' of 'progress'")
    return Progress(**saved)


# ``type`` and not isinstance: JSON's true is an int in Python, and no number of steps.
def _are_numbers(values: Any) -> bool:
    return isinstance(values, dict) and all(type(n) in (int, float) for n in values.values())


def _is_window(spikes: Any) -> bool:
    """Whether it is what :meth:`smp.training.faults.spikes.Spikes.state` gives: as many losses as norms."""
    lists = isinstance(spikes, list) and len(spikes) == 2 and all(isinstance(one, list) for one in spikes)
    return lists and len(spikes[0]) == len(spikes[1]) and all(type(x) is float for one in spikes for x in one)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_blend(phases: Any) -> bool:
    """Whether it is what :mod:`smp.data.blend` writes down of the data that were read."""
    try:
        sources = [source for phase in phases for source in phase["sources"]]
        starts = all(_is_count(phase["start"]) for phase in phases)
        # Any error of form below means that it is not one of ours.
        read = all(isinstance(s["key"], str) and _is_count(s["offset"]) for s in sources)
        weights = all(_is_count(s["weight"]) and s["weight"] > 0 for s in sources)
        read = read and weights and all(phase["sources"] for phase in phases)
    except (TypeError, KeyError):
        return False
    return isinstance(phases, list) and len(phases) > 0 and starts and read


def _is_tuning(parts: Any) -> bool:
    """Whether it is what :mod:`smp.data.tuning.batches` or ``prompts`` write down: fingerprints of texts and of their
    order."""
    if not isinstance(parts, list) or len(parts) != 1 or not isinstance(parts[0], dict):
        return False
    kinds = ({"samples", "sequences"}, {"prompts", "chosen"})
    return set(parts[0]) in kinds and all(isinstance(text, str) for text in parts[0].values())


def _require(condition: bool, where: object, problem: str) -> None:
    if not condition:
        raise CheckpointError(
            f"{where}: {problem} in extra is not that of a run: only weights can be loaded, by --finetune"
        )
