"""HyperPod's recipes of ``hyperpod_checkpointless_nemo``: NeMo's pretraining and fine-tuning.

Which model, and whether it is fine-tuned, is code of AWS's image; the recipes' names say it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smp.config import ConfigError
from smp.launch.hyperpod import tuning, values
from smp.launch.hyperpod.form import Form
from smp.launch.hyperpod.key import FLAG, INTEGER, LIST, NAMED, TEXT, Get, Key, nothing, only, read_with, switch, to

_MODELS = {"llama3_70b": "llama3-70b", "gpt_oss_120b": "gpt-oss-120b"}
_LORA = {"lora_rank": 32, "lora_alpha": 32, "lora_dropout": 0.0}
"""NeMo's defaults, which recipes do not state."""
_OF_FOLDER = "the model's name says it"
_SAVING = "checkpoints are this project's"


def _finetune(get: Get) -> bool:
    return "finetune" in str(get("log.name"))


def _name(value: Any, get: Get) -> Mapping[str, Any]:
    """The model in names such as ``llama3_70b_checkpointless_pretraining`` and
    ``gpt_oss_120b_full_finetune_checkpointless``."""
    model = next((own for name, own in _MODELS.items() if value.startswith(name)), None)
    if model is None:
        raise ConfigError(f"{value} begins with none of {', '.join(_MODELS)}, which are the models it stands for")
    if ("finetune" in value) == ("pretrain" in value):
        raise ConfigError(f"{value} must say which it is, pretraining or finetune")
    if not _finetune(get):
        return {"model": model}
    whole = "full" in str(value)
    return {} if whole or get("model.peft.peft_scheme") else _LORA


def _peft(value: Any, get: Get) -> Mapping[str, Any]:
    if value != "lora":
        raise ConfigError(f"{value} cannot be had: take lora, or null to train all weights")
    return _LORA if _finetune(get) else {}


