"""Recipes: how a command line is composed, what both dialects become, and that random ones end in one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smp.config import ConfigError, Layout
from smp.config.command_line.entry_points import FINETUNE, PRETRAIN
from smp.config.command_line.fields import settings as settings_of
from smp.config.rules.elastic import OWN_STORES
from smp.launch import get_recipe, list_recipes
from smp.launch.cli import main, prepare
from smp.launch.compose import compose
from smp.launch.hyperpod import KEYS, flatten, translate
from smp.launch.hyperpod.values import FAMILIES
from smp.launch.job import Job
from smp.launch.recipe import Recipe, read_recipe
from smp.launch.yaml_text import load_text
from smp.models.presets import PRESETS
from tools.recipes import catalogue, summary

ROOT = Path(__file__).parents[2]

V1 = """
run: {name: tiny, results_dir: "${base_results_dir}/${.name}", time_limit: "6-00:00:00", model_type: hf}
trainer: {devices: 8, num_nodes: 2, accelerator: gpu, precision: bf16, max_steps: 50, log_every_n_steps: 1,
          val_check_interval: 10, limit_val_batches: 0}
exp_manager:
  exp_dir: null
  create_tensorboard_logger: false
  checkpoint_dir: ${recipes.exp_manager.exp_dir}/checkpoints/
  create_checkpoint_callback: true
  checkpoint_callback_params: {save_top_k: 0, every_n_train_steps: 10, monitor: step, mode: max}
use_smp_model: true
model:
  model_type: llama_v3
  train_batch_size: 2
  tensor_model_parallel_degree: 2
  activation_checkpointing: true
  sharding_strategy: hybrid_shard
  shard_degree: 4
  fp8: false
  max_context_width: 8192
  max_position_embeddings: ${.max_context_width}
  num_hidden_layers: 4
  hidden_size: 256
  num_attention_heads: 8
  num_key_value_heads: 4
  intermediate_size: 512
  vocab_size: 1024
  rope_theta: 500000.0
  rope_scaling: {rope_type: llama3, factor: 8.0, high_freq_factor: 4.0, low_freq_factor: 1.0,
                 original_max_position_embeddings: 8192}
  do_finetune: false
  peft: {peft_type: null}
  precision: ${recipes.trainer.precision}
  lr_decay_iters: ${recipes.trainer.max_steps}
  optim: {name: adamw, lr: 0.0001, betas: [0.9, 0.95],
          sched: {name: CosineAnnealing, warmup_steps: 5, constant_steps: 0, min_lr: 0.000001}}
  data: {train_dir: /data/train, dataset_type: hf, use_synthetic_data: false}
