"""HyperPod's recipes of ``verl``: SFT and DPO, with FSDP2 or Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smp.config import ConfigError
from smp.launch.hyperpod import tuning, values
from smp.launch.hyperpod.form import Form
from smp.launch.hyperpod.key import (
    FLAG,
    INTEGER,
    LIST,
    NUMBER,
    PAIR,
    STEPS,
    TEXT,
    TEXTS,
    Convert,
    Get,
    Key,
    Kind,
    nothing,
    only,
    read_with,
    switch,
    to,
)

_T = "training_config."
_SCHEDULES = {"cosine": "cosine", "constant": "constant", "linear": "linear"}
_OF_FOLDER = "the model's folder says its architecture"
_KERNELS = "the device says which kernels run"
BY_TOKENS = "use_dynamic_bsz fills micro-batches by tokens"
NOT_BY_TOKENS = "it goes with use_dynamic_bsz, which is unset or false"


def model_parallel(get: Get, engine: str) -> int:
    """Number of processes that share a sample, from an engine's section; one of FSDP2 lacks most of these keys."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    # FSDP2's engine calls context parallelism Ulysses, Megatron's has the other three.
    product: int = get(f"{engine}.ulysses_sequence_parallel_size") or 1
    for name in sizes:
        product *= get(f"{engine}.{name}") or 1
    return product


def _micro_batch(value: Any, get: Get) -> Mapping[str, Any] | str:
    """--micro-batch-size. verl fills micro-batches up to a number of tokens; here it is the number of full-length
    samples."""
    data = _T + "data."
    if not get(data + "use_dynamic_bsz"):
        return NOT_BY_TOKENS
    processes = tuning.data_processes(get, model_parallel(get, _T + "engine"))
    most = tuning.micro_batch_of_tokens(value, get(data + "max_length"))
    return {"micro_batch_size": tuning.micro_batch(most, get(data + "train_batch_size") or processes, processes)}


def _fixed_micro_batch(value: Any, get: Get) -> Mapping[str, Any] | str:
    return BY_TOKENS if get(_T + "data.use_dynamic_bsz") else {"micro_batch_size": value}


def lora(section: str, model: str) -> Convert:
    """LoRA from keys that begin with ``section``: peft's names, or Megatron-Bridge's below "lora.", which win."""
    others = _of_lora(section, model)

    def convert(value: Any, get: Get) -> Mapping[str, Any] | str:
        if not value:
            return {}
        if why := others(value, get):
            return why
        # "lora." has names of its own below it; peft's names are lora_rank, lora_alpha, but target_modules.
        targets = get((section if section.endswith(".") else model) + "target_modules")
        alpha, dropout = get(section + "alpha"), get(section + "dropout")
        return tuning.adapters(value, alpha, dropout, targets, get(model + "target_parameters"))

    return convert


def _of_lora(section: str, model: str) -> Convert:
    """A key that :func:`lora` reads, or why it is not read."""

    def convert(value: Any, get: Get) -> Mapping[str, Any] | str:
        if get(model + "lora_adapter_path"):
            return "the adapter in lora_adapter_path says it"
        if section != model + "lora." and get(model + "lora.rank"):
            return "keys below lora say it"
        return {} if get(section + "rank") else f"it goes with {section.removeprefix(model)}rank, which is unset or 0"

    return convert


_PARTS = ("model", "optimizer", "extra", "hf_model")


def _contents(value: Any, get: Get) -> Mapping[str, Any]:
    names = [value] if isinstance(value, str) else value
    if unknown := [name for name in names if name not in _PARTS]:
        raise ConfigError(f"{unknown[0]} is none of {', '.join(_PARTS)}")
    return {"save_hf": True} if "hf_model" in names else {}


SAVED = Key("`save_hf`, with hf_model; checkpoints are whole", _contents, kind=TEXTS)


def _warmup_ratio(section: str) -> Key:
    """--lr-warmup-fraction from an optimizer's section, where it gives no number of steps."""

    def convert(value: Any, get: Get) -> Mapping[str, Any] | str:
        if value and (get(section + "lr_warmup_steps") or 0) > 0:
            return "lr_warmup_steps says it"
        return {"lr_warmup_fraction": value} if value else {}

    return Key("`lr_warmup_fraction`, without lr_warmup_steps", convert, kind=NUMBER)


