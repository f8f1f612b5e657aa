"""Recipes that are lines of a table, and the script that runs any recipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from smp.config import ConfigError
from smp.launch import get_recipe, list_recipes
from smp.launch.cli import main, prepare
from smp.launch.library import read_recipe_text

ROOT = Path(__file__).parents[2]
NAME = "training/mixtral/hf_mixtral_8x22b_seq16k_gpu_p5x128_pretrain"
TABLE = """
lora:
  shared:
    run: {task: finetune, time_limit: "1-00:00:00"}
    trainer: {devices: 8}
    lora_rank: 32
    keep_last_k: 2
  recipes:
    mine/one: {about: "One: mine, and no other.", name: one, base: debug, nodes: 2, tp: 4, lr: 1e-4, keep_last_k: 3}
    mine/two: {about: Two., name: "007", base: debug, nodes: 1, lr: 0.5, run_note: "a, b"}
"""


def test_a_line_of_the_table_is_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    tree = get_recipe(NAME)
    assert tree["run"] == {"name": "mixtral-8x22b-16k-128n", "time_limit": "6-00:00:00"}
    assert tree["trainer"] == {"num_nodes": 128, "devices": 8}
    assert (tree["tensor_model_parallel_size"], tree["sequence_parallel"], tree["lr"]) == (4, True, 1.5e-4)
    assert (tree["weight_decay"], tree["async_save"], tree["moe_aux_loss_coeff"]) == (0.1, True, 0.02)
    assert NAME in list_recipes() and len(list_recipes()) > 90
    assert main(["--list", "8x22b", "seq16k", "128"]) == 0 and capsys.readouterr().out == f"{NAME}\n"
    assert main(["--list", "8x22b", "nosuchthing"]) == 2
    assert capsys.readouterr().err == (
        "error: no recipe has 8x22b and nosuchthing in its name; --list alone names them all\n"
    )
    assert main(["--help", NAME]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].startswith("# Mixtral 8x22B on 16k tokens, 128 nodes") and "\nlr: 0.00015\n" in out


def test_a_table_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes_collection").mkdir()
    (tmp_path / "recipes_collection/table.yaml").write_text(TABLE)
    monkeypatch.chdir(tmp_path)
    assert get_recipe("mine/one") == {
        **{"run": {"name": "one", "base_model": "debug", "task": "finetune", "time_limit": "1-00:00:00"}},
        **{"trainer": {"num_nodes": 2, "devices": 8}, "tensor_model_parallel_size": 4, "sequence_parallel": True},
        **{"lr": 1e-4, "keep_last_k": 3, "lora_rank": 32},
    }
    two = get_recipe("mine/two")
    assert (two["run"]["name"], two["run_note"], two["keep_last_k"]) == ("007", "a, b", 2)
    text, path = read_recipe_text("mine/one")
    assert text.startswith("# One: mine, and no other.\nrun: {") and path.name == "table.yaml"
    job, _ = prepare(["recipes=mine/one", "cluster=slurm", "recipes.keep_last_k=5"])
    assert (job.recipe.name, job.recipe.settings["keep_last_k"], job.recipe.world_size) == ("one", 5, 16)
    with pytest.raises(ConfigError, match=r"table.yaml: run_note: there is no such key"):
        prepare(["recipes=mine/two", "cluster=slurm"])
    with pytest.raises(ConfigError, match="did you mean mine/one"):
        prepare(["recipes=mine/oen"])


@pytest.mark.parametrize("text", ["a: 1\n", "a: {shared: {}}\n", "[1]\n", "a: {recipes: {x: 1}}\n", "a: [\n"])
def test_a_table_that_is_none_is_one_line(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes_collection").mkdir()
    (tmp_path / "recipes_collection/table.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="table.yaml: ") as raised:
        prepare(["recipes=laptop/nothing"])
    assert "\n" not in str(raised.value)


def test_the_script_runs_any_recipe(tmp_path: Path) -> None:
    """With the variables that HyperPod's own scripts have; more words are passed on."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").symlink_to(sys.executable)
    given = {"EXP_DIR": f"{tmp_path}/exp", "TRAIN_DIR": "0.5 /fsx/a", "HF_MODEL_NAME_OR_PATH": "/fsx/llama"}
    environment = {**os.environ, **given, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    words = ["fine-tuning/llama/hf_llama3_8b_seq8k_gpu_lora", "dry_run=true", "recipes.lora_rank=7"]
    command = ["bash", f"{ROOT}/launcher_scripts/run.sh", *words]
    done = subprocess.run(
        command, cwd=tmp_path, env={**environment, "CLUSTER": "slurm"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "exp/results/llama-8b-8k-lora/settings.yaml").read_text()
    assert "lora_rank: 7\n" in written and "load: /fsx/llama\n" in written and "data_path: 0.5 /fsx/a\n" in written
    done = subprocess.run(command[:2], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and "give the name of a recipe" in done.stderr