"""


@pytest.fixture
def v1(tmp_path: Path) -> str:
    (tmp_path / "v1.yaml").write_text(V1)
    return f"recipes={tmp_path / 'v1.yaml'}"


def job(*words: str) -> Job:
    return prepare(list(words))[0]


def recipe(*words: str) -> Recipe:
    return job(*words, "cluster=slurm").recipe


def test_recovery_inside_the_process_gets_a_store_for_each_start(v1: str) -> None:
    inside = job(v1, "cluster=slurm", "recipes.inprocess_restart=true", "recipes.peer_snapshot_interval=10")
    assert inside.defaults[OWN_STORES] == "1" and OWN_STORES not in job(v1, "cluster=slurm").defaults


def test_a_recipe_of_hyperpod_becomes_settings(v1: str) -> None:
    found = recipe(v1)
    assert (found.task, found.num_nodes, found.devices, found.name) == ("pretrain", 2, 8, "tiny")
    expected = {
        "train_iters": 50, "log_interval": 1, "tensorboard": False, "micro_batch_size": 2, "lr": 1e-4, "min_lr": 1e-6,
        "tensor_model_parallel_size": 2, "sequence_parallel": True, "recompute_granularity": "full", "bf16": True,
        "hybrid_shard_degree": 4, "seq_length": 8192, "max_position_embeddings": 8192, "num_layers": 4,
        "hidden_size": 256, "num_attention_heads": 8, "num_query_groups": 4, "ffn_hidden_size": 512,
        "vocab_size": 1024, "rotary_base": 500000.0, "use_rope_scaling": True, "rope_scaling_factor": 8.0,
        "rope_high_freq_factor": 4.0, "rope_low_freq_factor": 1.0, "rope_original_max_position": 8192,
        "lr_decay_iters": 50, "optimizer": "adam", "adam_beta1": 0.9, "adam_beta2": 0.95, "lr_warmup_iters": 5,
        "train_data_path": "/data/train",
    }  # fmt: skip
    assert found.settings == expected and not found.missing
    assert found.config is not None and found.config.data.global_batch_size == 16


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["recipes.trainer.limit_val_batches=4", "recipes.model.data.val_dir=/v"],
         {"eval_interval": 10, "eval_iters": 4, "valid_data_path": "/v"}),
        (["recipes.exp_manager.checkpoint_callback_params.save_top_k=3"], {"save_interval": 10, "keep_last_k": 3}),
        (["recipes.mock_data=true"], {"mock_data": True, "train_data_path": None}),
        (["recipes.exp_manager.exp_dir=/fsx/exp"], {"save": "/fsx/exp/checkpoints/"}),
        (["+recipes.exp_manager.auto_checkpoint.enabled=true"], {"save_mtbf_hours": 24.0, "async_save": True}),
        (["recipes.model.sharding_strategy=full_shard"], {"hybrid_shard_degree": 0}),
        (["recipes.model.sharding_strategy=null"], {"hybrid_shard_degree": 4}),
        (["+recipes.model.context_parallel_degree=2"], {"context_parallel_size": 2, "hybrid_shard_degree": 2}),
        (["+recipes.model.context_parallel_degree=4", "+recipes.cp_comm_type=all_gather"],
         {"context_parallel_size": 4, "hybrid_shard_degree": 1, "cp_comm_type": "all_gather"}),
        (["+recipes.pipeline_model_parallel_size=2"], {"pipeline_model_parallel_size": 2}),
        (["recipes.model.model_type=mixtral", "recipes.model.moe=true", "+recipes.model.num_local_experts=8",
          "+recipes.model.num_experts_per_tok=2", "+recipes.model.moe_load_balancing=sinkhorn",
          "+recipes.model.moe_all_to_all_dispatcher=true", "recipes.model.expert_model_parallel_degree=2"],
         {"num_experts": 8, "moe_router_topk": 2, "moe_aux_loss_coeff": None, "moe_z_loss_coeff": 1e-3,
          "moe_router_load_balancing_type": "sinkhorn", "expert_model_parallel_size": 2}),
        (["recipes.model.train_batch_size=1", "+recipes.lr=1e-3"], {"micro_batch_size": 1, "lr": 1e-3}),
        (["+recipes.exp_manager.create_wandb_logger=true", "+recipes.exp_manager.name=x"],
         {"wandb_project": "smp", "wandb_exp_name": "x"}),
    ],
)  # fmt: skip
def test_other_values_of_its_keys(v1: str, words: list[str], settings: dict[str, Any]) -> None:
    found = recipe(v1, *words).settings
    assert {name: found.get(name) for name in settings} == settings


def test_fine_tuning_takes_the_model_from_its_folder(v1: str) -> None:
    lora = ["recipes.model.do_finetune=true", "recipes.model.peft={peft_type: lora, rank: 8, alpha: 16, dropout: 0.1}"]
    found = recipe(
        v1, *lora, "recipes.model.hf_model_name_or_path=/models/x", "+recipes.model.dpo={enabled: true, beta: 0.2}"
    )
    assert found.task == "finetune" and "rotary_base" not in found.settings
    expected = {"load": "/models/x", "data_path": "/data/train", "num_layers": 4, "lora_rank": 8, "lora_alpha": 16.0}
    assert expected.items() <= found.settings.items()
    assert found.settings["objective"] == "dpo" and found.settings["dpo_beta"] == 0.2
    assert found.config is not None and found.config.model.rotary_base == 500000.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipes.model.precision=32"], "bf16 false contradicts trainer.precision, which says true; say both alike"),
        (
            ["recipes.model.do_finetune=true", "recipes.exp_manager.resume_from_checkpoint=/c"],
            "exp_manager.resume_from_checkpoint: /c cannot be had: fine-tuning continues from its own folder",
        ),
        (["recipes.trainer.max_steps=-1"], "--train-iters -1 must be above 0 (trainer.max_steps)"),
        (["recipes.model.optim.lr=-1"], "--lr -1.0 must be above 0 (model.optim.lr)"),
    ],
)
def test_what_contradicts_names_the_keys(v1: str, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        recipe(v1, *words)
    assert message in str(raised.value)


def test_an_error_of_ones_own_setting_names_no_key_of_the_recipe(v1: str) -> None:
    with pytest.raises(ConfigError, match=r"--lr -1.0 must be above 0$"):
        recipe(v1, "recipes.lr=-1")


def test_an_error_of_a_key_on_a_recipe_of_this_project_names_it() -> None:
    with pytest.raises(ConfigError, match=r"--lr -1.0 must be above 0 \(model.optim.lr\)"):
        recipe("recipes=laptop/debug", "recipes.model.optim.lr=-1")


def test_a_setting_that_is_off_takes_no_others_place(v1: str) -> None:
    found = recipe(v1, "recipes.mock_data=false", "recipes.model.data.train_dir=/d")
    assert found.settings["train_data_path"] == "/d"


def test_a_degree_alone_shards_on_a_recipe_of_this_project() -> None:
    assert (
        recipe("recipes=eight-gpus/llama3_8b_seq8k_pretrain", "recipes.model.shard_degree=4").settings[
            "hybrid_shard_degree"
        ]
        == 4
    )


@pytest.mark.parametrize(
    ("word", "note"),
    [
        ("recipes.model.peft.dropout=0.3", "model.peft.dropout: it goes with peft_type, which is unset or 0"),
        ("+recipes.model.peft.target_modules=[q_proj]", "model.peft.target_modules: it goes with peft_type"),
        (
            "recipes.exp_manager.create_checkpoint_callback=false",
            "checkpoint_callback_params.every_n_train_steps: create_checkpoint_callback is unset or false",
        ),
        ("recipes.exp_manager.checkpoint_callback_params.save_top_k=0", "every_n_train_steps: save_top_k is 0"),
        ("+recipes.exp_manager.wandb_logger_kwargs.project=p", "project: it goes with create_wandb_logger"),
        (
            "recipes.model.sharding_strategy=full_shard",
            "model.shard_degree: sharding_strategy full_shard has no degree",
        ),
    ],
)
def test_a_key_of_release_1_that_is_not_read_is_in_the_notes(v1: str, word: str, note: str) -> None:
    assert any(note in line for line in recipe(v1, word).notes)


def test_keys_that_no_other_reads_are_in_the_notes(v1: str) -> None:
    synthetic = recipe(v1, "recipes.model.data.use_synthetic_data=true", "+recipes.model.dpo.beta=0.2")
    assert synthetic.settings["mock_data"] and "train_data_path" not in synthetic.settings
    for line in (
        "model.data.train_dir: use_synthetic_data makes samples",
        "model.dpo.beta: it goes with dpo.enabled, which is unset or 0",
        "trainer.val_check_interval: it goes with limit_val_batches, which is unset or 0",
    ):
        assert line in synthetic.notes
    resumed = recipe(v1, "+recipes.exp_manager.resume_from_checkpoint=/c/epoch=9", "recipes.train_data_path=/d")
    assert (resumed.settings["load"], resumed.settings["train_data_path"]) == ("/c/epoch=9", "/d")


def test_a_familys_own_settings_give_way_to_keys_in_any_order() -> None:
    said = {"model.rope_scaling.factor": 16.0}
    for leaves in ({"model.model_type": "gpt_oss", **said}, {**said, "model.model_type": "gpt_oss"}):
        shape = translate(leaves).shape
        assert (shape["rope_scaling_factor"], shape["rope_original_max_position"]) == (16.0, 4096)


def test_a_known_size_is_pretrained_by_its_name() -> None:
    """HyperPod's recipe of Falcon has no widths, only the name of a folder of the hub."""
    leaves = {
        "model.model_type": "falcon",
        "model.do_finetune": False,
        "model.hf_model_name_or_path": "tiiuae/falcon-7b",
    }
    found = translate(leaves)
    assert not found.finetune and {**found.values, **found.shape}["model"] == "falcon-7b"
    with pytest.raises(ConfigError, match="goes with model.do_finetune"):
        translate({**leaves, "model.hf_model_name_or_path": "tiiuae/falcon-40b"})


