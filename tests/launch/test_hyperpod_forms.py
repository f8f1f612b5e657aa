"""HyperPod's newer recipes: what those of each trainer become, what is said of the rest, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from smp.config import ConfigError
from smp.config.command_line.entry_points import FINETUNE, PRETRAIN
from smp.config.command_line.fields import settings as settings_of
from smp.launch.cli import describe, main, prepare
from smp.launch.hyperpod import FORMS, FeatureError, flatten, form_of, key_of, translate
from smp.launch.hyperpod.values import FAMILIES
from smp.launch.recipe import Recipe
from tests.training.tiny_hf import write_model, write_samples, write_tokenizer

ROOT = Path(__file__).parents[2]
LLMFT = """
display_name: a title
version: 2.2.1
instance_types: [ml.p5.48xlarge, ml.g6e.48xlarge]
elastic_policy: {is_elastic: false, max_nodes: 16}
scale_config: {2: {trainer: {num_nodes: 2}, training_config: {training_args: {train_batch_size: 128}}}}
run: {hf_access_token: null, model_type: llm_finetuning_aws, name: llama, results_dir: "${base_results_dir}/${.name}"}
trainer: {devices: 8, num_nodes: 2}
training_config:
  datasets:
    preprocessor_cfgs:
    - {type: TrainingSFTSampleConverter}
    - {type: Seq2SeqTokensProcessor, chat_template_name: null, ignore_prompt_labels: true}
    - {type: DropColumns, column_names: [messages]}
    train_data: {file_path: '', limit: null, name: ''}
    val_data: {file_path: '', limit: null, name: ''}
    train_val_split_ratio: 0.9
  mlflow: {run_id: '', tracking_uri: ''}
  model_config:
    attn_implementation: sdpa
    generation_cfg: {temperature: 0.6}
    lora_checkpoint_file_path: null
    model_name_or_path: meta-llama/Llama-3.1-8B-Instruct
    multimodal: false
    peft_config: {bias: none, lora_alpha: 32, lora_dropout: 0.05, peft_type: lora, r: 16, target_modules: all-linear,
                  task_type: CAUSAL_LM, use_dora: false}
  training_args:
    adam_betas: [0.9, 0.95]
    eval_steps: 0
    gradient_checkpointing: true
    gradient_clipping: true
    gradient_clipping_threshold: 1.0
    max_norm: 1.0
    l2: 0.0
    weight_decay: 0.0
    learning_rate: 0.0001
    lr_scheduler: cosine
    lr_warmup_ratio: 0.1
    max_ckpt_num: 3
    max_epochs: 5
    max_len: 4096
    merge_weights: true
    micro_train_batch_size: 1
    packing_samples: false
    ring_attn_size: 1
    ulysses_sequence_parallel_size: 1
    save_steps: 0
    seed: 42
    strategy: {fsdp_config: {cpu_offload: false, sharding_strategy: HYBRID_SHARD, sync_module_states: true}}
    train_batch_size: 16
    trainer_callbacks: [{_target_: metering_callback.MeteringCallback, output_path: /opt/ml/metering}]
    trainer_type: sft
    use_tensorboard: logs
"""
VERL = """
run: {model_type: verl, name: verl-sft, results_dir: "${base_results_dir}/${.name}"}
trainer: {devices: 8, num_nodes: 1}
training_config:
  checkpoint: {_target_: verl.CheckpointConfig, save_contents: [model, optimizer, extra, hf_model]}
  data:
    custom_cls: {name: null, path: null}
    max_length: 4096
    max_token_len_per_gpu: 16384
    messages_key: messages
    micro_batch_size_per_gpu: 8
    pad_mode: no_padding
    train_batch_size: 64
    train_files: null
    train_val_split_ratio: 1.0
    truncation: left
    use_dynamic_bsz: true
  engine: {_target_: verl.FSDPEngineConfig, dtype: bfloat16, forward_only: false, fsdp_size: -1, model_dtype: bf16,
           reshard_after_forward: true, seed: 42, strategy: fsdp2, ulysses_sequence_parallel_size: 1,
           wrap_policy: {min_num_params: 0}}
  mlflow: {run_id: '', tracking_uri: ''}
  model: {enable_gradient_checkpointing: true, lora_alpha: 64, lora_rank: 32, path: Qwen/Qwen3-8B,
          target_modules: all-linear, override_config: {}, exclude_modules: null}
  optim: {betas: [0.9, 0.95], clip_grad: 1.0, lr: 0.0002, lr_scheduler_type: cosine, lr_warmup_steps: -1,
          lr_warmup_steps_ratio: 0.1, min_lr_ratio: 0.1, num_cycles: 0.5, optimizer: AdamW, total_training_steps: -1,
          weight_decay: 0.001}
  profiler: {enable: false, tool_config: {npu: {level: level0}}}
  trainer: {default_local_dir: /opt/ml/model, device: cuda, experiment_name: one, project_name: sft,
            logger: [console, mlflow, tensorboard], max_ckpt_to_keep: 3, merge_lora_on_final_save: true, nnodes: 1,
            save_freq: after_each_epoch, test_freq: 5, total_epochs: 2, total_training_steps: null}
"""
NEMO = """
run: {model_type: hyperpod_checkpointless_nemo, name: llama-3-3-70b, time_limit: 6-00:00:00}
trainer: {accelerator: gpu, devices: 8, num_nodes: 16, limit_val_batches: 32, log_every_n_steps: 10, max_steps: 1000,
          val_check_interval: 200, accumulate_grad_batches: 1}
callbacks:
- {_target_: nemo.TimingCallback}
- {_target_: hyperpod.HPFaultInjectionCallback, test_fault_config: {fault_prob_random: 0, fault_ranks: [8]}}
data: {global_batch_size: 512, micro_batch_size: 1, seq_length: 2048}
dataset: {dataset_path: null, shuffle: false}
log: {name: llama3_70b_checkpointless_pretraining, log_dir: "${recipes.log_dir}",
      ckpt: {dirpath: "${recipes.log_dir}", every_n_train_steps: 20, save_top_k: 2, monitor: step, mode: max}}
log_dir: null
model: {config: {vocab_size: 128256}}
optim: {config: {adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1.0e-05, bf16: true, clip_grad: 1.0, lr: 0.0003,
                 optimizer: adam, weight_decay: 0.1}, lr_scheduler: {min_lr: 3.0e-05, warmup_steps: 20}}
