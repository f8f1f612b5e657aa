"""Words of a command line: Hydra's grammar, and texts that arrive as they were typed."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smp.config import ConfigError
from smp.config.command_line.cli import read_yaml
from smp.launch.backends import in_sagemaker
from smp.launch.cli import main, prepare
from smp.launch.compose import compose
from smp.launch.overrides import read_value, values
from smp.launch.yaml_text import load_text

DEBUG = "recipes=laptop/debug"
CLUSTERS = {
    "local": ["cluster=local"],
    "slurm": ["cluster=slurm"],
    "k8s": ["cluster=k8s", "container=i", "cluster.persistent_volume_claims.0={claimName:fsx,mountPath:/fsx}"],
    "sm_jobs": [
        "cluster=sm_jobs",
        "container=i",
        "instance_type=p5.48xlarge",
        "cluster.sm_jobs_config.role=arn:aws:iam::123456789012:role/training",
        "cluster.sm_jobs_config.output_path=s3://bucket/out",
    ],
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", ""), ("1_000", 1000), ("007", "007"), ("1.10", 1.1), (".5", 0.5), ("1e-4", 1e-4), ("-.inf", "-.inf"),
        ("on", "on"), ("TRUE", True), ("NULL", None), ("5:30", "5:30"), ("10-20", "10-20"), ("  a b ", "a b"),
        ("[]", []), ("[a,1, [b]]", ["a", 1, ["b"]]), ("{a:b, c : {d:1.5}}", {"a": "b", "c": {"d": 1.5}}),
        ("[{claimName:fsx,mountPath:/data}]", [{"claimName": "fsx", "mountPath": "/data"}]),
        ("'a, b'", "a, b"), (r'"x\"y"', 'x"y'), (r"'a\\'", "a\\"), (r"'\\n'", r"\\n"), (r"a\,b\=c\ ", "a,b=c "),
        ("''", ""), (r"\\", "\\"), ("${x.y}/z", "${x.y}/z"), ("['x','${a:b,c}']", ["x", "${a:b,c}"]), ("s3://b/c?x", "s3://b/c?x"),
    ],
)  # fmt: skip
def test_a_value_is_what_hydra_reads(text: str, value: Any) -> None:
    """Of hydra-core 1.3.8, which cannot be installed with what else is tested here."""
    assert values(read_value(text)) == value and type(values(read_value(text))) is type(value)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("recipes.lr=1e-4,1e-3", "sweep"),
        ("recipes.lr=choice(1,2)", "choice(...) is a sweep"),
        ("recipes.lr=range(1,3)", "range(...) is a sweep"),
        ("recipes=a,b", "that is a sweep"),
        ("-m", "-m: there are no sweeps"),
        ("--config-name=x", "recipes=FILE.yaml"),
        ("hydra.run.dir=/x", "base_results_dir"),
        ("git.token=x", "credential helper"),
        ("+git.entry_script=x.py", "recipes.training_cfg.entry_script"),
        ("+recipes@x=y", "no groups"),
        ("~recipes.nothing", "there is no such key to remove"),
        ("~recipes.train_iters=3", "it is 20 and is not removed"),
        ("recipes.seq_length.x=1", "recipes.seq_length is 128 and has no keys"),
        ("cluster.srun_args.2=x", "is a list of 0"),
        ("cluster.srun_args=[a", "expected , or ]"),
        ("cluster.srun_args=[a,,b]", "a value is missing"),
        ("cluster.requeue=off", "cluster.requeue: expected true or false, got 'off'"),
        ("trainer.max_steps=20", "did you mean recipes.trainer.max_steps?"),
        ("recipe.lr=1", "there is no such key in /"),
        ("+recipe.lr=1", "there is no such key: did you mean recipes?"),
        ("+clusters.partition=p", "there is no such key: did you mean cluster?"),
        ("+training_config.x=1", "did you mean recipes.training_config.x?"),
        ("dryrun=true", "did you mean dry_run?"),
        ("dry_run=yes", "dry_run: expected true or false, got 'yes'"),
    ],
)
def test_what_cannot_be_done_is_one_line_with_the_word(
    word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare([DEBUG, "cluster=slurm", word])
    line = str(caught.value)
    assert main([word, DEBUG, "cluster=slurm"]) == 2 and capsys.readouterr().err == f"error: {line}\n"
    assert message in line and word.lstrip("+~").partition("=")[0] in line and "\n" not in line


def test_lists_are_changed_by_index_and_keys_are_removed() -> None:
    words = ["+cluster.container_mounts.0=/fsx:/fsx", "cluster.container_mounts.1=/b", "~recipes.vocab_size"]
    words += ["++cluster.slurm_docker_cfg.docker_args=[a]", "cluster.slurm_docker_cfg={post_launch_commands:[b]}"]
    tree = compose([DEBUG, "cluster_type=slurm", *words]).tree
    assert tree["cluster"]["container_mounts"] == ["/fsx:/fsx", "/b"] and "vocab_size" not in tree["recipes"]
    assert tree["cluster"]["slurm_docker_cfg"] == {"docker_args": ["a"], "post_launch_commands": ["b"]}


def test_where_no_cluster_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compose([DEBUG]).backend == "local"
    assert compose([DEBUG, "recipes.trainer.num_nodes=2"]).backend == "slurm"
    assert compose([DEBUG, "container=x.sqsh"]).backend == "slurm"
    assert compose([DEBUG, "cluster.cluster_type=k8s"]).backend == "k8s"
    (tmp_path / "recipes_collection").mkdir()
    text = "defaults: [_self_, {cluster: k8s}]\nhydra: {run: {dir: .}}\ncluster_type: k8s\nbase_results_dir: null\n"
    (tmp_path / "recipes_collection/config.yaml").write_text(
        text + "git: {token: null, use_default: true}\ndebug: false\n"
    )
    monkeypatch.chdir(tmp_path)
    assert compose([DEBUG]).backend == "k8s" and compose([DEBUG]).tree["base_results_dir"] == "results"
    assert compose([DEBUG, "cluster_type=slurm"]).backend == "slurm"
    tree = compose([DEBUG, "cluster.cluster_type=slurm", "cluster.instance_type=ml.p5.48xlarge"]).tree
    assert tree["instance_type"] == "ml.p5.48xlarge" and not {"cluster_type", "instance_type"} & tree["cluster"].keys()


OVERRIDES = [
    ("one-gpu/llama3_8b_seq4k_lora", "recipes.model.peft.rank=64", {"lora_rank": 64}),
    ("one-gpu/llama3_8b_seq4k_lora", "recipes.model.data.train_dir=007", {"data_path": "007"}),
    ("one-gpu/llama3_8b_seq4k_lora", "recipes.model.peft.peft_type=qlora_4bit", {"load_in_4bit": True}),
    ("one-gpu/llama3_2_1b_seq4k_pretrain", "recipes.trainer.max_steps=20", {"model": "llama3.2-1b", "train_iters": 20}),
    ("one-gpu/llama3_2_1b_seq4k_pretrain", "recipes.exp_manager.exp_dir=/fsx", {"save": "/fsx/checkpoints/"}),
    ("one-gpu/llama3_2_1b_seq4k_pretrain", "recipes.model.optim.lr=2e-4", {"lr": 2e-4}),
    ("one-gpu/llama3_2_1b_seq4k_pretrain", "recipes.model.num_hidden_layers=2", {"num_layers": 2}),
    ("training/mixtral/hf_mixtral_8x7b_seq8k_gpu_p5x16_pretrain", "recipes.model.shard_degree=16",
     {"hybrid_shard_degree": 16, "num_experts": None}),
    ("training/mixtral/hf_mixtral_8x7b_seq8k_gpu_p5x16_pretrain",
     "recipes.exp_manager.checkpoint_callback_params.save_top_k=5", {"keep_last_k": 5, "save_interval": 500}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "word", "expected"), OVERRIDES)
def test_keys_of_hyperpod_on_a_recipe_of_this_project(name: str, word: str, expected: dict[str, Any]) -> None:
    before, after = (prepare([f"recipes={name}", "cluster=slurm", *words])[0].recipe.settings for words in ([], [word]))
    assert {key: after.get(key) for key in expected} == expected
    assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} <= expected.keys()


def arrived(cluster: str, words: list[str]) -> dict[str, Any]:
    """What a job of a back-end is given: its variables, its settings, the words of its script."""
    _, files = prepare([*CLUSTERS[cluster], *words, "base_results_dir=/fsx"])
    if cluster == "sm_jobs":
        request = json.loads(files["request.json"])
        given = in_sagemaker.hyper_parameters({"SM_HPS": json.dumps(request["HyperParameters"])}, Path())
        script = json.loads(given["smp_script"]) if "smp_script" in given else []
        return {"V": request["Environment"].get("V"), "exp": given.get("wandb_exp_name"), "script": script}
    if cluster == "k8s":
        files = load_text(files["manifest.yaml"].split("---\n")[0])["data"]
    lines = files["train.sh"].split("\n")
    start = next((i for i, line in enumerate(lines) if line.startswith("export V=")), len(lines))
    run = "\n".join(lines[start : next(i for i, line in enumerate(lines) if line.startswith("exec"))])
    told = subprocess.run(["bash", "-c", run.partition("\ncd ")[0] + '\nprintf %s "${V-unset}"'], capture_output=True)
    last = files["train.sh"].partition("--nproc-per-node")[2].partition("\\\n")[2].strip()
    return {"V": told.stdout.decode(), "exp": files.get("settings.yaml"), "script": last}


TEXTS = st.text(st.sampled_from("abc019_.:-#'\"\\[]{}(),=%&*!?@~`<>|;+/ é"), min_size=1, max_size=12)


def check_text(text: str, tmp_path: Path) -> None:
    """A text behind +env_vars.V=, a setting and a script's argument is what the job of every back-end sees."""
    quoted = "'" + text.replace("\\'", "\\\\\\'").replace("'", "\\'") + "'" if text.strip()[:1] in "'\"" else text
    if text[:1] in "'\"" or text.lower() == "null" or "${" in text or text.endswith("\\"):
        return  # quotes around a text, and what has a meaning in every text
    file = tmp_path / "s.yaml"
    file.write_text("training_cfg: {entry_script: t.py, run: {name: x}}\n")
    for cluster in CLUSTERS:
        got = arrived(
            cluster, [DEBUG, f"+env_vars.V={quoted}", f"+recipes.wandb_exp_name={quoted}", "+recipes.wandb_project=p"]
        )
        assert got["V"] == text, cluster
        if cluster == "sm_jobs":
            assert got["exp"] == text
        else:
            (tmp_path / "settings.yaml").write_text(got["exp"])
            assert read_yaml(str(tmp_path / "settings.yaml"))["wandb_exp_name"] == text
        words = arrived(cluster, [f"recipes={file}", "+env_vars.V=x", "recipes.training_cfg.script_args.0=" + quoted])[
            "script"
        ]
        assert (words if cluster == "sm_jobs" else shlex.split(words)) == ["t.py", text], cluster


