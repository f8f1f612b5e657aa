"""What two operators take around a pod: the schema of their custom resources, but for the pod's template.

Fields, types and choices are those of kubeflow.org/v1 ``pytorchjobs`` and sagemaker.amazonaws.com/v1
``hyperpodpytorchjobs``. An API server drops a field that it does not know; here it is an error. The operators' own
definitions, pods included, are read where ``SMP_CRDS`` names a folder of them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]
DEFINITIONS = {
    "PyTorchJob": "pytorchjobs.kubeflow.org",
    "HyperPodPyTorchJob": "hyperpodpytorchjobs.sagemaker.amazonaws.com",
}
"""By kind, the name of the custom resource's definition: ``kubectl get crd NAME -o yaml > NAME.yaml`` writes it."""
_INTEGER: Schema = {"type": "integer"}
_STRING: Schema = {"type": "string"}
_CLEAN: Schema = {"enum": ["All", "Running", "None"]}


def _object(required: str = "", **fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


def _resource(version: str, kind: str, spec: Schema) -> Schema:
    return _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=_object("name", name=_STRING, namespace=_STRING, labels={"type": "object"}, annotations={}),
        spec=spec,
    )


_POD: Schema = {"type": "object", "required": ["spec"]}
_KUBEFLOW_REPLICA = _object(
    replicas=_INTEGER,
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=_POD,
)
_LOG_RULE = _object(
    "name logPattern",
    name=_STRING,
    logPattern=_STRING,
    stopPattern=_STRING,
    expectedStartCutOffInSeconds=_INTEGER,
    expectedRecurringFrequencyInSeconds=_INTEGER,
    metricThreshold={"type": "number"},
    metricEvaluationDataPoints=_INTEGER,
    operator={"enum": ["gt", "gteq", "lt", "lteq", "eq"]},
    faultOnMatch={"type": "boolean"},
)
OPERATORS: dict[str, Schema] = {
    "PyTorchJob": _resource(
        "kubeflow.org/v1",
        "PyTorchJob",
        _object(
            "pytorchReplicaSpecs",
            nprocPerNode=_STRING,
            runPolicy=_object(
                activeDeadlineSeconds=_INTEGER,
                backoffLimit=_INTEGER,
                cleanPodPolicy=_CLEAN,
                suspend={"type": "boolean"},
                ttlSecondsAfterFinished=_INTEGER,
            ),
            pytorchReplicaSpecs=_object(Master=_KUBEFLOW_REPLICA, Worker=_KUBEFLOW_REPLICA),
        ),
    ),
    "HyperPodPyTorchJob": _resource(
        "sagemaker.amazonaws.com/v1",
        "HyperPodPyTorchJob",
        _object(
            nprocPerNode=_STRING,
            runPolicy=_object(
                activeDeadlineSeconds=_INTEGER,
                cleanPodPolicy=_CLEAN,
                jobMaxRetryCount=_INTEGER,
                logMonitoringConfiguration={"type": "array", "items": _LOG_RULE},
                suspend={"type": "boolean"},
                ttlSecondsAfterFinished=_INTEGER,
            ),
            replicaSpecs={
                "type": "array",
                "items": _object("name", name=_STRING, replicas=_INTEGER, spares=_INTEGER, template=_POD),
            },
        ),
    ),
}
"""By kind."""


def definition(kind: str) -> tuple[Schema | None, str]:
    """The schema of a kind's definition in the folder that SMP_CRDS names; or None, and why there is none."""
    folder, name = os.environ.get("SMP_CRDS"), DEFINITIONS[kind]
    if folder is None:
        return None, "SMP_CRDS names no folder of CustomResourceDefinitions"
    path = Path(folder) / f"{name}.yaml"
    if not path.is_file():
        return None, f"{path} is not there: kubectl get crd {name} -o yaml"
    # Not by the launcher's reader, whose limit of 10,000 values is for recipes: a definition with its pods has more.
    (version,) = (v for v in yaml.safe_load(path.read_text())["spec"]["versions"] if v["name"] == "v1")
    return closed(version["schema"]["openAPIV3Schema"]), ""


def closed(schema: Schema) -> Schema:
    """A definition's schema in which what an API server would drop is an error."""
    out = dict(schema)
    if "properties" in schema:
        out["properties"] = {name: closed(field) for name, field in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            out.setdefault("additionalProperties", False)
    for name in ("items", "additionalProperties"):
        if isinstance(out.get(name), dict):
            out[name] = closed(out[name])
    return out