strategy: {num_distributed_optimizer_instances: 2, pipeline_model_parallel_size: 4, tensor_model_parallel_size: 8,
           sequence_parallel: true, context_parallel_size: 1, ckpt_async_save: true}
"""
GRPO = """
run: {model_type: verl, name: grpo, results_dir: "${base_results_dir}/${.name}"}
ray_cluster: {head_node: {cpu: '16'}}
trainer: {num_nodes: 1}
training_config:
  actor_rollout_ref:
    actor:
      clip_ratio: 0.2
      clip_ratio_low: 0.2
      clip_ratio_high: 0.28
      clip_ratio_c: 3.0
      fsdp_config: {fsdp_size: -1, model_dtype: bfloat16, optimizer_offload: true, param_offload: true}
      grad_clip: 1.0
      kl_loss_coef: 0.001
      kl_loss_type: low_var_kl
      use_kl_loss: true
      loss_agg_mode: token-mean
      optim: {lr: 1.0e-06, lr_warmup_steps: -1, lr_warmup_steps_ratio: 0.0, total_training_steps: -1,
              warmup_style: constant, weight_decay: 0.01}
      policy_loss: {loss_mode: vanilla, clip_cov_lb: 1.0}
      ppo_epochs: 1
      ppo_max_token_len_per_gpu: 12288
      ppo_micro_batch_size_per_gpu: 2
      ppo_mini_batch_size: 32
      strategy: fsdp2
      use_dynamic_bsz: true
    model: {lora_alpha: 64, lora_rank: 32, path: "Qwen/Qwen3-8B", target_modules: all-linear}
    ref: {fsdp_config: {param_offload: true}, strategy: "${recipes.training_config.actor_rollout_ref.actor.strategy}"}
    rollout: {n: 8, name: vllm, prompt_length: 512, response_length: 1024, temperature: 1.0, top_k: -1, top_p: 1,
              gpu_memory_utilization: 0.6, multi_turn: {enable: false, format: hermes},
              val_kwargs: {do_sample: false, n: 1, temperature: 0}}
  algorithm: {adv_estimator: grpo, gamma: 1.0, norm_adv_by_std_in_grpo: true, use_kl_in_reward: false,
              kl_ctrl: {kl_coef: 0.001}, rollout_correction: {rollout_is: null, rollout_is_threshold: 2.0}}
  critic: {enable: null, strategy: fsdp}
  custom_reward_function: {name: '', path: '', lambda_arn: ''}
  data: {max_prompt_length: 512, max_response_length: 4096, train_batch_size: 128, train_files: null, truncation: error,
         train_val_split_ratio: 0.9, filter_overlong_prompts: true, prompt_key: prompt}
  mlflow: {tracking_uri: ''}
  reward_model: {enable: false, reward_manager: batch, reward_kwargs: {reward_fn_name: llmj}}
  trainer: {logger: [console, mlflow], n_gpus_per_node: 8, nnodes: 1, save_freq: 20, test_freq: 5, total_epochs: 2,
            merge_lora_on_final_save: true, default_local_dir: /opt/ml/model}
