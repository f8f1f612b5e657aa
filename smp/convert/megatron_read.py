"""Megatron's checkpoints, ``torch_dist`` and the older one file per rank, opened as weights."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from smp.checkpoint import CheckpointError, DamagedError
from smp.checkpoint.tensor_file import Slot
from smp.config import ConfigError, ModelConfig
from smp.convert.layout import Link, links, stacked
from smp.convert.megatron_legacy import arguments, legacy_store
from smp.convert.megatron_table import RENAMED, from_args, megatron_table, said_vocab_size
from smp.convert.store import OpenFiles, Piece, PieceStore, unreadable
from smp.convert.torch_file import RestrictedUnpickler, _RefusedError, read_torch_file
from smp.convert.weights import LinkedWeights, Store, refuse_difference, unknown

METADATA, COMMON, BACKEND, TRACKER = ".metadata", "common.pt", "metadata.json", "latest_checkpointed_iteration.txt"
INERT = ("megatron.", "signal.", "types.SimpleNamespace", "pathlib.", "numpy", "_codecs.", "io.", "torch.distributed.")
"""Beginnings of names whose objects are in checkpoints of Megatron and become inert records here."""
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_COMMON_STATE = "common_state/shard_0_1"  # where megatron-core after 0.16 has what was in common.pt


def iteration_folder(path: Path) -> Path | None:
    """The checkpoint that a path means: itself, or the newest of a run of Megatron's. None: it is not Megatron's."""
    if is_one(path):
        return path
    tracker = path / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    name = text if text == "release" else f"iter_{int(text):07d}" if text.isdecimal() else ""
    if not name or not is_one(path / name):
        raise CheckpointError(f"{tracker} names {text!r}, which is no checkpoint in {path}")
    return path / name


def is_one(path: Path) -> bool:
    """Whether a folder is one checkpoint of Megatron's."""
    return (path / METADATA).is_file() or any(path.glob("mp_rank_*"))


def open_megatron(
    path: str | Path, *, config: ModelConfig | None = None, vocab_size: int | None = None
) -> LinkedWeights:
    """The weights of a checkpoint of Megatron's GPT.

    Args:
        path: a run's folder, which stands for its newest checkpoint, or one checkpoint's.
        config: the model's settings, when the checkpoint does not hold its arguments.
        vocab_size: number of token ids without padding; None: what the arguments say.

    Raises:
        CheckpointError: it is damaged, holds something else than data, or not the tensors of the model.
        ConfigError: a model that is not supported, or whose settings are not known.
    """
    folder = iteration_folder(Path(path))
    if folder is None:
        raise CheckpointError(f"{path} is not a checkpoint of Megatron's")
    if (folder / METADATA).is_file():
        store, args = torch_dist_store(folder)
    else:
        store, args = legacy_store(folder, INERT, config)
    try:
        return _weights(folder, store, args, config, vocab_size)
    except BaseException:
        store.close()
        raise


def _weights(
    folder: Path, store: PieceStore, args: Mapping[str, Any] | None, config: ModelConfig | None, vocab_size: int | None
) -> LinkedWeights:
    if _EMBEDDING not in store.tensors:
        raise CheckpointError(f"{folder}: tensor {_EMBEDDING} is missing")
    padded, notes = store.tensors[_EMBEDDING].shape[0], list(store.notes)
    if config is None:
        if args is None:
            raise ConfigError(f"{folder} holds no arguments of Megatron's: --reference FOLDER says what model it is")
        config = from_args(args, str(folder), padded, vocab_size)
        if vocab_size is None and said_vocab_size(args) is None:
            notes.append(f"nothing says how many of the {padded} rows of the vocabulary are padding: all are kept")
    found = {ours: _placed(link, config, store, padded) for ours, link in links(megatron_table(config), config).items()}
    weights = LinkedWeights(store, found, config)
    extra = unknown(store, found, ("_extra_state",))
    if not config.untie_embeddings_and_output_weights and _HEAD in extra:  # the last pipeline stage's copy
        refuse_difference(store, _HEAD, _EMBEDDING)
        extra.remove(_HEAD)
    if extra:
        raise CheckpointError(f"{store.where(extra[0])}: tensor {extra[0]} belongs to nothing in this architecture")
    if padded > (config.vocab_size or 0):
        weights.notes.append(f"{padded - (config.vocab_size or 0)} rows that pad the vocabulary are left out")
    weights.notes += notes
    return weights