def min_lr(section: str) -> Key:
    """--min-lr as a share of the learning rate of an optimizer's section."""
    return Key("`min_lr`", lambda value, get: {"min_lr": value * get(section + "lr")} if value else {}, kind=NUMBER)


def optimizer_keys(section: str) -> dict[str, Key]:
    """Keys of an optimizer's section."""
    return {
        "lr": to("lr"),
        "optimizer": Key(
            "`optimizer: adam`",
            lambda value, get: (
                {"optimizer": "adam"}
                if value in ("AdamW", "adam")
                else tuning.refuse(f"{value} cannot be had: take AdamW, or recipes.optimizer")
            ),
            kind=TEXT,
        ),
        "optimizer_impl": only(("torch.optim",), "the optimizer is this project's"),
        "betas": Key(
            "`adam_beta1`, `adam_beta2`",
            lambda value, get: dict(zip(("adam_beta1", "adam_beta2"), value, strict=True)),
            kind=PAIR,
        ),
        "weight_decay": to("weight_decay"),
        "weight_decay_incr_style": only(("constant",), "weight decay is constant"),
        "clip_grad": to("clip_grad"),
        "lr_warmup_steps": Key(
            "`lr_warmup_iters`; 0 and -1: lr_warmup_steps_ratio says it",
            lambda value, get: {"lr_warmup_iters": value} if value > 0 else {},
            kind=INTEGER,
        ),
        "lr_warmup_steps_ratio": _warmup_ratio(section),
        "lr_warmup_init": to("lr_warmup_init"),
        "lr_scheduler_type": Key("`lr_decay_style`", tuning.scheduler(_SCHEDULES), kind=TEXT),
        "lr_decay_style": Key("`lr_decay_style`", tuning.scheduler(_SCHEDULES | {"WSD": "WSD"}), kind=TEXT),
        "warmup_style": Key("`lr_decay_style`", tuning.scheduler(_SCHEDULES), kind=TEXT),
        "lr_decay_steps": to("lr_decay_iters"),
        "lr_wsd_decay_steps": to("lr_wsd_decay_iters"),
        "lr_wsd_decay_style": to("lr_wsd_decay_style"),
        "min_lr": to("min_lr"),
        "min_lr_ratio": min_lr(section),
        "num_cycles": only((0.5,), "cosine goes down once"),
        "total_training_steps": nothing("verl says the run's length over it; recipes.lr_decay_iters says another"),
        "use_checkpoint_opt_param_scheduler": only((False,), "a resumed run takes the settings that are given"),
        "override_optimizer_config.use_precision_aware_optimizer": nothing("moments are fp32, see exp_avg_dtype"),
        "override_optimizer_config.optimizer_cpu_offload": switch("optimizer_cpu_offload"),
        "override_optimizer_config.optimizer_offload_fraction": only((1, 1.0), "all moments are offloaded, or none"),
        "override_optimizer_config.overlap_cpu_optimizer_d2h_h2d": nothing("copies overlap with the optimizer's work"),
        "override_optimizer_config.*": only((), "take the setting of finetune.py"),
    }


