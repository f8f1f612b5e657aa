"""Adapters from a folder that peft wrote: what is in it is checked, and what smp cannot compute is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint import CheckpointError
from smp.config import ConfigError, ModelConfig
from smp.convert.huggingface.config import read_json
from smp.convert.huggingface.family import Family
from smp.convert.huggingface.store import safetensors_store
from smp.convert.layout import SCORE
from smp.convert.peft.adapters import (
    CONFIG,
    FRONT,
    MAGNITUDE,
    TENSORS,
    Adapter,
    Adapters,
    check_shapes,
    linear_modules,
)
from smp.convert.peft.experts import expert_tensors, parted

_KNOWN = {
    *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
    *(
        "target_parameters",
        "bias",
        "init_lora_weights",
        "eva_config",
        "megatron_config",
        "megatron_core",
        "qalora_group_size",
        "modules_to_save",
    ),
}
"""Keys that may be set in adapter_config.json. Any other key that is set may mean that the adapter computes something
else than ``scale x B A`` (or DoRA) on the model's own weights."""
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that can be read. Others (PiSSA, OLoRA, CorDA, LoftQ) change the model's weights as
well."""


def read_adapters(folder: str | Path, config: ModelConfig, family: Family) -> tuple[Adapters, float]:
    """(adapters by the name of the layer, their dropout) of a folder that peft wrote.

    Raises:
        CheckpointError: it is damaged or cannot be read, or its shapes are not this model's.
        ConfigError, DamageError: the same of its configuration; or it does what smp cannot.
    """
    folder = Path(folder)
    content = _read_config(folder)
    tensors = _read_tensors(folder)
    # Taken out of ``tensors`` before the rest is compared.
    score = _score(content, config, folder, tensors)
    _check_in_blocks(tensors, family, folder)
    magnitudes = _magnitudes(tensors)
    modules, found = linear_modules(config, family), dict(_pairs(folder, tensors))
    # Taken out before the rest is compared: they belong to no linear layer.
    of_experts = _experts(content, config, family, found, folder)
    _check_modules(content, found, magnitudes, modules, folder)
    adapters: dict[str, Adapter] = {}
    for module in (module for module in modules if module in found):
        a, b = found[module]
        for name, link in modules[module].items():
            check_shapes(a, b, (link.rows.external_rows, link.shape[1]), f"{folder / TENSORS}: the adapter of {module}")
            # Several of this project's layers lie in one module: each takes the same A, and its rows of B.
            runs = list(link.rows.runs(0, link.rows.smp_rows))
            rows = torch.cat([b[row : row + count] for row, _, count in runs])
            m = _magnitude(content, module, magnitudes, b.shape[0], folder)
            m = None if m is None else torch.cat([m[row : row + count] for row, _, count in runs])
            adapters[name] = Adapter(a, rows, _scale(content, module, a.shape[0], folder), m)
    adapters |= of_experts
    if not adapters:
        raise CheckpointError(f"{folder / TENSORS} holds no adapter")
    return Adapters(adapters, score), _dropout(content, folder)


def read_own_names(folder: str | Path, matrices: Mapping[str, tuple[int, ...]]) -> tuple[Adapters, float]:
    """:func:`read_adapters` for a model whose layers have Hugging Face's names: ``matrices``, (out, in) by name."""
    folder = Path(folder)
    content = _read_config(folder)
    tensors = _read_tensors(folder)
    for key in ("modules_to_save", "target_parameters"):
        if content.get(key):
            raise ConfigError(
                f"{folder / CONFIG}: {key} is {_short(content[key])}, and of a model that transformers computes only "
                f"linear layers of blocks have adapters: {_MERGE}"
            )
    magnitudes, found = _magnitudes(tensors), dict(_pairs(folder, tensors))
    _check_modules(content, found, magnitudes, matrices.keys(), folder)
    adapters: dict[str, Adapter] = {}
    for module, (a, b) in found.items():
        check_shapes(a, b, matrices[module], f"{folder / TENSORS}: the adapter of {module}")
        m = _magnitude(content, module, magnitudes, b.shape[0], folder)
        adapters[module] = Adapter(a, b, _scale(content, module, a.shape[0], folder), m)
    if not adapters:
        raise CheckpointError(f"{folder / TENSORS} holds no adapter")
    return Adapters(adapters), _dropout(content, folder)


def _dropout(content: Mapping[str, Any], folder: Path) -> float:
    dropout = _number(content.get("lora_dropout", 0.0), "lora_dropout", folder)
    if not 0 <= dropout < 1:
        raise CheckpointError(f"{folder / CONFIG}: lora_dropout {dropout} must be at least 0 and below 1")
    return dropout