"""
TEXTS = {"llmft": LLMFT, "verl": VERL, "nemo": NEMO, "grpo": GRPO}
A = "recipes.training_config.actor_rollout_ref."
ALG = "recipes.training_config.algorithm."
ARGS, MODEL = "recipes.training_config.training_args.", "recipes.training_config.model_config."
EVAL = "recipes.training_config.datasets."
DATA, ENGINE, TRAINER, OPTIM = (f"recipes.training_config.{name}." for name in ("data", "engine", "trainer", "optim"))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def recipe(files: Path, name: str, *words: str) -> Recipe:
    return prepare([f"recipes={files}/{name}.yaml", "cluster=slurm", "base_results_dir=/fsx", *words])[0].recipe


def test_llmft_becomes_settings(files: Path) -> None:
    found = recipe(files, "llmft")
    assert (found.task, found.num_nodes, found.devices, found.missing) == ("finetune", 2, 8, ("data_path",))
    assert found.settings == {
        **{"bf16": True, "split": "90,10,0", "load": "hub:meta-llama/Llama-3.1-8B-Instruct"},
        **{"lora_rank": 16, "lora_alpha": 32.0, "lora_dropout": 0.05},
        **{"adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.0, "clip_grad": 1.0},
        **{"lr": 1e-4, "lr_decay_style": "cosine", "lr_warmup_fraction": 0.1, "train_epochs": 5.0},
        **{"seq_length": 4096, "global_batch_size": 16, "micro_batch_size": 1, "packing": "off"},
        **{"recompute_granularity": "full", "hybrid_shard_degree": 8, "keep_last_k": 3, "save_hf": True},
        **{"seed": 42, "tensorboard": True, "eval_epochs": 1.0, "full_validation": True},
    }


def test_verl_becomes_settings(files: Path) -> None:
    found = recipe(files, "verl")
    assert (found.task, found.num_nodes, found.devices, found.missing) == ("finetune", 1, 8, ("data_path",))
    assert found.settings == {
        **{"bf16": True, "split": "100,0,0", "load": "hub:Qwen/Qwen3-8B", "truncation_side": "left"},
        **{"lora_rank": 32, "lora_alpha": 64.0, "optimizer": "adam", "adam_beta1": 0.9, "adam_beta2": 0.95},
        **{"weight_decay": 0.001, "clip_grad": 1.0, "lr": 2e-4, "min_lr": pytest.approx(2e-5)},
        **{"lr_decay_style": "cosine", "lr_warmup_fraction": 0.1, "train_epochs": 2.0},
        **{"seq_length": 4096, "global_batch_size": 64, "micro_batch_size": 4, "packing": "off"},
        **{"recompute_granularity": "full", "hybrid_shard_degree": 0, "keep_last_k": 3, "save_hf": True},
        **{"seed": 42, "tensorboard": True, "save_epochs": 1.0},
    }


_C, _EMPTY = "recipes.training_config.", "recipes.training_config.datasets.val_data."
_LLMFT_SCRIPT = [
    *(f"{_C}model_config.model_name_or_path=/fsx/model", f"{_C}model_config.model_save_name=Llama"),
    *(f"{_C}training_args.training_dir=/fsx/exp", f"{_C}datasets.train_data.name=train"),
    *(f"{_C}datasets.train_data.file_path=/fsx/train.jsonl", f"{_EMPTY}name=val", f"{_EMPTY}file_path=/fsx/val.jsonl"),
    *("container=image", "+cluster.container_mounts.0=/fsx:/fsx"),
    *("git.entry_module=amzn_awsllm_fine_tuning.train_hp", "git.use_default=false"),
]
_VERL_SCRIPT = [
    *("run.name=typed", "cluster_type=slurm", "container=image"),
    *(
        f"++{_C}trainer.default_local_dir=/fsx/exp",
        f"++{_C}data.train_files=/fsx/train.jsonl",
        f"++{_C}data.val_files=/fsx/val.jsonl",
    ),
]
_SFT_SCRIPT = [*_VERL_SCRIPT, f"++{_C}model.path=/fsx/model", f"++{_C}model.tokenizer_path=/fsx/model"]
_RL_SCRIPT = [
    *(*_VERL_SCRIPT, f"++{_C}actor_rollout_ref.model.path=/fsx/model", f"++{_C}critic.model.path=/fsx/critic"),
    *(f"++{_C}critic.model.tokenizer_path=/fsx/model", f"++{_C}reward_model.model.path=/fsx/reward"),
    f"++{_C}reward_model.model.input_tokenizer=/fsx/model",
]


@pytest.mark.parametrize(
    ("name", "script"),
    [("llmft", _LLMFT_SCRIPT), ("verl", _SFT_SCRIPT), ("verl", _RL_SCRIPT), ("grpo", _RL_SCRIPT)],
    ids=["LLMFT", "verl", "DPO", "GRPO"],
)
def test_the_words_of_hyperpods_scripts_arrive(files: Path, name: str, script: list[str]) -> None:
    """As release 2026-06 generates them; its scripts of DPO say the model as those of GRPO do."""
    found = recipe(files, name, *script)
    expected = {"load": "/fsx/model", "save": "/fsx/exp", "data_path": "/fsx/train.jsonl"}
    expected |= {"valid_data_path": "/fsx/val.jsonl"}
    assert {key: found.settings[key] for key in expected} == expected
    job, _ = prepare([f"recipes={files}/{name}.yaml", "cluster=slurm", "base_results_dir=/fsx", *script])
    assert job.recipe.name == "typed" or name == "llmft"
    if name == "verl":
        assert found.settings.get("objective", "sft") != "grpo"


def test_a_module_of_ones_own_is_not_taken_for_a_trainer(files: Path) -> None:
    with pytest.raises(ConfigError, match=r"git.entry_module: a recipe's module is this project's; \+recipes"):
        recipe(files, "llmft", "git.entry_module=mine.train")


def test_grpo_becomes_settings(files: Path) -> None:
    found = recipe(files, "grpo")
    assert (found.num_nodes, found.devices, found.missing) == (1, 8, ("data_path", "reward_funcs"))
    assert found.settings == {
        **{"objective": "grpo", "num_generations": 8, "advantage_estimator": "grpo", "scale_rewards": "group"},
        **{"epsilon": 0.2, "epsilon_high": 0.28, "delta": 3.0, "loss_type": "dapo", "num_iterations": 1},
        **{"beta": 0.001, "kl_estimator": "k3", "use_bias_correction_kl": False},
        **{"global_batch_size": 256, "steps_per_generation": 4, "micro_batch_size": 8},
        **{"seq_length": 1536, "max_completion_length": 1024, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
        **{"num_generations_eval": 1, "eval_temperature": 0.0, "eval_interval": 5, "split": "90,10,0"},
        "full_validation": True,
        **{"load": "hub:Qwen/Qwen3-8B", "lora_rank": 32, "lora_alpha": 64.0, "bf16": True, "hybrid_shard_degree": 0},
        **{"lr": 1e-6, "weight_decay": 0.01, "lr_decay_style": "constant", "adam_beta2": 0.999, "clip_grad": 1.0},
        **{"optimizer_cpu_offload": True, "tensorboard": False, "save_interval": 20, "save_hf": True},
        **{"train_epochs": 2.0},
    }
    given = recipe(files, "grpo", "+recipes.reward_funcs=number", "recipes.training_config.data.train_files=/p.jsonl")
    assert given.missing == () and given.settings["reward_funcs"] == "number"


def test_checkpointless_becomes_settings(files: Path) -> None:
    found = recipe(files, "nemo")
    assert (found.task, found.num_nodes, found.missing) == ("pretrain", 16, ("data_path",))
    assert found.settings == {
        **{"model": "llama3-70b", "bf16": True, "lr": 3e-4, "min_lr": 3e-5, "lr_warmup_iters": 20, "weight_decay": 0.1},
        **{"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-5, "clip_grad": 1.0},
        **{"global_batch_size": 512, "micro_batch_size": 1, "seq_length": 2048, "train_iters": 1000},
        **{"eval_iters": 32, "eval_interval": 200, "log_interval": 10, "save_interval": 20, "keep_last_k": 2},
        **{"tensor_model_parallel_size": 8, "sequence_parallel": True, "pipeline_model_parallel_size": 4},
        **{"context_parallel_size": 1, "hybrid_shard_degree": 2, "async_save": True},
    }


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("llmft", [MODEL + "peft_config=null"], {"lora_rank": None}),
        ("llmft", ["~" + MODEL + "peft_config"], {"lora_rank": None}),
        ("llmft", [MODEL + "peft_config.use_dora=true", MODEL + "peft_config.lora_dropout=0"], {"use_dora": True}),
        ("llmft", [MODEL + "peft_config.target_modules=[q_proj,v_proj]"], {"lora_target_modules": "query,value"}),
        (
            "llmft",
            ["+" + MODEL + "peft_config.target_parameters=[mlp.experts.down_proj]"],
            {"lora_target_modules": "all-linear,*.experts.down"},
        ),
        ("llmft", [MODEL + "lora_checkpoint_file_path=/a"], {"load_adapter": "/a", "lora_rank": None}),
        ("llmft", [MODEL + "model_name_or_path=/fsx/007"], {"load": "/fsx/007"}),
        ("llmft", [MODEL + "attn_implementation=eager"], {"attention_backend": "math"}),
        (
            "llmft",
            [ARGS + "trainer_type=dpo", "+" + ARGS + "beta=0.01", "+" + ARGS + "loss_type=ipo"],
            {"objective": "dpo", "dpo_beta": 0.01, "dpo_loss_type": "ipo"},
        ),
        ("llmft", ["+" + ARGS + "beta=0.01"], {"dpo_beta": None}),
        ("llmft", [ARGS + "ring_attn_size=2"], {"context_parallel_size": 2, "cp_comm_type": "p2p"}),
        (
            "llmft",
            [ARGS + "ulysses_sequence_parallel_size=2"],
            {"context_parallel_size": 2, "cp_comm_type": "a2a", "hybrid_shard_degree": 4},
        ),
        (
            "llmft",
            [ARGS + "ring_attn_size=2", ARGS + "ulysses_sequence_parallel_size=2"],
            {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": "2 2", "hybrid_shard_degree": 2},
        ),
        ("llmft", [ARGS + "strategy.fsdp_config.sharding_strategy=FULL_SHARD"], {"hybrid_shard_degree": 0}),
        ("llmft", [ARGS + "strategy.fsdp_config.cpu_offload=true"], {"optimizer_cpu_offload": True}),
        ("llmft", [ARGS + "gradient_clipping=false"], {"clip_grad": 0.0}),
        ("llmft", [ARGS + "weight_decay=0.1"], {"weight_decay": 0.1}),
        ("llmft", [ARGS + "l2=0.1"], {"weight_decay": 0.1}),
        ("llmft", [ARGS + "lr_scheduler=cosine_with_min_lr"], {"min_lr": pytest.approx(1e-5)}),
        ("llmft", [ARGS + "packing_samples=true"], {"packing": "best-fit"}),
        ("llmft", [ARGS + "eval_steps=5", ARGS + "save_steps=7"], {"eval_interval": 5, "save_interval": 7}),
        ("llmft", [ARGS + "merge_weights=false"], {"save_hf": None}),
        ("llmft", ["recipes.training_config.mlflow.tracking_uri=http://m"], {"mlflow_experiment": "llama"}),
        ("llmft", ["recipes.lr=3e-4", "recipes.load=/m"], {"lr": 3e-4, "load": "/m"}),
        ("verl", [DATA + "use_dynamic_bsz=false"], {"micro_batch_size": 8}),
        ("verl", [DATA + "train_batch_size=24"], {"micro_batch_size": 3}),
        ("verl", [DATA + "train_files=[/a.parquet,/b.parquet]"], {"data_path": "/a.parquet /b.parquet"}),
        ("verl", [DATA + "truncation=right"], {"truncation_side": None}),
        ("verl", [ENGINE + "fsdp_size=4", ENGINE + "reshard_after_forward=false"],
         {"hybrid_shard_degree": 4, "data_parallel_sharding_strategy": "optim_grads"}),
        ("verl", ["recipes.training_config.model.lora_rank=0"], {"lora_rank": None, "lora_alpha": None}),
        ("verl", ["recipes.training_config.optim.lr_warmup_steps=10"],
         {"lr_warmup_iters": 10, "lr_warmup_fraction": None}),
        ("verl", [DATA + "train_val_split_ratio=0.9"],
         {"eval_interval": 5, "split": "90,10,0", "full_validation": True}),
        ("llmft", [EVAL + "val_data.file_path=/v.jsonl"],
         {"valid_data_path": "/v.jsonl", "split": None, "eval_epochs": 1.0, "eval_interval": None}),
        ("llmft", [EVAL + "val_data.file_path=/v.jsonl", "~" + ARGS + "eval_steps"],
         {"valid_data_path": "/v.jsonl", "split": None, "eval_epochs": 1.0, "full_validation": True}),
        ("llmft", [ARGS + "eval_steps=7"], {"eval_epochs": None, "eval_interval": 7, "full_validation": True}),
        ("llmft", [EVAL + "train_val_split_ratio=1.0"], {"eval_epochs": None, "split": "100,0,0"}),
        ("llmft", ["recipes.eval_interval=3", "recipes.eval_iters=2", "recipes.train_iters=9"],
         {"eval_epochs": None, "full_validation": None, "train_epochs": None, "train_iters": 9, "eval_iters": 2}),
        ("llmft", ["recipes.valid_data_path=/v.jsonl"], {"valid_data_path": "/v.jsonl", "split": None}),
        ("verl", [DATA + "val_files=/v.parquet"], {"valid_data_path": "/v.parquet", "split": None, "eval_interval": 5}),
        ("verl", [DATA + "val_files=[/v,/w]", TRAINER + "test_freq=after_each_epoch"],
         {"valid_data_path": "/v /w", "eval_interval": None, "eval_epochs": 1.0, "full_validation": True}),
        ("grpo", [DATA + "val_files=/v.parquet"], {"valid_data_path": "/v.parquet", "split": None, "eval_interval": 5}),
        ("verl", [TRAINER + "total_training_steps=30"], {"train_iters": 30, "train_epochs": None}),
        ("verl", [TRAINER + "save_freq=20", TRAINER + "default_local_dir=/fsx/ck"],
         {"save_interval": 20, "save": "/fsx/ck"}),
        ("verl", ["recipes.training_config.mlflow.tracking_uri=http://m"],
         {"mlflow_experiment": "sft", "mlflow_run_name": "one", "mlflow_tracking_uri": "http://m"}),
        ("verl", ["+" + DATA + "chosen_key=chosen", "+" + TRAINER + "beta=0.01"],
         {"objective": "dpo", "dpo_beta": 0.01}),
        (
            "verl",
            ["+" + ENGINE + "tensor_model_parallel_size=2", "+" + ENGINE + "sequence_parallel=true",
             "+" + ENGINE + "override_transformer_config.recompute_granularity=selective",
             "~recipes.training_config.model.target_modules",
             "+recipes.training_config.model.lora={rank: 8, alpha: 16, target_modules: [linear_qkv, linear_fc2]}"],
            {"tensor_model_parallel_size": 2, "sequence_parallel": True, "recompute_granularity": "selective",
             "lora_rank": 8, "lora_target_modules": "query,key,value,down"},
        ),
        ("grpo", [A + "actor.use_kl_loss=false"], {"beta": 0.0}),
        ("grpo", [A + "actor.use_dynamic_bsz=false"], {"micro_batch_size": 2}),
        ("grpo", [A + "actor.use_kl_loss=false", ALG + "use_kl_in_reward=true", "+" + ALG + "kl_penalty=low_var_kl"],
         {"beta": 0.001, "kl_placement": "reward", "kl_estimator": "k3"}),
        ("grpo", [A + "actor.use_kl_loss=false", ALG + "use_kl_in_reward=true"], {"kl_estimator": "k1"}),
        ("grpo", [A + "actor.use_kl_loss=false", ALG + "use_kl_in_reward=true", ALG + "kl_ctrl.kl_coef=0.0"],
         {"beta": 0.0, "kl_placement": None}),
        ("grpo", [A + "actor.use_kl_loss=false", A + "actor.policy_loss.loss_mode=gspo"],
         {"objective": "gspo", "loss_type": None, "delta": None, "epsilon": 0.2, "epsilon_high": 0.28}),
        ("grpo", [A + "actor.loss_agg_mode=seq-mean-token-sum-norm"], {"loss_type": "dr_grpo"}),
        ("grpo", ["recipes.training_config.algorithm.rollout_correction.rollout_is=sequence"],
         {"importance_sampling_mode": "sequence_truncate", "importance_sampling_clip_max": 2.0}),
        ("grpo", ["recipes.training_config.algorithm.adv_estimator=rloo"], {"advantage_estimator": "rloo"}),
        ("grpo", ["recipes.training_config.algorithm.norm_adv_by_std_in_grpo=false"], {"scale_rewards": "off"}),
        ("grpo", ["recipes.training_config.custom_reward_function.path=/r.py"],
         {"reward_funcs": "/r.py:compute_score"}),
        ("grpo", [A + "rollout.val_kwargs.do_sample=true", A + "rollout.val_kwargs.temperature=0.7"],
         {"eval_temperature": 0.7}),
        ("grpo", [A + "rollout.n=16", "recipes.training_config.data.train_batch_size=64"],
         {"num_generations": 16, "global_batch_size": 512, "steps_per_generation": 2}),
        ("nemo", ["recipes.log.name=gpt_oss_120b_full_finetune", "+recipes.load=/m", "recipes.trainer.num_nodes=32"],
         {"lora_rank": None, "load": "/m"}),
        ("nemo", ["recipes.log.name=gpt_oss_120b_finetune", "+recipes.load=/m", "recipes.trainer.num_nodes=32"],
         {"lora_rank": 32, "lora_alpha": 32.0}),
        ("nemo", ["recipes.log_dir=/fsx/007"], {"save": "/fsx/007"}),
        ("verl", [TRAINER + "max_ckpt_to_keep=0"], {"keep_last_k": None}),
        ("verl", [TRAINER + "max_ckpt_to_keep=-1"], {"keep_last_k": None}),
        ("verl", [TRAINER + "max_ckpt_to_keep=1"], {"keep_last_k": 2}),
        ("grpo", ["+" + TRAINER + "max_actor_ckpt_to_keep=0"], {"keep_last_k": None}),
        ("llmft", [ARGS + "max_ckpt_num=-1"], {"keep_last_k": None}),
        ("nemo", ["recipes.log.ckpt.save_top_k=-1"], {"keep_last_k": None}),
        ("verl", [TRAINER + "logger=tensorboard"], {"tensorboard": True}),
        ("verl", [TRAINER + "logger=console"], {"tensorboard": False}),
        ("llmft", [ARGS + "lr_scheduler=constant"], {"lr_decay_style": "constant", "lr_warmup_fraction": None}),
        ("llmft", [ARGS + "lr_scheduler=constant_with_warmup"], {"lr_warmup_fraction": 0.1}),
        ("verl", ["recipes.training_config.optim.lr_scheduler_type=constant"], {"lr_warmup_fraction": 0.1}),
        ("verl", ["~recipes.training_config.model.lora_rank",
                  "+recipes.training_config.model.lora={rank: 8, target_modules: [linear_qkv]}"], {"lora_rank": 8}),
        ("grpo", ["+recipes.display_name='Gemma 4'", A + "model.path=/m",
                  "+" + DATA + "apply_chat_template_kwargs.enable_thinking=false"], {"load": "/m"}),
        ("verl", [OPTIM + "lr_warmup_steps=0"], {"lr_warmup_iters": None, "lr_warmup_fraction": 0.1}),
        ("verl", [OPTIM + "lr_warmup_steps=7"], {"lr_warmup_iters": 7, "lr_warmup_fraction": None}),
        ("verl", ["~" + OPTIM + "lr_scheduler_type", "~" + OPTIM + "betas"],
         {"lr_decay_style": "constant", "adam_beta2": 0.999}),
        ("verl", [OPTIM + "total_training_steps=9"], {"lr_decay_iters": None}),
        ("verl", [TRAINER + "test_freq=-1", "+" + DATA + "val_files=/v"],
         {"valid_data_path": "/v", "eval_epochs": 2.0, "full_validation": True}),
        ("verl", [TRAINER + "test_freq=-1", "+" + DATA + "val_files=/v", TRAINER + "total_training_steps=30"],
         {"eval_interval": 30, "eval_epochs": None}),
        ("verl", ["~" + TRAINER + "test_freq", "+" + DATA + "val_files=/v"], {"eval_epochs": 1.0}),
        ("grpo", [TRAINER + "test_freq=-1", "+" + DATA + "val_files=/v"],
         {"valid_data_path": None, "eval_interval": None, "eval_epochs": None}),
        ("verl", ["+recipes.training_config.model.lora={rank: 8, alpha: 24}"], {"lora_rank": 8, "lora_alpha": 24.0}),
        ("grpo", ["~" + A + "actor.kl_loss_coef"], {"beta": 0.001}),
        ("grpo", [A + "actor.kl_loss_coef=0"], {"beta": 0.0}),
        ("grpo", ["~" + A + "actor.clip_ratio_high", A + "actor.clip_ratio=0.3"],
         {"epsilon": 0.2, "epsilon_high": 0.3}),
        ("grpo", [A + "actor.clip_ratio=0.3"], {"epsilon": 0.2}),
        ("grpo", ["~" + A + "actor.clip_ratio_low", A + "actor.clip_ratio=0.25"], {"epsilon": 0.25}),
        ("grpo", ["+" + A + "rollout.repetition_penalty=1.0"], {"temperature": 1.0}),
    ],
)  # fmt: skip
def test_other_values_of_keys(files: Path, name: str, words: list[str], expected: dict[str, Any]) -> None:
    found = recipe(files, name, *words).settings
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "word", "message"),
    [
        ("llmft", MODEL + "multimodal=true", "multimodal: true cannot be had: smp trains language models only"),
        ("llmft", "recipes.training_config.datasets.val_data.limit=9", "val_data.limit: 9 cannot be had: all samples"),
        ("llmft", ARGS + "trainer_callbacks=[{_target_: mine.Callback}]", "trainer_callbacks: mine.Callback is code"),
        ("llmft", ARGS + "trainer_type=ppo", "trainer_type: ppo cannot be had: take sft or dpo"),
        ("llmft", "+" + ARGS + "use_wandb=secret", "use_wandb: it would be a token"),
        ("llmft", ARGS + "max_norm=0.5", "max_norm and gradient_clipping_threshold are 0.5 and 1.0"),
        ("llmft", "recipes.training_config.datasets.preprocessor_cfgs.1.type=Mine", "is none of TrainingSFTSample"),
        ("llmft", "recipes.training_config.datasets.preprocessor_cfgs.1.mine=1", "mine: there is no such key"),
        ("llmft", "+" + ARGS + "lr_sched=x", "training_args.lr_sched: there is no such key: did you mean"),
        ("verl", DATA + "custom_cls.path=/mine.py", "custom_cls.path: /mine.py cannot be had"),
        ("verl", "+" + ENGINE + "nothing=1", "engine.nothing: there is no such key"),
        ("verl", "+" + ENGINE + "param_offload=true", "param_offload: true cannot be had: weights stay on GPUs"),
        ("verl", "+recipes.training_config.model.override_config.rope_theta=1", "rope_theta: 1 cannot be had"),
        ("verl", "recipes.training_config.model.exclude_modules=.*down_proj.*", "cannot be left out by name"),
        (
            "grpo",
            A + "rollout.multi_turn.enable=true",
            "multi_turn.enable: true cannot be had: a completion is one turn",
        ),
        ("grpo", "recipes.training_config.reward_model.enable=true", "reward_model.enable: true cannot be had"),
        ("grpo", "recipes.training_config.data.train_batch_size=100", "32 does not divide data.train_batch_size 100"),
        (
            "grpo",
            "+" + DATA + "apply_chat_template_kwargs.enable_thinking=false",
            "enable_thinking: false cannot be had",
        ),
        ("grpo", ALG + "use_kl_in_reward=true", "use_kl_loss and use_kl_in_reward cannot be had together: take one"),
        ("grpo", A + "actor.policy_loss.loss_mode=clip_cov", "clip_cov cannot be had: take vanilla, gspo"),
        ("grpo", A + "actor.policy_loss.loss_mode=gspo", "token-mean of the KL term alone cannot be had"),
        ("grpo", "+" + A + "rollout.repetition_penalty=1.1", "repetition_penalty: 1.1 cannot be had: completions are"),
        ("grpo", "+" + A + "rollout.stop=[x]", "rollout.stop: ['x'] cannot be had: completions are sampled by"),
        ("grpo", "+recipes.reward_funcs=nosuch", "--reward-funcs nosuch: neither FILE.py:NAME nor one of exact_match"),
        (
            "llmft",
            "recipes.trainer.num_node=2",
            "trainer.num_node: there is no such key: did you mean trainer.num_nodes",
        ),
        ("grpo", "+" + A + "rollout.temprature=0.7", "there is no such key: did you mean"),
        ("grpo", "+" + A + "actor.rollout_n=4", "rollout_n: 4 cannot be had: rollout.n is 8"),
        ("llmft", ARGS + "gradient_clipping=0.5", "gradient_clipping: expected true or false, got '0.5'"),
        (
            "llmft",
            "+" + ARGS + "strategy.fsdp_config.activation_checkpointing=false",
            "contradicts training_config.training_args.gradient_checkpointing, which says full; say both alike",
        ),
        ("llmft", ARGS + "learning_rate=-1", "--lr -1.0 must be above 0 (training_config.training_args.learning_rate)"),
        ("verl", DATA + "truncation=error", "data.truncation: error cannot be had: samples that are too long are cut"),
        ("verl", "+recipes.training_config.optim.warmup_style=constant", "optim.lr_scheduler_type, which says cosine"),
        ("nemo", "+recipes.plugins.precision=32", "bf16 false contradicts optim.config.bf16, which says true"),
        ("nemo", "recipes.callbacks.1.test_fault_config.fault_prob_random=0.5", "faults are not injected"),
        ("nemo", "recipes.log.name=bert_340m", "log.name: bert_340m begins with none of"),
        ("nemo", "recipes.strategy.num_distributed_optimizer_instances=0", "instances: 0 is not a value of this key"),
        ("nemo", "recipes.strategy.num_distributed_optimizer_instances=3", "3 does not divide the 4 data-parallel"),
    ],
)
def test_what_cannot_be_had_is_one_line(files: Path, name: str, word: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        recipe(files, name, word)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_name_of_a_run_says_no_model(files: Path) -> None:
    word = "+" + DATA + "apply_chat_template_kwargs.enable_thinking=false"
    with pytest.raises(ConfigError, match="enable_thinking: false cannot be had"):
        recipe(files, "grpo", "recipes.run.name=against-gemma", word)


def test_an_elastic_recipe_is_an_elastic_job(files: Path) -> None:
    policy = "recipes.elastic_policy={is_elastic: true, min_nodes: 2, max_nodes: 8, replica_increment_step: 2}"
    found = recipe(files, "llmft", policy).settings
    wanted = {"max_nodes": 8, "min_nodes": 2, "replica_increment_step": 2, "peer_snapshot_interval": 10}
    assert {name: found.get(name) for name in wanted} == wanted and found["global_batch_size"]
    words = [f"recipes={files}/llmft.yaml", "base_results_dir=/fsx", policy]
    _, artifacts = prepare([*words, "cluster=slurm"])
    script = artifacts["train.sh"]
    assert "--nnodes 2:8 --max-restarts 1000 --rdzv-conf last_call_timeout=30" in script
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}" in script
    with pytest.raises(ConfigError, match="max_nodes with cluster=local: it is one machine"):
        prepare([*words, "cluster=local"])
    with pytest.raises(ConfigError, match="trainer.num_nodes: 1 of an elastic job"):
        prepare([*words, "cluster=slurm", "recipes.trainer.num_nodes=1"])


def test_nodes_beyond_the_most_of_an_elastic_job_are_spare(files: Path) -> None:
    policy = "recipes.elastic_policy={is_elastic: true, min_nodes: 2, max_nodes: 3}"
    words = [f"recipes={files}/llmft.yaml", "base_results_dir=/fsx", policy, "cluster=slurm"]
    job, artifacts = prepare([*words, "recipes.trainer.num_nodes=4"])
    assert "spare nodes, which wait to take the place of lost ones: 1" in describe(job, artifacts)
    assert job.recipe.world_size == 3 * job.recipe.devices
    assert "--nnodes 2:4 --max-restarts 1000" in artifacts["train.sh"]
    assert any("--nodes=4" in text for text in artifacts.values())


@pytest.mark.parametrize("name", TEXTS)
def test_every_key_is_a_setting_or_said_or_refused(files: Path, name: str) -> None:
    """None is dropped: it is in notes.txt, or what it becomes names settings, or another value would be refused."""
    tree = yaml.safe_load(TEXTS[name])
    form = form_of(tree)
    assert form is not None
    whole = recipe(files, name)
    noted = {note.partition(":")[0] for note in whole.notes}
    for key, value in flatten(tree).items():
        if value in (None, "") or "${" in str(value) or key.startswith(("run.", "trainer.")) or key in noted:
            continue
        found = form.find(key)
        assert found is not None, key
        said = found.text
        assert "`" in said or said.startswith(("refused", "with ")), (key, said)


@pytest.mark.parametrize("name", TEXTS)
def test_a_key_that_becomes_nothing_is_neutral_or_read_by_another(files: Path, name: str) -> None:
    tree = yaml.safe_load(TEXTS[name])
    form = form_of(tree)
    assert form is not None
    leaves = {key: value for key, value in flatten(tree).items() if value not in (None, "") and "${" not in str(value)}
    silent, read = set[str](), set[str]()
    for key, value in leaves.items():
        asked = set[str]()

        def get(other: str, asked: set[str] = asked) -> Any:
            asked.add(other)
            return leaves.get(other)

        became = found.convert(value, get) if (found := form.find(key)) is not None else "of all recipes"
        if became == {} and found is not None and not found.text.startswith("refused"):
            silent |= {key}
        read |= asked if became and not isinstance(became, str) else set()
    neutral = (True, False, 0, 1, -1, "sft", "vanilla", "/opt/ml/model")
    assert not {key for key in silent - read - set(form.sizes.values()) if leaves[key] not in neutral}


def test_what_changes_nothing_is_in_the_notes(files: Path) -> None:
    _, artifacts = prepare([f"recipes={files}/llmft.yaml", "cluster=slurm", "base_results_dir=/fsx"])
    for line in (
        "display_name: a title",
        "scale_config.2.trainer.num_nodes: batch size and learning rate are the same with any number of nodes",
        "elastic_policy.max_nodes: is_elastic says that nodes stay",
        "training_config.model_config.generation_cfg.temperature: it is of AWS's evaluation",
        "training_config.training_args.trainer_callbacks: it counts for AWS's bill",
    ):
        assert f"\n{line}" in artifacts["notes.txt"]


@pytest.mark.parametrize(
    ("name", "word", "note"),
    [
        ("llmft", "+" + ARGS + "beta=0.01", "training_args.beta: it is of dpo, which trainer_type does not say"),
        ("llmft", MODEL + "peft_config.peft_type=null", "peft_config.r: it goes with peft_type, which is unset or 0"),
        ("llmft", ARGS + "lr_scheduler=constant", "lr_warmup_ratio: lr_scheduler constant has no warmup"),
        (
            "verl",
            "recipes.training_config.model.lora_rank=0",
            "model.lora_alpha: it goes with lora_rank, which is unset",
        ),
        (
            "verl",
            "++recipes.training_config.actor_rollout_ref.model.path=/m",
            "config.model.path: actor_rollout_ref.model.path says it",
        ),
        ("grpo", DATA + "max_response_length=9", "data.max_response_length: rollout.response_length says it"),
        ("grpo", A + "rollout.prompt_length=9", "rollout.prompt_length: data.max_prompt_length says it"),
        ("grpo", A + "actor.use_kl_loss=false", "actor.kl_loss_coef: it goes with use_kl_loss, which is unset or 0"),
        ("verl", OPTIM + "lr_warmup_steps=7", "lr_warmup_steps_ratio: lr_warmup_steps says it"),
        ("verl", OPTIM + "total_training_steps=9", "optim.total_training_steps: verl says the run's length over it"),
        ("verl", TRAINER + "total_training_steps=30", "trainer.total_epochs: total_training_steps says 30 steps; verl"),
        ("verl", TRAINER + "project_name=p", "trainer.project_name: trainer.logger names no wandb, and no mlflow with"),
        ("verl", TRAINER + "nnodes=3", "trainer.nnodes: recipes.trainer.num_nodes says 1"),
        ("verl", DATA + "micro_batch_size_per_gpu=2", "micro_batch_size_per_gpu: use_dynamic_bsz fills micro-batches"),
        ("verl", DATA + "use_dynamic_bsz=false", "max_token_len_per_gpu: it goes with use_dynamic_bsz, which is unset"),
        ("grpo", A + "actor.ppo_micro_batch_size_per_gpu=1", "ppo_micro_batch_size_per_gpu: use_dynamic_bsz fills"),
        ("verl", "+recipes.training_config.model.lora={rank: 8}", "model.lora_rank: keys below lora say it"),
        (
            "verl",
            "+recipes.training_config.model.lora={alpha: 8}",
            "lora.alpha: it goes with lora.rank, which is unset",
        ),
        ("verl", "+recipes.training_config.model.lora_adapter_path=/a", "lora_rank: the adapter in lora_adapter_path"),
        ("llmft", MODEL + "lora_checkpoint_file_path=/a", "peft_config.r: the adapter in lora_checkpoint_file_path"),
        ("nemo", "recipes.trainer.limit_val_batches=0", "val_check_interval: it goes with limit_val_batches"),
    ],
)
def test_a_key_that_no_other_reads_is_in_the_notes(files: Path, name: str, word: str, note: str) -> None:
    assert any(note in line for line in recipe(files, name, word).notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {name: x, model_type: 'amazon.nova-lite-v1:0:300k'}\n", "is Amazon's own model"),
        ("run: {name: x, model_type: mtrl}\nmodel: {model_name: nova-lite}\n", "nova-lite is Amazon's own model"),
        ("run: {name: x, model_type: mtrl}\n", "reinforcement learning over several turns"),
        ("run: {name: x}\nevaluation: {task: mmlu}\n", "evaluation: it is no job here; tools/evaluate.py"),
        ("run: {name: x}\nllm_as_judge: {metrics: ''}\n", "llm_as_judge: no language model judges"),
        ("run: {name: x, model_type: other}\ntraining_config: {a: 1}\n", "other is none of hf, llm_finetuning_aws"),
        ("run: {name: x}\ntraining_config: {a: 1}\n", "run.model_type is missing next to training_config"),
        ("run: {name: x}\nmodel: {mcore_gpt: true, a: '${nothing.b}'}\n", "a recipe of NeMo's own trainer"),
        ("run: {name: x, model_type: neuron-hf}\nmodel: {a: '${nothing.b}'}\n", "is for Trainium"),
    ],
)
def test_other_trainers_are_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        recipe(tmp_path, "x")
    assert isinstance(raised.value, FeatureError) == (": other" not in text and "{a: 1}" not in text)


def test_a_word_that_is_not_taken_gives_way_to_why_the_recipe_is_refused(tmp_path: Path) -> None:
    """AWS's scripts of evaluations type launch_json."""
    (tmp_path / "x.yaml").write_text("run: {name: x}\nevaluation: {task: mmlu}\n")
    with pytest.raises(FeatureError, match="evaluation: it is no job here"):
        recipe(tmp_path, "x", "launch_json=true")


