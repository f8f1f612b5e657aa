"""``logMonitoringConfiguration`` of a HyperPodPyTorchJob: rules by which HyperPod's agent watches a run's log lines.

The agent reads the standard output of the first training process of every pod. A rule whose line does not come in time
marks the job as hanging, one whose number is on the wrong side of a threshold as slow; the operator then starts it
again. Only rank 0 of a job prints lines of iterations, so there are rules for jobs of one node only: the pods of all
other nodes would be taken for hanging.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smp.config import ConfigError

KEYS: dict[str, float | None] = {"start_seconds": 3600, "hang_seconds": 1800, "min_tokens_per_second": None}
"""Keys of cluster.log_monitoring with their defaults; null: no such rule."""
ITERATION = r".*\] iteration +\d+/ *\d+ \|.*"
"""The line of --log-interval in both formats."""
SPEED = r".*\] iteration +\d+/.* tokens/s: (\d+).*"
OVER = r".*goodput \d+\.\d+ % of .*"
"""What a run prints when it has saved its last checkpoint."""
POINTS = 5
"""Consecutive lines that must be slow."""
NOT_WATCHED = (
    "cluster.log_monitoring: HyperPod's agent reads the lines of every node, and only the first node prints those of "
    "iterations, so a job of several nodes has no rules"
)
"""The note in notes.txt."""


def log_monitoring(given: Any) -> list[dict[str, Any]] | None:
    """Rules for the lines of a run; None: no rules.

    Args:
        given: cluster.log_monitoring: null, or values of :data:`KEYS`.

    Raises:
        ConfigError: another key, or no positive number.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping) or set(given) - set(KEYS):
        raise ConfigError(f"cluster.log_monitoring: {given!r} has other keys than {', '.join(KEYS)}")
    start, hang, speed = (_number(key, value) for key, value in {**KEYS, **given}.items())
    rules: list[dict[str, Any]] = []
    if start is not None:
        rules.append({"name": "Start", "logPattern": ITERATION, "expectedStartCutOffInSeconds": int(start)})
    # expectedStartCutOffInSeconds: the first iteration must be there by then, with loading and
    # compilation.
    if hang is not None:
        # stopPattern ends the rule: after the last save no line comes.
        recurring = {"expectedRecurringFrequencyInSeconds": int(hang), "stopPattern": OVER}
        rules.append({"name": "Hang", "logPattern": ITERATION, **recurring})
    if speed is not None:
        slow = {"metricThreshold": speed, "operator": "lt", "metricEvaluationDataPoints": POINTS, "stopPattern": OVER}
        rules.append({"name": "LowThroughput", "logPattern": SPEED, **slow})
    return rules or None


def _number(key: str, value: Any) -> float | None:
    """The number of a key; files of clusters may have numbers as text."""
    try:
        number = None if value is None else float(str(value))
    except ValueError:
        number = 0.0
    if number is not None and not 0 < number < float("inf"):
        raise ConfigError(f"cluster.log_monitoring.{key}: {value} is no number above 0")
    return number
