"""Which keys of a configuration are text. Text stays as written: an account 00123, a version 1.10."""

from __future__ import annotations

from typing import Any

from smp.config.command_line.entry_points import FINETUNE, PRETRAIN
from smp.config.command_line.fields import Setting, settings
from smp.launch.hyperpod import key_of
from smp.launch.overrides import Override, Path, read_text, read_value, settled

_BASE_VALUES = ("dry_run", "max_tries", "instances", "debug", "launch_json")
_BASE_TEXTS = ("base_results_dir", "container", "python", "instance_type")
SBATCH_FLAGS = (
    *("contiguous", "exclusive", "hold", "no_kill", "no_requeue", "overcommit", "oversubscribe", "parsable", "quiet"),
    *("reboot", "spread_job", "test_only", "use_min_nodes", "verbose", "wait", "wait_all_nodes"),
)
"""Options of sbatch without a value, where true and false say whether they are given."""
_CLUSTER_VALUES = (
    *SBATCH_FLAGS,
    *("background", "requeue", "signal_seconds", "stderr_to_stdout", "slurm_create_submission_file_only"),
    *("hostNetwork", "privileged", "termination_seconds", "weights", "use_hyperpod_pytorch_job"),
    *("volume_size_gb", "max_run", "enable_remote_debug"),
)
_CLUSTER_GROUPS = ("sm_jobs_config", "additional_estimator_kwargs", "label_selector")
_LISTS_OF_OBJECTS = ("volumes", "persistent_volume_claims", "tolerations", "envFrom")
_OBJECT_VALUES = ("tolerationSeconds", "optional")
_CONTAINERS = (
    *("setup", "stages", "env_vars", "git", "srun_args", "container_mounts", "slurm_docker_cfg", "docker_args"),
    *("post_launch_commands", "pre_script", "post_script", "volumes", "persistent_volume_claims", "custom_labels"),
    *("annotations", "nodeSelector", "label_selector", "required", "preferred", "tolerations", "resources", "limits"),
    *("requests", "envFrom", "sm_jobs_config", "inputs", "s3", "file_system", "tensorboard_config", "subnets"),
    *("security_group_ids", "additional_estimator_kwargs", "recipe_overrides", "training_cfg", "script_args", "run"),
)
"""Keys with lists, or keys and values, whose leaves are text."""


def is_text(path: Path) -> bool:
    """Whether the value at ``path``, or the leaves below it, are text."""
    head, *rest = path
    if head == "recipes":
        return bool(rest) and _is_text_of_recipe(tuple(rest))
    if head == "cluster" and "recipe_overrides" in rest:
        return is_text(("recipes", *rest[rest.index("recipe_overrides") + 1 :]))
    if head == "cluster":
        named = [part for part in rest if part not in _CLUSTER_GROUPS][:1]
        return bool(named) and named[0].replace("-", "_") not in _CLUSTER_VALUES and path[-1] not in _OBJECT_VALUES
    return head not in _BASE_VALUES


def _is_text_of_recipe(path: Path) -> bool:
    if path[0] == "run":
        return True
    if path[0] == "training_cfg":
        return path[-1] not in ("nodes", "ntasks_per_node")
    if (setting := setting_of(path[0])) is not None and (len(path) == 1 or path[1].isdigit()):
        return setting.type is str
    keys = (key_of(name) for name in (".".join(path), ".".join(path[:-1])) if name)
    return any(key is not None and key.is_text for key in keys)


def setting_of(name: str) -> Setting | None:
    """A setting of either entry point; None: no such setting."""
    return settings(FINETUNE).get(name) or settings(PRETRAIN).get(name)


def needs_value(path: Path) -> bool:
    """Whether an empty text is no value of what is at ``path``, a key of a recipe of HyperPod's."""
    key = key_of(".".join(path[1:])) if path[0] == "recipes" and len(path) > 1 else None
    return key is not None and key.needs_value


def takes_one_text(path: Path) -> bool:
    """Whether ``path`` can only hold a text, so that brackets and commas are part of it."""
    if not is_text(path) or path[-1] in _CONTAINERS or (path[-1].isdigit() and path[-2] in _LISTS_OF_OBJECTS):
        return False
    if path[0] == "recipes":
        setting = setting_of(path[1])
        key = key_of(".".join(path[1:]))
        return not (key.is_list if key is not None else setting is not None and setting.many)
    return len(path) > 1 or path[0] in _BASE_TEXTS


def value_of(override: Override) -> Any:
    """The value to which an override sets its key.

    Raises:
        ValueError: it is not in the grammar.
    """
    text, path = override.text or "", override.path
    if not takes_one_text(path):
        return settled(read_value(text), is_text, path)
    if text.strip().lower() == "null":
        return None
    # An empty word is a shell variable that was not set; an environment variable may be empty.
    return None if text == "" and path[0] != "env_vars" else read_text(text)