def _placed(link: Link, config: ModelConfig, store: Store, padded: int) -> Link:
    """As this checkpoint spells it: local norms, all layers in one tensor, a padded vocabulary."""
    if link.ours in ("embedding.weight", "head.weight"):
        return replace(link, padded=padded)
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", link.theirs)
    if match is None:
        return link
    number, rest = int(match[1]), match[2]
    for name in (rest, *(rest.replace(te, local) for te, local in RENAMED.items())):
        if f"decoder.layers.{number}.{name}" in store.tensors:
            return replace(link, theirs=f"decoder.layers.{number}.{name}")
        if f"decoder.layers.{name}" in store.tensors:
            return stacked(link, f"decoder.layers.{name}", number, config.num_layers)
    return link


def torch_dist_store(folder: Path) -> tuple[PieceStore, dict[str, Any] | None]:
    """The model's tensors in a ``torch_dist`` checkpoint, and the arguments in it."""
    metadata = _read_metadata(folder / METADATA)
    files = OpenFiles(folder)
    try:
        pieces: dict[str, list[Piece]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        names = [str(name) for name in metadata["state_dict_metadata"]]
        prefix = next(
            (n.removesuffix(_EMBEDDING) for n in names if re.fullmatch(rf"(model\.|module\.)?{_EMBEDDING}", n)), ""
        )
        left = {"_extra_state": 0, "optimizer": 0}
        common: Any = []
        for index, info in metadata["storage_data"].items():
            place, full = info.state, str(index.state["fqn"])
            stored = metadata["state_dict_metadata"].get(full)
            if stored is None or not stored.kind.endswith(".TensorStorageMetadata"):
                left["_extra_state"] += "_extra_state" in full
                if full == _COMMON_STATE:
                    common = _item(files, folder, place, full)
                continue
            name = full.removeprefix(prefix)
            if not name.startswith(("embedding.", "decoder.", "output_layer.")):
                left["optimizer"] += 1
                continue
            shapes[name] = tuple(stored.state["size"])
            slot = _item(files, folder, place, full)
            if not isinstance(slot, Slot):
                raise DamagedError(f"{folder / METADATA}: {full} is a {type(slot).__name__}, not a tensor")
            slot = replace(slot, key=full)
            pieces.setdefault(name, []).append(Piece(str(place["relative_path"]), slot, tuple(index.state["offset"])))
        store = PieceStore(files, pieces, shapes)
        args = arguments(common[0], str(folder / METADATA)) if common else _args(folder)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        files.close()
        if isinstance(error, CheckpointError):
            raise
        raise DamagedError(f"{folder / METADATA} is damaged ({type(error).__name__}: {error})"[:500]) from None
    texts = {"_extra_state": "objects of _extra_state are ignored", "optimizer": "pieces of other tensors are left out"}
    store.notes = [f"{count} {texts[kind]}" for kind, count in left.items() if count]
    return store, args


def _item(files: OpenFiles, folder: Path, place: Mapping[str, Any], name: str) -> Any:
    """What an item of a data file is: each is a file of ``torch.save`` within the file."""
    file, offset, length = str(place["relative_path"]), place["offset"], place["length"]
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", file):
        raise CheckpointError(
            f"{folder / METADATA}: tensor {name} is said to be in {file!r}: that is no file of this folder"
        )
    path, source = folder / file, files.open(file)
    if not (type(offset) is int and type(length) is int and offset >= 0 and offset + length <= source.size):
        raise DamagedError(f"{path} is cut off: tensor {name} should be at {offset}..{offset + length}")
    try:
        return read_torch_file(source, path, start=offset, size=length, inert=INERT)
    except CheckpointError as error:
        raise type(error)(f"{error}, at {offset}: tensor {name}") from error


def _read_metadata(path: Path) -> dict[str, Any]:
    """The state of DCP's Metadata, with records in place of its classes."""

    def storage(*_: Any) -> Any:
        raise _RefusedError("a tensor")

    known = {"torch.serialization._get_layout": str}
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        content = RestrictedUnpickler(io.BytesIO(data), storage, known, INERT).load()
        state = content.state
        return {key: dict(state[key]) for key in ("state_dict_metadata", "storage_data")}
    except _RefusedError as refused:
        raise CheckpointError(f"{path} asks for {refused}, which is not plain data: refused") from None
    except Exception as error:  # what a broken pickle can raise is without end
        raise DamagedError(f"{path} is damaged or cut off ({type(error).__name__}: {error})"[:500]) from None


def _args(folder: Path) -> dict[str, Any] | None:
    """The arguments in ``common.pt``, if there are any."""
    if not (folder / COMMON).is_file():
        return None
    files = OpenFiles(folder)
    try:
        content = read_torch_file(files.open(COMMON), folder / COMMON, inert=INERT)
    finally:
        files.close()
    return arguments(content, str(folder / COMMON))