def _replicas(value: Any, get: Get) -> Mapping[str, Any]:
    """--hybrid-shard-degree: HyperPod shards the optimizer over this part of the data-parallel processes, and here
    weights are sharded, too."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    shared = 1
    for name in sizes:
        shared *= get(f"strategy.{name}") or 1
    processes = tuning.data_processes(get, shared)
    if processes % value:
        raise ConfigError(f"{value} does not divide the {processes} data-parallel processes")
    return {"hybrid_shard_degree": processes // value}


def _callbacks(value: Any, get: Get) -> Mapping[str, Any] | str:
    for item in value:
        name = str(item.get("_target_") if isinstance(item, Mapping) else item).rpartition(".")[2]
        if name not in _CALLBACKS:
            raise ConfigError(f"{name} is none of {', '.join(_CALLBACKS)}")
        # Only what would change results is refused: AWS's recipes list all callbacks.
        faults = item.get("test_fault_config") or {}
        if any(given for key, given in faults.items() if key.startswith("fault_prob")):
            raise ConfigError(f"{name}: faults are not injected here; give probabilities of 0")
        if item.get("tp_comm_overlap"):
            raise ConfigError(f"{name}.tp_comm_overlap: true cannot be had; sequence_parallel overlaps by itself")
    return (
        "what they do without a result is done or not needed; a job that fails starts again from its newest "
        "checkpoint, not from the memory of its other processes"
    )


_CALLBACKS = (
    *("TimingCallback", "GarbageCollectionCallback", "MegatronCommOverlapCallback", "HPFaultInjectionCallback"),
    *("CheckpointlessCallback", "DataModuleEpochCallback"),
)


def _all(prefix: str, keys: Mapping[str, Key]) -> dict[str, Key]:
    return {f"{prefix}.{name}": key for name, key in keys.items()}


def _notes(prefix: str, names: tuple[str, ...], why: str) -> dict[str, Key]:
    return {f"{prefix}.{name}": nothing(why) for name in names}


_TRAINER = {
    "accelerator": only(("gpu", "cuda", "auto"), "for CPUs give env_vars.CUDA_VISIBLE_DEVICES=''"),
    "max_steps": to("train_iters"),
    "log_every_n_steps": to("log_interval"),
    "limit_val_batches": Key("`eval_iters`, `eval_interval`; 0: no validation", values.validation, kind=INTEGER),
    "val_check_interval": read_with("limit_val_batches", "trainer.limit_val_batches", kind=INTEGER),
    "accumulate_grad_batches": Key("refused unless 1: give `global_batch_size`", values.accumulation, kind=INTEGER),
    "limit_test_batches": nothing("there is no test at the end; tools/evaluate.py tests a model"),
    "num_sanity_val_steps": nothing("a run of finetune.py is evaluated before its first step"),
    "reload_dataloaders_every_n_epochs": nothing("samples are a function of the seed and their number"),
    "use_distributed_sampler": nothing("samples are a function of the seed and their number"),
}
_OPTIM = {
    "config.lr": to("lr"),
    "config.weight_decay": to("weight_decay"),
    "config.adam_beta1": to("adam_beta1"),
    "config.adam_beta2": to("adam_beta2"),
    "config.adam_eps": to("adam_eps"),
    "config.clip_grad": to("clip_grad"),
    "config.optimizer": only(("adam",), "take recipes.optimizer"),
    "config.bf16": to("bf16"),
    "config.fp16": only((False,), "take bf16"),
    "config.use_distributed_optimizer": nothing("the optimizer is sharded with the weights"),
    "lr_scheduler.warmup_steps": to("lr_warmup_iters"),
    "lr_scheduler.min_lr": to("min_lr"),
    "lr_scheduler.constant_steps": only((0,), "take +recipes.lr_decay_style=WSD"),
}
_STRATEGY = {
    "tensor_model_parallel_size": to("tensor_model_parallel_size"),
    "sequence_parallel": Key(
        "`sequence_parallel`, with tensor parallelism",
        lambda value, get: (
            {"sequence_parallel": value} if (get("strategy.tensor_model_parallel_size") or 1) > 1 else {}
        ),
        kind=FLAG,
    ),
    "pipeline_model_parallel_size": to("pipeline_model_parallel_size"),
    "virtual_pipeline_model_parallel_size": to("num_virtual_stages_per_pipeline_rank"),
    "context_parallel_size": to("context_parallel_size"),
    "expert_model_parallel_size": Key(
        "`expert_model_parallel_size`",
        lambda value, get: {} if value == 1 else {"expert_model_parallel_size": value},
        kind=INTEGER,
    ),
    "num_distributed_optimizer_instances": Key(
        "`hybrid_shard_degree`: data-parallel processes / this", _replicas, kind=INTEGER
    ),
    "ckpt_async_save": to("async_save"),
    "gradient_as_bucket_view": nothing("FSDP2 has no buckets"),
    "pipeline_dtype": nothing("stages send what layers compute in"),
    "ckpt_load_strictness": nothing("checkpoints are whole or refused"),
}
KEYS: dict[str, Key] = {
    **tuning.COMMON,
    "*._target_": nothing("a class of NeMo's"),
    "run.model_type": only(("hyperpod_checkpointless_nemo",), "it is the form of the recipe"),
    "callbacks": Key("refused but for those that change no result", _callbacks, kind=LIST),
    "data.global_batch_size": to("global_batch_size"),
    "data.micro_batch_size": to("micro_batch_size"),
    "data.seq_length": to("seq_length"),
    "dataset.dataset_path": Key("`data_path`", lambda value, get: {"data_path": value}, is_text=True),
    **_notes(
        "dataset",
        ("drop_last", "keep_in_memory", "num_workers", "partition", "pin_memory", "shuffle"),
        "samples are a function of the seed and their number",
    ),
    "ddp.average_in_collective": nothing("gradients are divided once, by the number of tokens"),
    "ddp.check_for_nan_in_grad": nothing("a step with such gradients is skipped and counted, see max_skipped_steps"),
    "ddp.grad_reduce_in_fp32": only((True,), "gradients are summed in fp32"),
    **_notes(
        "ddp",
        ("overlap_grad_reduce", "overlap_param_gather", "suggested_communication_unit_size"),
        "FSDP2 overlaps communication by itself",
    ),
    "exp_manager.exp_dir": nothing("log.ckpt.dirpath says where checkpoints are"),
    "exp_manager.name": nothing("run.name is the job's"),
    "log_dir": read_with("log.ckpt.dirpath", kind=TEXT),
    "log.log_dir": nothing("logs are in the job's folder"),
    "log.name": Key("`model` of that name, or LoRA of NeMo's defaults: rank 32, alpha 32", _name, kind=TEXT),
    "log.tensorboard.*": nothing("TensorBoard events are in the job's folder"),
    "log.wandb": only((), "take recipes.wandb_project"),
    "log.ckpt.dirpath": Key("`save`", lambda value, get: {"save": value}, is_text=True),
    "log.ckpt.every_n_train_steps": to("save_interval"),
    "log.ckpt.save_top_k": tuning.KEPT,
    "log.ckpt.monitor": only(("step",), "the newest are kept; recipes.keep_best_k keeps the best"),
    "log.ckpt.mode": only(("max",), "the newest are kept; recipes.keep_best_k keeps the best"),
    **_notes("log.ckpt", ("filename", "save_last", "save_optim_on_train_end", "save_weights_only"), _SAVING),
    **_notes(
        "mmap",
        ("cache_dir", "checkpoint_frequency", "lookback_length", "prefetch_length"),
        "data are read from their files",
    ),
    "model.config.seq_length": nothing("data.seq_length says it"),
    "model.config.deterministic_mode": switch("deterministic_mode"),
    "model.config.cross_entropy_loss_fusion": nothing("the device says which kernels run"),
    "model.config.recompute_granularity": to("recompute_granularity"),
    "model.config.recompute_modules": nothing("selective recomputes attention"),
    **_notes("model.config", ("num_layers", "num_moe_experts", "vocab_size", "add_bias_linear"), _OF_FOLDER),
    "model.config.window_size": only((), _OF_FOLDER),
    "model.peft.peft_scheme": Key("LoRA of NeMo's defaults: rank 32, alpha 32, dropout 0", _peft, kind=TEXT),
    **_all("optim", _OPTIM),
    "plugins.precision": Key("`bf16`", values.precision, kind=NAMED),
    "pre_script": nothing("it prepares AWS's image; setup=[...] runs commands before a training"),
    "resources.*": nothing("+cluster.resources says what a pod asks for"),
    "resume.restore_config.path": Key("`load`", lambda value, get: {"load": value}, is_text=True),
    "resume.restore_config.load_artifacts": nothing("the folder of the model has its tokenizer"),
    "resume.resume_from_directory": nothing("a job continues from its newest checkpoint"),
    **_notes(
        "resume",
        ("resume_if_exists", "resume_ignore_no_checkpoint", "resume_past_end"),
        "a job continues from its newest checkpoint",
    ),
    **_all("strategy", _STRATEGY),
    **_notes("strategy", ("ckpt_parallel_load", "ckpt_torch_dist_multiproc"), _SAVING),
    **_all("trainer", _TRAINER),
}
CHECKPOINTLESS = Form("hyperpod_checkpointless_nemo", KEYS, _finetune)
