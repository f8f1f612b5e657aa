"""Jobs of HyperPod's recipes are what the operators, Kubernetes' API and SageMaker's API define.

All that load of the folders of releases that SMP_HYPERPOD_RECIPES names, and one of them always.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from smp.launch.cli import prepare
from smp.launch.hyperpod import FeatureError
from smp.launch.yaml_text import load_text
from tests.launch.operators import OPERATORS
from tests.launch.test_artifacts import BACKENDS
from tests.launch.test_hyperpod_forms import LLMFT


def check(path: Path) -> None:
    """Raises an error that says what is wrong with a recipe's job anywhere."""
    place = [f"recipes={path}", "base_results_dir=/fsx/results"]
    for kind in OPERATORS:
        _, files = prepare([*place, *BACKENDS["k8s"], f"cluster.kind={kind}"])
        (manifest,) = (m for m in map(load_text, files["manifest.yaml"].split("---\n")) if m["kind"] == kind)
        check_manifest(manifest, kind)
    _, files = prepare([*place, *BACKENDS["sm_jobs"]])
    check_request(json.loads(files["request.json"]))
    _, files = prepare([*place, *BACKENDS["slurm"]])
    subprocess.run(["bash", "-n"], input=files["submit.sbatch"], text=True, check=True)


def check_manifest(manifest: dict[str, Any], kind: str) -> None:
    jsonschema, models = pytest.importorskip("jsonschema"), pytest.importorskip("kubernetes.client.models")
    jsonschema.validate(manifest, OPERATORS[kind])
    spec = manifest["spec"]
    for replica in spec.get("replicaSpecs") or spec["pytorchReplicaSpecs"].values():
        models.V1PodTemplateSpec.model_validate(replica["template"])


def check_request(request: dict[str, Any]) -> None:
    session, validate = pytest.importorskip("botocore.session"), pytest.importorskip("botocore.validate")
    model = session.get_session().get_service_model("sagemaker").operation_model("CreateTrainingJob")
    report = validate.ParamValidator().validate(request | {"TrainingJobName": "job"}, model.input_shape)
    assert not report.has_errors(), report.generate_report()


def test_jobs_of_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "llmft.yaml").write_text(LLMFT)
    check(tmp_path / "llmft.yaml")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    "SMP_HYPERPOD_RECIPES" not in os.environ, reason="SMP_HYPERPOD_RECIPES names no folders of releases"
)
def test_jobs_of_every_recipe_that_loads() -> None:
    checked = 0
    for folder in os.environ["SMP_HYPERPOD_RECIPES"].split(os.pathsep):
        for path in sorted((Path(folder) / "recipes_collection/recipes").rglob("*.yaml")):
            try:
                check(path)
            except FeatureError:
                continue
            checked += 1
    assert checked >= 300
