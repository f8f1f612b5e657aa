"""Megatron's checkpoints in the format ``torch_dist``, opened as weights."""

from __future__ import annotations

import io
import pickle
import re
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from smp.checkpoint import CheckpointError, DamagedError
from smp.checkpoint.format.tensor_file import Slot
from smp.config import ConfigError, ModelConfig
from smp.convert.layout import Link
from smp.convert.megatron.table import RENAMED, from_args, megatron_links, said_vocab_size
from smp.convert.megatron.torch_file import GETATTR, Inert, read_torch_file, refusal
from smp.convert.store import OpenFiles, Piece, PieceStore, unreadable
from smp.convert.weights import LinkedWeights

METADATA, COMMON, BACKEND, TRACKER = ".metadata", "common.pt", "metadata.json", "latest_checkpointed_iteration.txt"
INERT = ("megatron.", "signal.", "types.SimpleNamespace", "pathlib.", "numpy", "_codecs.", "io.", "torch.distributed.")
"""Prefixes of names whose objects are in Megatron's checkpoints and are not needed: they get a stand-in."""
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_COMMON_STATE = "common_state/shard_0_1"  # item with the contents of common.pt, in megatron-core after 0.16
_METADATA_CLASSES = {
    **{f"{metadata.__name__}.{name}": getattr(metadata, name) for name in metadata.__all__},
    f"{metadata.__name__}._MEM_FORMAT_ENCODING": metadata._MEM_FORMAT_ENCODING,
    f"{filesystem.__name__}._StorageInfo": filesystem._StorageInfo,
    "collections.OrderedDict": OrderedDict,
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": str,
}


def is_megatron_folder(path: Path) -> bool:
    """Whether a folder is a run of Megatron's, or one of its checkpoints."""
    return (path / TRACKER).is_file() or _is_checkpoint(path)


def _is_checkpoint(path: Path) -> bool:
    # mp_rank_*: the older format, which is recognized in order to be refused with a hint.
    return (path / METADATA).is_file() or any(path.glob("mp_rank_*"))


def _iteration_folder(path: Path) -> Path:
    """The checkpoint at a path: itself, or the newest of a run."""
    if _is_checkpoint(path):
        return path
    tracker = path / TRACKER
    if not tracker.is_file():
        raise CheckpointError(f"{path} is not a checkpoint of Megatron's")
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    # Megatron's names: "release", or the iteration in 7 digits.
    name = text if text == "release" else f"iter_{int(text):07d}" if text.isdecimal() else ""
    if not name or not _is_checkpoint(path / name):
        raise CheckpointError(f"{tracker} names {text!r}, which is no checkpoint in {path}")
    return path / name


def open_megatron(
    path: str | Path, *, reference: Callable[[], ModelConfig] | None = None, vocab_size: int | None = None
) -> LinkedWeights:
    """The weights of a checkpoint of Megatron's GPT.

    Args:
        path: a run's folder, which stands for its newest checkpoint, or one checkpoint's.
        reference: gives the model's settings when the checkpoint does not hold its arguments.
        vocab_size: number of token ids without padding; None: what the arguments say.

    Raises:
        CheckpointError: it is damaged, holds something else than data, or not the tensors of the model.
        ConfigError: a model that is not supported, or whose settings are not known.
    """
    folder = _iteration_folder(Path(path))
    if not (folder / METADATA).is_file():
        raise ConfigError(
            f"{folder} is in Megatron's older format, a file per rank, which is not read: let Megatron-LM write it as "
            "torch_dist first (--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER)"
        )
    store, args = _open_store(folder)
    if _EMBEDDING not in store.tensors:
        raise CheckpointError(f"{folder}: tensor {_EMBEDDING} is missing")
    # Megatron pads the vocabulary to a multiple of the tensor-parallel size.
    padded = store.tensors[_EMBEDDING].shape[0]
    if args is not None:
        config = from_args(args, str(folder), padded, vocab_size)
        if vocab_size is None and said_vocab_size(args) is None:
            unsaid = f"nothing says how many of the {padded} rows of the vocabulary are padding: all are kept"
            store.notes.append(unsaid)
    elif reference is not None:
        config = reference()
    else:
        raise ConfigError(f"{folder} holds no arguments of Megatron's: --reference FOLDER says what model it is")
    return _weights(folder, store, config, padded)


def _weights(folder: Path, store: PieceStore, config: ModelConfig, padded: int) -> LinkedWeights:
    vocab = config.vocab_size or 0
    if vocab > padded:
        raise ConfigError(f"{folder}: the embedding has {padded} rows for {vocab} token ids")
    found = [_placed(link, config, store) for link in megatron_links(config, padded)]
    weights = LinkedWeights(store, found, config)
    weights.refuse_extra(
        _EMBEDDING, (_HEAD,), ("_extra_state",)
    )  # with tied weights the last pipeline stage has a copy
    if padded > vocab:
        weights.notes.append(f"{padded - vocab} rows that pad the vocabulary are left out")
    weights.notes += store.notes
    return weights


