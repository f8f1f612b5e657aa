"""Adapters as peft keeps them: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

Two things differ from ours. Modules have Hugging Face's names, which the tables of families translate. And where
several of our matrices lie in one of theirs (GPT-2's fused query, key and value), so do our adapters: ours of ranks r
become one of rank sum(r), A's one below the other and B's in the rows and columns of their own; theirs becomes one for
each of ours, with the same A and the rows of B.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint import CheckpointError
from smp.checkpoint.entries import DTYPES, DamagedError
from smp.checkpoint.local import LocalFolder, write_durably
from smp.checkpoint.tensor_file import lay_out, raw_bytes, read_header, read_tensor, write_file
from smp.config import ConfigError, ModelConfig
from smp.convert.families import FAMILIES, Family
from smp.convert.hf_config import family_of, to_hf
from smp.convert.layout import Link, links
from smp.convert.weights import Weights

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_FRONT = "base_model.model."
_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "modules that are trained whole",
    "lora_bias": "biases of adapters",
    "layer_replication": "replicated layers",
    "trainable_token_indices": "trained token embeddings",
    "target_parameters": "adapters on bare parameters",
}


@dataclass(frozen=True)
class Adapter:
    """What one of our layers adds: ``scale x B A``.

    Attributes:
        a, b: (rank, in) and (out, rank), whole.
        scale: alpha / rank.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        """Rows of A."""
        return int(self.a.shape[0])

    @property
    def alpha(self) -> float:
        """scale x rank."""
        return self.scale * self.rank


def is_adapter_folder(path: str | Path) -> bool:
    """Whether ``path`` is a folder with an adapter in it."""
    return (Path(path) / CONFIG).is_file()


def family_for(config: ModelConfig, reference: Mapping[str, Any] | None) -> Family:
    """The architecture that gives an adapter its names.

    Args:
        config: of the model, resolved.
        reference: its config.json, if it came with one.

    Raises:
        ConfigError: no architecture of Hugging Face's computes what this model does.
    """
    if reference is not None:
        return family_of(reference, "config.json")
    return FAMILIES[to_hf(config, "float32")["model_type"]]


def _places(config: ModelConfig, family: Family) -> dict[str, Link]:
    """Where the matrix of each of our linear layers lies there, by the name of the layer."""
    found = links(family.table, config)
    linear = {name: link for name, link in found.items() if name.startswith("layers.") and len(link.shape) == 2}
    return {name.removesuffix(".weight"): link for name, link in linear.items()}


def write_adapters(
    folder: Path, adapters: Mapping[str, Adapter], config: ModelConfig, family: Family, *, dropout: float, base: str
) -> None:
    """Write a folder that peft loads.

    Args:
        folder: made if it is not there; an adapter in it is replaced.
        adapters: by the name of our layer.
        config: of the model.
        family: see :func:`family_for`.
        dropout: noted for who trains on.
        base: the model's path, noted.
    """
    places = _places(config, family)
    theirs: dict[str, list[tuple[Link, Adapter]]] = {}
    for name, adapter in adapters.items():
        theirs.setdefault(places[name].theirs.removesuffix(".weight"), []).append((places[name], adapter))
    tensors: dict[str, torch.Tensor] = {}
    ranks, alphas = {}, {}
    for module, members in theirs.items():
        a, b, scale = _fused(members)
        tensors[f"{_FRONT}{module}.lora_A.weight"], tensors[f"{_FRONT}{module}.lora_B.weight"] = a, b
        ranks[module], alphas[module] = a.shape[0], scale * a.shape[0]
    every = {link.theirs.removesuffix(".weight") for link in places.values()}
    content = _config(ranks, alphas, every, dropout, base, family.table.transposed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)  # it comes last: a folder without it is no adapter
    (folder / TENSORS).unlink(missing_ok=True)
    layout = lay_out(tensors, {"format": "pt"})
    slots = ((slot.key, raw_bytes(tensors[slot.key].contiguous())) for slot in layout.slots)
    write_file(LocalFolder(folder), TENSORS, layout, slots)
    write_durably(folder / CONFIG, (json.dumps(content, indent=2) + "\n").encode())


