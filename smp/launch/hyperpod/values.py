"""Translations of HyperPod's keys that are not copied: what they become, or why they are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smp.config import ConfigError
from smp.config.command_line.fields import did_you_mean
from smp.config.command_line.hub import PREFIX
from smp.launch.hyperpod.key import Convert, Get

_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MODULES = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    # of latent attention
    "q_a_proj": "query_down",
    "q_b_proj": "query_up",
    "kv_a_proj_with_mqa": "key_value_down",
    "kv_b_proj": "key_value_up",
    # of Mamba's mixers
    "in_proj": "query,key,value,gate,step",
    "out_proj": "output",
    # Megatron's
    "linear_qkv": "query,key,value",
    "linear_proj": "output",
    "linear_fc1": "gate,up",
    "linear_fc2": "down",
}
_NO_EXPERTS = "it goes with moe, which is unset or false"
SMP_COEFFICIENT = 1e-3
"""Coefficient of SMP v2's auxiliary losses of experts, which its recipes cannot change."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama_v3": {},
    "mistral": {},
    "mixtral": {},
    "deepseek_r1": {},
    "deepseek_r1_llama_v3": {},
    "deepseek_r1_qwen_v2": {"add_qkv_bias": True},
    "qwen_v2": {"add_qkv_bias": True},
    "falcon": {},
    "llama_v4": {  # Scout's text model, which its recipes are of
        **{"kv_channels": 128, "rotary_interleaved": True, "no_rope_freq": "4", "attention_chunk_size": 8192},
        **{"qk_l2_norm": True, "attn_temperature_tuning": True, "num_experts": 16, "moe_router_topk": 1},
        **{"moe_router_score_function": "sigmoid", "moe_apply_probs_on_input": True},
        **{"moe_shared_expert_intermediate_size": 8192},
    },
    "gpt_oss": {
        **{"kv_channels": 64, "disable_bias_linear": False, "softmax_type": "learnable"},
        **{"swiglu": False, "quick_geglu": True, "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0},
        **{"window_size": 128, "window_attn_skip_freq": "2"},
        **{"use_rope_scaling": True, "rope_scaling_type": "yarn", "rope_scaling_factor": 32.0},
        **{"rope_original_max_position": 4096, "yarn_truncate": False},
    },
}
SIZES = {"tiiuae/falcon-7b": "falcon-7b"}
"""Hub folders whose architecture a recipe trains from scratch, with the named size."""
_PATTERN = re.compile(r"(?:language_model\.)?model\.layers\.\*\.?(?:self_attn|mlp)\.\(([a-z_|]+)\)")
"""Matches names of modules in all layers; the last parts identify them without the rest."""


def finetunes(get: Get) -> bool:
    """Whether a recipe is for finetune.py, which alone reads images."""
    return bool(get("model.do_finetune") or get("model.multi_modal"))


def do_finetune(value: Any, get: Get) -> Mapping[str, Any] | str:
    if get("model.multi_modal") and not value:
        return "with multi_modal weights begin as those of hf_model_name_or_path, not as new ones"
    return {}


def model_type(value: Any, get: Get) -> Mapping[str, Any]:
    if value == "llama_v4" and not finetunes(get):
        raise ConfigError(
            f"{value} goes with model.do_finetune: a recipe's keys do not say which layers have experts and RoPE; for "
            "pretraining take a recipe of this project's with model: llama4-scout"
        )
    if value not in FAMILIES:
        raise ConfigError(f"{value} is not known{did_you_mean(str(value), FAMILIES)}")
    return {} if get("model.multi_modal") else FAMILIES[value]


def width(value: Any, get: Get) -> Mapping[str, Any]:
    """Width of the MLP. Llama 4's is that of its experts; its dense layers are wider."""
    return {"moe_ffn_hidden_size" if get("model.model_type") == "llama_v4" else "ffn_hidden_size": value}


def moe(value: Any, get: Get) -> Mapping[str, Any]:
    """Nothing by itself, except SMP v2's losses of experts."""
    if not value:
        return {}
    missing = [key for key in ("num_local_experts", "num_experts_per_tok") if get(f"model.{key}") is None]
    if missing:
        raise ConfigError(f"{value} needs {missing[0]} with it")
    if get("model.dpo.enabled"):  # routers are not measured with pairs
        return {}
    losses = {"moe_z_loss_coeff": SMP_COEFFICIENT}
    if get("model.moe_load_balancing") != "none" and not _sinkhorn(get):
        losses["moe_aux_loss_coeff"] = SMP_COEFFICIENT
    return losses


def with_experts(name: str) -> Convert:
    """A key that is the setting ``name`` of a model with experts."""
    return lambda value, get: {name: value} if get("model.moe") else _NO_EXPERTS


def _sinkhorn(get: Get) -> bool:
    """Whether Sinkhorn balances experts. Fine-tuning has padded rows, and uses the loss instead."""
    return get("model.moe_load_balancing") == "sinkhorn" and not finetunes(get)


