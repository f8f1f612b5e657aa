"""Files of a Hugging Face folder: which holds which tensor."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from smp.checkpoint import CheckpointError, DamagedError
from smp.checkpoint.format.tensor_file import Slot, read_header
from smp.config.command_line.commands import tool
from smp.convert.huggingface.config import read_json
from smp.convert.megatron.torch_file import read_torch_file
from smp.convert.store import OpenFiles, Piece, PieceStore, unreadable

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
# Prefix of the text model's tensors in a model that also sees images.
_TEXT = "language_model."
_IMAGES = ("vision_model", "vision_tower", "multi_modal_projector")
"""First words of tensors' names that belong to a vision part."""
# No slash: a name must not lead out of the folder.
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


def open_store(folder: Path, allow_pickle: bool) -> PieceStore:
    """The tensors of a folder's safetensors files; without any those of its ``.bin`` files, if they are allowed.

    Raises:
        CheckpointError: files are missing, cut off, cannot be read, or are not what the index says.
        ConfigError, DamageError: the index is no JSON or cannot be read.
    """
    if (folder / INDEX).is_file() or (folder / SINGLE).exists():
        return safetensors_store(folder, SINGLE)
    bins = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if not bins:
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}")
    if not allow_pickle:
        raise CheckpointError(
            f"{folder / bins[0]} is a pickle file, which can hold code: {tool('convert')} --allow-pickle "
            "reads the tensors and runs nothing"
        )
    return _store(folder, "pytorch_model.bin", _torch_tensors)


def keep_text(store: PieceStore) -> None:
    """Reduce the store of a model with a text part to that part: its tensors without their prefix; a note counts what
    is left out."""
    if not any(name.startswith(_TEXT) for name in store.tensors):
        return
    left = Counter(front for name in store.tensors if (front := name.split(".")[0]) in _IMAGES)
    kept = {name: name.removeprefix(_TEXT) for name in store.tensors if name.split(".")[0] not in left}
    store.pieces = {new: store.pieces[old] for old, new in kept.items()}
    store.tensors = {new: store.tensors[old] for old, new in kept.items()}
    if left:
        counts = " and ".join(f"{count} tensors of {front}" for front, count in sorted(left.items()))
        store.notes.append(f"{counts} are left out: smp trains the text part")


def safetensors_store(folder: Path, single: str) -> PieceStore:
    """The tensors of the file ``single``, or of those that its index names."""
    return _store(folder, single, _safetensors)


# Only headers are read now.
def _safetensors(files: OpenFiles, name: str) -> dict[str, Slot]:
    source, path = files.open(name), files.folder / name
    try:
        return read_header(source)
    except DamagedError as error:
        raise DamagedError(f"{path} is damaged or cut off: {error}") from None
    except OSError as error:
        raise unreadable(path, error) from error


def _torch_tensors(files: OpenFiles, name: str) -> dict[str, Slot]:
    path = files.folder / name
    content = read_torch_file(files.open(name), path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a dictionary of tensors")
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, Slot):
            raise CheckpointError(f"{path}: {key} is not a tensor but a {type(value).__name__}")
    return content


def _store(folder: Path, single: str, read: Callable[[OpenFiles, str], dict[str, Slot]]) -> PieceStore:
    index_name = f"{single}.index.json"
    index = _read_index(folder, index_name) if (folder / index_name).is_file() else None
    if index is not None and (folder / single).exists() and single not in index.values():
        # Which of the two is current cannot be known.
        raise CheckpointError(f"{folder / single}: {index_name} does not name it: remove one of the two")
    names = sorted(set(index.values())) if index is not None else [single]
    files = OpenFiles(folder)
    pieces: dict[str, list[Piece]] = {}
    for name in names:
        for key, slot in read(files, name).items():
            if key in pieces:
                # A tensor in one file is one piece.
                raise CheckpointError(f"{folder / name}: tensor {key} is also in {pieces[key][0].file}")
            pieces[key] = [Piece(name, slot, (0,) * len(slot.shape))]
    if index is not None:
        # Both ways: a missing shard, and a stale index.
        _compare(folder, index_name, index, {key: piece.file for key, (piece,) in pieces.items()})
    return PieceStore(files, pieces, {})


def _compare(folder: Path, index_name: str, index: Mapping[str, str], found: Mapping[str, str]) -> None:
    for tensor, file in index.items():
        if found.get(tensor) != file:
            raise CheckpointError(f"{folder / file}: tensor {tensor} is not in it, but {index_name} says so")
    for tensor, file in found.items():
        if tensor not in index:
            raise CheckpointError(f"{folder / file}: tensor {tensor} is not in {index_name}")


def _read_index(folder: Path, name: str) -> dict[str, str]:
    """Tensor -> file of an index. Each file is checked to be a plain name."""
    path = folder / name
    content = read_json(path)
    try:
        items = {str(tensor): str(file) for tensor, file in content["weight_map"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index ({type(error).__name__}: {error})"[:500]) from None
    for tensor, file in items.items():
        if not _PLAIN.fullmatch(file):
            raise CheckpointError(f"{path}: tensor {tensor} is said to be in {file!r}: that is no file of this folder")
    return items