def test_a_model_that_cannot_be_read_yet_is_not_submitted(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"recipes={files}/verl.yaml", "cluster=slurm", f"base_results_dir={tmp_path}", DATA + "train_files=/x"]
    model = "recipes.training_config.model.path="
    assert main([*words, model + "google/gemma-4-31B-it", "dry_run=true"]) == 0
    assert "hub:google/gemma-4-31B-it cannot be trained so" in capsys.readouterr().out
    assert main([*words, model + "google/gemma-4-31B-it"]) == 2
    assert "share keys and values" in capsys.readouterr().err
    assert recipe(files, "verl", model + "Qwen/Qwen3.5-27B").unread is None
    experts = "+recipes.training_config.model.target_parameters=[mlp.experts.down_proj]"
    assert recipe(files, "verl", model + "openai/gpt-oss-20b", experts).unread is None
    llama4 = model + "meta-llama/Llama-4-Scout-17B-16E-Instruct"
    assert recipe(files, "verl", llama4, experts).unread == "adapters on Llama 4's experts"
    assert recipe(files, "verl", llama4).unread is None


def test_a_dry_run_names_the_form(files: Path) -> None:
    for name, form in (("llmft", "llm_finetuning_aws"), ("grpo", "verl with an actor")):
        lines = describe(*prepare([f"recipes={files}/{name}.yaml", "cluster=slurm"]))
        assert f"translated from HyperPod's keys ({form}); settings.yaml is what they became" in lines
    assert not any("HyperPod" in line for line in describe(*prepare(["recipes=laptop/debug"])))