def _check_modules(
    content: Mapping[str, Any],
    found: Mapping[str, Any],
    magnitudes: Mapping[str, Any],
    modules: Collection[str],
    folder: Path,
) -> None:
    """Raise unless the file has adapters for linear layers of this model, and for all that its configuration
    chooses."""
    # An adapter that nothing here takes would be lost silently.
    if strange := sorted(found.keys() - set(modules)):
        raise CheckpointError(f"{folder / TENSORS}: {strange[0]} is no linear layer of this model")
    if alone := sorted(magnitudes.keys() - found.keys()):
        raise CheckpointError(f"{folder / TENSORS}: the magnitude of {alone[0]} has no adapter")
    # peft leaves out nothing that its targets choose, so what is missing means another model.
    if missing := [module for module in _targets(content, modules, folder) if module not in found]:
        raise CheckpointError(
            f"{folder / TENSORS} has no adapter for {missing[0]}, which its target_modules choose: it belongs to "
            "another model"
        )


def _check_in_blocks(tensors: Collection[str], family: Family, folder: Path) -> None:
    """Raise ConfigError for adapters or whole copies of the output matrix or the embeddings."""
    for key in tensors:
        for module in family.table.ends.values():
            if key.removeprefix(FRONT).startswith(f"{module}."):
                raise ConfigError(
                    f"{folder / CONFIG}: it changes {module}, and adapters are supported on linear layers of blocks "
                    f"only: {_MERGE}"
                )


_MERGE = "merge it into the model with peft (merge_and_unload), or train it without that"
"""Advice for an adapter that cannot be read."""


def _score(
    content: Mapping[str, Any], config: ModelConfig, folder: Path, tensors: dict[str, torch.Tensor]
) -> torch.Tensor | None:
    """The head of a reward model that was trained with the adapter, fp32, taken out of ``tensors``; None: there is
    none."""
    whole = content.get("modules_to_save")
    if not whole:
        return None
    key = f"{FRONT}{SCORE}.weight"
    score = tensors.pop(key, None)
    if (
        not isinstance(whole, list) or score is None or set(whole) - {SCORE, "classifier"}
    ):  # peft names both for sequence classification
        raise ConfigError(
            f"{folder / CONFIG}: modules_to_save is {_short(whole)}, and the only module that is trained whole here is "
            f"a reward model's head of scores: {_MERGE}"
        )
    if tuple(score.shape) != (1, config.hidden_size):
        raise CheckpointError(f"{folder / TENSORS}: {key} is {list(score.shape)}, not [1, {config.hidden_size}]")
    return score.float()


def _experts(
    content: Mapping[str, Any],
    config: ModelConfig,
    family: Family,
    found: dict[str, tuple[torch.Tensor, torch.Tensor]],
    folder: Path,
) -> dict[str, Adapter]:
    """Adapters of experts, taken out of ``found``."""
    targets = content.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise CheckpointError(f"{folder / CONFIG}: target_parameters is no list of names")
    adapters: dict[str, Adapter] = {}
    # peft's rule: a target is the end of a name, from a dot on.
    for tensor in expert_tensors(config, family, lambda name, _: any(f".{name}".endswith(f".{t}") for t in targets)):
        if tensor.module not in found:
            raise CheckpointError(
                f"{folder / TENSORS} has no adapter for {tensor.name}, which target_parameters choose"
            )
        a, b = found.pop(tensor.module)
        link = next(iter(tensor.members.values()))
        # A is (experts x rank, in).
        rank = a.shape[0] // tensor.count if a.ndim == 2 else 0
        matrix = link.rows.external_rows, link.shape[1]
        if rank == 0 or a.shape != (rank * tensor.count, matrix[1]) or b.shape != (matrix[0], rank * tensor.count):
            raise CheckpointError(
                f"{folder / TENSORS}: the adapter of {tensor.name} has shapes {list(a.shape)} and {list(b.shape)}, for "
                f"{tensor.count} matrices of {list(matrix)}: it belongs to another model"
            )
        adapters |= parted(tensor, a, b, _scale(content, tensor.name, rank, folder))
    return adapters


