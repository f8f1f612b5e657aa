"""Megatron's older checkpoints: ``mp_rank_TT[_PPP]/model_optim_rng.pt``, a file per tensor- and pipeline-parallel rank.

Each file holds the rank's own parts, with layers counted from 0 on each pipeline rank. Here they become pieces of whole
tensors under the names that ``torch_dist`` has, so that one table serves both. Reading only: no program writes them any
more.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from smp.checkpoint import CheckpointError, DamagedError
from smp.checkpoint.tensor_file import Slot
from smp.config import ModelConfig
from smp.convert.megatron_table import COLUMN_PARALLEL, OLD_NAMES, ROW_PARALLEL
from smp.convert.store import OpenFiles, Piece, PieceStore
from smp.convert.torch_file import read_torch_file

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")


def legacy_store(
    folder: Path, inert: tuple[str, ...], config: ModelConfig | None = None
) -> tuple[PieceStore, dict[str, Any] | None]:
    """The tensors of all ranks, and the arguments of the first.

    Args:
        folder: of the checkpoint.
        inert: as of :class:`RestrictedUnpickler`.
        config: the model's settings, for files without arguments: only they say how ranks cut a matrix of the MLP.

    Raises:
        CheckpointError: a rank is missing, or a file is damaged or holds something else than data.
    """
    names, (tp, pp) = _ranks(folder)
    files = OpenFiles(folder)
    try:
        contents = {place: _read(files, folder, name, inert) for place, name in names.items()}
        args = arguments(contents[0, 0], str(folder / names[0, 0]))
        gated = bool(args["swiglu"]) if args and "swiglu" in args else config is not None and config.swiglu
        pieces: dict[str, list[Piece]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        chunks = [{place: _chunks(contents[place])[0] for place in contents}]
        for version in range(1, len(_chunks(contents[0, 0]))):
            chunks.append({place: _chunks(contents[place])[version] for place in contents})
        first = 0
        for chunk in chunks:  # virtual stages: all pipeline ranks' first parts, then all their second parts
            for stage in range(pp):
                count = _add(pieces, shapes, [(names[t, stage], chunk[t, stage]) for t in range(tp)], first, gated)
                first += count
        return PieceStore(files, pieces, shapes), args
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        files.close()
        if isinstance(error, CheckpointError):
            raise
        raise DamagedError(f"{folder}: not what Megatron writes ({type(error).__name__}: {error})"[:500]) from None
    except BaseException:
        files.close()
        raise


def arguments(content: Any, where: str) -> dict[str, Any] | None:
    """The arguments in what a file of Megatron's holds; None: there are none.

    Raises:
        DamagedError: what has their name is something else.
    """
    args = content.get("args") if isinstance(content, dict) else None
    if args is not None and not isinstance(args, Namespace):
        raise DamagedError(f"{where}: its args are a {type(args).__name__}, not arguments of a command line")
    return None if args is None else dict(vars(args))


def _ranks(folder: Path) -> tuple[dict[tuple[int, int], str], tuple[int, int]]:
    """Files by (tensor rank, pipeline rank), and how many there are of each."""
    names: dict[tuple[int, int], str] = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = _RANK.fullmatch(path.name)
        if match is None:
            raise CheckpointError(f"{path}: experts over ranks are not supported")
        file = next((name for name in _FILES if (path / name).is_file()), None)
        if file is None:
            raise CheckpointError(f"{path / _FILES[0]} is missing")
        names[int(match[1]), int(match[2] or 0)] = f"{path.name}/{file}"
    tp, pp = max(t for t, _ in names) + 1, max(p for _, p in names) + 1
    for t in range(tp):
        for p in range(pp):
            if (t, p) not in names:
                suffix = f"_{p:03d}" if pp > 1 else ""
                raise CheckpointError(f"{folder / f'mp_rank_{t:02d}{suffix}' / _FILES[0]} is missing")
    return names, (tp, pp)


def _read(files: OpenFiles, folder: Path, name: str, inert: tuple[str, ...]) -> dict[str, Any]:
    content = read_torch_file(files.open(name), folder / name, inert=inert)
    if not isinstance(content, dict) or not _chunks(content):
        raise CheckpointError(f"{folder / name} holds no model of Megatron's")
    version = content.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version < 2:
        raise CheckpointError(
            f"{folder / name} has checkpoint_version {version}: before 2.0 the rows of query, key and value lie in "
            "another order, which is not supported"
        )
    return content


def _chunks(content: Mapping[str, Any]) -> list[Any]:
    """The rank's parts of the model: one, or one per virtual stage."""
    if "model" in content:
        return [content["model"]]
    return [content[f"model{i}"] for i in range(len(content)) if f"model{i}" in content]


def _add(
    pieces: dict[str, list[Piece]],
    shapes: dict[str, tuple[int, ...]],
    ranks: list[tuple[str, Any]],
    first: int,
    gated: bool,
) -> int:
    """Put together what the tensor-parallel ranks of one stage hold; the number of layers in it."""
    flat = [(file, dict(_flattened(model))) for file, model in ranks]
    layers = 0
    for name, slot in flat[0][1].items():
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        whole = name if match is None else f"decoder.layers.{first + int(match[1])}.{match[2]}"
        layers = max(layers, 0 if match is None else int(match[1]) + 1)
        if whole in pieces and whole.startswith("embedding."):
            continue  # the last stage's copy of a tied embedding
        if whole in pieces:
            raise CheckpointError(f"{ranks[0][0]}: tensor {name} is on two pipeline-parallel ranks")
        parts = [(file, tensors[name]) for file, tensors in flat if name in tensors]
        if len(parts) != len(flat) or len({part.shape for _, part in parts}) != 1:
            raise CheckpointError(f"{ranks[0][0]}: tensor {name} is not on all tensor-parallel ranks alike")
        pieces[whole], shapes[whole] = _merged(name, slot, parts, gated)
    return layers


def _flattened(model: Any, prefix: str = "") -> Iterator[tuple[str, Slot]]:
    """Tensors by name, as megatron-core calls them; old models are nested dictionaries."""
    if not isinstance(model, dict):
        return
    for key, value in model.items():
        name = f"{prefix}{key}"
        if isinstance(value, Slot):
            for old, new in OLD_NAMES:
                name = name.replace(old, new)
            if not name.startswith("word_embeddings_for_head"):
                yield name, replace(value, key=name)
        elif isinstance(value, dict):
            yield from _flattened(value, f"{name}.")


def _merged(name: str, slot: Slot, parts: list[tuple[str, Slot]], gated: bool) -> tuple[list[Piece], tuple[int, ...]]:
    """Pieces of the whole tensor, and its shape."""
    module, kind = name.rsplit(".", 1)
    tp, shape = len(parts), slot.shape
    if module.endswith(COLUMN_PARALLEL) and not kind.startswith("layer_norm_"):
        halves = 2 if gated and module.endswith("mlp.linear_fc1") else 1  # each rank has [its gate; its up]
        rows = shape[0] // halves
        pieces = []
        for rank, (file, part) in enumerate(parts):
            for half in range(halves):
                whole = Piece(file, part, (0,) * len(shape))
                at = (half * tp + rank) * rows
                pieces.append(Piece(file, whole.within(half * rows, rows), (at, *(0 for _ in shape[1:]))))
        return pieces, (shape[0] * tp, *shape[1:])
    if module.endswith(ROW_PARALLEL) and kind == "weight":
        return [Piece(f, p, (0, rank * shape[1])) for rank, (f, p) in enumerate(parts)], (shape[0], shape[1] * tp)
    return [Piece(*parts[0], (0,) * len(shape))], shape
