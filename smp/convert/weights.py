"""Weights under our names, whatever they are stored as: any box of any tensor, without building a model."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from smp.checkpoint import CheckpointError
from smp.config import ModelConfig
from smp.convert.layout import Link, by_theirs


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies in files."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Store(Protocol):
    """Tensors of another program's files, by their own names."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """What there is."""

    def where(self, name: str) -> str:
        """The file that holds a tensor, for messages."""

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        """Fill ``out``, a CPU tensor of the stored dtype, with the box of its shape at ``offsets``."""

    def fingerprint(self) -> Any:
        """JSON that changes when the files do."""

    def close(self) -> None:
        """Let go of files."""


class Weights(ABC):
    """A model's weights by our names (without the ``model.`` of checkpoints).

    Attributes:
        config: the model's settings, resolved, with its vocabulary.
        tensors: what there is, without padding.
        notes: what the user should hear, a line each.
    """

    config: ModelConfig
    tensors: dict[str, Stored]
    notes: list[str]

    def stretches(self, name: str, first: int, count: int, step: int) -> Iterator[tuple[int, int]]:
        """(first row, rows) of parts of ``count`` rows of a tensor from ``first`` on, in order, each of which is read
        alone at no more than its own cost: ``step`` rows where any are."""
        yield from ((row, min(step, first + count - row)) for row in range(first, first + count, step))

    @abstractmethod
    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        """Fill ``out``, of the stored dtype, with the box of its shape at ``offsets``."""

    @abstractmethod
    def fingerprint(self) -> Any:
        """JSON that changes when the files do."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Let go of files."""

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        out = torch.empty(self.tensors[name].shape, dtype=self.tensors[name].dtype)
        self.read_into(name, (0,) * out.ndim, out)
        return out


class LinkedWeights(Weights):
    """Weights in a store of another program.

    Args:
        store: the files.
        found: where each of our tensors is.
        config: the model's settings.

    Raises:
        CheckpointError: a tensor is missing or of another shape; the message names it and its file.
    """

    def __init__(self, store: Store, found: Mapping[str, Link], config: ModelConfig) -> None:
        self.store, self.links, self.config, self.notes = store, dict(found), config, []
        for theirs, parts in by_theirs(found).items():
            _check(store, theirs, parts)
        self.tensors = {name: Stored(k.shape, store.tensors[k.theirs].dtype) for name, k in found.items()}

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        link = self.links[name]
        front = () if link.layer is None else (link.layer,)
        for row, at, count in link.rows.runs(offsets[0], out.shape[0]):
            target = out[at : at + count]
            start = (row, *offsets[1:])
            if link.transposed:
                start, target = start[::-1], target.t()
            for _ in front:
                target = target.unsqueeze(0)
            self.store.read_into(link.theirs, (*front, *start), target)

    def stretches(self, name: str, first: int, count: int, step: int) -> Iterator[tuple[int, int]]:
        """Rows of a transposed matrix are columns of theirs, which are read with what is between them."""
        return super().stretches(name, first, count, max(1, count) if self.links[name].transposed else step)

    def fingerprint(self) -> Any:
        return self.store.fingerprint()

    def close(self) -> None:
        self.store.close()


def _check(store: Store, theirs: str, parts: Sequence[Link]) -> None:
    wanted = parts[0].their_shape
    stored = store.tensors.get(theirs)
    if stored is None:
        raise CheckpointError(f"{store.where(theirs)}: tensor {theirs} is missing")
    if stored.shape != wanted:
        said = f"tensor {theirs} has shape {list(stored.shape)}, the configuration says {list(wanted)}"
        raise CheckpointError(f"{store.where(theirs)}: {said}")


def unknown(store: Store, found: Mapping[str, Link], ignored: Sequence[str]) -> list[str]:
    """Names of tensors in ``store`` that belong to nothing of ours and do not end as one of ``ignored``."""
    used = {link.theirs for link in found.values()}
    return [name for name in store.tensors if name not in used and not name.endswith(tuple(ignored))]


def refuse_difference(store: Store, head: str, embedding: str) -> None:
    """A copy of the embedding that a tied head is stored as must be one.

    Raises:
        CheckpointError: the two differ.
    """
    if not _equal(store, head, embedding):
        raise CheckpointError(f"{store.where(head)}: tensor {head} differs from {embedding}, to which it is tied")


def _equal(store: Store, one: str, other: str) -> bool:
    """Whether two matrices have the same bits; a few rows at a time."""
    stored = store.tensors[one]
    if stored != store.tensors[other]:
        return False
    step = max(1, (1 << 23) // max(1, stored.nbytes // stored.shape[0]))
    for first in range(0, stored.shape[0], step):
        rows = (min(step, stored.shape[0] - first), *stored.shape[1:])
        a, b = torch.empty(rows, dtype=stored.dtype), torch.empty(rows, dtype=stored.dtype)
        store.read_into(one, (first, 0), a)
        store.read_into(other, (first, 0), b)
        if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            return False
    return True


def widest(weights: Weights, parts: Sequence[Link]) -> torch.dtype:
    """The dtype that holds the values of all parts."""
    return functools.reduce(torch.promote_types, (weights.tensors[part.ours].dtype for part in parts))


def assemble(weights: Weights, parts: Sequence[Link], shape: tuple[int, ...], memory: torch.Tensor) -> torch.Tensor:
    """One of their tensors, of ``shape`` (without the dimension of layers), from the parts of ours that lie in it.

    Rows that no part has (padding of the vocabulary) are zero. Parts of different dtypes are of the one that holds the
    values of all. The tensor lies at the beginning of ``memory``, uint8; behind it is room for any one part, for those
    that do not lie in one piece there.
    """
    dtype = widest(weights, parts)
    size = torch.Size(shape).numel() * dtype.itemsize
    out, spare = memory[:size].view(dtype).view(shape), memory[size:]
    filled = 0  # rows; what is left at the end is padding of the vocabulary
    for part in parts:
        target = out.t() if part.transposed else out
        if part.rows.whole and not part.transposed and weights.tensors[part.ours].dtype == out.dtype:
            weights.read_into(part.ours, (0,) * len(part.shape), target[: part.rows.ours])
        else:
            stored = weights.tensors[part.ours]
            tensor = spare[: stored.nbytes].view(stored.dtype).view(stored.shape)
            weights.read_into(part.ours, (0,) * tensor.ndim, tensor)
            for row, at, count in part.rows.runs(0, part.rows.ours):
                target[row : row + count] = tensor[at : at + count]
        filled += part.rows.ours
    if parts[0].padded is not None:
        out[filled:] = 0
    return out