def _placed(link: Link, config: ModelConfig, store: PieceStore) -> Link:
    """The link in this checkpoint's spelling: norms of local layers, or all layers in one tensor."""
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", link.external_name)
    if match is None:
        return link
    number, rest = int(match[1]), match[2]
    # Transformer Engine fuses the norm into the linear layer; local layers name it apart.
    others = [rest.replace(*pair) for te, local in RENAMED.items() for pair in ((te, local), (local, te))]
    for name in (rest, *others):
        if (single := f"decoder.layers.{number}.{name}") in store.tensors:
            return replace(link, external_name=single)
        # A tensor of all layers has the layer's number as a dimension, and none in its name.
        if (stacked := f"decoder.layers.{name}") in store.tensors:
            return replace(link, external_name=stacked, leading=((number, config.num_layers), *link.leading))
    return link


def _open_store(folder: Path) -> tuple[PieceStore, dict[str, Any] | None]:
    """The model's tensors in a checkpoint, and the arguments in it."""
    try:
        return _store(OpenFiles(folder), _read_metadata(folder / METADATA))
    except CheckpointError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DamagedError(f"{folder / METADATA} is damaged ({type(error).__name__}: {error})"[:500]) from None


def _store(files: OpenFiles, content: metadata.Metadata) -> tuple[PieceStore, dict[str, Any] | None]:
    names = [str(name) for name in content.state_dict_metadata]
    # The prefix depends on what Megatron has wrapped the model in.
    front = next((m[1] for n in names if (m := re.fullmatch(rf"(model\.|module\.|){_EMBEDDING}", n))), "")
    pieces: dict[str, list[Piece]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    left: Counter[str] = Counter()
    common = None
    for index, info in content.storage_data.items():
        stored = content.state_dict_metadata.get(index.fqn)
        name = str(index.fqn).removeprefix(front)
        if index.fqn == _COMMON_STATE:
            common = _item(files, info, name)[0]
        elif not isinstance(stored, metadata.TensorStorageMetadata):
            left["objects of _extra_state are ignored"] += "_extra_state" in name
        elif not name.startswith(("embedding.", "decoder.", "output_layer.")):
            left["pieces of other tensors are left out"] += 1
        else:
            shapes[name] = tuple(stored.size)
            pieces.setdefault(name, []).append(_piece(files, info, name, tuple(index.offset)))
    store = PieceStore(files, pieces, shapes)
    store.notes = [f"{count} {text}" for text, count in sorted(left.items()) if count]
    return store, _args(files, common)


def _piece(files: OpenFiles, info: filesystem._StorageInfo, name: str, offsets: tuple[int, ...]) -> Piece:
    slot = _item(files, info, name)
    if not isinstance(slot, Slot):
        raise DamagedError(f"{files.folder / METADATA}: {name} is a {type(slot).__name__}, not a tensor")
    return Piece(info.relative_path, slot, offsets)


def _item(files: OpenFiles, info: filesystem._StorageInfo, name: str) -> Any:
    """The content of an item of a data file: each item is a ``torch.save`` file within the file."""
    file, start, size = info.relative_path, info.offset, info.length
    # A name from a file: it must not lead out of the folder.
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", file):
        raise CheckpointError(
            f"{files.folder / METADATA}: tensor {name} is said to be in {file!r}: that is no file of this folder"
        )
    path, source = files.folder / file, files.open(file)
    # Before the item is opened: a file that was cut off is told as such.
    if not (type(start) is int and type(size) is int and start >= 0 and start + size <= source.size):
        raise DamagedError(f"{path} is cut off: tensor {name} should be at {start}..{start + size}")
    try:
        return read_torch_file(source, path, start=start, size=size, inert=INERT)
    except CheckpointError as error:
        raise type(error)(f"{error}, at {start}: tensor {name}") from error


class _MetadataUnpickler(pickle.Unpickler):
    """Builds plain data and the classes of torch's ``Metadata``; other known names get a stand-in."""

    def find_class(self, module: str, name: str) -> Any:
        """The class for a name, from a table. Nothing is imported.

        Raises:
            CheckpointError: the name is not in it; the message does not name the file.
        """
        full = f"{module}.{name}"
        # A table, and nothing is imported: a pickle names functions that would run.
        if full in _METADATA_CLASSES:
            return _METADATA_CLASSES[full]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if full == GETATTR or full.startswith(INERT):
            return Inert
        raise CheckpointError(refusal(full))


def _read_metadata(path: Path) -> metadata.Metadata:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        content = _MetadataUnpickler(io.BytesIO(data)).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path} {error}") from None
    except Exception as error:  # what a broken pickle can raise is without end
        raise DamagedError(f"{path} is damaged or cut off ({type(error).__name__}: {error})"[:500]) from None
    if not isinstance(content, metadata.Metadata):
        raise DamagedError(f"{path} is damaged: it holds a {type(content).__name__}")
    return content


def _args(files: OpenFiles, common: Any) -> dict[str, Any] | None:
    """Megatron's arguments: in the common state, which older versions write as ``common.pt``; None: there are none.

    Raises:
        DamagedError: what has their name is something else.
    """
    path = files.folder / (METADATA if common is not None else COMMON)
    if common is None and path.is_file():
        common = read_torch_file(files.open(COMMON), path, inert=INERT)
    args = common.get("args") if isinstance(common, dict) else None
    if args is not None and not isinstance(args, Namespace):
        raise DamagedError(f"{path}: its args are a {type(args).__name__}, not arguments of a command line")
    return None if args is None else dict(vars(args))