def _targets(content: Mapping[str, Any], modules: Collection[str], folder: Path) -> list[str]:
    """Modules of this model that the adapter's target_modules choose, by peft's rule; none where other settings choose
    as well."""
    target = content.get("target_modules")
    if content.get("layers_to_transform") is not None or content.get("exclude_modules"):
        return []
    try:
        if isinstance(target, str):
            # A text is a regular expression for whole names, a list names their ends: peft's rule.
            return [module for module in modules if re.fullmatch(target, module)]
    except re.error as error:
        raise CheckpointError(f"{folder / CONFIG}: target_modules {_short(target)}: {error}") from None
    names = tuple(name for name in target if isinstance(name, str)) if isinstance(target, list) else ()
    ends = tuple(f".{name}" for name in names)
    return [module for module in modules if module in names or (ends and module.endswith(ends))]


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    content = read_json(path)
    if not isinstance(content, dict) or content.get("peft_type") != "LORA":
        raise ConfigError(f"{path} is not of a LoRA adapter")
    for key, value in content.items():
        off = value in (None, False, 0) or value == {} or value == []
        # A setting that is there but off changes nothing.
        if key not in _KNOWN and not off:
            raise ConfigError(f"{path}: {key} is {_short(value)}, and only LoRA and DoRA are supported")
    if content.get("bias", "none") != "none":
        raise ConfigError(f"{path}: trained biases are not supported")
    if (start := content.get("init_lora_weights", True)) not in _STARTS:
        raise ConfigError(
            f"{path}: init_lora_weights is {_short(start)}, which changes the model's own weights too: convert it to "
            "plain LoRA with peft (path_initial_model_for_weight_conversion)"
        )
    _number(content.get("lora_alpha"), "lora_alpha", folder)
    if not isinstance(content.get("alpha_pattern") or {}, dict):
        raise CheckpointError(f"{path}: alpha_pattern is no object")
    return content


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _number(value: Any, key: str, folder: Path) -> float:
    if type(value) not in (int, float):
        raise CheckpointError(f"{folder / CONFIG}: {key} is {_short(value)}, not a number")
    return float(value)


def _scale(content: Mapping[str, Any], module: str, rank: int, folder: Path) -> float:
    """alpha / rank, or with rsLoRA (arXiv 2312.03732) alpha / sqrt(rank). As in peft, keys of ``alpha_pattern`` are
    regular expressions for the end of a module's name, and the first that matches counts."""
    alpha = content["lora_alpha"]
    for pattern, value in (content.get("alpha_pattern") or {}).items():
        try:
            # peft's own expression.
            matches = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise CheckpointError(f"{folder / CONFIG}: alpha_pattern {_short(pattern)}: {error}") from None
        if matches:
            alpha = value
            break
    alpha = _number(alpha, "alpha_pattern", folder)
    return alpha / (math.sqrt(rank) if content.get("use_rslora") else rank)


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the file."""
    store, tensors = safetensors_store(folder, TENSORS), {}
    for key, stored in store.tensors.items():
        tensors[key] = torch.empty(stored.shape, dtype=stored.dtype)
        store.read_into(key, (0,) * len(stored.shape), tensors[key])
    store.files.close()
    return tensors


def _magnitudes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """DoRA's magnitudes, fp32, by the name of the module, taken out of ``tensors``. Both spellings of their names are
    read."""
    ends = (f".{MAGNITUDE}.weight", f".{MAGNITUDE}")
    keys = [(key, end) for key in tensors for end in ends if key.endswith(end)]
    return {key.removesuffix(end).removeprefix(FRONT): tensors.pop(key).float() for key, end in keys}


def _magnitude(
    content: Mapping[str, Any], module: str, magnitudes: Mapping[str, torch.Tensor], rows: int, folder: Path
) -> torch.Tensor | None:
    """The magnitude vector of a module with DoRA, (out,); None without."""
    found = magnitudes.get(module)
    if bool(content.get("use_dora")) != (found is not None):
        raise CheckpointError(
            f"{folder / TENSORS}: {module} has {'a' if found is not None else 'no'} magnitude, and use_dora is "
            f"{_short(content.get('use_dora', False))}"
        )
    if found is not None and found.shape != (rows,):
        raise CheckpointError(
            f"{folder / TENSORS}: the magnitude of {module} has shape {list(found.shape)}, the matrix has {rows} rows"
        )
    return found


def _pairs(
    folder: Path, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """(Hugging Face's module, (A, B)), both in fp32."""
    ends = (".lora_A.weight", ".lora_B.weight")
    for key in tensors:
        if not key.endswith(ends):
            raise CheckpointError(f"{folder / TENSORS}: tensor {key} is neither A nor B of an adapter")
    # The two ends are equally long.
    for module in dict.fromkeys(key[: -len(ends[0])] for key in tensors):
        a, b = (tensors.get(module + end) for end in ends)
        if a is None or b is None:
            raise CheckpointError(f"{folder / TENSORS}: {module} has no {'A' if a is None else 'B'}")
        yield module.removeprefix(FRONT), (a.float(), b.float())
