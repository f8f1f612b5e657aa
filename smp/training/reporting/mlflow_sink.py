"""Log to MLflow: settings become parameters, the record of the start becomes tags, scalars become metrics."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from smp.config import ConfigError
from smp.config.command_line.commands import pip_install
from smp.config.command_line.credentials import without_credentials
from smp.config.command_line.fields import as_text

_AT_ONCE = 100
"""Parameters or tags of one request: the most that an MLflow server takes."""
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""In place of MLflow's own 7 retries and 120 seconds: all processes wait for rank 0 within
--distributed-timeout-minutes."""
# Characters that MLflow refuses in names of metrics.
_NOT_IN_NAMES = re.compile(r"[^\w\-. /:]")


class MlflowSink:
    """A run of MLflow; a resume continues it, by the id that the first start left in ``folder``.

    A server that does not answer while the run goes on does not end it: that is said at once, it is asked no more, and
    at the end it is said how many records it lacks, which metrics.jsonl has.

    Args:
        folder: --log-dir.
        experiment: its name; made if it does not exist.
        name: of the run; None: MLflow makes one up.
        uri: of the server or the folder; None: what MLflow reads in MLFLOW_TRACKING_URI, or its own default.
        iteration: where the run starts.

    Raises:
        ConfigError: MLflow is not installed, or there is no such server.
    """

    def __init__(self, folder: Path, experiment: str, name: str | None, uri: str | None, iteration: int) -> None:
        for variable, value in _PATIENCE.items():
            # The user's own values stay.
            os.environ.setdefault(variable, value)
        try:
            import mlflow
        except ImportError:
            raise ConfigError(
                f"--mlflow-experiment {experiment} needs MLflow: {pip_install('mlflow-skinny')}"
            ) from None
        self._mlflow, self._lost = mlflow, 0
        folder.mkdir(parents=True, exist_ok=True)
        id_file = folder / "mlflow_run_id"
        # A run from the start is a new one, whatever lies in the folder.
        known = id_file.read_text().strip() if iteration > 0 and id_file.exists() else None
        try:
            self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
            self._run = self._continued(known, experiment, name) if known else self._begun(experiment, name)
        except Exception as error:  # of whichever library reaches the server
            raise ConfigError(f"--mlflow-experiment {experiment}: {_in_one_line(error)}") from None
        id_file.write_text(self._run + "\n")

    def _begun(self, experiment: str, name: str | None) -> str:
        """The id of a new run."""
        found = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if found is None else found.experiment_id
        return str(self._client.create_run(number, run_name=name).info.run_id)

    def _continued(self, run: str, experiment: str, name: str | None) -> str:
        # Set again: the earlier start has ended the run as failed or finished.
        self._client.update_run(run, status="RUNNING")
        info = self._client.get_run(run).info
        own = self._client.get_experiment(info.experiment_id).name
        if own != experiment or name not in (None, info.run_name):
            print(f"note: --mlflow-experiment: the run continues as {info.run_name} of {own}", file=sys.stderr)
        return run

    def start(self, record: Mapping[str, Any]) -> None:
        """Parameters cannot change: where a resume has other settings, these are tags ``changed.NAME``."""
        settings = {name: as_text(value) for name, value in record["settings"].items()}
        tags = {key: value if isinstance(value, str) else json.dumps(value) for key, value in record.items()}
        tags = {f"smp.{key}": value for key, value in tags.items() if key != "settings"}
        # MLflow refuses a parameter with another value.
        known = self._client.get_run(self._run).data.params
        tags |= {f"changed.{name}": value for name, value in settings.items() if known.get(name, value) != value}
        entities = self._mlflow.entities
        for new in _some([entities.Param(name, value) for name, value in settings.items() if name not in known]):
            self._client.log_batch(self._run, params=new)
        for new in _some([entities.RunTag(name, value) for name, value in tags.items()]):
            self._client.log_batch(self._run, tags=new)

    def log(self, iteration: int, scalars: Mapping[str, float]) -> None:
        # Counted, not sent: a server that does not answer would cost a timeout at every line.
        if self._lost:
            self._lost += 1
            return
        metric, now = self._mlflow.entities.Metric, round(time.time() * 1000)
        batch = [metric(metric_name(name), value, now, iteration) for name, value in scalars.items()]
        try:
            self._client.log_batch(self._run, metrics=batch)
        except Exception as error:
            why = _in_one_line(error)
            print(f"WARNING: MLflow lacks iteration {iteration} and what follows: {why}", file=sys.stderr)
            self._lost = 1

    def table(self, iteration: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log rows as an artifact, one file for each iteration."""
        text = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
        try:
            self._client.log_text(self._run, text, f"completions/{iteration}.jsonl")
        except Exception as error:
            print(f"WARNING: MLflow lacks completions of iteration {iteration}: {_in_one_line(error)}", file=sys.stderr)

    def close(self, failed: bool = False) -> None:
        if self._lost:
            print(f"WARNING: MLflow lacks {self._lost} records, which metrics.jsonl has", file=sys.stderr)
        try:
            self._client.set_terminated(self._run, status="FAILED" if failed else "FINISHED")
        except Exception as error:
            print(f"WARNING: MLflow was not told of the end of the run: {_in_one_line(error)}", file=sys.stderr)


def metric_name(name: str) -> str:
    """A name that MLflow takes: ``peak memory (GB)`` is ``peak memory GB``."""
    return _NOT_IN_NAMES.sub("", name)


def _some(entries: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (entries[i : i + _AT_ONCE] for i in range(0, len(entries), _AT_ONCE))


def _in_one_line(error: Exception) -> str:
    return str(without_credentials(" ".join(str(error).split()))) or type(error).__name__
