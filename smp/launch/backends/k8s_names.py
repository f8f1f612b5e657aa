"""Checks of what Kubernetes' API server refuses, before it is asked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from smp.config import ConfigError

# DNS labels, DNS subdomains, label values and quantities as Kubernetes' documentation defines them.
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_QUANTITY = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+|[numkMGTPE]|[KMGTPE]i)?")


def check_name(name: str, kind: str, nodes: int) -> None:
    """Raise ConfigError for a job name from which names of pods or the Service cannot be made."""
    last = {"Job": f"-{nodes - 1}", "HyperPodPyTorchJob": f"-pods-{nodes - 1}"}
    suffix = last.get(kind, f"-worker-{nodes - 2}" if nodes > 11 else "-master-0")
    # A pod's name becomes a label and a hostname, which have at most 63 characters.
    if len(name) + len(suffix) > 63:
        raise ConfigError(
            f"run.name: {name} has {len(name)} letters; its pods are called {name}{suffix}, and 63 is the most"
        )
    if not name[0].isalpha() and (nodes > 1 or kind == "PyTorchJob"):
        raise ConfigError(f"run.name: {name} must begin with a letter: it is the name of a Service with cluster=k8s")


def check_label(key: str, value: Any) -> str:
    """``value`` as a DNS label, such as a namespace's name."""
    if not _LABEL.fullmatch(str(value)) or len(str(value)) > 63:
        raise ConfigError(f"cluster.{key}: {value!r} must be of a-z, 0-9 and -, at most 63 of them")
    return str(value)


def check_subdomain(key: str, value: Any) -> str:
    """``value`` as the name of an object, such as a claim's."""
    if not _SUBDOMAIN.fullmatch(str(value)) or len(str(value)) > 253:
        raise ConfigError(f"cluster.{key}: {value!r} must be of a-z, 0-9, - and ., at most 253 of them")
    return str(value)


def check_labels(key: str, labels: Mapping[str, Any], values: bool = True) -> dict[str, str]:
    """Checked labels; or annotations, whose ``values`` may be anything."""
    for name, value in labels.items():
        # NAME or DNS-PREFIX/NAME: the rules of Kubernetes for keys of labels and annotations.
        prefix, slash, rest = name.rpartition("/")
        if not _VALUE.fullmatch(rest) or not 0 < len(rest) <= 63 or (slash and not _SUBDOMAIN.fullmatch(prefix)):
            raise ConfigError(f"cluster.{key}: {name!r} cannot be the name of a label")
        if isinstance(value, dict | list) or value is None:
            raise ConfigError(f"cluster.{key}.{name}: expected a text, got {value!r}")
        if values and (not _VALUE.fullmatch(str(value)) or len(str(value)) > 63):
            raise ConfigError(
                f"cluster.{key}.{name}: {value!r} must be of letters, digits, -, _ and ., at most 63 of them"
            )
    return {name: str(value) for name, value in labels.items()}


def check_quantity(key: str, value: Any) -> str:
    """A quantity, such as 64Gi."""
    if not _QUANTITY.fullmatch(str(value)):
        raise ConfigError(f"cluster.{key}: {value!r} is no amount, such as 4 or 64Gi")
    return str(value)


def check_tolerations(tolerations: Iterable[Any]) -> None:
    """Raise ConfigError for a toleration that no taint can match."""
    choices = {"operator": ("Exists", "Equal"), "effect": ("NoSchedule", "PreferNoSchedule", "NoExecute")}
    known = ("key", "value", "tolerationSeconds", *choices)
    for given in tolerations:
        if not isinstance(given, Mapping) or (unknown := [name for name in given if name not in known]):
            name = f".{unknown[0]}" if isinstance(given, Mapping) else ""
            raise ConfigError(f"cluster.tolerations{name}: {given!r} must have some of {', '.join(known)}")
        for name, allowed in choices.items():
            if given.get(name) not in (None, *allowed):
                raise ConfigError(f"cluster.tolerations.{name}: {given[name]!r} is none of {', '.join(allowed)}")
        # Kubernetes' own rule (core/v1 Toleration). Its API server would refuse the pod after the job is made.
        if given.get("operator") == "Exists" and given.get("value"):
            raise ConfigError(f"cluster.tolerations.value: {given['value']!r} does not go with the operator Exists")


def check_env_from(sources: Iterable[Any]) -> None:
    """Raise ConfigError for a source of variables other than a Secret or ConfigMap."""
    for source in sources:
        kinds = [name for name in ("secretRef", "configMapRef") if isinstance(source, Mapping) and name in source]
        if len(kinds) != 1 or set(source) - {*kinds, "prefix"}:
            raise ConfigError(f"cluster.envFrom: {source!r} must have secretRef or configMapRef, and may have prefix")
        named = source[kinds[0]]
        if not isinstance(named, Mapping) or set(named) - {"name", "optional"}:
            raise ConfigError(f"cluster.envFrom.{kinds[0]}: {named!r} must have name, and may have optional")
        check_subdomain(f"envFrom.{kinds[0]}.name", named.get("name"))


def termination_seconds(cluster: Mapping[str, Any]) -> int:
    """``cluster.termination_seconds``, checked."""
    value = cluster["termination_seconds"]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"cluster.termination_seconds: {value!r} is not a number of seconds")
    return value


def check_mounts(paths: Iterable[str]) -> None:
    """Raise ConfigError for a path that is mounted twice, or that cannot be a mount path."""
    seen: set[str] = set()
    for path in paths:
        if ":" in path or path == "/":
            raise ConfigError(f"cluster: mountPath {path} cannot be one")
        if path in seen:
            raise ConfigError(f"cluster: mountPath {path} is given twice, or is one of a job's own (/config, /dev/shm)")
        seen.add(path)


def volume_name(wanted: str, taken: Iterable[str]) -> str:
    """A free name for a volume: a claim's name may be taken, or have dots."""
    name = wanted if _LABEL.fullmatch(wanted) and len(wanted) <= 63 else "claim"
    # Numbered names stay below 63 characters.
    return next(n for n in [name, *(f"{name[:59]}-{i}" for i in range(1, 1000))] if n not in taken)
