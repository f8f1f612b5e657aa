"""Files of a Hugging Face folder: which holds which tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from smp.checkpoint import CheckpointError, DamagedError
from smp.checkpoint.tensor_file import Slot, read_header
from smp.convert.json_file import read_json
from smp.convert.store import OpenFiles, Piece, PieceStore, unreadable
from smp.convert.torch_file import read_torch_file

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
BIN_INDEX, BIN_SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


def safetensors_store(folder: Path) -> PieceStore:
    """The tensors of ``model.safetensors``, or of the files that its index names.

    Raises:
        CheckpointError: files are missing, cut off, cannot be read, or are not what the index says.
        ConfigError, DamageError: as :func:`read_index`.
    """
    return _store(folder, INDEX, SINGLE, _safetensors)


def bin_store(folder: Path) -> PieceStore:
    """The tensors of ``pytorch_model.bin``, or of the files that its index names; nothing that they hold is run.

    Raises:
        CheckpointError, ConfigError, DamageError: as :func:`safetensors_store`; or a file holds something else than
            tensors.
    """
    return _store(folder, BIN_INDEX, BIN_SINGLE, _torch_tensors)


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


def _store(
    folder: Path, index_name: str, single_name: str, read: Callable[[OpenFiles, str], dict[str, Slot]]
) -> PieceStore:
    index = read_index(folder, index_name) if (folder / index_name).is_file() else None
    if index is not None and (folder / single_name).exists() and single_name not in index.values():
        raise CheckpointError(f"{folder / single_name}: {index_name} does not name it: remove one of the two")
    names = sorted(set(index.values())) if index is not None else [single_name]
    files = OpenFiles(folder)
    try:
        pieces: dict[str, list[Piece]] = {}
        for name in names:
            for key, slot in read(files, name).items():
                if key in pieces:
                    raise CheckpointError(f"{folder / name}: tensor {key} is also in {pieces[key][0].file}")
                pieces[key] = [Piece(name, slot, (0,) * len(slot.shape))]
        if index is not None:
            _compare(folder, index_name, index, {key: piece.file for key, (piece,) in pieces.items()})
        return PieceStore(files, pieces, {})
    except BaseException:
        files.close()
        raise


def _compare(folder: Path, index_name: str, index: Mapping[str, str], found: Mapping[str, str]) -> None:
    for tensor, file in index.items():
        if found.get(tensor) != file:
            raise CheckpointError(f"{folder / file}: tensor {tensor} is not in it, but {index_name} says so")
    for tensor, file in found.items():
        if tensor not in index:
            raise CheckpointError(f"{folder / file}: tensor {tensor} is not in {index_name}")


def read_index(folder: Path, name: str) -> dict[str, str]:
    """Tensor -> file of an index, each checked to be a plain name.

    Raises:
        DamageError: it is no JSON.
        ConfigError: it cannot be read.
        CheckpointError: it is no index, or an entry leads out of the folder.
    """
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
