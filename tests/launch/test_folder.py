"""A job's folder that is there already: a job of another recipe does not get it, nor the checkpoints in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smp.config import ConfigError
from smp.launch.cli import describe, main, prepare
from tests.launch.test_hyperpod_forms import ARGS, GRPO, LLMFT

NAME = "recipes.run.name=llama-3-2-1b-instruct"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """AWS's recipes of one model have one name, whatever they do."""
    (tmp_path / "llmft_sft.yaml").write_text(LLMFT)
    (tmp_path / "llmft_dpo.yaml").write_text(LLMFT.replace("trainer_type: sft", "trainer_type: dpo"))
    return tmp_path


def dry(files: Path, recipe: str, *words: str) -> int:
    return main([f"recipes={recipe}", "cluster=slurm", f"base_results_dir={files}/results", "dry_run=true", *words])


def test_a_job_of_another_recipe_does_not_get_the_folder(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = files / "results" / "llama-3-2-1b-instruct"
    assert dry(files, f"{files}/llmft_sft.yaml", NAME) == 0
    kept = {path: path.read_bytes() for path in job.iterdir()}
    capsys.readouterr()
    assert dry(files, f"{files}/llmft_dpo.yaml", NAME) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"error: {job} has a job of another recipe, llmft_sft (sft) of {files}/llmft_sft.yaml, and "
    )
    assert f"this is llmft_dpo (dpo) of {files}/llmft_dpo.yaml: give another recipes.run.name" in error
    assert error.count("\n") == 1 and {path: path.read_bytes() for path in job.iterdir()} == kept
    assert dry(files, f"{files}/llmft_dpo.yaml", NAME + "-dpo") == 0
    assert dry(files, f"{files}/llmft_sft.yaml", NAME, ARGS + "trainer_type=dpo") == 2, "another objective"
    assert "llmft_sft (dpo)" in capsys.readouterr().err


def test_the_same_recipe_gets_its_folder_again(files: Path) -> None:
    """With other overrides, edited, or moved as it is."""
    assert dry(files, f"{files}/llmft_sft.yaml", NAME) == 0
    assert dry(files, f"{files}/llmft_sft.yaml", NAME, ARGS + "learning_rate=2e-5") == 0
    (files / "other").mkdir()
    (files / "other" / "llmft_sft.yaml").write_text(LLMFT)
    assert dry(files, f"{files}/other/llmft_sft.yaml", NAME) == 0
    (files / "other" / "llmft_sft.yaml").write_text(LLMFT.replace("max_epochs: 5", "max_epochs: 4"))
    assert dry(files, f"{files}/other/llmft_sft.yaml", NAME) == 0, "edited where it is"
    assert dry(files, f"{files}/llmft_sft.yaml", NAME) == 2, (
        "of that name, in another folder, and it says another thing"
    )
    origin = json.loads((files / "results" / "llama-3-2-1b-instruct" / "job.json").read_text())["origin"]
    assert (origin["recipe"], origin["objective"]) == ("llmft_sft", "sft")


def test_two_recipes_of_the_collection_are_two(tmp_path: Path) -> None:
    names = (
        "training/llama/hf_llama3_8b_seq16k_gpu_p5x16_pretrain",
        "training/llama/hf_llama3_8b_seq16k_gpu_p5x32_pretrain",
    )
    codes = [dry(tmp_path, name, "recipes.run.name=one") for name in (names[0], names[0], names[1], names[0])]
    assert codes == [0, 0, 2, 0]


