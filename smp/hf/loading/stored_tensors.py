"""Regions of a model's tensors from a Hugging Face folder, in the stored dtype: for weights that are quantized while
they are read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint import CheckpointError
from smp.convert.huggingface.store import open_store
from smp.hf.loading.stored_names import Source, rules_of, sources_of
from smp.hf.loading.twins import twin_of


class StoredTensors:
    """The tensors of a transformed model in a folder, by the model's names.

    Args:
        model: of which class and configuration they are.
        folder: of safetensors.
    """

    def __init__(self, model: Any, folder: str | Path) -> None:
        self._store, self._twin = open_store(Path(folder), False), twin_of(model)
        sources = sources_of(self._twin, rules_of(self._twin), self._store.tensors)
        self._sources = {name: source for source in sources for name in source.targets}
        self._made: dict[str, torch.Tensor] = {}  # of the last rule: its targets are asked for in some rows each

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.files.close()

    def form(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and stored dtype.

        Raises:
            CheckpointError: there is none.
        """
        source = self._source(name)
        if source.rule is None:
            stored = self._store.tensors[source.stored[""][0]]
            return tuple(stored.shape), stored.dtype
        made = self._by_rule(name, source)
        return tuple(made.shape), made.dtype

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        """Fill ``out``, which has the stored dtype, with the region of its shape at ``offsets``."""
        source = self._source(name)
        if source.rule is None:
            self._store.read_into(source.stored[""][0], offsets, out)
            return
        part = tuple(slice(offset, offset + size) for offset, size in zip(offsets, out.shape, strict=True))
        out.copy_(self._by_rule(name, source)[part])

    def _source(self, name: str) -> Source:
        if name not in self._sources:
            raise CheckpointError(f"{self._store.where('')} has no tensor {name}")
        return self._sources[name]

    def _by_rule(self, name: str, source: Source) -> torch.Tensor:
        if name not in self._made:
            self._made = source.made(self._twin, partial(_read, self._store), slice(None))
        return self._made[name]


def _read(store: Any, name: str) -> torch.Tensor:
    stored = store.tensors[name]
    read = torch.empty(stored.shape, dtype=stored.dtype)
    store.read_into(name, (0,) * read.ndim, read)
    return read