def load_balancing(value: Any, get: Get) -> Mapping[str, Any] | str:
    if value not in ("sinkhorn", "balanced", "aux_loss", "none"):
        raise ConfigError(f"{value} cannot be had: take aux_loss or none")
    if not get("model.moe"):
        return _NO_EXPERTS
    if value in ("aux_loss", "none"):
        return {}
    if _sinkhorn(get):
        return {"moe_router_load_balancing_type": "sinkhorn"}
    return f"{value} does not exist here: loads are evened by aux_loss with moe_aux_loss_coeff {SMP_COEFFICIENT}"


def shard(value: Any, get: Get) -> Mapping[str, Any]:
    """--hybrid-shard-degree. HyperPod's degree counts context-parallel processes; here it is multiplied by their
    number."""
    degree, context = get("model.shard_degree") or 0, get("model.context_parallel_degree")
    context = context if isinstance(context, int) and context > 0 else 1  # other values are refused by its own key
    if value == "full_shard" or (value == "hybrid_shard" and not degree):
        return {"hybrid_shard_degree": 0}
    if value == "no_shard":
        if context > 1:
            raise ConfigError(
                f"{value} with context_parallel_degree {context} cannot be had: weights are sharded over those "
                f"processes; take hybrid_shard with shard_degree {context}"
            )
        return {"hybrid_shard_degree": 1}
    if value != "hybrid_shard":
        raise ConfigError(
            f"{value} cannot be had: weights, gradients and optimizer are sharded alike; take hybrid_shard"
        )
    if degree % context:
        raise ConfigError(
            f"shard_degree {degree} is not divisible by context_parallel_degree {context}, whose processes it counts"
        )
    return {"hybrid_shard_degree": degree // context}


def shard_degree(value: Any, get: Get) -> Mapping[str, Any] | str:
    """Nothing where sharding_strategy reads it; without a strategy HyperPod's default is hybrid_shard."""
    strategy = get("model.sharding_strategy")
    if strategy is None:
        return shard("hybrid_shard", get)
    return {} if strategy == "hybrid_shard" else f"sharding_strategy {strategy} has no degree"


def precision(value: Any, get: Get) -> Mapping[str, Any]:
    if value in ("bf16", "bf16-mixed"):
        return {"bf16": True}
    if str(value) in ("32", "32-true"):
        return {"bf16": False}
    raise ConfigError(f"{value} cannot be had: take bf16 or 32")


def fp8(value: Any, get: Get) -> Mapping[str, Any] | str:
    if value and get("use_smp_model") is False:
        return "HyperPod's trainer does not read it without use_smp_model either"
    return {"fp8_format": "hybrid", "fp8_recipe": "delayed"} if value else {}


def of_fp8(name: str) -> Convert:
    """A key of delayed scaling: the setting ``name``, with FP8 only."""

    def convert(value: Any, get: Get) -> Mapping[str, Any] | str:
        if get("model.fp8") and get("use_smp_model") is not False:
            return {name: value}
        return "without fp8 there are no scales"

    return convert


def peft(value: Any, get: Get) -> Mapping[str, Any]:
    if value not in ("lora", "qlora_4bit"):
        raise ConfigError(f"{value} cannot be had: take lora or qlora_4bit, or null to train all weights")
    # Defaults of HyperPod's trainer.
    rank, alpha = get("model.peft.rank") or 32, get("model.peft.alpha") or 16
    # 0 is a dropout, null is HyperPod's.
    given = 0.0 if get("model.multi_modal") else get("model.peft.dropout")
    lora = {"lora_rank": rank, "lora_alpha": alpha, "lora_dropout": 0.1 if given is None else given}
    return lora | ({"load_in_4bit": True} if value == "qlora_4bit" else {})


_NO_ADAPTERS = "it goes with peft_type, which is unset or 0"


def peft_dropout(value: Any, get: Get) -> Mapping[str, Any] | str:
    if not get("model.peft.peft_type"):
        return _NO_ADAPTERS
    if value and get("model.multi_modal"):
        return f"{value} is 0 with multi_modal: adapters on transformers' modules have no dropout here"
    return {}


def targets(value: Any, get: Get) -> Mapping[str, Any] | str:
    if not get("model.peft.peft_type"):
        return _NO_ADAPTERS
    if value in ("all-linear", ["all-linear"]):
        return {}
    if get("model.multi_modal"):  # transformers' modules have its names
        return {"lora_target_modules": ",".join(_named_parts(value))}
    return {"lora_target_modules": ",".join(module_names(value))}


def module_names(given: Any) -> list[str]:
    """This project's names of modules with adapters, from transformers' and Megatron's.

    Args:
        given: a name, a pattern of names, or a list of them.
    """
    names = _named_parts(given)
    if unknown := [name for name in names if name not in _MODULES]:
        raise ConfigError(f"{unknown[0]} is none of {', '.join(_MODULES)}")
    return list(dict.fromkeys(found for name in names for found in _MODULES[name].split(",")))


def _named_parts(given: Any) -> list[str]:
    return [part for name in ([given] if isinstance(given, str) else given) for part in _parts(str(name))]


def _parts(name: str) -> list[str]:
    """The last parts of the module names that a name or pattern matches."""
    if found := _PATTERN.fullmatch(name):
        return found[1].split("|")
    return [part.removeprefix(".*").removesuffix(".*") for part in name.split("|")]


def model_folder(value: Any, get: Get) -> Mapping[str, Any]:
    """--load for a folder, or a hub name; as in transformers, an existing folder wins."""
    text = str(value)
    on_hub = _HUB.fullmatch(text) is not None and not Path(text).is_dir()
    return {"load": f"{PREFIX}{text}" if on_hub else text}


def load(value: Any, get: Get) -> Mapping[str, Any]:
    if finetunes(get):
        return model_folder(value, get)
    if value not in SIZES:
        raise ConfigError(
            f"{value} goes with model.do_finetune: pretraining takes the architecture from the recipe's keys"
        )
    return {"model": SIZES[value]}


def resumed(value: Any, get: Get) -> Mapping[str, Any]:
    if finetunes(get):
        raise ConfigError(
            f"{value} cannot be had: fine-tuning continues from its own folder; recipes.save=FOLDER says another"
        )
    return {"load": value}


def train_data(value: Any, get: Get) -> Mapping[str, Any] | str:
    if get("model.data.use_synthetic_data"):
        return "use_synthetic_data makes samples"
    words = value if isinstance(value, str) else " ".join(value)
    return {"data_path": words} if finetunes(get) else {"train_data_path": words}


def validation_data(value: Any, get: Get) -> Mapping[str, Any] | str:
    if not get("trainer.limit_val_batches"):
        return "trainer.limit_val_batches says that a run does not evaluate"
    return {"valid_data_path": value if isinstance(value, str) else " ".join(value)}


def validation(value: Any, get: Get) -> Mapping[str, Any]:
    if not value:
        return {}
    if not isinstance(value, int):
        raise ConfigError(f"{value} must be a number of batches; 0 switches validation off")
    return {"eval_iters": value, "eval_interval": get("trainer.val_check_interval")}


_ONLY_THE_END = "create_checkpoint_callback is unset or false: only the end is saved"


def interval(value: Any, get: Get) -> Mapping[str, Any] | str:
    if not get("exp_manager.create_checkpoint_callback"):
        return _ONLY_THE_END
    if get("exp_manager.checkpoint_callback_params.save_top_k") == 0:
        return "save_top_k is 0: only the end is saved"
    return {"save_interval": value} if value else {}


def top_k(value: Any, get: Get) -> Mapping[str, Any] | str:
    if not get("exp_manager.create_checkpoint_callback"):
        return _ONLY_THE_END
    if not value or value < 0:
        return {}
    monitor = get("exp_manager.checkpoint_callback_params.monitor")
    # keep_last_k is at least 2: the newest may be damaged.
    return {"keep_last_k": max(2, value)} if monitor in (None, "step") else {"keep_best_k": value}


def monitor(value: Any, get: Get) -> Mapping[str, Any]:
    mode = get("exp_manager.checkpoint_callback_params.mode")
    if value != "step" and ("loss" not in str(value) or mode != "min"):
        raise ConfigError(f"{value} with mode {mode} cannot be had: take step with max, or val_loss with min")
    return {}


def window_layers(value: Any, get: Get) -> Mapping[str, Any] | str:
    if get("model.use_sliding_window"):
        raise ConfigError(f"{value} with use_sliding_window cannot be had: all layers have the window or none")
    return "there is no sliding window"


def scaling(value: Any, get: Get) -> Mapping[str, Any]:
    if value != "llama3":
        raise ConfigError(f"{value} cannot be had: take llama3")
    return {"use_rope_scaling": True}


def checkpoint_folder(value: Any, get: Get) -> Mapping[str, Any] | str:
    return {"save": value} if get("exp_manager.exp_dir") else "exp_dir is unset: checkpoints are in the job's folder"


def wandb(value: Any, get: Get) -> Mapping[str, Any]:
    if not value:
        return {}
    given = "exp_manager.wandb_logger_kwargs."
    return {
        "wandb_project": get(given + "project") or "smp",
        "wandb_exp_name": get(given + "name") or get("exp_manager.name"),
    }


def mlflow(value: Any, get: Get) -> Mapping[str, Any]:
    if not value:
        return {}
    given = "exp_manager.mlflow_logger_kwargs."
    said = {
        "mlflow_experiment": get(given + "experiment_name") or "smp",
        "mlflow_run_name": get(given + "run_name") or get("exp_manager.name"),
        "mlflow_tracking_uri": get(given + "tracking_uri"),
    }
    return {name: text for name, text in said.items() if text}


def accumulation(value: Any, get: Get) -> Mapping[str, Any]:
    if value in (1, None):
        return {}
    raise ConfigError(f"{value}: give the samples per step instead, +recipes.global_batch_size=N")