def test_the_machine_is_compared_with_those_of_the_recipe(files: Path) -> None:
    for machine, said in (("ml.p5.48xlarge", False), ("p4d.24xlarge", True)):
        made = prepare([f"recipes={files}/llmft.yaml", "cluster=slurm", f"instance_type={machine}"])
        lines = [line for line in describe(*made) if "none that HyperPod names" in line]
        assert bool(lines) == said


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_key_of_a_table_does_what_its_text_says(form: Any) -> None:
    """The settings that its text names exist; a key that changes nothing says so of any value."""
    known = settings_of(PRETRAIN).keys() | settings_of(FINETUNE).keys()
    for name, key in form.keys.items():
        if not key.text.startswith("refused"):
            named = re.findall(r"`(\w+)(?:: [\w ]+)?`", key.text)
            assert {word for word in named if word not in FAMILIES} <= known, name
        if key.text.startswith("changes nothing"):
            leaf = name.replace("*.", "x.").replace(".*", ".x")
            value = "anything" if key.kind is None else True
            assert translate({leaf: value}, form).notes[0].startswith(f"{leaf}: ")


_VALUES = st.sampled_from(
    [0, 1, -1, 3, 0.5, 1e9, True, False, "", "x", "a/b", "null", [], [1], [{"_target_": "x"}], ["a", "b"], "5", "é\n#"]
)
_KEYS = [(form, name) for form in FORMS.values() for name in form.keys]