def engine_keys(section: str) -> dict[str, Key]:
    """Keys of a section that describes how a model is trained."""
    return {
        "dtype": tuning.PRECISION,
        "model_dtype": nothing("master weights are fp32"),
        "strategy": only(("fsdp2", "fsdp", "megatron"), "weights are sharded by FSDP2"),
        "fsdp_size": Key(
            "`hybrid_shard_degree`; -1: over all",
            lambda value, get: {"hybrid_shard_degree": 0 if value < 0 else value},
            kind=INTEGER,
        ),
        "reshard_after_forward": Key(
            "`data_parallel_sharding_strategy`: optim_grads with false",
            lambda value, get: {} if value else {"data_parallel_sharding_strategy": "optim_grads"},
            kind=FLAG,
        ),
        "offload_policy": switch("optimizer_cpu_offload"),
        "optimizer_offload": switch("optimizer_cpu_offload"),
        "param_offload": only((False,), "weights stay on GPUs; optimizer_offload moves the optimizer"),
        "grad_offload": only((False,), "gradients stay on GPUs; optimizer_offload moves the optimizer"),
        "full_determinism": switch("deterministic_mode"),
        "seed": to("seed"),
        "forward_only": only((False,), "the model is trained"),
        "forward_prefetch": nothing("FSDP2 prefetches by itself"),
        "use_orig_params": nothing("FSDP2 keeps parameters as they are"),
        "wrap_policy.*": nothing("a block is a unit"),
        "entropy_checkpointing": nothing("the loss takes the vocabulary in chunks"),
        "entropy_from_logits_with_chunking": nothing("the loss takes the vocabulary in chunks"),
        "use_torch_compile": nothing("it is of verl's entropy; recipes.compile=true compiles blocks"),
        "ulysses_sequence_parallel_size": Key(
            "`context_parallel_size`, `cp_comm_type: a2a`",
            lambda value, get: {} if value == 1 else {"context_parallel_size": value, "cp_comm_type": "a2a"},
            kind=INTEGER,
        ),
        # Megatron's
        "tensor_model_parallel_size": to("tensor_model_parallel_size"),
        "sequence_parallel": Key(
            "`sequence_parallel`, with tensor parallelism",
            lambda value, get: (
                {"sequence_parallel": value} if (get(section + "tensor_model_parallel_size") or 1) > 1 else {}
            ),
            kind=FLAG,
        ),
        "pipeline_model_parallel_size": to("pipeline_model_parallel_size"),
        "virtual_pipeline_model_parallel_size": to("num_virtual_stages_per_pipeline_rank"),
        "context_parallel_size": to("context_parallel_size"),
        "expert_model_parallel_size": to("expert_model_parallel_size"),
        "expert_tensor_parallel_size": to("expert_tensor_parallel_size"),
        "use_distributed_optimizer": nothing("the optimizer is sharded with the weights"),
        "use_remove_padding": nothing("padding is no input of any product that it could change"),
        "use_mbridge": nothing("models are read from Hugging Face's folders"),
        "vanilla_mbridge": nothing("models are read from Hugging Face's folders"),
        "use_dist_checkpointing": nothing("checkpoints are this project's"),
        "dist_checkpointing_path": only((), "recipes.load=FOLDER says the model"),
        "dist_checkpointing_prefix": nothing("checkpoints are this project's"),
        "override_ddp_config.*": only((), "take the setting of finetune.py"),
        "override_mcore_model_config.*": only((), "take the setting of finetune.py"),
        "override_transformer_config.attention_backend": nothing(_KERNELS),
        "override_transformer_config.apply_rope_fusion": nothing(_KERNELS),
        "override_transformer_config.moe_router_dtype": only(("fp32",), "routers compute in fp32"),
        "override_transformer_config.moe_shared_expert_overlap": nothing("it is a matter of speed"),
        "override_transformer_config.moe_latent_size": nothing(_OF_FOLDER),
        "override_transformer_config.mtp_num_layers": only((0,), "the model's folder has them or not"),
        "override_transformer_config.recompute_granularity": Key(
            "`recompute_granularity`", lambda value, get: {"recompute_granularity": value}, kind=TEXT
        ),
        "override_transformer_config.recompute_method": nothing("blocks are recomputed one by one"),
        "override_transformer_config.recompute_num_layers": nothing("blocks are recomputed one by one"),
        "override_transformer_config.recompute_modules": nothing("selective recomputes attention"),
        "override_transformer_config.*": only((), "take the setting of finetune.py"),
    }


def _recompute(engine: str) -> Convert:
    """--recompute-granularity, unless Megatron's engine sets its own, which wins."""

    def convert(value: Any, get: Get) -> Mapping[str, Any]:
        if get(engine + "override_transformer_config.recompute_granularity"):
            return {}
        return {"recompute_granularity": "full" if value else "none"}

    return convert


