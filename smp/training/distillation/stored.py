"""A folder with what a teacher said of each token that is trained: its likeliest tokens and their log-probabilities.

``manifest.json`` says of which samples they are and lists the files, with a checksum of every tensor. It is written
last: a folder without it is not whole. A file ``part-RANK-NUMBER.safetensors`` has, for n labels in any order,

    numbers    int64 (n,)              number of the label among all tokens of the samples
    ids        int32 (n, k)            the k likeliest tokens, likeliest first
    log_probs  fp16 or fp32 (n, k)     their log-probabilities, of logits / temperature
    rest       fp32 (n,)               log-probability of all others together

So 6 k + 12 bytes a label in fp16: 780 for k = 128. Which process wrote what does not matter: any layout reads it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash

from smp.checkpoint import CheckpointError
from smp.checkpoint.folders.folder import open_folder
from smp.checkpoint.format.entries import DamagedError
from smp.checkpoint.format.tensor_bytes import DTYPES, raw_bytes
from smp.checkpoint.format.tensor_file import read_header
from smp.checkpoint.storage import write_tensors
from smp.data.tuning.samples import Samples
from smp.layers.heads.distillation import TopLogits
from smp.parallel.agree import on_all_or_none
from smp.training.distillation.meaning import MANIFEST, VERSION, Meaning, read_meaning

PART_BYTES = 256 << 20
"""Approximate size of a file in bytes."""
_DTYPES = {"fp16": torch.float16, "fp32": torch.float32}


class LogitsWriter:
    """Writes this rank's labels into files.

    Args:
        path: the folder, which exists.
        rank: of this process.
        meaning: of the folder.
        number: of its first file; those of an interrupted run have lower ones.
    """

    def __init__(self, path: str, rank: int, meaning: Meaning, number: int = 0) -> None:
        self._folder, self._rank, self._meaning, self._number = open_folder(path), rank, meaning, number
        self._held: list[dict[str, torch.Tensor]] = []
        self.parts: list[dict[str, Any]] = []

    @property
    def full(self) -> bool:
        """Whether it holds as much as a file has."""
        return sum(tensor.nbytes for held in self._held for tensor in held.values()) >= PART_BYTES

    def add(self, numbers: torch.Tensor, top: TopLogits) -> None:
        """Labels and what is known of them, on any device."""
        self._held.append(
            {
                "numbers": numbers.cpu(),
                "ids": top.ids.int().cpu(),
                "log_probs": top.log_probs.to(_DTYPES[self._meaning.dtype]).cpu(),
                "rest": top.rest.cpu(),
            }
        )

    def flush(self) -> None:
        """Write what has been added since the last file."""
        if not self._held:
            return
        tensors = {name: torch.cat([held[name] for held in self._held]) for name in self._held[0]}
        # Rank and number make the name unique: ranks write without asking each other.
        file = f"part-{self._rank:05d}-{self._number + len(self.parts):05d}.safetensors"
        checksums = write_tensors(self._folder, file, tensors)
        self.parts.append({"file": file, "labels": len(tensors["numbers"]), "xxh3_64": checksums})
        self._held.clear()


def write_manifest(path: str, meaning: Meaning, parts: Sequence[dict[str, Any]]) -> None:
    """Write the manifest, which makes the folder complete. On one rank, after all files."""
    content = {"format": "smp distillation logits", "version": VERSION, **asdict(meaning), "parts": list(parts)}
    open_folder(path).replace(MANIFEST, json.dumps(content, indent=1).encode())


class StoredLogits:
    """Stored log-probabilities of each label, in memory-mapped files. Tensors are read when they are looked up.

    Args:
        path: the folder.
        meaning: of it.
        parts: its files.
        samples: the texts of the run.
        share: (number of this process, processes): each compares the checksums of its share of the files.

    Raises:
        DamagedError: a file is missing or changed, or a label that is trained is in none.
    """

    def __init__(
        self,
        path: str,
        meaning: Meaning,
        parts: Sequence[dict[str, Any]],
        samples: Samples,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self._vocab_size = meaning.vocab_size
        # Checksums take reading everything: ranks share the files among them.
        self._files = [self._opened(Path(path), part, i % share[1] == share[0]) for i, part in enumerate(parts)]
        # By label: (file, row in it), -1 where there is none.
        self._where: npt.NDArray[np.int64] = np.full((len(samples.tokens), 2), -1, np.int64)
        for i, file in enumerate(self._files):
            numbers = file["numbers"].numpy()
            self._where[numbers, 0], self._where[numbers, 1] = i, np.arange(len(numbers))
        labels = samples.trained.copy()
        labels[samples.offsets[:-1]] = False  # the first token of a text is never predicted
        missing = int((labels & (self._where[:, 0] < 0)).sum())
        if missing:
            raise DamagedError(f"--logits-load-dir {path} knows nothing of {missing:,} of {int(labels.sum()):,} labels")

    @staticmethod
    def _opened(folder: Path, part: dict[str, Any], compare: bool) -> dict[str, torch.Tensor]:
        path = folder / part["file"]
        try:
            tensors = _mapped(path)
        except (OSError, DamagedError) as error:
            raise DamagedError(f"{path} cannot be read: {error}") from None
        for name, checksum in part["xxh3_64"].items() if compare else ():
            if name not in tensors or xxhash.xxh3_64_hexdigest(raw_bytes(tensors[name])) != checksum:
                raise DamagedError(f"{path}: {name} is not what was written")
        return tensors

    def __getitem__(self, numbers: torch.Tensor) -> TopLogits:
        """Stored logits of labels by number, int64 (n,); zeros below 0, and where the label is not trained."""
        # A copy, by fancy indexing: the next line changes it.
        where = self._where[numbers.clamp(min=0).numpy()]
        where[(numbers < 0).numpy()] = -1
        k = self._files[0]["ids"].shape[1]
        count = len(numbers)
        empty = torch.zeros(count, k, dtype=torch.int64), torch.zeros(count, k), torch.zeros(count)
        top = TopLogits(*empty, self._vocab_size)
        # One gather per file that has some of the labels.
        for i in np.unique(where[where[:, 0] >= 0, 0]).tolist():
            chosen = torch.from_numpy(np.flatnonzero(where[:, 0] == i))
            rows, file = torch.from_numpy(where[chosen.numpy(), 1]), self._files[i]
            top.ids[chosen] = file["ids"][rows].long()
            top.log_probs[chosen] = file["log_probs"][rows].float()
            top.rest[chosen] = file["rest"][rows]
        return top


def _mapped(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a file, which stay in it."""
    with open_folder(path.parent).reader(path.name) as source:
        slots = read_header(source)
    content = np.memmap(path, np.uint8, mode="c")  # copy on write: torch warns of read-only arrays
    out = {}
    for name, slot in slots.items():
        of = torch.from_numpy(content[slot.start : slot.start + slot.size])
        out[name] = of.view(DTYPES[slot.dtype]).view(slot.shape)
    return out


def read_stored(path: str, samples: Samples) -> StoredLogits:
    """Open a folder for a run on these samples, on all ranks, which share the work of comparing checksums.

    Raises:
        DamagedError, ConfigError: see :class:`StoredLogits` and :func:`read_meaning`.
    """
    meaning, parts = read_meaning(path)
    share = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    # All ranks go on, or all raise: a rank that waited for one that has failed would hang.
    return on_all_or_none(
        lambda: StoredLogits(path, meaning, parts, samples, share), CheckpointError, "--logits-load-dir"
    )