def _fused(members: Sequence[tuple[Link, Adapter]]) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A, B and scale of one of their matrices."""
    (first, adapter), *more = members
    if not more and first.rows.whole:
        return adapter.a, adapter.b, adapter.scale
    rank = sum(m.rank for _, m in members)
    b, at = torch.zeros(first.rows.theirs, rank), 0
    for link, m in members:
        # one scale for all: the others' goes into B
        for row, ours, count in link.rows.runs(0, link.rows.ours):
            b[row : row + count, at : at + m.rank] = m.b[ours : ours + count] * (m.scale / adapter.scale)
        at += m.rank
    return torch.cat([m.a for _, m in members]), b, adapter.scale


def _config(
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
    every: Set[str],
    dropout: float,
    base: str,
    transposed: bool,
) -> dict[str, Any]:
    """adapter_config.json: one rank and alpha for all, and patterns for those that differ. ``every``: all linear
    layers of the model."""
    rank, alpha = (max(sorted(set(v)), key=list(v).count) for v in (ranks.values(), alphas.values()))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": _whole(alpha),
        "lora_dropout": dropout,
        "target_modules": _targets(ranks, every),
        "rank_pattern": {m: r for m, r in ranks.items() if r != rank},
        "alpha_pattern": {m: _whole(a) for m, a in alphas.items() if a != alpha},
        "bias": "none",
        "fan_in_fan_out": transposed,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def _targets(modules: Mapping[str, int], every: Set[str]) -> list[str]:
    """Last parts of names where they choose exactly these modules, as people write it; else whole names."""
    last = {module.rpartition(".")[2] for module in modules}
    chosen = {module for module in every if module.rpartition(".")[2] in last}
    return sorted(last) if chosen == set(modules) else sorted(modules)


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else value


def read_adapters(folder: str | Path, config: ModelConfig, family: Family) -> tuple[dict[str, Adapter], float]:
    """(adapters by the name of our layer, their dropout) of a folder that peft wrote.

    Raises:
        CheckpointError: it is damaged, or its shapes are not this model's.
        ConfigError: it does what ours cannot.
    """
    folder = Path(folder)
    content = _read_config(folder)
    places, found = _places(config, family), dict(_pairs(folder))
    adapters: dict[str, Adapter] = {}
    for name, link in places.items():
        module = link.theirs.removesuffix(".weight")
        if module not in found:
            continue
        a, b = found[module]
        if a.shape[1] != link.shape[1] or b.shape != (link.rows.theirs, a.shape[0]):
            raise CheckpointError(
                f"{folder / TENSORS}: the adapter of {module} has shapes {list(a.shape)} and {list(b.shape)}, the "
                f"matrix is {[link.rows.theirs, link.shape[1]]}"
            )
        rows = [b[row : row + count] for row, _, count in link.rows.runs(0, link.rows.ours)]
        adapters[name] = Adapter(a, torch.cat(rows), _scale(content, module, a.shape[0]))
    known = {link.theirs.removesuffix(".weight") for link in places.values()}
    if strange := sorted(found.keys() - known):
        raise CheckpointError(f"{folder / TENSORS}: {strange[0]} is no linear layer of this model")
    if not adapters:
        raise CheckpointError(f"{folder / TENSORS} holds no adapter")
    return adapters, float(content.get("lora_dropout", 0.0))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("peft_type") != "LORA":
        raise ConfigError(f"{path} is not of a LoRA adapter")
    refused = [text for key, text in _REFUSED.items() if content.get(key)]
    if content.get("bias", "none") != "none":
        refused.append("trained biases")
    if refused:
        raise ConfigError(f"{path}: {refused[0]} are not supported")
    return content


def _scale(content: Mapping[str, Any], module: str, rank: int) -> float:
    """alpha / rank, or with rsLoRA (arXiv 2312.03732) alpha / sqrt(rank)."""
    patterns = content.get("alpha_pattern") or {}
    keys = [key for key in patterns if module == key or module.endswith(f".{key}")]
    alpha = float(patterns[keys[0]] if keys else content["lora_alpha"])
    return alpha / (math.sqrt(rank) if content.get("use_rslora") else rank)


def _pairs(folder: Path) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """(their module, (A, B)) in fp32."""
    tensors = _read_tensors(folder)
    for key, a in tensors.items():
        if not key.endswith(".lora_A.weight"):
            if not key.endswith(".lora_B.weight"):
                raise CheckpointError(f"{folder / TENSORS}: tensor {key} is neither A nor B of an adapter")
            continue
        b = tensors.get(key.replace(".lora_A.", ".lora_B."))
        if b is None:
            raise CheckpointError(f"{folder / TENSORS}: {key} has no B")
        yield key.removeprefix(_FRONT).removesuffix(".lora_A.weight"), (a.float(), b.float())


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / TENSORS
    try:
        with LocalFolder(folder).reader(TENSORS) as source:
            out = {}
            for key, slot in read_header(source).items():
                out[key] = torch.empty(slot.shape, dtype=DTYPES[slot.dtype])
                read_tensor(source, slot, raw_bytes(out[key]))
            return out
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (DamagedError, EOFError, OSError) as error:
        raise DamagedError(f"{path} is damaged or cut off: {error}") from None


class MergedWeights(Weights):
    """A model's weights with adapters added into them: ``W + scale x B A``, computed in fp32, in W's dtype.

    Args:
        base: the model.
        adapters: by the name of our layer.
    """

    def __init__(self, base: Weights, adapters: Mapping[str, Adapter]) -> None:
        self.base, self.adapters = base, {f"{name}.weight": adapter for name, adapter in adapters.items()}
        self.config, self.tensors = base.config, base.tensors
        self.notes = [*base.notes, f"{len(adapters)} adapters are merged"]

    def stretches(self, name: str, first: int, count: int, step: int) -> Iterator[tuple[int, int]]:
        return self.base.stretches(name, first, count, step)

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        self.base.read_into(name, offsets, out)
        adapter = self.adapters.get(name)
        if adapter is not None:
            (row, column), (rows, columns) = offsets, out.shape
            b, a = adapter.b[row : row + rows], adapter.a[:, column : column + columns]
            out.copy_(out.float() + adapter.scale * (b @ a))

    def fingerprint(self) -> Any:
        sums = [[n, m.scale, m.a.double().sum().item(), m.b.double().sum().item()] for n, m in self.adapters.items()]
        return [self.base.fingerprint(), sums]

    def close(self) -> None:
        self.base.close()
