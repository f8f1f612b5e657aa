"""Kubernetes: a job is its manifest (``k8s_manifest``), and kubectl says and does the rest."""

from __future__ import annotations

import subprocess
from pathlib import Path

from smp.config import ConfigError
from smp.launch.backends.backend import ASKED, NOT_SUBMITTED, Backend, Facts, run, said
from smp.launch.backends.k8s_manifest import artifacts


def _words(facts: Facts, *words: str) -> list[str]:
    where = [*(["--context", facts["context"]] if facts["context"] else []), "--namespace", facts["namespace"]]
    return ["kubectl", *where, *words]


def _kubectl(facts: Facts, *words: str) -> str:
    return run(_words(facts, *words), needed_for="cluster=k8s")


def busy(folder: Path, facts: Facts) -> str | None:
    """What a job that has not ended does; a cancelled one ends when its pods are gone."""
    # A job whose object is gone has ended.
    if not facts.get("id") or not _there(facts):
        return None
    conditions = _conditions(facts)
    return None if {"Complete", "Failed", "Succeeded", "Completed"} & set(conditions) else "waiting or running"


def _there(facts: Facts) -> bool:
    return bool(_kubectl(facts, "get", facts["resource"], "-o", "name", "--ignore-not-found"))


def _conditions(facts: Facts) -> list[str]:
    path = "jsonpath={range .status.conditions[?(@.status=='True')]}{.type} {end}"
    return _kubectl(facts, "get", facts["resource"], "-o", path).split()


def submit(folder: Path, facts: Facts) -> tuple[int, Facts]:
    """kubectl apply. A job of the same name is deleted first, because a finished Job cannot be changed."""
    # foreground: returns only when its pods are gone, too.
    _kubectl(facts, "delete", facts["resource"], "--ignore-not-found", "--cascade=foreground")
    for name in ("secret.yaml", "manifest.yaml"):
        if (folder / name).is_file():
            print(_kubectl(facts, "apply", "-f", str(folder / name)))
    return 0, {"id": facts["resource"]}


def state(folder: Path, facts: Facts) -> str:
    """What Kubernetes says, and the run's status file where the job's folder is visible from here."""
    if not facts.get("id"):
        return NOT_SUBMITTED
    conditions = (", ".join(_conditions(facts)) or "waiting or running") if _there(facts) else "not there any more"
    return f"{conditions} ({facts['resource']}); the run says {said(folder)}"


def logs(folder: Path, facts: Facts, more: bool) -> int:
    """Show the logs of all pods, selected by label: kubectl does not know the pods of the operators' kinds."""
    # kubectl follows at most 5 pods by default.
    following = ["--follow", f"--max-log-requests={facts['nodes']}"] if more else []
    # --tail=-1: with a selector kubectl shows the last 10 lines only.
    words = [
        "logs",
        "--selector",
        facts["pods"],
        "--tail=-1",
        *(["--prefix"] if facts["nodes"] > 1 else []),
        *following,
    ]
    if more:
        return subprocess.call(_words(facts, *words))
    print(_kubectl(facts, *words))
    return 0


def cancel(folder: Path, facts: Facts) -> str:
    """Delete the job; its pods have cluster.termination_seconds to save. Until they are gone the name is taken, so
    resume cannot start others next to them."""
    if busy(folder, facts) is None:
        raise ConfigError(f"{folder}: its job is not running")
    _kubectl(facts, "delete", facts["resource"], "--cascade=foreground", "--wait=false")
    return ASKED


BACKEND = Backend(artifacts=artifacts, busy=busy, submit=submit, state=state, logs=logs, cancel=cancel)
