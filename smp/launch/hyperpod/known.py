"""HyperPod's keys on a recipe of this project: its settings in HyperPod's terms, so that keys that depend on others
find them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smp.launch.hyperpod.translate import Translated, translate


def override(own: Mapping[str, Any], leaves: Mapping[str, Any], finetune: bool) -> Translated:
    """What HyperPod's keys change in a recipe's settings.

    Args:
        own: the recipe's settings.
        leaves: dotted key -> value; of HyperPod's.
        finetune: whether the recipe is for finetune.py.

    Raises:
        ConfigError: a key that is not known, or a value that cannot be had; one line that begins with the key.
    """
    known = {key: value for key, value in said_by(own, finetune).items() if value is not None}
    if leaves.get("exp_manager.exp_dir"):
        known["exp_manager.checkpoint_dir"] = f"{leaves['exp_manager.exp_dir']}/checkpoints/"
    if "model.shard_degree" in leaves and "model.sharding_strategy" not in leaves:
        known["model.sharding_strategy"] = "hybrid_shard"
    if "trainer.limit_val_batches" not in leaves and "eval_iters" not in own:
        known["trainer.limit_val_batches"] = 0
    # The difference of two translations: keys that only repeat the recipe change nothing.
    before, after = (
        translate({**known, "model.do_finetune": finetune}),
        translate({**known, "model.do_finetune": finetune, **leaves}),
    )
    changed = {
        name: value for name, value in after.values.items() if name not in before.values or before.values[name] != value
    }
    gone = tuple(before.values.keys() - after.values.keys())
    notes = [note for note in after.notes if note.partition(":")[0] in leaves]
    said = {setting: key for setting, key in after.said.items() if key in leaves}
    return Translated(after.finetune, changed, notes=notes, gone=gone, said=said)


def said_by(own: Mapping[str, Any], finetune: bool) -> dict[str, Any]:
    """The settings on which values of other keys depend, under HyperPod's names."""
    context, shards = own.get("context_parallel_size", 1), own.get("hybrid_shard_degree", 0)
    lora, keep = own.get("lora_rank"), own.get("keep_last_k")
    return {
        "model.sharding_strategy": "hybrid_shard" if shards else "full_shard",
        # HyperPod counts context-parallel ranks into the degree.
        "model.shard_degree": shards * context or None,
        "model.context_parallel_degree": context,
        "model.peft.peft_type": ("qlora_4bit" if own.get("load_in_4bit") else "lora") if lora and finetune else None,
        "model.peft.rank": lora,
        "model.peft.alpha": own.get("lora_alpha"),
        "model.peft.dropout": own.get("lora_dropout", 0.0) if lora else None,
        "model.dpo.enabled": own.get("objective") == "dpo" or None,
        "model.fp8": own.get("fp8_format") is not None or None,
        "model.offload_activations": own.get("offload_activations"),
        "trainer.limit_val_batches": own.get("eval_iters"),
        "trainer.val_check_interval": own.get("eval_interval"),
        "exp_manager.create_checkpoint_callback": True,
        "exp_manager.checkpoint_callback_params.save_top_k": keep,
        "exp_manager.checkpoint_callback_params.every_n_train_steps": own.get("save_interval"),
        "exp_manager.create_wandb_logger": own.get("wandb_project") is not None or None,
        "exp_manager.wandb_logger_kwargs.project": own.get("wandb_project"),
        "exp_manager.wandb_logger_kwargs.name": own.get("wandb_exp_name"),
        "exp_manager.create_mlflow_logger": own.get("mlflow_experiment") is not None or None,
        "exp_manager.mlflow_logger_kwargs.experiment_name": own.get("mlflow_experiment"),
        "exp_manager.mlflow_logger_kwargs.run_name": own.get("mlflow_run_name"),
        "exp_manager.mlflow_logger_kwargs.tracking_uri": own.get("mlflow_tracking_uri"),
    }
