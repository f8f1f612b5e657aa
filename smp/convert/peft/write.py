"""Adapters to a folder that peft loads: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from smp.checkpoint.folders.folder import Folder
from smp.checkpoint.format.tensor_bytes import lay_out, raw_bytes
from smp.checkpoint.format.tensor_file import write_file
from smp.config import ModelConfig
from smp.convert.huggingface.family import Family
from smp.convert.layout import SCORE, Link
from smp.convert.peft.adapters import CONFIG, FRONT, MAGNITUDE, TENSORS, Adapter, Adapters, linear_modules
from smp.convert.peft.experts import expert_tensors, joined


def write_adapters(
    folder: Folder, adapters: Mapping[str, Adapter], config: ModelConfig, family: Family, *, dropout: float, base: str
) -> None:
    """Write a folder that peft loads.

    Args:
        folder: on a file system or in an object store; made if it does not exist; an adapter in it is replaced.
        adapters: by the name of the layer.
        config: of the model.
        family: see :func:`family_for`.
        dropout: noted for who trains on.
        base: the model's path, noted.
    """
    modules = linear_modules(config, family)
    tensors: dict[str, torch.Tensor] = {}
    ranks, alphas = {}, {}
    for module, found in modules.items():
        if members := [(link, adapters[name]) for name, link in found.items() if name in adapters]:
            a, b, scale = _fused(members)
            tensors[f"{FRONT}{module}.lora_A.weight"] = a
            tensors[f"{FRONT}{module}.lora_B.weight"] = b
            # peft's alpha is per module: scale x rank.
            ranks[module], alphas[module] = a.shape[0], scale * a.shape[0]
            if (magnitude := _magnitude(members)) is not None:
                tensors[f"{FRONT}{module}.{MAGNITUDE}.weight"] = magnitude
    targets = _targets(ranks, modules.keys())
    # Stacked tensors of which at least one member has an adapter.
    stacked = expert_tensors(config, family, lambda _, members: any(name in adapters for name in members))
    for tensor in stacked:
        a, b, scale = joined(tensor, adapters)
        tensors |= {f"{FRONT}{tensor.module}.lora_{part}.weight": x.contiguous() for part, x in (("A", a), ("B", b))}
        ranks[tensor.name] = a.shape[0] // tensor.count
        alphas[tensor.name] = scale * ranks[tensor.name]
    content = _config(ranks, alphas, targets, [t.name for t in stacked], dropout, base, family.table.transposed)
    content["use_dora"] = any(adapter.magnitude is not None for adapter in adapters.values())
    _write(folder, *_with_score(tensors, content, adapters))


def write_own_names(
    folder: Folder, adapters: Mapping[str, Adapter], *, dropout: float, base: str, reads_apart: bool = False
) -> None:
    """:func:`write_adapters` for layers that have Hugging Face's names. Targets are whole names: peft would match the
    last part of some, such as up_proj, in experts, too. ``reads_apart``: an encoder with a decoder."""
    tensors: dict[str, torch.Tensor] = {}
    for name, adapter in adapters.items():
        tensors |= {f"{FRONT}{name}.lora_A.weight": adapter.a, f"{FRONT}{name}.lora_B.weight": adapter.b}
        if adapter.magnitude is not None:
            tensors[f"{FRONT}{name}.{MAGNITUDE}.weight"] = adapter.magnitude
    ranks = {name: adapter.rank for name, adapter in adapters.items()}
    alphas = {name: adapter.alpha for name, adapter in adapters.items()}
    use_dora = any(adapter.magnitude is not None for adapter in adapters.values())
    content = _config(ranks, alphas, sorted(ranks), [], dropout, base, False) | {"use_dora": use_dora}
    if reads_apart:
        content["task_type"] = "SEQ_2_SEQ_LM"
    _write(folder, *_with_score(tensors, content, adapters))


def _with_score(
    tensors: dict[str, torch.Tensor], content: dict[str, Any], adapters: Mapping[str, Adapter]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and configuration with a reward model's head, if there is one, as peft saves it for
    ...ForSequenceClassification."""
    score = adapters.score if isinstance(adapters, Adapters) else None
    if score is None:
        return tensors, content
    whole = {"task_type": "SEQ_CLS", "modules_to_save": [SCORE]}
    return {**tensors, f"{FRONT}{SCORE}.weight": score}, content | whole


