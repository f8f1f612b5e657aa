"""Weights under this project's names, in whatever format they are stored: any region of any tensor, without building a
model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from smp.checkpoint import CheckpointError
from smp.checkpoint.format.tensor_bytes import as_bits
from smp.config import ModelConfig
from smp.convert.layout import Link, by_external_name
from smp.convert.store import PieceStore, Stored


class Weights(ABC):
    """A model's weights by name (without the ``model.`` of checkpoints).

    Attributes:
        config: the model's settings, resolved, with its vocabulary.
        tensors: what there is, without padding.
        notes: what the user should hear, a line each.
    """

    config: ModelConfig
    tensors: dict[str, Stored]
    notes: list[str]

    @abstractmethod
    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        """Fill ``out``, a CPU tensor of the stored dtype, with the region of its shape at ``offsets``."""

    @abstractmethod
    def fingerprint(self) -> Any:
        """JSON that changes when the files do."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close files."""

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU."""
        out = torch.empty(self.tensors[name].shape, dtype=self.tensors[name].dtype)
        self.read_into(name, (0,) * out.ndim, out)
        return out


class LinkedWeights(Weights):
    """Weights in a store of another program's files.

    Args:
        store: the files.
        found: where each tensor is.
        config: the model's settings.

    Raises:
        CheckpointError: a tensor is missing or of another shape; the message names it and its file.
    """

    def __init__(self, store: PieceStore, found: Sequence[Link], config: ModelConfig) -> None:
        self.store, self.config, self.notes = store, config, []
        self.links: dict[str, list[Link]] = {}  # of experts, by their numbers
        for link in found:
            self.links.setdefault(link.smp_name, []).append(link)
        for external, parts in by_external_name(found).items():
            # All before the first is read: a conversion of hours must not end at its last tensor.
            stored, wanted = store.tensors.get(external), parts[0].external_shape
            if stored is None:
                raise CheckpointError(f"{store.where(external)}: tensor {external} is missing")
            if stored.shape != wanted:
                said = f"tensor {external} has shape {list(stored.shape)}, the configuration says {list(wanted)}"
                raise CheckpointError(f"{store.where(external)}: {said}")
        self.tensors = {name: self._stored(parts) for name, parts in self.links.items()}

    def _stored(self, parts: Sequence[Link]) -> Stored:
        kinds = {self.store.tensors[link.external_name].dtype for link in parts}
        if len(kinds) != 1:
            where = self.store.where(parts[0].external_name)
            raise CheckpointError(f"{where}: the tensors of {parts[0].smp_name} have different dtypes")
        # Experts with a tensor each make one tensor here.
        shape = parts[0].shape if parts[0].entry is None else (len(parts), *parts[0].shape)
        return Stored(shape, kinds.pop())

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        parts = self.links[name]
        if parts[0].entry is None:
            self._read(parts[0], offsets, out)
            return
        # Experts are tensors of their own there: a region begins at one of them and ends where ``out`` does.
        for link, target in zip(parts[offsets[0] :], out, strict=False):
            self._read(link, offsets[1:], target)

    def _read(self, link: Link, offsets: Sequence[int], out: torch.Tensor) -> None:
        if link.rows.single:
            self._read_between(link, offsets, out)
            return
        for row, at, count in link.rows.runs(offsets[0], out.shape[0]):
            self._read_rows(link, (row, *offsets[1:]), out[at : at + count])

    def _read_between(self, link: Link, offsets: Sequence[int], out: torch.Tensor) -> None:
        """Read rows that alternate with other rows: all are read as they lie, and every ``slots``-th is taken."""
        slots, others = link.rows.slots, out.shape[1:]
        rows = out.shape[0] * slots
        shape = (*others, rows) if link.transposed else (rows, *others)
        # In the file's order, so that it is one contiguous read.
        all_rows = torch.empty(shape, dtype=out.dtype)
        all_rows = all_rows.t() if link.transposed else all_rows
        self._read_rows(link, (offsets[0] * slots, *offsets[1:]), all_rows)
        out.copy_(all_rows[link.rows.start :: slots])

    def _read_rows(self, link: Link, start: tuple[int, ...], target: torch.Tensor) -> None:
        """Read rows of the external tensor from ``start`` on into ``target``, which has the shape of this project's
        tensor."""
        if link.inner_one:
            # (rows, ...) -> (rows, 1, ...)
            start, target = (start[0], 0, *start[1:]), target.unsqueeze(1)
        # Both are turned: the read fills this project's tensor through a view.
        if link.transposed:
            start, target = start[::-1], target.t()
        # From the innermost: experts, then layers.
        for index, _ in reversed(link.leading):
            start, target = (index, *start), target.unsqueeze(0)
        self.store.read_into(link.external_name, start, target)

    def fingerprint(self) -> Any:
        return self.store.files.fingerprint()

    def close(self) -> None:
        self.store.files.close()

    def refuse_extra(self, embedding: str, tied_heads: Sequence[str], ignored: Sequence[str]) -> list[str]:
        """Raise for a tensor in the files that belongs to nothing, and for a tied head that differs from the embedding.

        Args:
            embedding: its external name.
            tied_heads: names that a copy of it may have when the model ties the two.
            ignored: ends of names of tensors that hold no weights.

        Returns:
            The copies.

        Raises:
            CheckpointError: there is such a tensor.
        """
        used = {link.external_name for parts in self.links.values() for link in parts}
        extra = [name for name in self.store.tensors if name not in used and not name.endswith(tuple(ignored))]
        tied = not self.config.untie_embeddings_and_output_weights
        copies = [name for name in extra if tied and name in tied_heads]
        for name in copies:
            if not same_bits(self.store, name, embedding):
                where = self.store.where(name)
                raise CheckpointError(f"{where}: tensor {name} differs from {embedding}, to which it is tied")
        if extra := [name for name in extra if name not in copies]:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            where = self.store.where(extra[0])
            raise CheckpointError(f"{where}: tensor {extra[0]}{more} belongs to nothing in this architecture")
        return copies


def same_bits(store: PieceStore, one: str, other: str) -> bool:
    """Whether two matrices have equal bits; compared a few rows at a time."""
    stored = store.tensors[one]
    if stored != store.tensors[other]:
        return False
    step = max(1, (1 << 23) // max(1, stored.nbytes // stored.shape[0]))
    for first in range(0, stored.shape[0], step):
        rows = (min(step, stored.shape[0] - first), *stored.shape[1:])
        a, b = torch.empty(rows, dtype=stored.dtype), torch.empty(rows, dtype=stored.dtype)
        store.read_into(one, (first, 0), a)
        store.read_into(other, (first, 0), b)
        # Bits: a NaN equals itself.
        if not torch.equal(as_bits(a), as_bits(b)):
            return False
    return True
