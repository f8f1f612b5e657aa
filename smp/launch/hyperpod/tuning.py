"""Translations that HyperPod's fine-tuning trainers share: models, splits, adapters, batches, precision."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from smp.config import ConfigError
from smp.config.command_line.hub import PREFIX
from smp.config.rules.finetune import ALL
from smp.launch.hyperpod.key import FLAG, INTEGER, TEXT, Convert, Get, Key, nothing
from smp.launch.hyperpod.values import module_names

_UNREAD = {
    r"gemma-?4": "Gemma 4's layers that share keys and values",
}
"""Hub names (patterns), with the part of their architecture that finetune.py does not support yet."""
COMMON: dict[str, Key] = {
    "display_name": nothing("a title"),
    "version": nothing("of AWS's image, which does not run here"),
    "instance_types": nothing("those it was tried on there; instance_type says the machine"),
    "run.hf_access_token": nothing("models are read from a folder, or from the hub with env_vars.HF_TOKEN"),
    "run.results_dir": nothing("everything is in base_results_dir/run.name"),
}
"""Keys that the newer forms share."""
_ELASTIC = ("max_nodes", "min_nodes", "replica_increment_step")


def elastic(value: Any, get: Get) -> Mapping[str, Any]:
    """Settings of an elastic job; none if it is not elastic."""
    found = {name: get(f"elastic_policy.{name}") for name in _ELASTIC} if value else {}
    given = {name: each for name, each in found.items() if each is not None}
    # Without copies in memory a change of nodes would go back to the last checkpoint on disk.
    return given | ({"peer_snapshot_interval": 10} if value else {})


of_elastic = Key(
    "with is_elastic",
    lambda value, get: {} if get("elastic_policy.is_elastic") else "is_elastic says that nodes stay",
    kind=INTEGER,
)
"""A key that :func:`elastic` reads."""
MLFLOW: dict[str, Key] = {
    "mlflow.tracking_uri": Key(
        "`mlflow_tracking_uri`, `mlflow_experiment`: run.name",
        lambda value, get: {"mlflow_tracking_uri": value, "mlflow_experiment": get("run.name") or "smp"},
        is_text=True,
    ),
    "mlflow.run_id": Key(
        "refused: runs of MLflow have names here",
        lambda value, get: refuse(f"{value}: runs of MLflow have names here; give recipes.mlflow_run_name"),
        is_text=True,
    ),
}


def refuse(reason: str) -> Mapping[str, Any]:
    """Raise ConfigError within an expression."""
    raise ConfigError(reason)


def unread(settings: Mapping[str, Any]) -> str | None:
    """Features of a hub model that finetune.py does not support yet; None: none known."""
    name = str(settings.get("load") or "").lower()
    if not name.startswith(PREFIX):
        return None
    if "llama-4" in name and "experts" in str(settings.get("lora_target_modules")):
        return "adapters on Llama 4's experts"
    return next((why for pattern, why in _UNREAD.items() if re.search(pattern, name)), None)


def split_without(files: str) -> Convert:
    """The key ``split``: the share of samples for training, unless the key ``files`` names validation samples."""

    def convert(value: Any, get: Get) -> Mapping[str, Any] | str:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise ConfigError(f"{value!r} is no share of the samples that are trained")
        if get(files):
            return f"{files.rpartition('training_config.')[2]} are the samples for validation"
        # Rounded: 100 x 0.07 is 7.000000000000001 in floating point.
        train = round(100 * value, 6)
        return {"split": f"{train:g},{100 - train:g},0"}

    return convert


def evaluation(when: Any, files: Any, ratio: Any) -> Mapping[str, Any] | str:
    """How often a run evaluates all validation samples.

    Args:
        when: steps; after_each_epoch, or None.
        files: of samples for validation; nothing: there are none.
        ratio: of the samples that are trained on, where no files are named.
    """
    if not files and ratio in (1, 1.0):
        return "train_val_split_ratio keeps no samples for it"
    found = {"eval_epochs": 1.0} if when in (None, "after_each_epoch") else {"eval_interval": when}
    return found | {"full_validation": True}


def context_parallel(ring: str, ulysses: str) -> Convert:
    """Context parallelism from two keys: the size of a ring, and of the groups that exchange heads for tokens."""

    def convert(value: Any, get: Get) -> Mapping[str, Any]:
        around, within = get(ring) or 1, get(ulysses) or 1
        if around * within == 1:
            return {}
        kind = "p2p" if within == 1 else "a2a" if around == 1 else "a2a+p2p"
        found: dict[str, Any] = {"context_parallel_size": around * within, "cp_comm_type": kind}
        # Processes per all-to-all group, then per ring.
        return found | ({"hierarchical_context_parallel_sizes": f"{within} {around}"} if kind == "a2a+p2p" else {})

    return convert


def data_processes(get: Get, model_parallel: int = 1) -> int:
    """Number of processes that read different samples."""
    # At least 1: degrees that do not fit the processes are refused with the layout, where the numbers are named.
    return max(1, (get("trainer.num_nodes") or 1) * (get("trainer.devices") or 1) // model_parallel)


def micro_batch(most: int, batch: int, processes: int) -> int:
    """The largest micro-batch of at most ``most`` samples that divides each process's share of a batch."""
    # All micro-batches of a step have one size here.
    share = max(1, batch // processes)
    return max(size for size in range(1, max(1, min(most, share)) + 1) if share % size == 0)


def micro_batch_of_tokens(tokens: Any, length: Any) -> int:
    """Number of full-length samples in a budget of tokens."""
    return max(1, math.floor(tokens / length)) if tokens and length else 1


def adapters(rank: Any, alpha: Any, dropout: Any, targets: Any, parameters: Any = None) -> dict[str, Any]:
    """Settings of LoRA.

    Args:
        rank: of A and B.
        alpha: scale, multiplied by the rank.
        dropout: on the input of adapters.
        targets: all-linear, or names of modules.
        parameters: names of weights that are no modules: experts.
    """
    found: dict[str, Any] = {"lora_rank": rank}
    found |= {name: value for name, value in (("lora_alpha", alpha), ("lora_dropout", dropout)) if value is not None}
    # peft's all-linear is the default here as well, but for experts, which have to be named.
    names = [] if targets in (None, "all-linear", ["all-linear"]) else module_names(targets)
    experts = []
    for parameter in parameters or []:
        if not re.fullmatch(r"mlp\.experts\.(gate_up_proj|down_proj)", str(parameter)):
            raise ConfigError(f"{parameter} is no weight of experts: mlp.experts.gate_up_proj, mlp.experts.down_proj")
        # transformers keeps gate and up of all experts in one weight; here they are two, each with its adapter.
        experts += ["*.experts.down"] if "down" in str(parameter) else ["*.experts.gate", "*.experts.up"]
    if names or experts:
        found["lora_target_modules"] = ",".join([*(names or [ALL]), *experts])
    return found


def without_routers(value: Any, get: Get) -> Mapping[str, Any] | str:
    """Accept names that adapters leave out where they get none here either; refuse others."""
    names = [value] if isinstance(value, str) else list(value)
    parts = [part for name in names for part in str(name).split("|")]
    known = ("router", "vision", "visual", "audio", "projector", "embed_", "experts")
    if unknown := [part for part in parts if not any(word in part for word in known)]:
        raise ConfigError(
            f"{unknown[0]} cannot be left out by name; recipes.lora_target_modules says what gets adapters"
        )
    return "routers, embeddings, towers of images and sound, and experts that target_parameters does not name have none"


def callbacks(value: Any, get: Get) -> Mapping[str, Any] | str:
    names = [str(item.get("_target_")) if isinstance(item, Mapping) else str(item) for item in value]
    if unknown := [name for name in names if "Metering" not in name]:
        raise ConfigError(f"{unknown[0]} is code of AWS's image; a callback of your own goes into a script of your own")
    return "it counts for AWS's bill"


def style_of(value: Any, names: Mapping[str, str]) -> Mapping[str, Any]:
    """``lr_decay_style`` for a name of another library."""
    if value not in names:
        raise ConfigError(f"{value} cannot be had: take one of {', '.join(names)}, or recipes.lr_decay_style")
    return {"lr_decay_style": names[value]}


def scheduler(names: Mapping[str, str]) -> Convert:
    """A key that is ``lr_decay_style`` under another library's names."""
    return lambda value, get: style_of(value, names)


def zero_or(name: str) -> Convert:
    """A setting whose value 0 means that it is not set."""
    return lambda value, get: {name: value} if value else {}


PRECISION = Key(
    "`bf16`",
    lambda value, get: (
        {"bf16": value in ("bf16", "bfloat16")}
        if value in ("bf16", "bfloat16", "fp32", "float32")
        else refuse(f"{value} cannot be had: take bfloat16 or float32")
    ),
    kind=TEXT,
)
RECOMPUTE = Key(
    "`recompute_granularity` full or none",
    lambda value, get: {"recompute_granularity": "full" if value else "none"},
    kind=FLAG,
)
KEPT = Key(
    "`keep_last_k`, at least 2; below 1: all are kept",
    lambda value, get: {"keep_last_k": max(2, value)} if value > 0 else {},
    kind=INTEGER,
)
"""Number of checkpoints that are kept, at least two: one may be damaged."""