def model_keys(section: str, engine: str) -> dict[str, Key]:
    """Keys of the section of the trained model, with what ``engine`` says."""

    def of(name: str, kind: Kind) -> Key:
        return Key(f"with {name}rank", _of_lora(section + name, section), kind=kind)

    either = (section + "lora_rank", section + "lora.rank")
    return {
        "path": Key("`load`; a name of the hub is `hub:NAME`", values.model_folder, is_text=True),
        "tokenizer_path": Key("`tokenizer_model`", lambda value, get: {"tokenizer_model": value}, is_text=True),
        "hf_config_path": only((), _OF_FOLDER),
        "custom_chat_template": only((), "recipes.chat_template=FILE says a template"),
        "trust_remote_code": nothing("no code of a model's folder is run"),
        "external_lib": nothing("it is code of AWS's image"),
        "enable_gradient_checkpointing": Key("`recompute_granularity` full or none", _recompute(engine), kind=FLAG),
        "enable_activation_offload": switch("offload_activations"),
        "lora_adapter_path": Key("`load_adapter`", lambda value, get: {"load_adapter": value}, is_text=True),
        "lora_rank": Key(
            "`lora_rank`, `lora_alpha`, `lora_dropout`, `lora_target_modules`; 0: all weights",
            lora(section + "lora_", section),
            kind=INTEGER,
        ),
        **{f"lora_{name}": of("lora_", NUMBER) for name in ("alpha", "dropout")},
        "target_modules": of("lora_", TEXTS),
        "target_parameters": read_with("lora_rank", *either, kind=LIST),
        "exclude_modules": Key("refused unless they have no adapters here either", tuning.without_routers, kind=TEXTS),
        "lora.rank": Key("`lora_rank`, in place of the key lora_rank", lora(section + "lora.", section), kind=INTEGER),
        **{f"lora.{name}": of("lora.", NUMBER) for name in ("alpha", "dropout")},
        "lora.target_modules": of("lora.", TEXTS),
        "override_config.attn_implementation": nothing(_KERNELS),
        "override_config.*": only((), _OF_FOLDER),
        "fused_kernel_options.impl_backend": nothing(_KERNELS),
        "use_fused_kernels": nothing(_KERNELS),
        "use_liger": nothing(_KERNELS),
        "use_remove_padding": nothing("padding is no input of any product that it could change"),
        "use_shm": nothing("each process reads its own shard"),
        "tiled_mlp.*": nothing("it saves memory and changes no result; recipes.recompute_granularity saves more"),
    }


def _dpo(name: str, kind: Kind = NUMBER) -> Key:
    return Key(f"`{name}`, of DPO", lambda value, get: {name: value}, kind=kind)


def loggers(value: Any, get: Get) -> Mapping[str, Any]:
    names = [value] if isinstance(value, str) else list(value)
    project, run = get(_T + "trainer.project_name"), get(_T + "trainer.experiment_name")
    # The console has its line in every run.
    if unknown := [name for name in names if name not in ("console", "tensorboard", "mlflow", "wandb")]:
        raise ConfigError(f"{unknown[0]} is none of console, tensorboard, mlflow, wandb")
    found: dict[str, Any] = {"tensorboard": "tensorboard" in names}
    if "wandb" in names:
        found |= {"wandb_project": project or "smp", "wandb_exp_name": run}
    uri = get(_T + "mlflow.tracking_uri")
    if "mlflow" in names and uri:
        found |= {"mlflow_tracking_uri": uri, "mlflow_experiment": project or "smp", "mlflow_run_name": run}
    return {name: given for name, given in found.items() if given is not None}


TRACKED = Key(
    "with trainer.logger",
    lambda value, get: {} if "mlflow" in (get(_T + "trainer.logger") or ()) else "trainer.logger does not name mlflow",
    is_text=True,
)


def _save_freq(value: Any, get: Get) -> Mapping[str, Any]:
    if value == "after_each_epoch":
        return {"save_epochs": 1.0}
    return {"save_interval": value} if value > 0 else {}


_FILES, _RATIO = _T + "data.val_files", _T + "data.train_val_split_ratio"


def _val_files(value: Any, get: Get) -> Mapping[str, Any]:
    found = {"valid_data_path": words(value)}
    return found if get(_T + "trainer.test_freq") is not None else found | {"eval_epochs": 1.0, "full_validation": True}


def _test_freq(value: Any, get: Get) -> Mapping[str, Any] | str:
    """How often a run evaluates, where it has samples for that. Without a frequency verl evaluates at the end."""
    ratio = get(_RATIO)
    kept = tuning.evaluation(value, get(_FILES), 1 if ratio is None else ratio)
    if value == "after_each_epoch" or value > 0 or isinstance(kept, str):
        return kept
    steps, epochs = get(_T + "trainer.total_training_steps"), get(_T + "trainer.total_epochs")
    when = {"eval_interval": steps} if steps else {"eval_epochs": epochs or 1}
    return when | {"full_validation": True}


def _epochs(value: Any, get: Get) -> Mapping[str, Any] | str:
    if steps := get(_T + "trainer.total_training_steps"):
        return f"total_training_steps says {steps} steps; verl would also end after these epochs"
    return {"train_epochs": value}


