"""What two operators take around a pod: the schema of their custom resources, but for the pod's template.

Fields, types and choices are those of kubeflow.org/v1 ``pytorchjobs`` and sagemaker.amazonaws.com/v1
``hyperpodpytorchjobs``. An API server drops a field that it does not know; here it is an error.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
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
