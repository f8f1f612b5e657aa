"""HyperPod's recipes of ``llm_finetuning_aws``: SFT and DPO of all weights or LoRA, with FSDP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from smp.config import ConfigError
from smp.config.command_line.fields import as_text
from smp.launch.hyperpod import tuning, values
from smp.launch.hyperpod.form import Form
from smp.launch.hyperpod.key import (
    FLAG,
    INTEGER,
    LIST,
    NAMED,
    NUMBER,
    PAIR,
    TEXT,
    TEXTS,
    Get,
    Key,
    Kind,
    nothing,
    only,
    read_with,
    switch,
    to,
)

_ARGS = "training_config.training_args."
_DATA = "training_config.datasets."
_MODEL = "training_config.model_config."
_TEMPLATE = "the template of the model's folder renders samples; recipes.chat_template=FILE gives another"
_SCHEDULES = {
    **{"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"},
    "cosine_with_min_lr": "cosine",
}


_NOT_DPO = "it is of dpo, which trainer_type does not say"
_OF_ADAPTER = "the adapter in lora_checkpoint_file_path says it"


def _is_dpo(get: Get) -> bool:
    return bool(get(_ARGS + "trainer_type") == "dpo")


def _dpo(name: str, kind: Kind = NUMBER) -> Key:
    return Key(f"`{name}`, of dpo", lambda value, get: {name: value} if _is_dpo(get) else _NOT_DPO, kind=kind)


def _dpo_only(default: Any, kind: Kind, why: str) -> Key:
    """A key of DPO that is accepted with one value only."""

    def convert(value: Any, get: Get) -> Mapping[str, Any] | str:
        if not _is_dpo(get):
            return _NOT_DPO
        if value != default:
            raise ConfigError(f"{as_text(value)} cannot be had: {why}")
        return {}

    return Key(f"refused unless `{as_text(default)}`, of dpo: {why}", convert, kind=kind)


def _trainer(value: Any, get: Get) -> Mapping[str, Any]:
    if value not in ("sft", "dpo"):
        raise ConfigError(f"{value} cannot be had: take sft or dpo, or recipes.objective")
    return {"objective": "dpo"} if value == "dpo" else {}


def _schedule(value: Any, get: Get) -> Mapping[str, Any]:
    style = tuning.style_of(value, _SCHEDULES)
    if value != "cosine_with_min_lr":
        return style
    return {**style, "min_lr": 0.1 * get(_ARGS + "learning_rate")}  # the library's default: a tenth


def _warmup(value: Any, get: Get) -> Mapping[str, Any] | str:
    """--lr-warmup-fraction, except with transformers' schedule "constant", which has no warm-up."""
    if value and get(_ARGS + "lr_scheduler") == "constant":
        return "lr_scheduler constant has no warmup; constant_with_warmup has one"
    return tuning.zero_or("lr_warmup_fraction")(value, get)


def _clip(value: Any, get: Get) -> Mapping[str, Any]:
    """--clip-grad from max_norm, gradient_clipping and gradient_clipping_threshold, which mean the same."""
    if get(_ARGS + "gradient_clipping") is False:
        return {"clip_grad": 0.0}
    # Each of the keys is converted by this function: all must agree, or the order would decide.
    limits = {get(_ARGS + name) for name in ("max_norm", "gradient_clipping_threshold")} - {None}
    if len(limits) > 1:
        raise ConfigError(f"max_norm and gradient_clipping_threshold are {' and '.join(map(str, sorted(limits)))}")
    return {"clip_grad": value}


def _decay(value: Any, get: Get) -> Mapping[str, Any]:
    """--weight-decay from l2 or weight_decay, two names of the same; 0 is the default of both."""
    given = {get(_ARGS + name) for name in ("l2", "weight_decay")} - {None, 0}
    if len(given) > 1:
        raise ConfigError(f"l2 and weight_decay are {' and '.join(map(str, sorted(given)))}")
    return {"weight_decay": value} if value or not given else {}