def _run_name(value: Any, get: Get) -> Mapping[str, Any] | str:
    names = get(_T + "trainer.logger") or ()
    if "wandb" in names or ("mlflow" in names and get(_T + "mlflow.tracking_uri")):
        return {}
    return "trainer.logger names no wandb, and no mlflow with mlflow.tracking_uri"


def _said_by(key: str) -> Key:
    """A number that the recipe's section ``trainer`` also gives, which wins."""

    def convert(value: Any, get: Get) -> Mapping[str, Any] | str:
        said = get(f"trainer.{key}") or 1
        return {} if said == value else f"recipes.trainer.{key} says {said}"

    return Key(f"with recipes.trainer.{key}, which says it where it is given", convert, kind=INTEGER)


def _truncation(value: Any, get: Get) -> Mapping[str, Any]:
    if value not in ("left", "right"):
        raise ConfigError(f"{value} cannot be had: samples that are too long are cut; take left or right")
    return {} if value == "right" else {"truncation_side": value}


TRAINER = {
    "project_name": Key("with logger", _run_name, is_text=True),
    "experiment_name": Key("with logger", _run_name, is_text=True),
    "logger": Key(
        "`tensorboard`, `wandb_project`, `wandb_exp_name`; mlflow with mlflow.tracking_uri", loggers, kind=TEXTS
    ),
    "total_epochs": Key("`train_epochs`, without total_training_steps", _epochs, kind=NUMBER),
    "total_training_steps": Key("`train_iters`", tuning.zero_or("train_iters"), kind=INTEGER),
    "save_freq": Key("`save_interval`, or for after_each_epoch `save_epochs: 1`", _save_freq, kind=STEPS),
    "test_freq": Key(
        "`eval_interval`, or for after_each_epoch `eval_epochs: 1`; -1: when it ends; `full_validation`; where samples "
        "are kept for it",
        _test_freq,
        kind=STEPS,
    ),
    "max_ckpt_to_keep": tuning.KEPT,
    "merge_lora_on_final_save": switch("save_hf", "`save_hf`, whose adapters are merged"),
    "default_local_dir": Key(
        "`save`, unless it is SageMaker's /opt/ml/model",
        lambda value, get: {} if str(value).rstrip("/") == "/opt/ml/model" else {"save": value},
        is_text=True,
    ),
    "default_hdfs_dir": only((), "recipes.save may be an s3:// address"),
    "resume_mode": nothing("a job continues from its newest checkpoint"),
    "resume_from_path": Key(
        "refused: a job continues from its own folder",
        lambda value, get: tuning.refuse(
            f"{value}: a job continues from its own folder; recipes.save=FOLDER says another"
        ),
        is_text=True,
    ),
    "device": only(("cuda",), "for CPUs give +env_vars.CUDA_VISIBLE_DEVICES="),
    "nnodes": _said_by("num_nodes"),
    "n_gpus_per_node": _said_by("devices"),
    "profile_interval": nothing("recipes.profile=true profiles steps"),
}
_DPO_TRAINER = {
    "beta": _dpo("dpo_beta"),
    "label_smoothing": _dpo("dpo_label_smoothing"),
    "loss_type": _dpo("dpo_loss_type", TEXT),
    "reference_free": only((False,), "take recipes.objective=orpo, which has no reference"),
    "training_mode": only(("auto",), "adapters or all weights are trained, as lora_rank says"),
}
DATA = {
    "train_files": Key("`data_path`", lambda value, get: {"data_path": words(value)}, is_text=True, is_list=True),
    "val_files": Key("`valid_data_path`; `eval_epochs: 1` without test_freq", _val_files, is_text=True, is_list=True),
    "train_val_split_ratio": Key("`split`, without val_files", tuning.split_without(_FILES), kind=NUMBER),
    "train_max_samples": only((-1,), "all samples of a file are read; give a shorter one"),
    "val_max_samples": only((-1,), "all samples of a file are read; give a shorter one"),
    "custom_cls.*": only((), "samples of your own are files of what docs/finetuning.md names"),
    "train_batch_size": to("global_batch_size"),
    "use_shm": nothing("files are read where they are"),
    "shuffle": nothing("the order of samples is drawn by seed"),
    "seed": nothing("the order of samples is drawn by engine.seed"),
    "dataloader_num_workers": nothing("samples are encoded before the first step"),
    "truncation": Key("`truncation_side`; refused unless left or right", _truncation, kind=TEXT),
}
_OF_SAMPLES = {
    "max_length": to("seq_length"),
    "max_token_len_per_gpu": Key("`micro_batch_size`, with use_dynamic_bsz", _micro_batch, kind=INTEGER),
    "micro_batch_size_per_gpu": Key("`micro_batch_size`, without use_dynamic_bsz", _fixed_micro_batch, kind=INTEGER),
    "use_dynamic_bsz": read_with("max_token_len_per_gpu", kind=FLAG),
    "messages_key": only(("messages",), "finetune.py reads messages"),
    "prompt_key": only(("prompt",), "finetune.py reads prompt, chosen and rejected"),
    "chosen_key": Key(
        "`objective: dpo`",
        lambda value, get: (
            {"objective": "dpo"}
            if value == "chosen"
            else tuning.refuse(f"{value} cannot be had: finetune.py reads prompt, chosen and rejected")
        ),
        kind=TEXT,
    ),
    "rejected_key": only(("rejected",), "finetune.py reads prompt, chosen and rejected"),
    "pad_mode": nothing("no sample is padded that has a batch alone; loss and gradients do not see padding"),
    "ignore_input_ids_mismatch": nothing("a template that renders a turn otherwise once others follow is refused"),
    "remove_invalid_samples": nothing("bad_sample_threshold says how many may be dropped"),
    "apply_chat_template_kwargs.enable_thinking": only((False,), "templates write the reasoning that a sample has"),
    "apply_chat_template_kwargs.*": only((), "recipes.chat_template=FILE says another template"),
}