@settings(max_examples=6, suppress_health_check=list(HealthCheck), deadline=None)
@given(TEXTS)
def test_random_texts_arrive(tmp_path: Path, text: str) -> None:
    check_text(text, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=2000, suppress_health_check=list(HealthCheck), deadline=None, database=None)
@given(TEXTS)
def test_two_thousand_random_texts_arrive(tmp_path: Path, text: str) -> None:
    check_text(text, tmp_path)


@pytest.mark.parametrize(
    "text", ["00123", "on", "a # b", "2024_10", "1.10", "#x", "007", "yes", "True", "~", "1e5", "[x", "a,b"]
)
def test_texts_that_look_like_something_else_arrive(text: str, tmp_path: Path) -> None:
    check_text(text, tmp_path)


def test_texts_of_files_arrive(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "training_cfg: {entry_script: t.py, script_args: [{--v: 1.10}, {--id: 007}, {--use: yes}], "
        "run: {name: 2024_10}}\n"
    )
    assert "t.py --v 1.10 --id 007 --use yes" in arrived("slurm", [f"recipes={tmp_path}/s.yaml"])["script"]
    _, files = prepare(
        [f"recipes={tmp_path}/s.yaml", "cluster=slurm", "+cluster.account=00123", "+cluster.comment=true"]
    )
    assert "#SBATCH --account=00123\n" in files["submit.sbatch"] and "--comment=true\n" in files["submit.sbatch"]
    assert "--job-name=smp-2024-10\n" in files["submit.sbatch"]


def test_a_recipe_for_trainium_is_refused_by_that_word(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("run: {name: x, model_type: neuron-hf}\nname: hf_llama\ntrainer: {devices: 32}\n")
    for word in (f"recipes={tmp_path}/t.yaml", "recipes=training/llama/hf_llama3_8b_seq8k_trn1x4_pretrain"):
        with pytest.raises(ConfigError, match="Trainium"):
            prepare([word, "cluster=slurm"])
    with pytest.raises(ConfigError, match="instance_type: .*Trainium"):
        prepare([DEBUG, "instance_type=trn1.32xlarge"])
