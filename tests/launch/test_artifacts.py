"""Artifacts of every back-end, compared with files, and with what reads them: Kubernetes' API, boto3 and moto, bash.

``python -m tests.launch.test_artifacts`` writes the files anew.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smp.config import ConfigError
from smp.launch.backends import in_sagemaker, sm_jobs
from smp.launch.backends.backend import write_artifacts
from smp.launch.cli import main, prepare
from smp.launch.job import Job, to_yaml
from smp.launch.secrets import is_private, is_secret, without_secrets
from smp.launch.yaml_text import load_text
from smp.training.reporting.console import log_line, short_line
from smp.training.reporting.goodput import Account, describe
from tests.launch.operators import OPERATORS, definition
from tests.programs import run_program
from tests.training.test_metrics import CONFIG, RECORD

GOLDEN = Path(__file__).parent / "golden"
ROLE = "arn:aws:iam::123456789012:role/training"
RECIPES = {
    "pretrain": ["recipes=training/llama/hf_llama3_8b_seq8k_gpu_p5x16_pretrain", "recipes.data_path=/fsx/corpus"],
    "lora": [
        "recipes=fine-tuning/llama/hf_llama3_70b_seq8k_gpu_lora",
        "recipes.load=/fsx/llama",
        "recipes.data_path=/fsx/samples.jsonl",
    ],
    "custom": ["recipes=tests/launch/golden/custom.yaml"],
}
BACKENDS = {
    "local": ["cluster=local", "recipes.trainer.num_nodes=1"],
    "slurm": ["cluster=slurm", "instance_type=p5.48xlarge", "+cluster.partition=gpu", "cluster.srun_args=[--mpi=none]"],
    "slurm-pyxis": ["cluster=slurm", "container=/fsx/smp.sqsh", "cluster.container_mounts=[/scratch]"],
    "slurm-docker": ["cluster=slurm", "container=smp:1", "cluster.slurm_docker_cfg.docker_args=[--runtime=nvidia]"],
    "k8s": [
        "cluster=k8s",
        "container=smp:1",
        "instance_type=ml.p5.48xlarge",
        "cluster.persistent_volume_claims=[{claimName: fsx, mountPath: /fsx}]",
        "cluster.label_selector={required: {pool: [gpu]}, preferred: {zone: [a, b]}, weights: [10]}",
        "cluster.queue_name=research",
    ],
    "sm_jobs": [
        "cluster=sm_jobs",
        "container=123456789012.dkr.ecr.us-east-1.amazonaws.com/smp:1",
        "instance_type=ml.p5.48xlarge",
        f"cluster.sm_jobs_config.role={ROLE}",
        "cluster.sm_jobs_config.output_path=s3://bucket/out",
        "cluster.sm_jobs_config.inputs.s3.train=s3://bucket/train",
        "cluster.sm_jobs_config.wait=false",
        "cluster.sm_jobs_config.region=us-east-1",
    ],
}
SKIPPED = ("supervise.py", "recipe.yaml", "command.txt", "notes.txt")
"""Copies of what is elsewhere."""
CODE = Path(__file__).parents[2]


def artifacts(recipe: str, backend: str, *more: str) -> dict[str, str]:
    words = [*RECIPES[recipe], *BACKENDS[backend], "base_results_dir=/fsx/results", "python=python3", *more]
    if recipe == "custom":
        words = [word for word in words if not word.startswith("recipes.trainer")]
    if backend == "sm_jobs":
        words.remove("python=python3")
    if backend == "local":
        words += {"custom": ["recipes.training_cfg.run.nodes=1"], "pretrain": ["recipes.hybrid_shard_degree=8"]}.get(
            recipe, []
        )
    _, found = prepare(words)
    return {name: text.replace(str(CODE), "/code") for name, text in found.items() if name not in SKIPPED}


CASES = [(recipe, backend) for backend in BACKENDS for recipe in RECIPES]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CODE)


@pytest.mark.parametrize(("recipe", "backend"), CASES)
def test_artifacts_are_those_of_the_files(recipe: str, backend: str) -> None:
    folder = GOLDEN / backend / recipe
    expected = {path.name: path.read_text() for path in folder.iterdir()}
    assert artifacts(recipe, backend) == expected, "python -m tests.launch.test_artifacts writes them anew"


@pytest.mark.parametrize(("recipe", "backend"), CASES)
def test_scripts_are_scripts(recipe: str, backend: str, tmp_path: Path) -> None:
    for name, text in artifacts(recipe, backend).items():
        if name.endswith((".sh", ".sbatch")):
            (tmp_path / name).write_text(text)
            subprocess.run(["bash", "-n", str(tmp_path / name)], check=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_folder_with_a_line_break_is_refused(backend: str) -> None:
    with pytest.raises(ConfigError, match="base_results_dir: .*line breaks"):
        artifacts("custom", backend, "base_results_dir=/fsx/a\nb")


def test_sbatch_fills_in_nothing_of_the_folder() -> None:
    script = artifacts("pretrain", "slurm", "base_results_dir=/fsx/90%j it's")["submit.sbatch"]
    output = next(line for line in script.splitlines() if line.startswith("#SBATCH --output="))
    assert shlex.split(output.partition("=")[2])[0].startswith("/fsx/90%%j it's/")
    with pytest.raises(ConfigError, match="backslash"):
        artifacts("pretrain", "slurm", "base_results_dir='/fsx/a\\b'")


def test_values_of_the_environment_are_no_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    value = f'"$(touch {tmp_path}/ran)" }}`id` \' $HOME'
    monkeypatch.setattr(Job, "defaults", property(lambda job: {"OF_A_TABLE": value}))
    monkeypatch.setattr(Job, "environment", property(lambda job: {"OF_A_USER": value}))
    lines = [line for line in artifacts("pretrain", "slurm")["train.sh"].splitlines() if "OF_A_" in line]
    shown = ["bash", "-c", "\n".join([*lines, 'printf "%s\\n" "$OF_A_TABLE" "$OF_A_USER"'])]
    assert subprocess.run(shown, capture_output=True, text=True, check=True).stdout == f"{value}\n{value}\n"
    assert not (tmp_path / "ran").exists()
    own = {**os.environ, "OF_A_TABLE": "of the node"}
    assert subprocess.run(shown, capture_output=True, text=True, env=own).stdout == f"of the node\n{value}\n"


KINDS = {"ConfigMap": "V1ConfigMap", "Service": "V1Service", "Job": "V1Job"}


@pytest.mark.parametrize("kind", ["Job", "PyTorchJob", "HyperPodPyTorchJob"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_manifests_are_objects_of_kubernetes(recipe: str, kind: str) -> None:
    """By the models of its client, which refuse what the API does not know, and by the schema of the operators."""
    models = pytest.importorskip("kubernetes.client.models")
    jsonschema = pytest.importorskip("jsonschema")
    text = artifacts(recipe, "k8s", f"cluster.kind={kind}")["manifest.yaml"]
    for manifest in map(load_text, text.split("---\n")):
        if manifest["kind"] in KINDS:
            getattr(models, KINDS[manifest["kind"]]).model_validate(manifest)
            continue
        jsonschema.validate(manifest, OPERATORS[kind])
        spec = manifest["spec"]
        replicas = spec.get("replicaSpecs") or list(spec["pytorchReplicaSpecs"].values())
        for replica in replicas:
            models.V1PodTemplateSpec.model_validate(replica["template"])
        assert sum(replica["replicas"] for replica in replicas) == (16 if recipe == "pretrain" else 2)


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_manifests_are_what_the_operators_define(recipe: str, kind: str) -> None:
    """By their own CustomResourceDefinitions, whole."""
    jsonschema = pytest.importorskip("jsonschema")
    schema, missing = definition(kind)
    if schema is None:
        pytest.skip(missing)
    text = artifacts(recipe, "k8s", f"cluster.kind={kind}", "cluster.cleanPodPolicy=Running")["manifest.yaml"]
    (manifest,) = (found for found in map(load_text, text.split("---\n")) if found["kind"] == kind)
    jsonschema.validate(manifest, schema)
    manifest["spec"]["nothing"] = 1
    with pytest.raises(jsonschema.ValidationError, match="nothing"):
        jsonschema.validate(manifest, schema)


def test_those_models_refuse_what_is_wrong() -> None:
    models = pytest.importorskip("kubernetes.client.models")
    job = load_text(artifacts("lora", "k8s")["manifest.yaml"].split("---\n")[2])
    job["spec"]["template"]["spec"]["containers"][0]["imagePolicy"] = "Always"
    with pytest.raises(ValueError, match="imagePolicy"):
        models.V1Job.model_validate(job)


@pytest.mark.parametrize("kind", OPERATORS)
def test_a_field_that_an_operator_would_drop_is_an_error(kind: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    text = artifacts("lora", "k8s", f"cluster.kind={kind}", "cluster.cleanPodPolicy=Running")["manifest.yaml"]
    manifest = load_text(text.split("---\n")[1])
    jsonschema.validate(manifest, OPERATORS[kind])
    other = {"PyTorchJob": "jobMaxRetryCount", "HyperPodPyTorchJob": "backoffLimit"}[kind]
    for wrong in ({other: 3}, {"cleanPodPolicy": "Sometimes"}):
        spec = manifest["spec"] | {"runPolicy": manifest["spec"]["runPolicy"] | wrong}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(manifest | {"spec": spec}, OPERATORS[kind])


@pytest.mark.parametrize("kind", ["Job", "PyTorchJob"])
def test_each_pod_has_all_tries(kind: str) -> None:
    """One lost process ends the pods of all nodes, and both count restarts of all pods together."""
    text = artifacts("lora", "k8s", f"cluster.kind={kind}", "max_tries=5", "recipes.trainer.num_nodes=4")
    spec = load_text(text["manifest.yaml"].split("---\n")[-1])["spec"]
    assert (spec if kind == "Job" else spec["runPolicy"])["backoffLimit"] == 20


def test_pods_of_a_failed_pytorchjob_go() -> None:
    """With the operator's own None their restarts would go on after max_tries."""
    words = ("lora", "k8s", "cluster.kind=PyTorchJob")
    assert "cleanPodPolicy: Running" in artifacts(*words)["manifest.yaml"]
    assert "cleanPodPolicy: None" in artifacts(*words, "cluster.cleanPodPolicy=None")["manifest.yaml"]
    never = [*RECIPES["lora"], *BACKENDS["k8s"], "base_results_dir=/fsx", words[2], "cluster.restartPolicy=Never"]
    assert "max_tries: with cluster.restartPolicy=Never no pod starts again" in prepare(never)[1]["notes.txt"]
    assert "ExitCode" in artifacts("custom", *words[1:], "cluster.restartPolicy=ExitCode")["manifest.yaml"]