def test_relative_paths_are_of_the_folder_that_they_are_typed_in(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node runs in the folder of the code, where a file of the same name would be trained on."""
    (files / "model").mkdir()
    (files / "rewards.py").write_text("")
    monkeypatch.chdir(files)
    words = [
        "recipes=llmft_sft.yaml",
        "base_results_dir=results",
        "recipes.training_config.datasets.val_data.file_path=v",
    ]
    data = ["+recipes.data_path=[0.5,'a b.jsonl',0.5,/fsx/b]", "+recipes.save=s3://bucket/run", "recipes.load=model"]
    found = prepare([*words, *data, "cluster=slurm"])[0].recipe.settings
    assert found["data_path"] == f"0.5 '{files}/a b.jsonl' 0.5 /fsx/b" and found["valid_data_path"] == f"{files}/v"
    assert (found["load"], found["save"]) == (f"{files}/model", "s3://bucket/run")
    hub = "recipes.training_config.model_config.model_name_or_path=Qwen/Qwen3-8B"
    assert prepare([*words, hub, "cluster=slurm"])[0].recipe.settings["load"] == "hub:Qwen/Qwen3-8B"
    (files / "grpo.yaml").write_text(GRPO)
    named = ["recipes=grpo.yaml", "base_results_dir=results", "+recipes.reward_funcs=[rewards.py:one,regex]"]
    assert prepare([*named, "cluster=slurm"])[0].recipe.settings["reward_funcs"] == f"{files}/rewards.py:one regex"
    inside = ["cluster=k8s", "container=IMAGE", "cluster.persistent_volume_claims=[{claimName: c, mountPath: /fsx}]"]
    pods = prepare(
        [*words, *inside, "base_results_dir=/fsx", "recipes.training_config.datasets.train_data.file_path=a"]
    )
    assert pods[0].recipe.settings["data_path"] == "a", "of a pod's own file system"
    cloned = prepare([*words, "cluster=slurm", "git.repo_url_or_path=https://host/code.git"])
    assert cloned[0].recipe.settings["valid_data_path"] == "v", "of the code that is cloned"


def test_what_sagemaker_needs_is_said_at_once(files: Path) -> None:
    words = [f"recipes={files}/llmft_sft.yaml", "cluster=sm_jobs", "base_results_dir=/fsx"]
    with pytest.raises(ConfigError) as caught:
        prepare([*words, "cluster.sm_jobs_config.role=arn:aws:iam::123456789012:role/training"])
    wanted = "container=IMAGE, instance_type=ml.NAME, cluster.sm_jobs_config.output_path=s3://BUCKET/FOLDER"
    assert str(caught.value).endswith(f"cluster=sm_jobs needs {wanted}")


def test_a_folder_that_cannot_be_made_here_is_said(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of pods, too: a job's files are written to the pods' path on this machine as well."""
    (files / "file").touch()
    words = [f"recipes={files}/llmft_sft.yaml", "cluster=k8s", "container=image", f"base_results_dir={files}/file"]
    claims = f"+cluster.persistent_volume_claims=[{{claimName: c, mountPath: {files}}}]"
    assert main([*words, claims, "dry_run=true"]) == 2
    assert "cannot be made (Not a directory); a job's files are written there on this machine, and its pods" in (
        capsys.readouterr().err
    )


def test_false_says_kubeflows_job(files: Path) -> None:
    words = [f"recipes={files}/llmft_sft.yaml", "cluster=k8s", "container=IMAGE", "base_results_dir=/fsx"]
    claim = "cluster.persistent_volume_claims=[{claimName: c, mountPath: /fsx}]"
    for value, kind in (("false", "PyTorchJob"), ("true", "HyperPodPyTorchJob"), ("null", "Job")):
        _, made = prepare([*words, claim, f"cluster.use_hyperpod_pytorch_job={value}"])
        assert f"\nkind: {kind}\n" in made["manifest.yaml"]


def test_a_token_that_is_not_kept_is_said(files: Path) -> None:
    word = "recipes.run.hf_access_token=hf_abcdefghijklmnopqrstuvwxyz012345"
    made = prepare([f"recipes={files}/llmft_sft.yaml", "cluster=slurm", "base_results_dir=/fsx", word])
    assert any("give +env_vars.HF_TOKEN=..." in line for line in describe(*made))
