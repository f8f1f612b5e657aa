"""Adapters by the names of smp's layers, where they lie in peft's format, and a model with adapters added into it.

Two things differ in peft's format. Modules have Hugging Face's names, which the tables of families translate. And where
several of smp's matrices lie in one (GPT-2's fused query, key and value), so do their adapters: on writing, those of
ranks r become one of rank sum(r), A's one below the other and B's in rows and columns of their own; on reading, one
becomes several with the same A and each its rows of B. See ``read`` and ``write``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from smp.checkpoint import CheckpointError
from smp.checkpoint.format.tensor_bytes import raw_bytes
from smp.config import ModelConfig
from smp.convert.changes import changes_of_files
from smp.convert.huggingface.config import family_of, to_hf
from smp.convert.huggingface.family import Family
from smp.convert.huggingface.more_families import FAMILIES
from smp.convert.layout import Link, links
from smp.convert.store import Stored
from smp.convert.weights import Weights

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
"""Files of peft's format."""
MAGNITUDE = "lora_magnitude_vector"
"""Name of DoRA's tensors in peft's format."""
FRONT = "base_model.model."
"""Prefix of the model's own names in peft's format."""
HEAD = "head.weight"
"""A reward model's head here, instead of the output matrix."""


@dataclass(frozen=True)
class Adapter:
    """A layer's adapter, ``scale x B A``.

    Attributes:
        a, b: (rank, in) and (out, rank), whole; of experts (experts, rank, in) and (experts, out, rank).
        scale: alpha / rank.
        magnitude: (out,), with DoRA the norms that the rows of the sum are scaled to.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    magnitude: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        """Rows of A."""
        return int(self.a.shape[-2])

    @property
    def alpha(self) -> float:
        """scale x rank."""
        return self.scale * self.rank


class Adapters(dict[str, Adapter]):
    """Adapters by the name of their layer.

    Attributes:
        score: the row of a reward model's head, fp32 (1, hidden), which is trained with them as a whole; None: the
            model keeps its head.
        model: what they were trained with, where that is known: other settings than those of its base may be among it.
    """

    def __init__(
        self, given: Mapping[str, Adapter], score: torch.Tensor | None = None, model: ModelConfig | None = None
    ) -> None:
        super().__init__(given)
        self.score, self.model = score, model


def is_adapter_folder(path: str | Path) -> bool:
    """Whether ``path`` is a folder with an adapter in it."""
    return (Path(path) / CONFIG).is_file()


def family_for(config: ModelConfig, reference: Mapping[str, Any] | None) -> Family:
    """The architecture that gives an adapter its names: of ``reference``, the model's config.json, if it came with one.

    Raises:
        ConfigError: no architecture of Hugging Face's computes what this model does.
    """
    if reference is not None:
        return family_of(reference, "config.json")
    return FAMILIES[to_hf(config, "float32")["model_type"]]


def linear_modules(config: ModelConfig, family: Family) -> dict[str, dict[str, Link]]:
    """Linear layers by the name of Hugging Face's module, and where the matrix of each lies in it."""
    out: dict[str, dict[str, Link]] = {}
    for link in links(family.table, config):
        name = link.smp_name
        # Matrices of blocks that are no experts': those have adapters of their own kind.
        if name.startswith("layers.") and len(link.shape) == 2 and link.entry is None:
            module = out.setdefault(link.external_name.removesuffix(".weight"), {})
            module[name.removesuffix(".weight")] = link
    return out


def partly_adapted(names: Collection[str], config: ModelConfig, family: Family) -> list[str]:
    """Names of Hugging Face's modules in which some layers are in ``names`` and others are not."""
    modules = linear_modules(config, family).items()
    return [module for module, found in modules if 0 < sum(name in names for name in found) < len(found)]


def check_shapes(a: torch.Tensor, b: torch.Tensor, matrix: tuple[int, ...], what: str) -> None:
    """Raise CheckpointError unless ``b @ a`` has the shape of ``matrix``, (out, in) or (experts, out, in)."""
    # (experts, out, in) or (out, in)
    *experts, rows, columns = matrix
    rank = a.shape[-2] if a.ndim == len(matrix) else 0
    if rank == 0 or a.shape != (*experts, rank, columns) or b.shape != (*experts, rows, rank):
        raise CheckpointError(
            f"{what} has shapes {list(a.shape)} and {list(b.shape)}, the matrix is {list(matrix)}: it belongs to "
            "another model"
        )


