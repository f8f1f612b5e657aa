"""Every key of a HyperPod recipe of release 1, and its translation."""

from __future__ import annotations

from dataclasses import replace

from smp.launch.hyperpod import values
from smp.launch.hyperpod.form import Form
from smp.launch.hyperpod.key import (
    FLAG,
    INTEGER,
    NAMED,
    NUMBER,
    PAIR,
    TEXT,
    TEXTS,
    Key,
    nothing,
    only,
    read_with,
    switch,
    to,
)


def _dpo(name: str) -> Key:
    of = read_with("dpo.enabled", "model.dpo.enabled")
    return Key(f"`{name}`, with dpo.enabled", lambda value, get: of.convert(value, get) or {name: value}, kind=NUMBER)


_LOGGERS = ("exp_manager.create_wandb_logger", "exp_manager.create_mlflow_logger")


def _of_logger(logger: str, setting: str) -> Key:
    reader = f"create_{logger}_logger"
    return replace(read_with(reader, f"exp_manager.{reader}", kind=TEXT), text=f"`{setting}`, with {reader}")


_RUN = {
    "run.model_type": only(("hf",), "other trainers are closed or not this one"),
    "run.results_dir": nothing("everything is in base_results_dir/run.name"),
    "trainer.accelerator": only(("gpu", "cuda", "auto"), "for CPUs give env_vars.CUDA_VISIBLE_DEVICES=''"),
    "trainer.precision": Key("`bf16`", values.precision, kind=NAMED),
    "trainer.max_steps": to("train_iters"),
    "trainer.log_every_n_steps": to("log_interval"),
    "trainer.limit_val_batches": Key(
        "`eval_iters`, `eval_interval`; 0: no validation", values.validation, kind=INTEGER
    ),
    "trainer.val_check_interval": replace(
        read_with("limit_val_batches", "trainer.limit_val_batches", kind=INTEGER),
        text="`eval_interval`, with limit_val_batches",
    ),
    "trainer.accumulate_grad_batches": Key(
        "refused unless 1: give `global_batch_size`", values.accumulation, kind=INTEGER
    ),
    "trainer.gradient_clip_val": nothing("model.grad_clip clips"),
    "use_smp_model": nothing("all models are parallel models", FLAG),
    "distributed_backend": only(("nccl", "gloo"), "GPUs speak NCCL, CPUs gloo"),
}
_EXP = {
    "exp_dir": Key("where `save` is; null: the job's folder", lambda value, get: {}, kind=TEXT),
    "name": replace(
        read_with("create_wandb_logger or create_mlflow_logger", *_LOGGERS, kind=TEXT),
        text="`wandb_exp_name`, `mlflow_run_name`, with their loggers",
    ),
    "create_tensorboard_logger": to("tensorboard"),
    "summary_writer_kwargs.save_dir": nothing("TensorBoard events are in the job's folder"),
    "create_mlflow_logger": Key(
        "`mlflow_experiment`, `mlflow_run_name`, `mlflow_tracking_uri`", values.mlflow, kind=FLAG
    ),
    "mlflow_logger_kwargs.tracking_uri": _of_logger("mlflow", "mlflow_tracking_uri"),
    "mlflow_logger_kwargs.experiment_name": _of_logger("mlflow", "mlflow_experiment"),
    "mlflow_logger_kwargs.run_name": _of_logger("mlflow", "mlflow_run_name"),
    "create_wandb_logger": Key("`wandb_project`, `wandb_exp_name`", values.wandb, kind=FLAG),
    "wandb_logger_kwargs.save_dir": nothing("W&B's files are where WANDB_DIR says"),
    "wandb_logger_kwargs.project": _of_logger("wandb", "wandb_project"),
    "wandb_logger_kwargs.name": _of_logger("wandb", "wandb_exp_name"),
    "create_checkpoint_callback": Key(
        "with false no `save_interval`; the end is saved", lambda value, get: {}, kind=FLAG
    ),
    "checkpoint_callback_params.save_top_k": Key(
        "`keep_last_k` or `keep_best_k`; 0: only the end is saved", values.top_k, kind=INTEGER
    ),
    "checkpoint_callback_params.every_n_train_steps": Key(
        "`save_interval`, unless save_top_k is 0", values.interval, kind=INTEGER
    ),
    "checkpoint_callback_params.monitor": Key("step: `keep_last_k`; a loss: `keep_best_k`", values.monitor, kind=TEXT),
    "checkpoint_callback_params.mode": read_with(
        "monitor", "exp_manager.checkpoint_callback_params.monitor", kind=TEXT
    ),
    "checkpoint_callback_params.save_last": nothing("the end of a run is saved in any case"),
    "checkpoint_dir": Key("`save`, with exp_dir", values.checkpoint_folder, kind=TEXT),
    "resume_from_checkpoint": Key("`load`; refused with do_finetune", values.resumed, kind=TEXT),
    "auto_checkpoint.enabled": Key(
        "`save_mtbf_hours: 24`, `async_save`",
        lambda value, get: {"save_mtbf_hours": 24, "async_save": True} if value else {},
        kind=FLAG,
    ),
    "export_full_model.every_n_train_steps": only(
        (0,), "checkpoints are whole; tools/convert_checkpoint.py exports one"
    ),
    "export_full_model.save_last": nothing("checkpoints are whole; tools/convert_checkpoint.py exports the last"),
}
_SHAPE = {
    "model_type": Key(
        "the family: " + ", ".join(f"`{name}`" for name in values.FAMILIES),
        values.model_type,
        shape=True,
        default=True,
        kind=NAMED,
    ),
    "max_position_embeddings": to("max_position_embeddings", shape=True),
    "num_hidden_layers": to("num_layers", shape=True),
    "hidden_size": to("hidden_size", shape=True),
    "num_attention_heads": to("num_attention_heads", shape=True),
    "num_key_value_heads": to("num_query_groups", shape=True),
    "intermediate_size": Key(
        "`ffn_hidden_size`; of llama_v4 `moe_ffn_hidden_size`", values.width, shape=True, kind=INTEGER
    ),
    "vocab_size": to("vocab_size", shape=True),
    "initializer_range": to("init_method_std", shape=True),
    "layernorm_epsilon": to("norm_epsilon", shape=True),
    "rms_norm_eps": to("norm_epsilon", shape=True),
    "rope_theta": to("rotary_base", shape=True),
    "rope_scaling.rope_type": Key("`use_rope_scaling`", values.scaling, shape=True, kind=NAMED),
    "rope_scaling.factor": to("rope_scaling_factor", shape=True),
    "rope_scaling.high_freq_factor": to("rope_high_freq_factor", shape=True),
    "rope_scaling.low_freq_factor": to("rope_low_freq_factor", shape=True),
    "rope_scaling.original_max_position_embeddings": to("rope_original_max_position", shape=True),
    "tie_word_embeddings": Key(
        "`untie_embeddings_and_output_weights`",
        lambda value, get: {"untie_embeddings_and_output_weights": not value},
        shape=True,
        kind=FLAG,
    ),
    "sliding_window": Key(
        "`window_size`, unless use_sliding_window is false",
        lambda value, get: (
            "use_sliding_window is false" if get("model.use_sliding_window") is False else {"window_size": value}
        ),
        shape=True,
        kind=INTEGER,
    ),
    "use_sliding_window": Key("with sliding_window", lambda value, get: {}, shape=True, kind=FLAG),
    "max_window_layers": Key("refused with use_sliding_window", values.window_layers, shape=True, kind=INTEGER),
}
_MODEL = {
    "train_batch_size": to("micro_batch_size"),
    "val_batch_size": nothing("evaluation takes micro_batch_size"),
    "seed": to("seed"),
    "grad_clip": to("clip_grad"),
    "log_reduced_training_loss": nothing("the logged loss is that of all processes"),
    "precision": Key("`bf16`", values.precision, kind=NAMED),
    "tensor_model_parallel_degree": Key(
        "`tensor_model_parallel_size`, with `sequence_parallel` above 1",
        lambda value, get: {"tensor_model_parallel_size": value, "sequence_parallel": value != 1},
        kind=INTEGER,
    ),
    "context_parallel_degree": to("context_parallel_size"),
    "expert_model_parallel_degree": Key(
        "`expert_model_parallel_size`",
        lambda value, get: {} if value == 1 else {"expert_model_parallel_size": value},
        kind=INTEGER,
    ),
    "moe": Key(
        "with num_local_experts; `moe_z_loss_coeff` and, unless moe_load_balancing is none or sinkhorn, "
        "`moe_aux_loss_coeff` of SMP v2, 0.001",
        values.moe,
        kind=FLAG,
    ),
    "num_local_experts": Key("`num_experts`, with moe", values.with_experts("num_experts"), shape=True, kind=INTEGER),
    "num_experts_per_tok": Key(
        "`moe_router_topk`, with moe", values.with_experts("moe_router_topk"), shape=True, kind=INTEGER
    ),
    "moe_load_balancing": Key(
        "aux_loss or none; `moe_router_load_balancing_type: sinkhorn`; balanced, and in fine-tuning sinkhorn, become "
        "aux_loss",
        values.load_balancing,
        kind=TEXT,
    ),
    "moe_all_to_all_dispatcher": nothing("rows go to experts by all-to-all"),
    "global_token_shuffle": nothing("tokens are routed where they are"),
    "multi_modal": Key(
        "`finetune.py`, `model_implementation: transformers`, `packing: off`; samples may have images",
        lambda value, get: {"model_implementation": "transformers", "packing": "off"} if value else {},
        kind=FLAG,
    ),
    "activation_checkpointing": Key(
        "`recompute_granularity` full or none",
        lambda value, get: {"recompute_granularity": "full" if value else "none"},
        kind=FLAG,
    ),
    "activation_loading_horizon": Key(
        "`activation_loading_horizon`, with offload_activations",
        lambda value, get: (
            {"activation_loading_horizon": value}
            if get("model.offload_activations")
            else "it goes with offload_activations, which is unset or 0"
        ),
        kind=INTEGER,
    ),
    "offload_activations": switch("offload_activations"),
    "delayed_param": nothing("weights are always made where they rest"),
    "sharding_strategy": Key(
        "`hybrid_shard_degree`: shard_degree / context_parallel_degree, 0 for full_shard, 1 for no_shard",
        values.shard,
        kind=NAMED,
    ),
    "shard_degree": Key("`hybrid_shard_degree`, with hybrid_shard", values.shard_degree, kind=INTEGER),
    "forward_prefetch": nothing("FSDP2 prefetches by itself"),
    "backward_fetch_policy": nothing("FSDP2 prefetches by itself"),
    "limit_all_gathers": nothing("FSDP2 bounds its memory by itself"),
    "use_orig_param": nothing("FSDP2 keeps parameters as they are"),
    "auto_wrap_policy": only(("transformer_auto_wrap_policy",), "a block is a unit"),
    "fp8": Key(
        "`fp8_format` hybrid and `fp8_recipe` delayed, but for use_smp_model: false, where HyperPod's trainer does not "
        "read it either",
        values.fp8,
        kind=FLAG,
    ),
    "fp8_amax_history_len": Key(
        "`fp8_amax_history_len`, with fp8", values.of_fp8("fp8_amax_history_len"), kind=INTEGER
    ),
    "fp8_amax_compute_algo": Key(
        "`fp8_amax_compute_algo`, with fp8", values.of_fp8("fp8_amax_compute_algo"), kind=TEXT
    ),
    "use_flash_attention": Key(
        "`attention_backend`: auto, or math with false",
        lambda value, get: {} if value else {"attention_backend": "math"},
        kind=FLAG,
    ),
    "max_context_width": to("seq_length"),
    "do_finetune": Key(
        "`finetune.py`, else `pretrain_gpt.py`; with multi_modal `finetune.py`", values.do_finetune, kind=FLAG
    ),
    "hf_model_name_or_path": Key(
        "`load`, with do_finetune or multi_modal, a name of the hub as `hub:NAME`; else `model`, of a known size",
        values.load,
        kind=TEXT,
    ),
    "hf_access_token": nothing("models are read from a folder, or from the hub with env_vars.HF_TOKEN"),
    "peft.peft_type": Key(
        "lora: `lora_rank`, `lora_alpha`, `lora_dropout`; qlora_4bit: `load_in_4bit`, too", values.peft, kind=NAMED
    ),
    **{
        f"peft.{name}": replace(
            read_with("peft_type", "model.peft.peft_type", kind=NUMBER), text=f"`lora_{name}`, with peft_type"
        )
        for name in ("rank", "alpha")
    },
    "peft.dropout": Key("`lora_dropout`, with peft_type; 0 with multi_modal", values.peft_dropout, kind=NUMBER),
    "peft.target_modules": Key("`lora_target_modules`, with peft_type", values.targets, kind=TEXTS),
    "dpo.enabled": Key("`objective: dpo`", lambda value, get: {"objective": "dpo"} if value else {}, kind=FLAG),
    "dpo.beta": _dpo("dpo_beta"),
    "dpo.label_smoothing": _dpo("dpo_label_smoothing"),
    "lr_decay_iters": to("lr_decay_iters"),
    "optim.name": Key(
        "`optimizer: adam`", lambda value, get: {"optimizer": {"adamw": "adam"}.get(value, value)}, kind=TEXT
    ),
    "optim.lr": to("lr"),
    "optim.weight_decay": to("weight_decay"),
    "optim.betas": Key(
        "`adam_beta1`, `adam_beta2`",
        lambda value, get: dict(zip(("adam_beta1", "adam_beta2"), value, strict=True)),
        kind=PAIR,
    ),
    "optim.sched.name": only(("CosineAnnealing",), "take it, or +recipes.lr_decay_style=linear, WSD or constant"),
    "optim.sched.warmup_steps": to("lr_warmup_iters"),
    "optim.sched.constant_steps": only((0,), "take +recipes.lr_decay_style=WSD"),
    "optim.sched.min_lr": to("min_lr"),
    "data.train_dir": Key(
        "`train_data_path`; `data_path` of finetune.py; changes nothing with use_synthetic_data",
        values.train_data,
        kind=TEXTS,
    ),
    "data.val_dir": Key("`valid_data_path`, with limit_val_batches", values.validation_data, kind=TEXTS),
    "data.dataset_type": only(("hf", "synthetic"), "take hf, with .bin/.idx, .jsonl or .parquet files"),
    "data.use_synthetic_data": switch("mock_data"),
    "data.tokenizer_name": to("tokenizer_model"),
    "data.zipped_data": nothing("compressed files are known by their names"),
    "viztracer.enabled": only((False,), "take +recipes.profile=true"),
}

