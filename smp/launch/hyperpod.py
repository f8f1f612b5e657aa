"""HyperPod's recipes (v1, model type hf): what every one of their keys becomes.

One table, ``KEYS``, says it for each key: a setting, a refusal with its reason and the nearest thing, or that it
changes nothing here. docs/launching.md is generated from it. A key that is not in it is an error, so nothing is dropped
in silence.

A key of a feature that smp does not have yet is written with the setting that the feature is going to bring. While the
schema has no such setting, only the key's neutral value passes; from the day that it has, the key is translated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from smp.config import ConfigError
from smp.config.entry_points import PRETRAIN
from smp.config.fields import did_you_mean, settings

Get = Callable[[str], Any]
Convert = Callable[[Any, Get], Mapping[str, Any] | str]
"""(value, getter of other keys) -> settings, or why it changes nothing here."""


@dataclass(frozen=True)
class Key:
    """What a key of a recipe becomes.

    Attributes:
        text: for the table in the docs.
        convert: does it.
        shape: describes the model; fine-tuning takes that from the model's folder.
    """

    text: str
    convert: Convert
    shape: bool = False


@dataclass(frozen=True)
class Translated:
    """A recipe in settings.

    Attributes:
        finetune: whether it is for finetune.py.
        values: name of a setting -> value.
        shape: values of the settings of the model, which a fine-tuning run takes from its folder.
        notes: what has no effect here.
    """

    finetune: bool
    values: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def _to(name: str, shape: bool = False, scale: Callable[[Any], Any] = lambda value: value) -> Key:
    return Key(f"`{name}`", lambda value, get: {name: scale(value)}, shape=shape)


def _awaits(name: str, neutral: Any, feature: str, nearest: str, value: Any = ...) -> Key:
    """A key of a feature whose setting ``name`` may not be there yet."""

    def convert(given: Any, get: Get) -> Mapping[str, Any] | str:
        if given == neutral:
            return {}
        if name in settings(PRETRAIN):
            return {name: given if value is ... else value}
        raise ConfigError(f"{given} needs {feature}, which is not there yet; {nearest}")

    if name in settings(PRETRAIN):
        return Key(f"`{name}`", convert)
    return Key(f"refused unless {_shown(neutral)}: {feature} (`{name}`) is not there yet; {nearest}", convert)


def _only(values: tuple[Any, ...], why: str) -> Key:
    def convert(given: Any, get: Get) -> Mapping[str, Any]:
        if given not in values:
            raise ConfigError(f"{given} cannot be had: {why}")
        return {}

    return Key(f"refused unless {' or '.join(map(_shown, values))}: {why}", convert)


def _by(text: str, convert: Convert, shape: bool = False) -> Key:
    return Key(text, convert, shape=shape)


def _nothing(why: str) -> Key:
    return Key(f"changes nothing: {why}", lambda value, get: why)


def _shown(value: Any) -> str:
    return f"`{str(value).lower() if value is None or isinstance(value, bool) else value}`"


_MODULES = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
EXPERTS = "mixture of experts under v1's keys"
_OWN_KEYS = "experts are asked for by smp's own settings (num_experts, moe_router_topk), not by v1's keys yet"
_DENSE: dict[str, dict[str, Any]] = {
    "llama_v3": {},
    "mistral": {},
    "deepseek_r1_llama_v3": {},
    "deepseek_r1_qwen_v2": {"add_qkv_bias": True},
    "qwen_v2": {"add_qkv_bias": True},
}
_MISSING_FAMILIES = {
    "mixtral": EXPERTS,
    "deepseek_r1": f"{EXPERTS} and latent attention",
    "gpt_oss": f"{EXPERTS} and attention sinks",
    "llama_v4": EXPERTS,
    "falcon": "one normalization for attention and MLP together, as in Falcon",
}


def _model_type(value: Any, get: Get) -> Mapping[str, Any]:
    if get("model.multi_modal") or "Vision" in str(get("model.hf_model_name_or_path")):
        raise ConfigError(f"{value} of this recipe sees images: smp trains language models only")
    if value in _MISSING_FAMILIES:
        raise ConfigError(f"{value} needs {_MISSING_FAMILIES[value]}, which is not there yet")
    if value not in _DENSE:
        raise ConfigError(f"{value} is not known{did_you_mean(str(value), _DENSE)}")
    return _DENSE[value]


def _shard(value: Any, get: Get) -> Mapping[str, Any]:
    degrees = {"hybrid_shard": get("model.shard_degree") or 0, "full_shard": 0, "no_shard": 1}
    if value not in degrees:
        raise ConfigError(
            f"{value} cannot be had: weights, gradients and optimizer are sharded alike; take hybrid_shard"
        )
    return {"hybrid_shard_degree": degrees[value]}


def _precision(value: Any, get: Get) -> Mapping[str, Any]:
    if value in ("bf16", "bf16-mixed"):
        return {"bf16": True}
    if str(value) in ("32", "32-true"):
        return {"bf16": False}
    raise ConfigError(f"{value} cannot be had: take bf16 or 32")


def _fp8(value: Any, get: Get) -> Mapping[str, Any] | str:
    if value and get("use_smp_model") is False:
        return "HyperPod's trainer does not read it without use_smp_model either"
    return _awaits("fp8_format", False, "FP8", "take recipes.model.fp8=false", "hybrid").convert(value, get)


def _peft(value: Any, get: Get) -> Mapping[str, Any]:
    if str(value).startswith("qlora"):
        raise ConfigError(f"{value} needs 4-bit base weights (QLoRA), which are not there yet; take lora")
    if value != "lora":
        raise ConfigError(f"{value} cannot be had: take lora, or null to train all weights")
    rank, alpha = get("model.peft.rank") or 32, get("model.peft.alpha") or 16
    return {"lora_rank": rank, "lora_alpha": alpha, "lora_dropout": _or(get("model.peft.dropout"), 0.1)}


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _targets(value: Any, get: Get) -> Mapping[str, Any]:
    names = [value] if isinstance(value, str) else list(value)
    if get("model.peft.peft_type") is None or names == ["all-linear"]:
        return {}
    if unknown := [name for name in names if name not in _MODULES]:
        raise ConfigError(f"{unknown[0]} is none of {', '.join(_MODULES)}")
    return {"lora_target_modules": ",".join(_MODULES[name] for name in names)}


def _dpo(name: str) -> Key:
    return _by(f"`{name}`, with dpo.enabled", lambda value, get: {name: value} if get("model.dpo.enabled") else {})


def _load(value: Any, get: Get) -> Mapping[str, Any]:
    if not get("model.do_finetune"):
        raise ConfigError(
            f"{value} goes with model.do_finetune: pretraining takes the architecture from the recipe's keys"
        )
    return {"load": value}


def _train_data(value: Any, get: Get) -> Mapping[str, Any]:
    words = value if isinstance(value, str) else " ".join(value)
    return {"data_path": words} if get("model.do_finetune") else {"train_data_path": words}


def _validation_data(value: Any, get: Get) -> Mapping[str, Any]:
    if not get("trainer.limit_val_batches"):
        return {}
    if get("model.do_finetune"):
        raise ConfigError(f"{value} cannot be had: finetune.py splits its samples; give split, such as 95,5,0")
    return {"valid_data_path": value if isinstance(value, str) else " ".join(value)}


def _validation(value: Any, get: Get) -> Mapping[str, Any]:
    if not value:
        return {}
    if not isinstance(value, int):
        raise ConfigError(f"{value} must be a number of batches; 0 switches validation off")
    return {"eval_iters": value, "eval_interval": get("trainer.val_check_interval")}


def _interval(value: Any, get: Get) -> Mapping[str, Any]:
    top = get("exp_manager.checkpoint_callback_params.save_top_k")
    return {"save_interval": value} if value and top != 0 and get("exp_manager.create_checkpoint_callback") else {}


def _top_k(value: Any, get: Get) -> Mapping[str, Any]:
    if not value or value < 0 or not get("exp_manager.create_checkpoint_callback"):
        return {}
    monitor = get("exp_manager.checkpoint_callback_params.monitor")
    return {"keep_last_k": max(2, value)} if monitor in (None, "step") else {"keep_best_k": value}


def _monitor(value: Any, get: Get) -> Mapping[str, Any]:
    mode = get("exp_manager.checkpoint_callback_params.mode")
    if value != "step" and ("loss" not in str(value) or mode != "min"):
        raise ConfigError(f"{value} with mode {mode} cannot be had: take step with max, or val_loss with min")
    return {}


def _window_layers(value: Any, get: Get) -> Mapping[str, Any] | str:
    if get("model.use_sliding_window"):
        raise ConfigError(f"{value} with use_sliding_window cannot be had: all layers have the window or none")
    return "there is no sliding window"


def _scaling(value: Any, get: Get) -> Mapping[str, Any]:
    if value != "llama3":
        raise ConfigError(f"{value} cannot be had: take llama3")
    return {"use_rope_scaling": True}


def _checkpoint_folder(value: Any, get: Get) -> Mapping[str, Any]:
    return {"save": value} if get("exp_manager.exp_dir") else {}


def _wandb(value: Any, get: Get) -> Mapping[str, Any]:
    if not value:
        return {}
    given = "exp_manager.wandb_logger_kwargs."
    return {
        "wandb_project": get(given + "project") or "smp",
        "wandb_exp_name": get(given + "name") or get("exp_manager.name"),
    }


def _accumulation(value: Any, get: Get) -> Mapping[str, Any]:
    if value in (1, None):
        return {}
    raise ConfigError(f"{value}: give the samples per step instead, +recipes.global_batch_size=N")


_RUN = {
    "run.model_type": _only(("hf",), "other trainers are closed or not this one"),
    "run.results_dir": _nothing("everything is in base_results_dir/run.name"),
    "trainer.accelerator": _only(("gpu", "cuda", "auto"), "for CPUs give env_vars.CUDA_VISIBLE_DEVICES=''"),
    "trainer.precision": _by("`bf16`", _precision),
    "trainer.max_steps": _to("train_iters"),
    "trainer.log_every_n_steps": _to("log_interval"),
    "trainer.limit_val_batches": _by("`eval_iters`, `eval_interval`; 0: no validation", _validation),
    "trainer.val_check_interval": _by("`eval_interval`, with limit_val_batches", lambda value, get: {}),
    "trainer.accumulate_grad_batches": _by("refused unless 1: give `global_batch_size`", _accumulation),
    "trainer.gradient_clip_val": _nothing("model.grad_clip clips"),
    "use_smp_model": _nothing("all models are parallel models"),
    "distributed_backend": _only(("nccl", "gloo"), "GPUs speak NCCL, CPUs gloo"),
}
_EXP = {
    "exp_dir": _by("where `save` is; null: the job's folder", lambda value, get: {}),
    "name": _by("`wandb_exp_name`, with create_wandb_logger", lambda value, get: {}),
    "create_tensorboard_logger": _to("tensorboard"),
    "summary_writer_kwargs.save_dir": _nothing("TensorBoard events are in the job's folder"),
    "create_mlflow_logger": _only((False,), "take create_wandb_logger, or metrics.jsonl in the job's folder"),
    "mlflow_logger_kwargs.tracking_uri": _nothing("there is no MLflow logger"),
    "create_wandb_logger": _by("`wandb_project`, `wandb_exp_name`", _wandb),
    "wandb_logger_kwargs.save_dir": _nothing("W&B's files are where WANDB_DIR says"),
    "wandb_logger_kwargs.project": _by("`wandb_project`", lambda value, get: {}),
    "wandb_logger_kwargs.name": _by("`wandb_exp_name`", lambda value, get: {}),
    "create_checkpoint_callback": _by("with false no `save_interval`; the end is saved", lambda value, get: {}),
    "checkpoint_callback_params.save_top_k": _by("`keep_last_k` or `keep_best_k`; 0: only the end is saved", _top_k),
    "checkpoint_callback_params.every_n_train_steps": _by("`save_interval`, unless save_top_k is 0", _interval),
    "checkpoint_callback_params.monitor": _by("step: `keep_last_k`; a loss: `keep_best_k`", _monitor),
    "checkpoint_callback_params.mode": _by("with monitor", lambda value, get: {}),
    "checkpoint_callback_params.save_last": _nothing("the end of a run is saved in any case"),
    "checkpoint_dir": _by("`save`, with exp_dir", _checkpoint_folder),
    "resume_from_checkpoint": _to("load"),
    "auto_checkpoint.enabled": _by(
        "`save_mtbf_hours: 24`, `async_save`",
        lambda value, get: {"save_mtbf_hours": 24, "async_save": True} if value else {},
    ),
    "export_full_model.every_n_train_steps": _only(
        (0,), "checkpoints are whole; tools/convert_checkpoint.py exports one"
    ),
    "export_full_model.save_last": _nothing("checkpoints are whole; tools/convert_checkpoint.py exports the last"),
}
_SHAPE = {
    "model_type": _by("the family: " + ", ".join(f"`{name}`" for name in _DENSE), _model_type, shape=True),
    "max_position_embeddings": _to("max_position_embeddings", shape=True),
    "num_hidden_layers": _to("num_layers", shape=True),
    "hidden_size": _to("hidden_size", shape=True),
    "num_attention_heads": _to("num_attention_heads", shape=True),
    "num_key_value_heads": _to("num_query_groups", shape=True),
    "intermediate_size": _to("ffn_hidden_size", shape=True),
    "vocab_size": _to("vocab_size", shape=True),
    "initializer_range": _to("init_method_std", shape=True),
    "layernorm_epsilon": _to("norm_epsilon", shape=True),
    "rms_norm_eps": _to("norm_epsilon", shape=True),
    "rope_theta": _to("rotary_base", shape=True),
    "rope_scaling.rope_type": _by("`use_rope_scaling`", _scaling, shape=True),
    "rope_scaling.factor": _to("rope_scaling_factor", shape=True),
    "rope_scaling.high_freq_factor": _to("rope_high_freq_factor", shape=True),
    "rope_scaling.low_freq_factor": _to("rope_low_freq_factor", shape=True),
    "rope_scaling.original_max_position_embeddings": _to("rope_original_max_position", shape=True),
    "tie_word_embeddings": _by(
        "`untie_embeddings_and_output_weights`",
        lambda value, get: {"untie_embeddings_and_output_weights": not value},
        shape=True,
    ),
    "sliding_window": _by(
        "`window_size`, unless use_sliding_window is false",
        lambda value, get: {} if get("model.use_sliding_window") is False else {"window_size": value},
        shape=True,
    ),
    "use_sliding_window": _by("with sliding_window", lambda value, get: {}, shape=True),
    "max_window_layers": _by("refused with use_sliding_window", _window_layers, shape=True),
}
_MODEL = {
    "train_batch_size": _to("micro_batch_size"),
    "val_batch_size": _nothing("evaluation takes micro_batch_size"),
    "seed": _to("seed"),
    "grad_clip": _to("clip_grad"),
    "log_reduced_training_loss": _nothing("the logged loss is that of all processes"),
    "precision": _by("`bf16`", _precision),
    "tensor_model_parallel_degree": _by(
        "`tensor_model_parallel_size`, with `sequence_parallel` above 1",
        lambda value, get: {"tensor_model_parallel_size": value, "sequence_parallel": value != 1},
    ),
    "context_parallel_degree": _awaits(
        "context_parallel_size", 1, "context parallelism", "take a shorter sequence or TP"
    ),
    "expert_model_parallel_degree": _only((1,), _OWN_KEYS),
    "moe": _only((False,), _OWN_KEYS),
    "num_local_experts": _only((1,), _OWN_KEYS),
    "num_experts_per_tok": _only((1,), _OWN_KEYS),
    "moe_load_balancing": _nothing("without experts there is no load to balance"),
    "moe_all_to_all_dispatcher": _nothing("without experts there is nothing to dispatch"),
    "global_token_shuffle": _nothing("without experts there is nothing to shuffle"),
    "multi_modal": _only((False,), "smp trains language models only"),
    "activation_checkpointing": _by(
        "`recompute_granularity` full or none",
        lambda value, get: {"recompute_granularity": "full" if value else "none"},
    ),
    "activation_loading_horizon": _nothing("it tunes offloaded activations"),
    "offload_activations": _awaits(
        "cpu_offloading", False, "offload of activations", "take more processes, TP or a pipeline"
    ),
    "delayed_param": _nothing("weights are always made where they rest"),
    "sharding_strategy": _by("`hybrid_shard_degree`: shard_degree, 0 for full_shard, 1 for no_shard", _shard),
    "shard_degree": _by("`hybrid_shard_degree`, with hybrid_shard", lambda value, get: {}),
    "forward_prefetch": _nothing("FSDP2 prefetches by itself"),
    "backward_fetch_policy": _nothing("FSDP2 prefetches by itself"),
    "limit_all_gathers": _nothing("FSDP2 bounds its memory by itself"),
    "use_orig_param": _nothing("FSDP2 keeps parameters as they are"),
    "auto_wrap_policy": _only(("transformer_auto_wrap_policy",), "a block is a unit"),
    "fp8": _by(
        "refused unless `false`, or `use_smp_model: false`, where HyperPod's trainer does not read it either: FP8 "
        "(`fp8_format`) is not there yet"
        if "fp8_format" not in settings(PRETRAIN)
        else "`fp8_format`",
        _fp8,
    ),
    "fp8_amax_history_len": _nothing("it tunes delayed scaling"),
    "fp8_amax_compute_algo": _nothing("it tunes delayed scaling"),
    "use_flash_attention": _by(
        "`attention_backend`: auto, or math with false",
        lambda value, get: {} if value else {"attention_backend": "math"},
    ),
    "max_context_width": _to("seq_length"),
    "do_finetune": _by("`finetune.py`, else `pretrain_gpt.py`", lambda value, get: {}),
    "hf_model_name_or_path": _by("`load`, with do_finetune", _load),
    "hf_access_token": _nothing("models are loaded from a folder; download with `hf download` before"),
    "peft.peft_type": _by("lora: `lora_rank`, `lora_alpha`, `lora_dropout`; QLoRA is not there yet", _peft),
    "peft.rank": _by("`lora_rank`, with peft_type", lambda value, get: {}),
    "peft.alpha": _by("`lora_alpha`, with peft_type", lambda value, get: {}),
    "peft.dropout": _by("`lora_dropout`, with peft_type", lambda value, get: {}),
    "peft.target_modules": _by("`lora_target_modules`", _targets),
    "dpo.enabled": _by("`objective: dpo`", lambda value, get: {"objective": "dpo"} if value else {}),
    "dpo.beta": _dpo("dpo_beta"),
    "dpo.label_smoothing": _dpo("dpo_label_smoothing"),
    "lr_decay_iters": _to("lr_decay_iters"),
    "optim.name": _by("`optimizer: adam`", lambda value, get: {"optimizer": {"adamw": "adam"}.get(value, value)}),
    "optim.lr": _to("lr"),
    "optim.weight_decay": _to("weight_decay"),
    "optim.betas": _by(
        "`adam_beta1`, `adam_beta2`", lambda value, get: dict(zip(("adam_beta1", "adam_beta2"), value, strict=True))
    ),
    "optim.sched.name": _only(("CosineAnnealing",), "take it, or +recipes.lr_decay_style=linear, WSD or constant"),
    "optim.sched.warmup_steps": _to("lr_warmup_iters"),
    "optim.sched.constant_steps": _only((0,), "take +recipes.lr_decay_style=WSD"),
    "optim.sched.min_lr": _to("min_lr"),
    "data.train_dir": _by("`train_data_path`; `data_path` of finetune.py", _train_data),
    "data.val_dir": _by("`valid_data_path`, with limit_val_batches", _validation_data),
    "data.dataset_type": _only(("hf", "synthetic"), "take hf, with .bin/.idx, .jsonl or .parquet files"),
    "data.use_synthetic_data": _by("`mock_data`", lambda value, get: {"mock_data": True} if value else {}),
    "data.tokenizer_name": _to("tokenizer_model"),
    "data.zipped_data": _nothing("compressed files are known by their names"),
    "viztracer.enabled": _only((False,), "take +recipes.profile=true"),
}

KEYS: dict[str, Key] = {
    **_RUN,
    **{f"exp_manager.{name}": key for name, key in _EXP.items()},
    **{f"model.{name}": key for name, key in (_SHAPE | _MODEL).items()},
}
"""Every key of a v1 recipe except those that both dialects have: run.name, run.time_limit, trainer.devices and
trainer.num_nodes."""
_SECTIONS = {".".join(name.split(".")[:depth]) for name in KEYS for depth in range(1, name.count(".") + 1)}
_CHECKED_SHAPE = frozenset(("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size"))
"""What a fine-tuning run is told although its folder says it too: another model than the recipe's is then an error."""