class MergedWeights(Weights):
    """A model's weights with adapters added into them: ``W + scale x B A``, with DoRA rows of it scaled to their
    magnitudes, computed in fp32 and rounded once.

    Args:
        base: the model.
        adapters: by the name of the layer; with a ``score`` the result is a reward model.
        dtype: of the result; None: W's.

    Raises:
        CheckpointError: an adapter is of another model.
    """

    def __init__(self, base: Weights, adapters: Mapping[str, Adapter], dtype: torch.dtype | None = None) -> None:
        self.base, self.adapters = base, {f"{name}.weight": adapter for name, adapter in adapters.items()}
        # Before anything is read: an adapter of another model would add what fits by chance.
        for name, adapter in self.adapters.items():
            if (stored := base.tensors.get(name)) is None:
                raise CheckpointError(f"the adapter of {name} belongs to another model: this one has no such matrix")
            check_shapes(adapter.a, adapter.b, tuple(stored.shape), f"the adapter of {name}")
        trained = adapters.model if isinstance(adapters, Adapters) else None
        self.config = trained or base.config
        # Shapes do not change; the sum is rounded to the base's dtype or ``dtype``.
        self.tensors = {name: Stored(t.shape, dtype or t.dtype) for name, t in base.tensors.items()}
        self.score = adapters.score if isinstance(adapters, Adapters) else None
        self.notes = [*base.notes, f"{len(adapters)} adapters are merged"]
        if changed := changes_of_files(base.config, self.config):
            self.notes.append(f"the model has the settings that the adapters were trained with: {changed}")
        if self.score is not None:
            # A reward model's head replaces the output matrix, so nothing is tied to the embedding.
            self.config = replace(self.config, scalar_head=True, untie_embeddings_and_output_weights=True)
            self.tensors[HEAD] = Stored(tuple(self.score.shape), self.tensors["embedding.weight"].dtype)

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        if name == HEAD and self.score is not None:
            out.copy_(self.score[tuple(slice(o, o + n) for o, n in zip(offsets, out.shape, strict=True))])
            return
        adapter = self.adapters.get(name)
        if adapter is not None and adapter.magnitude is not None:
            out.copy_(self._scaled_rows(name, offsets, out.shape, adapter.magnitude))
            return
        # In the dtype of the files; the sum is made in fp32 and rounded once, into ``out``.
        block = torch.empty(out.shape, dtype=self.base.tensors[name].dtype)
        self.base.read_into(name, offsets, block)
        out.copy_(block if adapter is None else _added(block, adapter, offsets))

    def _scaled_rows(
        self, name: str, offsets: Sequence[int], shape: Sequence[int], magnitude: torch.Tensor
    ) -> torch.Tensor:
        """Rows of a matrix under DoRA, (rows, columns of the region), fp32: m (W + s B A) / |W + s B A| (arXiv
        2402.09353)."""
        stored, (row, column) = self.base.tensors[name], offsets
        # Whole rows, whatever columns are asked for: norms are of rows.
        whole = torch.empty(shape[0], stored.shape[1], dtype=stored.dtype)
        self.base.read_into(name, (row, 0), whole)
        added = _added(whole, self.adapters[name], (row, 0))
        norms = torch.linalg.vector_norm(added, dim=1)
        scale = magnitude[row : row + shape[0]] / torch.where(norms > 0, norms, 1.0)  # a row of zeros stays one
        return added[:, column : column + shape[1]] * scale[:, None]

    def fingerprint(self) -> Any:
        parts = [[n, m.scale, *map(_hash, _tensors(m))] for n, m in self.adapters.items()]
        return [self.base.fingerprint(), parts, *([] if self.score is None else [_hash(self.score)])]

    def close(self) -> None:
        self.base.close()


def _added(block: torch.Tensor, adapter: Adapter, offsets: Sequence[int]) -> torch.Tensor:
    """A region of a matrix plus the same region of ``scale x B A``, fp32."""
    # Rows of B and columns of A: only the region is computed.
    *first, rows, columns = (slice(o, o + n) for o, n in zip(offsets, block.shape, strict=True))
    b, a = adapter.b[(*first, rows)], adapter.a[(*first, slice(None), columns)]
    return block.float() + adapter.scale * (b @ a)


def _tensors(adapter: Adapter) -> list[torch.Tensor]:
    return [adapter.a, adapter.b, *([] if adapter.magnitude is None else [adapter.magnitude])]


def _hash(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(raw_bytes(tensor.contiguous()))