def words(value: Any) -> str:
    return value if isinstance(value, str) else " ".join(map(str, value))


def _own_path(value: Any, get: Get) -> Mapping[str, Any] | str:
    of_rl = get(_T + "actor_rollout_ref.model.path")
    return "actor_rollout_ref.model.path says it" if of_rl else values.model_folder(value, get)


_OF_RL = "it is of reinforcement learning, and AWS's scripts say it for every recipe"
KEYS: dict[str, Key] = {
    **tuning.COMMON,
    "run.model_type": only(("verl",), "it is the form of the recipe"),
    "*._target_": nothing("a class of verl's"),
    **{f"training_config.{name}": key for name, key in tuning.MLFLOW.items() if name != "mlflow.tracking_uri"},
    "training_config.mlflow.tracking_uri": TRACKED,
    "training_config.checkpoint.save_contents": SAVED,
    "training_config.checkpoint.load_contents": nothing("checkpoints are whole"),
    "training_config.checkpoint.save_only_adapter_if_lora": nothing("checkpoints with adapters have adapters only"),
    **{f"training_config.data.{name}": key for name, key in (DATA | _OF_SAMPLES).items()},
    **{f"training_config.engine.{name}": key for name, key in engine_keys(_T + "engine.").items()},
    **{f"training_config.model.{name}": key for name, key in model_keys(_T + "model.", _T + "engine.").items()},
    "training_config.model.path": Key("`load`; a name of the hub is `hub:NAME`", _own_path, is_text=True),
    "training_config.actor_rollout_ref.model.path": Key(
        "`load`, before `training_config.model.path`: AWS's scripts of DPO say it so", values.model_folder, is_text=True
    ),
    **dict.fromkeys(("training_config.critic.*", "training_config.reward_model.*"), nothing(_OF_RL)),
    **{f"training_config.optim.{name}": key for name, key in optimizer_keys(_T + "optim.").items()},
    **{f"training_config.trainer.{name}": key for name, key in (TRAINER | _DPO_TRAINER).items()},
    "training_config.trainer_callbacks": Key("refused but for AWS's metering", tuning.callbacks, kind=LIST),
    "training_config.profiler.enable": switch("profile"),
    "training_config.profiler.*": nothing("recipes.profile=true profiles steps"),
}
SIZES = {"devices": _T + "trainer.n_gpus_per_node", "num_nodes": _T + "trainer.nnodes"}
"""Keys for the number of devices and nodes where the recipe's section ``trainer`` lacks them."""
ALWAYS = {"packing": "off", "bf16": True, "lr_decay_style": "constant", "adam_beta2": 0.999}
"""verl's defaults where no key gives another value."""
VERL = Form("verl", KEYS, lambda get: True, ALWAYS, SIZES)