def _write(folder: Folder, tensors: Mapping[str, torch.Tensor], content: Mapping[str, Any]) -> None:
    folder.make()
    folder.delete(CONFIG)  # it comes last: a folder without it is no adapter
    folder.delete(TENSORS)
    layout = lay_out(tensors, {"format": "pt"})
    slots = ((slot.key, raw_bytes(tensors[slot.key].contiguous())) for slot in layout.slots)
    # An adapter that was there is invalid from the deletion of its configuration on.
    write_file(folder, TENSORS, layout, slots)
    folder.replace(CONFIG, (json.dumps(content, indent=2) + "\n").encode())


def _fused(members: Sequence[tuple[Link, Adapter]]) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(A, B, scale) of an external matrix in which several of this project's may lie."""
    (first, adapter), *more = members
    if not more and first.rows.whole:
        return adapter.a, adapter.b, adapter.scale
    rank = sum(m.rank for _, m in members)
    # Block-diagonal: A's lie below each other, and each B takes its own columns of the joined rank.
    b, column = torch.zeros(first.rows.external_rows, rank), 0
    for link, m in members:
        # one scale for all: the others' goes into B
        for row, at, count in link.rows.runs(0, link.rows.smp_rows):
            b[row : row + count, column : column + m.rank] = m.b[at : at + count] * (m.scale / adapter.scale)
        column += m.rank
    return torch.cat([m.a for _, m in members]), b, adapter.scale


def _magnitude(members: Sequence[tuple[Link, Adapter]]) -> torch.Tensor | None:
    """DoRA's norms of rows, (out,), of an external matrix in which several of this project's may lie; None without
    DoRA."""
    out, filled = torch.zeros(members[0][0].rows.external_rows), 0
    for link, adapter in members:
        if adapter.magnitude is None:
            return None
        for row, at, count in link.rows.runs(0, link.rows.smp_rows):
            out[row : row + count] = adapter.magnitude[at : at + count]
            filled += count
    assert filled == len(out), "all layers of a matrix have adapters; see partly_adapted"
    return out


def _config(
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
    targets: list[str],
    stacked: list[str],
    dropout: float,
    base: str,
    transposed: bool,
) -> dict[str, Any]:
    """adapter_config.json: one rank and alpha for most modules, and patterns for the others. ``stacked``: tensors of
    experts."""
    # The most frequent of each is the rule, and patterns name the others; of equally frequent ones the smaller.
    rank, alpha = (max(sorted(set(v)), key=list(v).count) for v in (ranks.values(), alphas.values()))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": _whole(alpha),
        "lora_dropout": dropout,
        "target_modules": targets,
        **({"target_parameters": stacked} if stacked else {}),
        "rank_pattern": {m: r for m, r in ranks.items() if r != rank},
        "alpha_pattern": {m: _whole(a) for m, a in alphas.items() if a != alpha},
        "bias": "none",
        # For Conv1D of GPT-2, whose weights are (in, out).
        "fan_in_fan_out": transposed,
        "inference_mode": True,
        "use_rslora": False,
        "modules_to_save": None,
    }


def _targets(modules: Mapping[str, int], every: Set[str]) -> list[str]:
    """Last parts of names where they choose exactly these modules, as people write them; else whole names."""
    last = {module.rpartition(".")[2] for module in modules}
    chosen = {module for module in every if module.rpartition(".")[2] in last}
    # Only where the short names choose these modules and no others.
    return sorted(last) if chosen == set(modules) else sorted(modules)


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else value