def test_pods_ask_for_the_network_of_their_machine_and_for_no_privilege() -> None:
    text = artifacts("lora", "k8s")["manifest.yaml"]
    assert "vpc.amazonaws.com/efa: '32'" in text and "privileged" not in text and "IPC_LOCK" in text
    assert "privileged: true" in artifacts("lora", "k8s", "cluster.privileged=true")["manifest.yaml"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.persistent_volume_claims=[]"], "base_results_dir: /fsx/results/llama-70b-8k-lora is on none"),
        (["cluster.pullPolicy=Sometimes"], "cluster.pullPolicy"),
        (["cluster.kind=Pod"], "cluster.kind"),
        (["cluster.kind=PyTorchJob", "cluster.restartPolicy=onfailure"], "onfailure is none of OnFailure, Never"),
        (["cluster.kind=PyTorchJob", "cluster.restartPolicy=Always"], "Always starts a training again that has ended"),
        (["cluster.kind=PyTorchJob", "cluster.restartPolicy=ExitCode"], "ExitCode takes the code of a run that is to"),
        (
            ["cluster.kind=PyTorchJob", "cluster.cleanPodPolicy=all"],
            "cleanPodPolicy: all is none of All, Running, None",
        ),
        (
            ["cluster.kind=PyTorchJob", "cluster.use_hyperpod_pytorch_job=true"],
            "use_hyperpod_pytorch_job: true contradicts cluster.kind=PyTorchJob",
        ),
        (
            ["cluster.kind=HyperPodPyTorchJob", "cluster.use_hyperpod_pytorch_job=false"],
            "use_hyperpod_pytorch_job: false contradicts cluster.kind=HyperPodPyTorchJob",
        ),
        (
            ["cluster.kind=Job", "+cluster.use_hyperpod_pytorch_job=false"],
            "use_hyperpod_pytorch_job: false contradicts cluster.kind=Job",
        ),
        (
            ["+cluster.use_hyperpod_pytorch_job=true", "cluster.kind=Job"],
            "use_hyperpod_pytorch_job: true contradicts cluster.kind=Job",
        ),
        (["cluster.privileged=no"], "cluster.privileged: expected true or false, got 'no'"),
        (["cluster.hostNetwork=off"], "cluster.hostNetwork: expected true or false, got 'off'"),
        (["+cluster.queue=x"], "did you mean queue_name?"),
        (["stages=[training,export]"], "stages"),
        (["instance_type=p9.48xlarge"], "how many GPUs has p9.48xlarge"),
        (["recipes.run.name=123"], "run.name: 123 must begin with a letter"),
        (["recipes.run.name=" + 62 * "a"], "has 62 letters"),
        (["cluster.namespace=A"], "cluster.namespace: 'A' must be of"),
        (["+cluster.custom_labels.team=a b"], "cluster.custom_labels.team: 'a b'"),
        (["+cluster.custom_labels.-=a"], "cannot be the name of a label"),
        (["cluster.shm_size=much"], "cluster.shm_size: 'much' is no amount"),
        (["cluster.persistent_volume_claims.1={claimName:b,mountPath:fsx}"], "mountPath /fsx is given twice"),
        (["cluster.persistent_volume_claims.1={claimName:b,mountPath:/config}"], "mountPath /config is given twice"),
        (["cluster.persistent_volume_claims.1={claimName:B,mountPath:/b}"], "claimName: 'B' must be of"),
        (["cluster.volumes=[{volumeName:shm,hostPath:/a,mountPath:/a}]"], "the volumeName shm is taken"),
        (["cluster.resources={limits:{memory:lots}}"], "cluster.resources.limits.memory: 'lots' is no amount"),
        (["base_results_dir=s3://b/x"], "base_results_dir: s3://b/x is no folder"),
        (["cluster.termination_seconds=soon"], "cluster.termination_seconds: 'soon' is not a number of seconds"),
        (["cluster.termination_seconds=-1"], "cluster.termination_seconds: -1 is not a number of seconds"),
        (["cluster.service_account_name=A_b"], "cluster.service_account_name: 'A_b' must be of"),
        (["cluster.priority_class_name=a b"], "cluster.priority_class_name: 'a b' must be of"),
        (["container=my image:1"], "container: 'my image:1' has blanks"),
        (["cluster.tolerations=[{key:a,operator:In}]"], "cluster.tolerations.operator: 'In' is none of Exists, Equal"),
        (["cluster.tolerations=[{key:a,operator:Exists,value:b}]"], "'b' does not go with the operator Exists"),
        (["cluster.tolerations=[{name:a}]"], "cluster.tolerations.name: .* must have some of key, value"),
        (["cluster.tolerations=[a]"], "cluster.tolerations: 'a' must have some of"),
        (["cluster.envFrom=[{secretRef:{name:A_B}}]"], "cluster.envFrom.secretRef.name: 'A_B' must be of"),
        (["cluster.envFrom=[{secret:{name:a}}]"], "cluster.envFrom: .* must have secretRef or configMapRef"),
        (["cluster.envFrom=[{secretRef:hub}]"], "cluster.envFrom.secretRef: 'hub' must have name"),
    ],
)
def test_what_kubernetes_cannot_do_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        artifacts("lora", "k8s", *words)