def _peft(value: Any, get: Get) -> Mapping[str, Any] | str:
    if value != "lora":
        raise ConfigError(f"{value} cannot be had: take lora, or peft_config=null to train all weights")
    section = _MODEL + "peft_config."
    if get(_MODEL + "lora_checkpoint_file_path"):
        return _OF_ADAPTER
    found = tuning.adapters(
        # peft's default rank and alpha are 8.
        get(section + "r") or 8,
        get(section + "lora_alpha") or 8,
        get(section + "lora_dropout"),
        get(section + "target_modules"),
        get(section + "target_parameters"),
    )
    return found | ({"use_dora": True} if get(section + "use_dora") else {})


def _of_peft(kind: Kind) -> Key:
    """A key that :func:`_peft` reads."""
    of = read_with("peft_type", _MODEL + "peft_config.peft_type")
    return replace(
        of,
        kind=kind,
        convert=lambda value, get: _OF_ADAPTER if get(_MODEL + "lora_checkpoint_file_path") else of.convert(value, get),
    )


def _sharding(value: Any, get: Get) -> Mapping[str, Any]:
    # torch's HYBRID_SHARD shards within a node.
    strategies = {"FULL_SHARD": 0, "HYBRID_SHARD": get("trainer.devices") or 1, "NO_SHARD": 1}
    # ZeRO-2: weights stay gathered after the forward pass.
    if value in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
        return {
            "hybrid_shard_degree": 0 if value == "SHARD_GRAD_OP" else strategies["HYBRID_SHARD"],
            "data_parallel_sharding_strategy": "optim_grads",
        }
    if value not in strategies:
        raise ConfigError(f"{value} cannot be had: take one of {', '.join(strategies)}")
    degree = strategies[value]
    # HyperPod's degree counts context-parallel processes.
    around = (get(_ARGS + "ring_attn_size") or 1) * (get(_ARGS + "ulysses_sequence_parallel_size") or 1)
    return {"hybrid_shard_degree": max(1, degree // around) if degree else 0}


_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def _attention(value: Any, get: Get) -> Mapping[str, Any] | str:
    if value == "eager":
        return {"attention_backend": "math"}
    if value not in _ATTENTION and "/" not in value:  # a kernel of the hub
        raise ConfigError(f"{value} cannot be had: take one of eager, {', '.join(_ATTENTION)}")
    return "the device says which kernel runs"


def _tensorboard(value: Any, get: Get) -> Mapping[str, Any]:
    """The library's own flag is a folder; true and false are taken too."""
    if value.lower() in ("no", "off", "yes", "on"):
        raise ConfigError(f"{value} cannot be had: take true, false or a folder")
    return {"tensorboard": value.lower() != "false"}


def _preprocessors(value: Any, get: Get) -> Mapping[str, Any] | str:
    """--no-mask-prompt from the steps that make samples of rows. finetune.py makes them by itself; steps that differ
    are refused."""
    found: dict[str, Any] = {}
    # A step passes if it says what finetune.py does anyway: any other would train on other tokens silently.
    for step in value:
        if not isinstance(step, Mapping) or step.get("type") not in _STEPS:
            raise ConfigError(f"{step!r} is none of {', '.join(_STEPS)}")
        known = _STEPS[step["type"]]
        for name, given in step.items():
            if name == "type":
                continue
            if name not in known:
                raise ConfigError(f"{step['type']}.{name}: there is no such key")
            if not known[name](given):
                raise ConfigError(f"{step['type']}.{name}: {given} cannot be had; {_STEPS_SAY}")
        if step.get("ignore_prompt_labels") is False:
            found["mask_prompt"] = False
    return found or f"finetune.py reads samples itself, under these names of keys; {_TEMPLATE}"


def _anything(value: Any) -> bool:
    return True


_FILES, _RATIO = _DATA + "val_data.file_path", _DATA + "train_val_split_ratio"


def _validation(value: Any, get: Get) -> Mapping[str, Any]:
    when = {} if get(_ARGS + "eval_steps") is not None else tuning.evaluation(None, value, None)
    assert not isinstance(when, str), "there are files"
    return {"valid_data_path": value, **when}


def _eval_steps(value: Any, get: Get) -> Mapping[str, Any] | str:
    """How often a run evaluates; 0 and -1: once per epoch."""
    return tuning.evaluation(value if value > 0 else None, get(_FILES), get(_RATIO))


_STEPS_SAY = "finetune.py reads messages; prompt, chosen and rejected"
_STEPS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "TrainingSFTSampleConverter": {},
    "Seq2SeqTokensProcessor": {
        "chat_template_name": _anything,
        "ignore_prompt_labels": lambda value: isinstance(value, bool),
        "enable_thinking": lambda value: value is False,  # templates then mark answers as without reasoning
    },
    "DropColumns": {"column_names": _anything},
    "SelectColumns": {"selected_columns": _anything},
    "TrainingPOSampleConverter": {
        "prompt_key": lambda value: value == "prompt",
        "key_map": lambda value: value == {"chosen": "chosen", "rejected": "rejected"},
    },
    "ApplyChatTemplate": {},
    "TokenizeSampleDPO": {
        "add_special_tokens": lambda value: value is False,
        "max_prompt_length": _anything,  # max_len bounds prompt and answer together
        "max_completion_length": _anything,
    },
    "SequenceLengthFilter": {"max_seq_length": _anything, "tokens_labels": _anything},
}
_DATASETS = {
    "train_data.file_path": Key("`data_path`", lambda value, get: {"data_path": value}, is_text=True),
    "train_data.name": nothing("a name in AWS's logs"),
    "train_data.limit": only((), "all samples of a file are read; give a shorter one"),
    "val_data.file_path": Key("`valid_data_path`, `eval_epochs: 1` without eval_steps", _validation, is_text=True),
    "val_data.name": nothing("a name in AWS's logs"),
    "val_data.limit": only((), "all samples of a file are read; give a shorter one"),
    "train_val_split_ratio": Key("`split`, without val_data.file_path", tuning.split_without(_FILES), kind=NUMBER),
    "train_val_split_seed": nothing("seed draws the split as well"),
    "data_dir": only((), "data are files: train_data.file_path"),
    "save_intermediate_processing_steps": nothing("samples are encoded in memory"),
    "preprocessor_cfgs": Key(
        "`mask_prompt`; steps that do another thing than finetune.py are refused", _preprocessors, kind=LIST
    ),
}
_MODEL_KEYS = {
    "model_name_or_path": Key("`load`; a name of the hub is `hub:NAME`", values.model_folder, is_text=True),
    "model_save_name": nothing("the model is in the job's folder, hf_model"),
    "apply_chat_template": nothing(_TEMPLATE),
    "chat_template_key": nothing(_TEMPLATE),
    "attn_implementation": Key(
        "`attention_backend` math for eager; others change nothing: the device says which kernel",
        _attention,
        kind=TEXT,
    ),
    "device_map": nothing("the layout says where weights are"),
    "generation_cfg.*": nothing("it is of AWS's evaluation after the training; tools/generate.py writes texts"),
    "lora_checkpoint_file_path": Key("`load_adapter`", lambda value, get: {"load_adapter": value}, is_text=True),
    "multimodal": only((False,), "smp trains language models only"),
    "peft_config.peft_type": Key("`lora_rank`, `lora_alpha`, `lora_dropout`, `lora_target_modules`", _peft, kind=TEXT),
    **{
        f"peft_config.{name}": _of_peft(kind)
        for name, kind in (
            *(("r", INTEGER), ("lora_alpha", NUMBER), ("lora_dropout", NUMBER), ("target_modules", TEXTS)),
            *(("target_parameters", LIST), ("use_dora", FLAG)),
        )
    },
    "peft_config.bias": only(("none",), "biases are not trained with adapters"),
    "peft_config.task_type": only(("CAUSAL_LM",), "language models are what is trained"),
    "peft_config.exclude_modules": Key(
        "refused unless they have no adapters here either", tuning.without_routers, kind=TEXTS
    ),
}
_ARGS_KEYS = {
    "trainer_type": Key("`objective`", _trainer, kind=TEXT),
    "beta": _dpo("dpo_beta"),
    "label_smoothing": _dpo("dpo_label_smoothing"),
    "loss_type": _dpo("dpo_loss_type", TEXT),
    "nll_loss_coef": _dpo_only(0.0, NUMBER, "take recipes.objective=orpo for a loss with it"),
    "reference_free": _dpo_only(False, FLAG, "take recipes.objective=orpo, which has no reference"),
    "ref_offload": _dpo_only(False, FLAG, "take recipes.dpo_reference=precomputed, which keeps no reference"),
    "M": _dpo_only(1, INTEGER, "an answer is compared once"),
    "sampling_method": _dpo_only("mc", TEXT, "answers are those of the data"),
    "train_batch_size": to("global_batch_size"),
    "micro_train_batch_size": to("micro_batch_size"),
    "max_len": to("seq_length"),
    "max_epochs": to("train_epochs"),
    "max_samples": Key(
        "refused below 100,000,000: all samples are read",
        lambda value, get: (
            "all samples are read" if value >= 1e8 else tuning.refuse(f"{value:g}: all samples are read; give fewer")
        ),
        kind=NUMBER,
    ),
    "packing_samples": Key(
        "`packing` best-fit or off", lambda value, get: {"packing": "best-fit" if value else "off"}, kind=FLAG
    ),
    "pretrain_mode": only((False,), "plain text is a sample with the key text"),
    "learning_rate": to("lr"),
    "lr_scheduler": Key("`lr_decay_style`", _schedule, kind=TEXT),
    "lr_warmup_ratio": Key("`lr_warmup_fraction`; changes nothing with lr_scheduler constant", _warmup, kind=NUMBER),
    "adam_betas": Key(
        "`adam_beta1`, `adam_beta2`",
        lambda value, get: dict(zip(("adam_beta1", "adam_beta2"), value, strict=True)),
        kind=PAIR,
    ),
    "weight_decay": Key("`weight_decay`", _decay, kind=NUMBER),
    "l2": Key("`weight_decay`", _decay, kind=NUMBER),
    "max_norm": Key("`clip_grad`", _clip, kind=NUMBER),
    "gradient_clipping_threshold": Key("`clip_grad`", _clip, kind=NUMBER),
    "gradient_clipping": Key(
        "with max_norm; false is `clip_grad: 0`", lambda value, get: {} if value else {"clip_grad": 0.0}, kind=FLAG
    ),
    "aux_loss_coef": Key("`moe_aux_loss_coeff`", tuning.zero_or("moe_aux_loss_coeff"), kind=NUMBER),
    "seed": to("seed"),
    "gradient_checkpointing": tuning.RECOMPUTE,
    "gradient_checkpointing_use_reentrant": nothing("blocks are recomputed in one way"),
    "grad_accum_dtype": only(("fp32", "float32"), "gradients are summed in fp32"),
    "ring_attn_size": Key(
        "`context_parallel_size`, `cp_comm_type`, with ulysses_sequence_parallel_size",
        tuning.context_parallel(_ARGS + "ring_attn_size", _ARGS + "ulysses_sequence_parallel_size"),
        kind=INTEGER,
    ),
    "ulysses_sequence_parallel_size": Key(
        "`context_parallel_size`, `cp_comm_type`, with ring_attn_size",
        tuning.context_parallel(_ARGS + "ring_attn_size", _ARGS + "ulysses_sequence_parallel_size"),
        kind=INTEGER,
    ),
    "ring_head_stride": nothing("how many heads go round at a time changes no result"),
    "strategy.fsdp_config.sharding_strategy": Key(
        "`hybrid_shard_degree`: a node's processes for HYBRID_SHARD; `data_parallel_sharding_strategy`",
        _sharding,
        kind=TEXT,
    ),
    "strategy.fsdp_config.cpu_offload": switch(
        "optimizer_cpu_offload", "`optimizer_cpu_offload`; weights stay on GPUs"
    ),
    "strategy.fsdp_config.activation_checkpointing": tuning.RECOMPUTE,
    "strategy.fsdp_config.auto_wrap_policy": only(("TRANSFORMER_BASED_WRAP",), "a block is a unit"),
    **{
        f"strategy.fsdp_config.{name}": nothing(why)
        for name, why in (
            ("backward_prefetch", "FSDP2 prefetches by itself"),
            ("forward_prefetch", "FSDP2 prefetches by itself"),
            ("cpu_ram_efficient_loading", "each process reads its own shard"),
            ("sync_module_states", "each process reads its own shard"),
            ("state_dict_type", "checkpoints load in any layout"),
            ("use_orig_params", "FSDP2 keeps parameters as they are"),
        )
    },
    "logging_steps": to("log_interval"),
    "log_gpu_memory": nothing("memory is in metrics.jsonl"),
    "log_run_time": nothing("times are in metrics.jsonl"),
    "use_tensorboard": Key("`tensorboard`; a folder is true", _tensorboard, is_text=True),
    "use_wandb": Key(
        "`wandb_project`: run.name, with true; a token is refused",
        lambda value, get: (
            {}
            if value is False
            else {"wandb_project": str(get("run.name") or "smp")}
            if value is True
            else tuning.refuse("it would be a token; give +env_vars.WANDB_API_KEY and recipes.wandb_project")
        ),
        kind=NAMED,
    ),
    "eval_steps": Key(
        "`eval_interval`, or for 0 and -1 `eval_epochs: 1`; `full_validation`; where samples are kept for it",
        _eval_steps,
        kind=INTEGER,
    ),
    "save_steps": Key(
        "`save_interval`; 0 and -1: the end is saved",
        lambda value, get: {"save_interval": value} if value > 0 else {},
        kind=INTEGER,
    ),
    "max_ckpt_num": tuning.KEPT,
    "max_ckpt_mem": nothing("max_ckpt_num bounds checkpoints"),
    "disable_ds_ckpt": nothing("checkpoints are this project's"),
    "save_hf_ckpt": switch("save_hf", "`save_hf`: the job's folder/hf_model"),
    "merge_weights": switch("save_hf", "`save_hf`, whose adapters are merged"),
    "load_checkpoint": nothing("a job continues from its newest checkpoint"),
    "resume_checkpoint_path": Key(
        "refused: a job continues from its own folder",
        lambda value, get: tuning.refuse(
            f"{value}: a job continues from its own folder; recipes.save=FOLDER says another"
        ),
        is_text=True,
    ),
    "training_dir": Key("`save`", lambda value, get: {"save": value}, is_text=True),
    "override_training_dir": nothing("a job continues from its newest checkpoint; give another run.name to start over"),
    "disable_fast_tokenizer": only((False,), "tokenizers are the fast ones"),
    "trainer_callbacks": Key("refused but for AWS's metering", tuning.callbacks, kind=LIST),
}
KEYS: dict[str, Key] = {
    **tuning.COMMON,
    "run.model_type": only(("llm_finetuning_aws",), "it is the form of the recipe"),
    "elastic_policy.is_elastic": Key(
        "`max_nodes`, `min_nodes`, `replica_increment_step`, `peer_snapshot_interval: 10`", tuning.elastic, kind=FLAG
    ),
    **{f"elastic_policy.{name}": tuning.of_elastic for name in ("min_nodes", "max_nodes", "replica_increment_step")},
    "elastic_policy.scaling_timeout": nothing("torchrun waits 30 seconds for more nodes (last_call_timeout)"),
    "elastic_policy.graceful_shutdown_timeout": nothing("torchrun waits 30 seconds; 600 at the end of the job"),
    "elastic_policy.*": nothing("torchrun finds nodes that are lost and meets with new ones"),
    "scale_config.*": nothing("batch size and learning rate are the same with any number of nodes"),
    "training_config.force_rerun": nothing("give another run.name to begin again"),
    **{f"training_config.{name}": key for name, key in tuning.MLFLOW.items()},
    **{f"training_config.datasets.{name}": key for name, key in _DATASETS.items()},
    **{f"training_config.model_config.{name}": key for name, key in _MODEL_KEYS.items()},
    **{f"training_config.training_args.{name}": key for name, key in _ARGS_KEYS.items()},
}
LLMFT = Form("llm_finetuning_aws", KEYS, lambda get: True, {"bf16": True})