def translate(leaves: Mapping[str, Any]) -> Translated:
    """The settings that the keys of a v1 recipe stand for.

    Args:
        leaves: dotted key -> value, as :func:`flatten` gives them.

    Raises:
        ConfigError: a key that is not known, or a value that cannot be had; one line that begins with the key.
    """
    result = Translated(finetune=bool(leaves.get("model.do_finetune")))
    refused = []
    for name, value in leaves.items():
        if name not in KEYS and (value is not None or name not in _SECTIONS):
            raise ConfigError(f"{name}: there is no such key{did_you_mean(name, KEYS)}")
        if value is None:
            continue
        key = KEYS[name]
        try:
            became = key.convert(value, leaves.get)
        except ConfigError as error:
            refused.append(f"{name}: {error}")
            continue
        except (TypeError, ValueError, AttributeError, KeyError):
            raise ConfigError(f"{name}: {value!r} is not a value of this key ({key.text})") from None
        if isinstance(became, str):
            result.notes.append(f"{name}: {became}")
        elif key.shape:
            result.shape.update(became)
        else:
            result.values.update(became)
    if refused:
        raise ConfigError("; ".join(refused))
    given = result.shape if not result.finetune else {k: v for k, v in result.shape.items() if k in _CHECKED_SHAPE}
    result.values.update(given)
    return result


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of a tree; a section without keys counts as unset."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves.update(flatten(value, f"{prefix}{key}.") or {f"{prefix}{key}": None})
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
