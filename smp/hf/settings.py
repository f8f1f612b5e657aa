"""The keys of ``smp.init``: those of SMP v2, by their names and with their defaults. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from smp.config.command_line.fields import did_you_mean
from smp.config.layout import Layout
from smp.config.schema import ConfigError

LAUNCHER = "SM_HP_MP_PARAMETERS"
"""SageMaker's launcher puts the keys of its estimator into this environment variable, as JSON. They win."""


@dataclass(frozen=True)
class Settings:
    """What ``smp.init`` accepts. ``NO_EFFECT`` names the keys that change nothing here, and why."""

    hybrid_shard_degree: int = 0
    """Ranks that share weights, gradients and optimizer state: 0 all data ranks, 1 none of them, n groups of n."""
    sm_activation_offloading: bool = True
    """Has no effect."""
    activation_loading_horizon: int = 2
    """Has no effect."""
    fsdp_cache_flush_warnings: bool = True
    """Has no effect."""
    allow_empty_shards: bool = False
    """Has no effect."""
    tensor_parallel_degree: int = 1
    """Ranks that share every matrix after ``smp.transform``."""
    context_parallel_degree: int = 1
    """Ranks that share every sequence after ``smp.transform``; among the ranks of hybrid_shard_degree."""
    expert_parallel_degree: int = 1
    """Ranks that have some of the experts each after ``smp.transform``; among the ranks of hybrid_shard_degree."""
    random_seed: int | None = None
    """Seed of ``DelayedParamIniter``."""
    sequence_parallel: bool = False
    """Not SMP v2's: between blocks each tensor-parallel rank has some of the tokens."""


NO_EFFECT = {
    "sm_activation_offloading": "scripts read it in smp.state and wrap the model in torch's offload_wrapper; or call "
    "smp.sharding.offload_activations(layers)",
    "activation_loading_horizon": "give horizon to smp.sharding.offload_activations",
    "fsdp_cache_flush_warnings": "torch.cuda.memory_stats()['num_alloc_retries'] counts them",
    "allow_empty_shards": "FSDP always allows empty shards",
    "random_seed": "of DelayedParamIniter only: smp.transform draws no numbers, and all ranks must be seeded alike",
}

_PIPELINE = (
    "a transformed model keeps Hugging Face's forward, which has no stages; "
    "pretrain_gpt.py and finetune.py have --pipeline-model-parallel-size"
)
_SEQUENCE = "the ranks are those of tensor_parallel_degree: give sequence_parallel: true"
_REFUSED = {
    "pipeline_parallel_degree": _PIPELINE,
    "pipeline_model_parallel_size": _PIPELINE,
    "pipeline": _PIPELINE,
    "partitions": _PIPELINE,
    "microbatches": _PIPELINE,
    "sequence_parallel_degree": _SEQUENCE,
}


DEGREES = ("tensor_parallel_degree", "expert_parallel_degree", "context_parallel_degree")
"""Degrees that scripts assign to ``smp.state`` before ``init``."""


def read(
    config: Mapping[str, Any] | str | os.PathLike[str] | None, set_before: Mapping[str, int] = MappingProxyType({})
) -> tuple[Settings, list[str]]:
    """The settings that ``config`` and the launcher's environment variable give, and which given keys change nothing.

    Degrees in ``set_before``, which the script has assigned to ``smp.state``, win over both.

    Raises:
        ConfigError: a file that does not exist or is no JSON object, an unknown key, a value that cannot work.
    """
    given = _keys(config)
    launcher = os.environ.get(LAUNCHER)
    if launcher:
        given |= _object(launcher, LAUNCHER)
    given |= set_before
    known = {field.name: field for field in fields(Settings)}
    for key, value in given.items():
        if key in _REFUSED:
            raise ConfigError(f"{key}: {_REFUSED[key]}")
        if key not in known:
            raise ConfigError(f"smp.init knows no key {key}{did_you_mean(str(key), known, _listed(known))}")
        _check_type(key, value)
    settings = Settings(**given)
    _check(settings)
    return settings, [key for key in given if key in NO_EFFECT]


def layout_of(settings: Settings, world_size: int) -> Layout:
    """How ``world_size`` processes are divided.

    Raises:
        ConfigError: the degrees do not multiply to it.
    """
    tp, shard = settings.tensor_parallel_degree, settings.hybrid_shard_degree
    if world_size % tp:
        start = "; start them with torchrun --nproc-per-node N" if world_size == 1 else ""
        raise ConfigError(f"tensor_parallel_degree {tp} does not divide {world_size} processes{start}")
    data = world_size // tp
    shard = shard or data
    if data % shard:
        raise ConfigError(
            f"hybrid_shard_degree {shard} does not divide {data} data ranks ({world_size} processes / "
            f"tensor_parallel_degree {tp})"
        )
    # Ranks with parts of one sequence have the same weights, so FSDP shards over them, too.
    cp = settings.context_parallel_degree
    if shard % cp:
        raise ConfigError(
            f"context_parallel_degree {cp} does not divide hybrid_shard_degree {shard}: ranks that share a sequence "
            "share weights too"
        )
    ep = settings.expert_parallel_degree
    if shard % ep:
        raise ConfigError(
            f"expert_parallel_degree {ep} does not divide hybrid_shard_degree {shard}: ranks that exchange rows for "
            "experts share the other weights"
        )
    return Layout(dp_replicate=data // shard, dp_shard=shard // cp, cp=cp, tp=tp, ep=ep)


def _keys(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"smp.init: a dictionary or the path of a JSON file, not {type(config).__name__}")
    try:
        text = Path(config).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"smp.init: {error.strerror}: {config}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"smp.init: {config} is no text in UTF-8: {error}") from None
    return _object(text, str(config))


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"smp.init: {where} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"smp.init: {where} holds no JSON object")
    return value


def _listed(known: Mapping[str, Any]) -> str:
    return f"; there are {', '.join(known)}"


def _check_type(key: str, value: Any) -> None:
    default = getattr(Settings(), key)
    wanted = bool if isinstance(default, bool) else int
    if key == "random_seed" and value is None:
        return
    # type(), not isinstance(): True is an int in Python.
    if type(value) is not wanted:
        raise ConfigError(f"{key} is {'true or false' if wanted is bool else 'an integer'}, not {value!r}")


def _check(settings: Settings) -> None:
    for key, lowest in (
        ("hybrid_shard_degree", 0),
        ("tensor_parallel_degree", 1),
        ("context_parallel_degree", 1),
        ("expert_parallel_degree", 1),
        ("activation_loading_horizon", 1),
    ):
        if getattr(settings, key) < lowest:
            raise ConfigError(f"{key} {getattr(settings, key)}: at least {lowest}")
    if settings.sequence_parallel and settings.tensor_parallel_degree == 1:
        raise ConfigError("sequence_parallel cuts tokens over the ranks of tensor_parallel_degree, which is 1")