@settings(max_examples=1500, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(_KEYS), _VALUES), min_size=1, max_size=4))
def test_any_value_of_any_key_is_settings_or_one_error(given_keys: list[tuple[tuple[Any, str], Any]]) -> None:
    form = given_keys[0][0][0]
    leaves = {name.replace("*.", "x.").replace(".*", ".x"): value for (of, name), value in given_keys if of is form}
    try:
        found = translate(leaves, form, {"trainer.devices": 8, "trainer.num_nodes": 2})
    except ConfigError as error:
        assert any(name in str(error) for name in leaves)
        return
    known = settings_of(PRETRAIN).keys() | settings_of(FINETUNE).keys()
    assert found.values.keys() <= known


def test_texts_of_these_forms_stay_texts() -> None:
    for name in ("training_config.datasets.train_data.file_path", "training_config.model.path", "log.ckpt.dirpath"):
        key = key_of(name)
        assert key is not None and key.is_text


RUNS = {
    "llmft": [
        *(MODEL + "model_name_or_path={0}", "recipes.training_config.datasets.train_data.file_path={0}/sft.jsonl"),
        *(ARGS + "max_len=48", ARGS + "train_batch_size=8", "+recipes.train_iters=2", ARGS + "max_epochs=null"),
    ],
    "verl": [
        *("recipes.training_config.model.path={0}", DATA + "train_files={0}/sft.jsonl", DATA + "max_length=48"),
        *(DATA + "train_batch_size=8", TRAINER + "total_training_steps=2"),
    ],
    "grpo": [
        *(A + "model.path={0}", DATA + "train_files={0}/prompts.jsonl", "+recipes.reward_funcs=regex"),
        *(DATA + "max_prompt_length=40", A + "rollout.response_length=8", A + "rollout.n=2"),
        *(DATA + "train_batch_size=4", A + "actor.ppo_mini_batch_size=2", A + "actor.use_dynamic_bsz=false"),
        *("+" + TRAINER + "total_training_steps=2", TRAINER + "test_freq=0"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_from_the_typed_line_to_a_hugging_face_folder(files: Path, tmp_path: Path, name: str) -> None:
    """With overrides that make it tiny, a recipe trains here; what it leaves is read by transformers."""
    transformers = pytest.importorskip("transformers")
    model = tmp_path / "model"
    write_tokenizer(model)
    write_model(model)
    write_samples(model)
    prompts = [{"prompt": f"what is {n}? ", "pattern": "[a-e]"} for n in range(24)]
    (model / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    words = [word.format(model) for word in RUNS[name]]
    place = ["cluster=local", f"base_results_dir={tmp_path}", "recipes.run.name=tiny", "recipes.trainer.num_nodes=1"]
    sizes = ["++recipes.trainer.devices=1"]
    done = subprocess.run(
        [sys.executable, f"{ROOT}/main.py", f"recipes={files}/{name}.yaml", *place, *sizes, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "tiny/status.json").read_text())["status"] == "done"
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tiny/checkpoints/hf_model")
    assert trained.config.model_type == "llama"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "tiny/checkpoints/hf_model").chat_template