def test_llama_4s_text_model_is_fine_tuned(v1: str) -> None:
    """Its recipes name modules by a pattern, and the width of experts."""
    words = ["recipes.model.do_finetune=true", "recipes.model.model_type=llama_v4"]
    pattern = "language_model.model.layers.*self_attn.(q_proj|k_proj|v_proj|o_proj)"
    peft = f"recipes.model.peft={{peft_type: lora, rank: 8, alpha: 16, dropout: 0.1, target_modules: ['{pattern}']}}"
    found = recipe(v1, *words, "recipes.model.hf_model_name_or_path=/models/x", peft)
    assert found.settings["lora_target_modules"] == "query,key,value,output"
    assert "ffn_hidden_size" not in found.settings
    sees = recipe(v1, *words, peft, "+recipes.model.multi_modal=true")
    assert sees.settings["lora_target_modules"] == "q_proj,k_proj,v_proj,o_proj"
    assert (sees.settings["model_implementation"], sees.settings["packing"]) == ("transformers", "off")


def test_qlora_is_lora_on_weights_in_4_bits(v1: str) -> None:
    words = ["recipes.model.do_finetune=true", "recipes.model.hf_model_name_or_path=/models/x"]
    found = recipe(v1, *words, "recipes.model.peft={peft_type: qlora_4bit, rank: 16}")
    assert found.settings["load_in_4bit"] is True and found.settings["lora_rank"] == 16
    assert found.config is not None and found.config.lora is not None and found.config.lora.bnb_4bit_use_double_quant
    with pytest.raises(ConfigError, match="take lora or qlora_4bit"):
        recipe(v1, *words, "recipes.model.peft={peft_type: qlora_8bit}")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("recipes.model.num_attention_heads=3", "not divisible by --num-attention-heads 3"),
        ("recipes.model.model_type=llama_v4", "llama_v4 goes with model.do_finetune"),
        ("recipes.model.moe=true", "needs num_local_experts with it"),
        ("recipes.model.tensor_model_paralel_degree=2", "did you mean model.tensor_model_parallel_degree?"),
        ("recipes.model.shard_degree=3", "--hybrid-shard-degree 3"),
        ("+recipes.model.context_parallel_degree=8", "shard_degree 4 is not divisible by context_parallel_degree 8"),
        ("recipes.model.train_batch_size=x", "model.train_batch_size: expected an integer, got 'x'"),
        ("recipes.model.optim.betas=3", "model.optim.betas: expected a list of two numbers, got '3'"),
        ("+recipes.lrr=1", "lrr: there is no such key: did you mean lr?"),
        ("recipes.trainer.num_nodes=0", "trainer.num_nodes: 0"),
        ("recipes.run.name=A B", "run.name"),
        ("recipes.run.time_limit=soon", "run.time_limit"),
        ("+recipes.lora_rank=8", "lora_rank: "),
        ("recipes.model.max_position_embeddings=${.nothing}", "nothing"),
        ("base_result_dir=x", "did you mean base_results_dir?"),
        ("cluster_type=k8s", "contradicts"),
        ("cluster.srun_args=[1", "cluster.srun_args=[1"),
        ("word", "unexpected 'word'"),
    ],
)
def test_a_mistake_is_one_line(v1: str, word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([v1, "cluster=slurm", word]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


def test_fp8_is_delayed_scaling(v1: str) -> None:
    found = recipe(v1, "recipes.model.fp8=true", "+recipes.model.fp8_amax_history_len=32")
    expected = {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 32}
    assert expected.items() <= found.settings.items()
    without = recipe(v1, "recipes.model.fp8=false", "+recipes.model.fp8_amax_history_len=32")
    assert not expected.keys() & without.settings.keys()


def test_what_changes_nothing_is_said(v1: str) -> None:
    found = recipe(v1, "+recipes.model.forward_prefetch=true", "recipes.use_smp_model=false", "recipes.model.fp8=true")
    assert any(note.startswith("model.forward_prefetch: ") for note in found.notes)
    assert any(note.startswith("model.fp8: ") for note in found.notes)


@pytest.mark.parametrize("name", KEYS)
def test_every_key_of_the_table_does_what_its_text_says(name: str) -> None:
    """A key whose text names no setting either refuses or says that it changes nothing; the settings it names exist."""
    known = settings_of(PRETRAIN).keys() | settings_of(FINETUNE).keys()
    text = KEYS[name].text
    words = [word.strip("`").partition(":")[0] for word in text.split() if word.startswith("`")]
    if "not there yet" not in text:
        named = [word.strip("`,;:)(") for word in words]
        assert all(word in known or word in text for word in named)
    if text.startswith("changes nothing"):
        value = "anything" if KEYS[name].kind is None else True
        assert translate({name: value}).notes[0].startswith(f"{name}: ")


def test_shards_of_context_parallelism_are_those_of_hyperpod(v1: str) -> None:
    """Its degree counts the processes that a sequence is cut over: 4 x 2 replicas x TP 2 on 16, with any number."""
    for degree in (1, 2, 4):
        config = recipe(v1, f"+recipes.model.context_parallel_degree={degree}").config
        assert config is not None
        layout = Layout.from_config(config.parallel, 16)
        assert (layout.cp, layout.dp_shard * layout.cp, layout.dp_replicate) == (degree, 4, 2)
        assert config.data.global_batch_size == 2 * 8 // degree
    with pytest.raises(ConfigError, match="no_shard with context_parallel_degree 2 cannot be had"):
        recipe(v1, "+recipes.model.context_parallel_degree=2", "recipes.model.sharding_strategy=no_shard")


def test_the_cluster_says_its_type(tmp_path: Path, v1: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compose([v1, "cluster=slurm", "cluster_type=bcm"]).backend == "slurm"
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "recipes_collection"
    (own / "cluster").mkdir(parents=True)
    (own / "recipes/mine").mkdir(parents=True)
    (own / "cluster/big.yaml").write_text("cluster_type: slurm\nrequeue: false\npartition: big\n")
    (own / "recipes/mine/tiny.yaml").write_text(V1)
    composed = compose(["recipes=mine/tiny", "cluster=big"])
    assert composed.backend == "slurm" and composed.tree["cluster"]["signal_seconds"] == 600  # of this project's file
    assert {"requeue": False, "partition": "big"}.items() <= composed.tree["cluster"].items()
    assert "mine/tiny" in list_recipes() and get_recipe("mine/tiny")["use_smp_model"] is True


def test_a_cluster_file_that_leaves_a_key_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes_collection/cluster").mkdir(parents=True)
    text = "namespace: null\nkind:\npullPolicy: null\nshm_size:\nqueue_name: null\n"
    (tmp_path / "recipes_collection/cluster/k8s.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    cluster = compose(["recipes=laptop/debug", "cluster=k8s"]).tree["cluster"]
    assert [cluster[key] for key in ("namespace", "pullPolicy", "shm_size")] == ["default", "Always", "64Gi"]
    assert cluster["kind"] is None and cluster["queue_name"] is None


def test_yaml_means_what_flags_mean() -> None:
    assert load_text("{a: 3e-4, b: 010, c: 12:00:00, d: 1_000, e: 2024-01-01, f: null, g: true, h: 1.5, i: '5'}") == {
        "a": 3e-4, "b": 10, "c": "12:00:00", "d": 1000, "e": "2024-01-01", "f": None, "g": True, "h": 1.5, "i": "5",
    }  # fmt: skip
    with pytest.raises(ValueError, match="a is given twice"):
        load_text("a: 1\na: 2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x: &x {y: *x}", "levels"),
        ("x: &x [*x]", "levels"),
        ("x: " + "[" * 500 + "]" * 500, "levels"),
        ("a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a, *a]\n"
         "c: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b]\nd: [*c, *c, *c, *c, *c, *c, *c, *c, *c, *c, *c]", "values"),
        ("training_cfg: {entry_script: x, script_args: 'a \"b'}", "training_cfg.script_args: No closing quotation"),
        ("training_cfg: {entry_script: x, script_args: [{--a: {b: 1}}]}", "training_cfg.script_args: {'b': '1'}"),
        ("training_cfg: {entry_script: [x]}", "training_cfg.entry_script: ['x']"),
        ("training_cfg: {entry_script: ''}", "training_cfg.entry_script: ''"),
        ("training_cfg: {entry_script: x, run: 3}", "training_cfg.run: expected"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_recipe_is_one_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.yaml").write_text(text)
    assert main([f"recipes={tmp_path / 'odd.yaml'}", "dry_run=true", f"base_results_dir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'odd.yaml'}: ") and error.count("\n") == 1 and message in error


def test_a_secret_is_written_nowhere(v1: str) -> None:
    _, artifacts = prepare([v1, "cluster=slurm", "+recipes.model.hf_access_token=hf_secret"])
    assert not [name for name, text in artifacts.items() if "hf_secret" in text and name != "command.txt"]
    assert "hf_secret" not in artifacts["command.txt"]


def test_a_password_in_a_url_is_where_the_run_reads_it_alone() -> None:
    url = "https://me:hush@h/x"
    words = [
        "recipes=laptop/debug",
        "recipes.mock_data=false",
        f"recipes.data_path={url}",
        "recipes.data_cache_path=/c",
    ]
    _, artifacts = prepare([*words, "cluster=slurm"])
    assert [name for name, text in artifacts.items() if "hush" in text] == ["settings.yaml"]
    assert all("https://***@h/x" in artifacts[name] for name in ("recipe.yaml", "command.txt"))


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_of_the_collection_fits_together(name: str) -> None:
    composed = compose([f"recipes={name}"])
    found = read_recipe(composed.tree["recipes"], composed.source.stem)
    assert set(found.missing) <= {"data_path", "load", "tokenizer_model", "reward_funcs"}
    assert found.config is not None or name.startswith("laptop/")


def test_pages_are_in_step() -> None:
    done = subprocess.run([sys.executable, "tools/recipes.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    "SMP_HYPERPOD_RECIPES" not in os.environ, reason="SMP_HYPERPOD_RECIPES names no folders of releases"
)
def test_every_recipe_of_a_release_loads_or_is_refused_by_feature() -> None:
    """With the files of a job of every back-end."""
    for folder in os.environ["SMP_HYPERPOD_RECIPES"].split(os.pathsep):
        found = catalogue(Path(folder))
        assert {one.name: one.said for one in found if one.kind == "bad"} == {}, summary(found)
        open_models = [one for one in found if "Amazon's own model" not in one.said]
        assert sum(one.kind == "loads" for one in open_models) > 0.85 * len(open_models), summary(found)


def test_the_launcher_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; sys.path.insert(0, '.'); from smp.launch.cli import main; "
    code += "sys.exit(main(['recipes=laptop/debug', 'dry_run=true', 'base_results_dir=/dev/null/x']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (1, 2) and done.stderr.startswith("error: base_results_dir: /dev/null"), done.stderr


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["--help"], {"jinja2", "omegaconf", "numpy"}),
        (["--list"], {"jinja2", "omegaconf", "numpy"}),
        (["recipes=laptop/debug", "cluster=slurm", "dry_run=true", "base_results_dir=RESULTS"], {"numpy", "boto3"}),
    ],
)
def test_what_a_command_does_not_need_is_not_imported(words: list[str], heavy: set[str], tmp_path: Path) -> None:
    """What each command would wait for. A dry run takes a third of a second of processor time, --help a sixth."""
    words = [word.replace("RESULTS", str(tmp_path)) for word in words]
    code = f"import sys; sys.path.insert(0, '.'); from smp.launch.cli import main; code = main({words}); "
    code += f"print(sorted({heavy | {'torch', 'kubernetes'}} & sys.modules.keys()), file=sys.stderr); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")


WORDS = st.sampled_from(
    ["null", "true", "false", "0", "1", "2", "-1", "3.5", "1e-4", "x", "[]", "[1, 2]", "{}", "{a: 1}", "''", "${.x}",
     "[", "a: b: c", "llama_v3", "lora", "7", "64", "100000000000000000000", "nan", ".inf", "5:30", "é\n#",
     "s3://b/c", "/data"]
)  # fmt: skip


def _keys() -> list[str]:
    paths = [f"recipes.{key}" for key in [*KEYS, *settings_of(PRETRAIN), *settings_of(FINETUNE)]]
    paths += [
        "recipes.run.name",
        "recipes.run.time_limit",
        "recipes.run.task",
        "recipes.trainer.num_nodes",
        "recipes.run",
    ]
    paths += [
        "recipes.trainer.devices",
        "recipes.trainer",
        "recipes.model",
        "recipes",
        "cluster",
        "recipes.training_cfg",
    ]
    for name in ("slurm", "k8s", "sm_jobs", "local"):
        path = ROOT / f"recipes_collection/cluster/{name}.yaml"
        paths += [f"cluster.{key}" for key in flatten(load_text(path.read_text()))]
    base = load_text((ROOT / "recipes_collection/config.yaml").read_text())
    return paths + list(flatten(base)) + ["instances.x", "nothing", "cluster.array", "cluster_type"]


OVERRIDES = st.lists(st.tuples(st.sampled_from(["", "+"]), st.sampled_from(_keys()), WORDS), max_size=4)
PLACES = {
    "local": ["recipes.trainer.num_nodes=1", "recipes.trainer.devices=16", "recipes.hybrid_shard_degree=0"],
    "slurm": ["+cluster.partition=gpu"],
    "k8s": ["container=smp:1", "cluster.persistent_volume_claims=[{claimName: fsx, mountPath: /fsx}]"],
    "sm_jobs": [
        "container=smp:1",
        "instance_type=p5.48xlarge",
        "cluster.sm_jobs_config.role=arn:aws:iam::123456789012:role/training",
        "cluster.sm_jobs_config.output_path=s3://bucket/out",
    ],
}
"""What lets most recipes be launched there, so that random words are what is refused."""


def check_random(name: str, cluster: str, overrides: list[tuple[str, str, str]]) -> bool:
    """Either a dry run, or one line that names a key, and the file or the word that it is in."""
    given = [f"{sign}{key}={value}" for sign, key, value in overrides]
    words = [f"recipes={name}", f"cluster={cluster}", "base_results_dir=/fsx", *PLACES[cluster], *given]
    try:
        prepare(words)
    except ConfigError as error:
        line = str(error)
        assert line.strip() and "\n" not in line, words
        message = line.rpartition(".yaml: ")[2].replace("--", " ").replace("-", "_")  # its file has keys' names too
        assert ".yaml" in line or any(word.lstrip("+")[:20] in line for word in words) or "given twice" in line, (
            words,
            line,
        )
        assert any(re.search(rf"\b{leaf}\b", message) for leaf in LEAVES), (words, line)
        return False
    return True


LEAVES = {key.rpartition(".")[2] for key in _keys()}
CASES = (st.sampled_from(list_recipes()), st.sampled_from(["local", "slurm", "k8s", "sm_jobs"]), OVERRIDES)


@pytest.mark.parametrize("cluster", PLACES)
def test_random_overrides_start_from_what_can_be_launched(cluster: str) -> None:
    launched = [name for name in list_recipes() if check_random(name, cluster, [])]
    assert len(launched) > 10


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(*CASES)
def test_random_overrides(name: str, cluster: str, overrides: list[tuple[str, str, str]]) -> None:
    check_random(name, cluster, overrides)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=10_000, suppress_health_check=list(HealthCheck), database=None)
@given(*CASES)
def test_ten_thousand_random_overrides(name: str, cluster: str, overrides: list[tuple[str, str, str]]) -> None:
    check_random(name, cluster, overrides)


@pytest.mark.parametrize(("family", "size"), [("gpt_oss", "gpt-oss-20b"), ("llama_v4", "llama4-scout")])
def test_a_family_with_settings_of_its_own_is_the_named_size(family: str, size: str) -> None:
    """What a recipe does not say is as in the model of that name: of GPT-OSS a window in every other layer, sinks."""
    named = PRESETS[size]
    assert {name: named.get(name) for name in FAMILIES[family]} == FAMILIES[family]
    said_by_recipes = {"vocab_size", "max_position_embeddings", "norm_epsilon", "rotary_base"}
    shape = {"num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size"}
    left = named.keys() - FAMILIES[family].keys() - said_by_recipes - shape
    left = {name for name in left if family == "gpt_oss" or not name.startswith(("rope_", "use_rope"))}
    assert {name for name in left if not name.startswith(("moe_", "num_experts"))} == set()