_TEXTS = (
    *("run.model_type", "run.results_dir", "exp_manager.exp_dir", "exp_manager.name", "exp_manager.checkpoint_dir"),
    *("exp_manager.summary_writer_kwargs.save_dir", "exp_manager.wandb_logger_kwargs.save_dir"),
    *(f"exp_manager.mlflow_logger_kwargs.{name}" for name in ("tracking_uri", "experiment_name", "run_name")),
    *("exp_manager.wandb_logger_kwargs.project", "exp_manager.wandb_logger_kwargs.name"),
    *("exp_manager.resume_from_checkpoint", "model.model_type", "model.hf_model_name_or_path"),
    *("model.hf_access_token", "model.data.tokenizer_name"),
)
_LISTS = ("model.data.train_dir", "model.data.val_dir", "model.peft.target_modules")
_KEYS = {
    **_RUN,
    **{f"exp_manager.{name}": key for name, key in _EXP.items()},
    **{f"model.{name}": key for name, key in (_SHAPE | _MODEL).items()},
}
KEYS: dict[str, Key] = {
    name: replace(key, is_text=name in (*_TEXTS, *_LISTS), is_list=name in _LISTS) for name, key in _KEYS.items()
}
"""Every key of a v1 recipe except those that both dialects have: run.name, run.time_limit, trainer.devices and
trainer.num_nodes."""
V1 = Form("hf", KEYS, values.finetunes)
"""Recipes of release 1."""