def pod_of(*words: str) -> Any:
    """The pod of a job of Kubernetes, which its models take."""
    models = pytest.importorskip("kubernetes.client.models")
    manifests = list(map(load_text, artifacts("lora", "k8s", *words)["manifest.yaml"].split("---\n")))
    models.V1Job.model_validate(manifests[-1])
    return manifests[-1]["spec"]["template"]["spec"]


def test_claims_are_volumes_of_their_own_whatever_their_names() -> None:
    claims = "[{claimName:fsx,mountPath:/fsx},{claimName:fsx,mountPath:/b},{claimName:config,mountPath:/c}]"
    pod = pod_of(f"cluster.persistent_volume_claims={claims}")
    assert [volume["name"] for volume in pod["volumes"]] == ["config", "shm", "fsx", "config-1"]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {"/config": "config", "/dev/shm": "shm", "/fsx": "fsx", "/b": "fsx", "/c": "config-1"}


def test_pods_have_what_a_cluster_asks_for() -> None:
    words = ["cluster.tolerations=[{key:gpu,operator:Exists}]", "cluster.envFrom.0.secretRef.name=hub"]
    pod = pod_of(*words, "cluster.resources={limits:{memory:1Ti},requests:{cpu:90}}")
    container = pod["containers"][0]
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert container["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert container["resources"]["limits"]["memory"] == "1Ti" and container["resources"]["requests"]["cpu"] == "90"
    for given, amounts in (
        ("{limits:{nvidia.com/gpu:null,vpc.amazonaws.com/efa:null}}", None),
        ("{requests:{nvidia.com/gpu:null,vpc.amazonaws.com/efa:4}}", {"vpc.amazonaws.com/efa": "4"}),
        ("{limits:{amd.com/gpu:8,nvidia.com/gpu:null}}", {"amd.com/gpu": "8", "vpc.amazonaws.com/efa": "32"}),
    ):
        found = pod_of(f"cluster.resources={given}")["containers"][0].get("resources")
        assert found == (amounts and {"limits": amounts, "requests": amounts})
    assert "resources" not in pod_of("+env_vars.CUDA_VISIBLE_DEVICES=")["containers"][0]  # a run on CPUs


TOKEN = "hf_AbCdEfGhIjKl"


@pytest.mark.parametrize("backend", ["local", "slurm", "k8s", "sm_jobs"])
def test_secrets_are_where_the_run_reads_them_alone(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in BACKENDS[backend] if "claims" not in word] + [f"base_results_dir={tmp_path}"]
    words += [f"cluster.persistent_volume_claims=[{{claimName:fsx,mountPath:{tmp_path}}}]"] * (backend == "k8s")
    words += ["recipes=laptop/debug", f"+env_vars.HF_TOKEN={TOKEN}", f"env_vars={{PGPASSWORD:{TOKEN}}}", "dry_run=true"]
    setup = [f"setup=['export MY_API_KEY={TOKEN}']"] * (backend == "local")
    assert main([*words, *setup]) == 0
    assert TOKEN not in capsys.readouterr().out
    folder = tmp_path / "debug"
    names = {"local": {"secrets.sh", "train.sh"}, "k8s": {"secret.yaml"}, "sm_jobs": {"secrets.json"}}
    having = {path.name for path in folder.iterdir() if TOKEN in path.read_text()}
    assert having == names.get(backend, {"secrets.sh"})
    assert all((folder / name).stat().st_mode & 0o077 == 0 for name in having)
    if backend in ("local", "slurm"):
        show = f'. {folder}/secrets.sh; printf %s "$HF_TOKEN$PGPASSWORD"'
        assert subprocess.run(["bash", "-c", show], capture_output=True, text=True).stdout == 2 * TOKEN
        assert '. "$files/secrets.sh"' in (folder / "train.sh").read_text()
    if backend == "k8s":
        assert load_text((folder / "secret.yaml").read_text())["stringData"]["HF_TOKEN"] == TOKEN
        assert "secretKeyRef" in (folder / "manifest.yaml").read_text()
    assert main([*words, f"+recipes.{TOKEN}.hf_token={TOKEN}", f"++recipes.hf_token={TOKEN}x"]) == 2
    assert f"{TOKEN}x" not in capsys.readouterr().err


FORM = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz12345678"


@pytest.mark.parametrize(
    "word",
    [
        *(
            f"+env_vars.{name}={TOKEN}"
            for name in ("DB_PASSWORD_RO", "SSHPASS", "HF_TOKENS", "accessToken", "MYSQL_PWD")
        ),
        f"+env_vars.MINE={FORM}",
        *(f"setup=['{line}']" for line in (f"wandb login {TOKEN}", f"x --token {TOKEN}", f"mine {FORM}")),
        f"setup=['curl -H \"Authorization: Bearer {TOKEN}\" https://x']",
        f"+cluster.annotations.api_token={TOKEN}",
        f"recipes.training_cfg.script_args=[{FORM}]",
    ],
)
def test_secrets_are_known_by_name_and_by_form(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend = "k8s" if "annotations" in word else "slurm"
    words = [word for word in BACKENDS[backend] if "claims" not in word] + [f"base_results_dir={tmp_path}"]
    words += [f"cluster.persistent_volume_claims=[{{claimName:fsx,mountPath:{tmp_path}}}]"] * (backend == "k8s")
    assert main([*RECIPES["custom" if "script_args" in word else "lora"], *words, word, "dry_run=true"]) == 0
    assert TOKEN not in capsys.readouterr().out
    [folder] = tmp_path.iterdir()
    having = [path for path in folder.iterdir() if TOKEN in path.read_text()]
    assert having and all(path.stat().st_mode & 0o077 == 0 for path in having)
    assert {path.name for path in having} <= {"secrets.sh", "train.sh", "manifest.yaml"}


def test_columns_of_data_are_no_secrets() -> None:
    for name in ("prompt_key", "recipes.data.messages_key", "--max-tokens", "num_tokens", "tokenizer", "topologyKey"):
        assert not is_secret(name)
    assert without_secrets({"prompt_key": "prompt", "note": "a prompt"}) == {"prompt_key": "prompt", "note": "a prompt"}
    assert not is_private("prompt_key: prompt\ntolerations:\n- key: gpu\n") and is_private("a:\n  api_key: abc\n")


@pytest.mark.parametrize("text", ["1e3", "1E-5", "+1e3", ".5e3", "0o17", "0x1F", "1_000", "y", "N", "on", ".inf", "1."])
def test_texts_stay_texts_for_kubectl(text: str) -> None:
    """Its reader takes more for numbers and truth values than PyYAML does."""
    written = to_yaml({text: [text]})
    assert written == f"'{text}':\n- '{text}'\n" and load_text(written) == {text: [text]}


def test_a_secret_argument_of_a_script_is_a_variable() -> None:
    found = artifacts("custom", "slurm", f"recipes.training_cfg.script_args=[--hf_token,{TOKEN}]")
    assert [name for name, text in found.items() if TOKEN in text] == ["secrets.sh"]
    assert '--hf_token "$SMP_ARGUMENT_' in found["train.sh"]


@pytest.mark.parametrize("kind", ["Job", "PyTorchJob"])
def test_a_job_of_kubernetes_is_submitted_watched_and_deleted(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a kubectl that writes down what it is told, and says of the job what the test says."""
    answers = (
        "case \"$*\" in *'-o name'*) cat name ;; *jsonpath*) cat conditions ;; *' logs '*) echo iteration 1 ;; esac"
    )
    (tmp_path / "kubectl").write_text(f'#!/bin/bash\ncd {tmp_path}\necho "$*" >> told\n{answers}\n')
    (tmp_path / "kubectl").chmod(0o755)
    (tmp_path / "name").write_text("")
    (tmp_path / "conditions").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    claim = f"cluster.persistent_volume_claims=[{{claimName: fsx, mountPath: {tmp_path}}}]"
    words = [*RECIPES["lora"], *BACKENDS["k8s"], claim, f"base_results_dir={tmp_path}", f"cluster.kind={kind}"]
    words.append("cluster.kube_context=lab")
    job = tmp_path / "llama-70b-8k-lora"
    resource = {"Job": "job.batch", "PyTorchJob": "pytorchjob.kubeflow.org"}[kind] + "/llama-70b-8k-lora"
    where = "--context lab --namespace default"
    started = [
        f"{where} delete {resource} --ignore-not-found --cascade=foreground",
        f"{where} apply -f {job}/manifest.yaml",
    ]

    def told() -> list[str]:
        lines = (tmp_path / "told").read_text().splitlines()
        (tmp_path / "told").unlink()
        return lines

    def says(code: int, *words: str) -> str:
        assert main(list(words)) == code
        return "".join(capfd.readouterr())

    says(0, *words)
    assert told() == started
    assert "not there any more" in says(0, "status", str(job))
    (tmp_path / "name").write_text(resource)  # it is there and has no condition yet
    assert "its job is waiting or running" in says(2, *words)
    assert "its job is waiting or running" in says(2, "resume", str(job))
    assert "waiting or running (" in says(0, "status", str(job))
    told()
    assert "iteration 1" in says(0, "logs", str(job), "--follow") and "iteration 1" in says(0, "logs", str(job))
    pods = "logs --selector app.kubernetes.io/name=llama-70b-8k-lora --tail=-1 --prefix"
    assert told() == [f"{where} {pods} --follow --max-log-requests=2", f"{where} {pods}"]
    says(0, "cancel", str(job))
    assert f"{where} delete {resource} --cascade=foreground --wait=false" in told()
    (tmp_path / "conditions").write_text("Complete\n")
    assert "Complete (" in says(0, "status", str(job))
    assert "its job is not running" in says(2, "cancel", str(job))
    told()
    says(0, "resume", str(job))
    assert told()[-2:] == started


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    moto = pytest.importorskip("moto")
    boto3 = pytest.importorskip("boto3")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with moto.mock_aws():
        yield boto3.client("sagemaker", region_name="us-east-1")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_request_arrives_at_sagemaker(recipe: str, aws: Any, tmp_path: Path) -> None:
    found = artifacts(recipe, "sm_jobs")
    write_artifacts(tmp_path, found)
    facts = json.loads(found["job.json"])
    code, more = sm_jobs.submit(tmp_path, facts)
    assert code == 0
    arrived = aws.describe_training_job(TrainingJobName=more["id"])
    request = json.loads(found["request.json"])
    for key in (
        "HyperParameters",
        "ResourceConfig",
        "InputDataConfig",
        "RoleArn",
        "StoppingCondition",
        "CheckpointConfig",
    ):
        given, got = request[key], arrived[key]
        assert got == given or {k: got[k] for k in given} == given, key
    image = request["AlgorithmSpecification"]["TrainingImage"]
    assert arrived["AlgorithmSpecification"]["TrainingImage"] == image
    assert more["id"] in sm_jobs.state(tmp_path, {**facts, **more})


def test_a_job_of_sagemaker_is_watched_stopped_and_resumed(
    aws: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import boto3

    words = [*RECIPES["pretrain"], *BACKENDS["sm_jobs"], f"base_results_dir={tmp_path}"]
    assert main(words) == 0
    job = tmp_path / "llama-8b-8k-16n"
    first = json.loads((job / "job.json").read_text())["id"]
    logs = boto3.client("logs", region_name="us-east-1")
    logs.create_log_group(logGroupName="/aws/sagemaker/TrainingJobs")
    capsys.readouterr()
    assert main(["logs", str(job)]) == 0 and "has written nothing yet" in capsys.readouterr().out
    for node in ("algo-1", "algo-2"):
        where = {"logGroupName": "/aws/sagemaker/TrainingJobs", "logStreamName": f"{first}/{node}-1700000000"}
        logs.create_log_stream(**where)
        events = [{"timestamp": int(time.time() * 1000), "message": f"iteration {i}"} for i in range(3)]
        logs.put_log_events(**where, logEvents=events)
    assert main(["logs", str(job), "--follow"]) == 0  # moto's jobs are complete at once
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"{node}-1700000000: iteration {i}" for node in ("algo-1", "algo-2") for i in range(3)]
    assert main(["status", str(job)]) == 0 and f"Completed ({first})" in capsys.readouterr().out
    time.sleep(1)  # the name of a job has the second in which it is submitted
    assert main(["resume", str(job)]) == 0
    second = json.loads((job / "job.json").read_text())["id"]
    places = [aws.describe_training_job(TrainingJobName=name)["CheckpointConfig"] for name in (first, second)]
    assert first != second and places[0] == places[1]
    call, stopped = sm_jobs._call, []

    def without_stop(facts: Any, action: str, *place: str, **words: Any) -> Any:  # moto does not have it
        return stopped.append(words) if action == "stop_training_job" else call(facts, action, *place, **words)

    monkeypatch.setattr(sm_jobs, "_call", without_stop)
    assert main(["cancel", str(job)]) == 0 and stopped == [{"TrainingJobName": second}]


def test_what_sagemaker_refuses_is_one_line(aws: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*RECIPES["pretrain"], *BACKENDS["sm_jobs"], f"base_results_dir={tmp_path}"]
    assert main([*words, "cluster.sm_jobs_config.role=me"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize("hosts", [["algo-1"], ["algo-1", "algo-2"]])
def test_a_container_of_sagemaker_runs_what_was_asked(hosts: list[str], tmp_path: Path) -> None:
    """Hyper-parameters come back as the same settings: from the file, and as the SDK and the toolkit write them."""
    request = json.loads(artifacts("pretrain", "sm_jobs")["request.json"])
    (tmp_path / "input/config").mkdir(parents=True)
    (tmp_path / "input/config/hyperparameters.json").write_text(json.dumps(request["HyperParameters"]))
    from_file = in_sagemaker.hyper_parameters({}, tmp_path)
    quoted = {name: json.dumps(value) for name, value in request["HyperParameters"].items()}
    given = json.dumps({**quoted, "mp_parameters": "{}", "sagemaker_program": '"x.py"'})
    from_sdk = in_sagemaker.hyper_parameters({"SM_HPS": given}, tmp_path)
    resources = {"current_host": hosts[-1], "hosts": hosts}
    words, text = in_sagemaker.command(from_file, resources, tmp_path)
    assert (words, text) == in_sagemaker.command(from_sdk, resources, tmp_path)
    (tmp_path / "settings.yaml").write_text(text)
    assert ("--standalone" in words) == (len(hosts) == 1)
    assert words[words.index("-m", words.index("torch.distributed.run")) + 1] == "pretrain_gpt"
    flags = ["--config", tmp_path / "settings.yaml", "--dry-run"]
    flags += ["--data-path", "none", "--global-batch-size", "none", "--hybrid-shard-degree", "1"]
    done = run_program(CODE / "pretrain_gpt.py", flags, tmp_path)
    assert "num_layers: 32" in done.stdout and "save: /opt/ml/checkpoints" in done.stdout, done.stderr


if __name__ == "__main__":
    os.chdir(CODE)
    for name, place in CASES:
        for file, written in artifacts(name, place).items():
            target = GOLDEN / place / name / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(written)


ONE_NODE = ("recipes.trainer.num_nodes=1", "recipes.hybrid_shard_degree=8")


def rules_of(*words: str) -> list[dict[str, Any]]:
    return rules_in(artifacts("pretrain", "k8s", "cluster.kind=HyperPodPyTorchJob", *ONE_NODE, *words))


def rules_in(files: dict[str, str]) -> list[dict[str, Any]]:
    manifests = files["manifest.yaml"].split("---\n")
    (job,) = [found for found in map(load_text, manifests) if found["kind"] == "HyperPodPyTorchJob"]
    return job["spec"]["runPolicy"].get("logMonitoringConfiguration", [])


def test_hyperpod_watches_the_lines_that_a_run_prints() -> None:
    """The patterns are those of the lines of both formats, and of the last one."""
    start, hang, slow = rules_of("cluster.log_monitoring.min_tokens_per_second=5000")
    assert start["expectedStartCutOffInSeconds"] == 3600 and hang["expectedRecurringFrequencyInSeconds"] == 1800
    record = {**RECORD, "goodput": 0.9}
    for line in (log_line(CONFIG, 120, record), short_line(CONFIG, 120, record)):
        for rule in (start, hang, slow):
            assert re.fullmatch(rule["logPattern"], line), line
        assert re.fullmatch(slow["logPattern"], line)[1] == "2000000"  # type: ignore[index]
    spent = Account(0.0, 0.0)
    assert re.fullmatch(hang["stopPattern"], describe(spent)) and not re.fullmatch(start["logPattern"], describe(spent))
    assert (slow["operator"], slow["metricThreshold"], slow["metricEvaluationDataPoints"]) == ("lt", 5000, 5)


@pytest.mark.parametrize(("nodes", "word", "noted"), [(2, "", True), (1, "", False), (2, "=null", False)])
def test_several_nodes_have_no_rules_for_only_the_first_prints_iterations(nodes: int, word: str, noted: bool) -> None:
    words = ["cluster.kind=HyperPodPyTorchJob", *(ONE_NODE if nodes == 1 else ())]
    words += [f"cluster.log_monitoring{word}"] if word else []
    _, files = prepare([*RECIPES["pretrain"], *BACKENDS["k8s"], "base_results_dir=/fsx/results", *words])
    assert bool(rules_in(files)) == (nodes == 1)
    assert ("cluster.log_monitoring: HyperPod's agent reads" in files.get("notes.txt", "")) == noted


def test_rules_can_be_left_out_and_are_checked() -> None:
    assert rules_of("cluster.log_monitoring=null") == []
    assert [rule["name"] for rule in rules_of("cluster.log_monitoring.start_seconds=null")] == ["Hang"]
    with pytest.raises(ConfigError, match="cluster.log_monitoring.hang_seconds: 0 is no number above 0"):
        rules_of("cluster.log_monitoring.hang_seconds=0")
