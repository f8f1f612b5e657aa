"""Hugging Face folders: opened as weights, and written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint import CheckpointError
from smp.checkpoint.folders.latest import ITERATION
from smp.checkpoint.folders.local import LocalFolder
from smp.checkpoint.format.tensor_bytes import lay_out
from smp.checkpoint.format.tensor_file import write_file
from smp.config import ModelConfig
from smp.convert.huggingface.config import (
    CONFIG,
    NEXT_N,
    block_of,
    family_of,
    from_hf,
    is_hf_folder,
    read_hf_config,
    read_json,
    to_hf,
)
from smp.convert.huggingface.family import Family
from smp.convert.huggingface.fp8_blocks import Fp8BlockStore
from smp.convert.huggingface.mxfp4 import BLOCKS, Mxfp4Store
from smp.convert.huggingface.store import INDEX, SINGLE, keep_text, open_store
from smp.convert.layout import Link, by_external_name, copies_in_predictions, links
from smp.convert.pieces import Feed, Planned, in_files, plan
from smp.convert.store import PieceStore
from smp.convert.weights import LinkedWeights, Weights, same_bits
from smp.models.inventory import EXPERT_BIAS

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files of which one is enough for a tokenizer."""

GENERATION = "generation_config.json"
COMPANIONS = (
    *TOKENIZERS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
    GENERATION,
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files and folders that go with a model unchanged: tokenizer, chat template, generation settings, processor."""

CARRIED = "hf"
"""Folder inside of a converted checkpoint with the config.json, tokenizer and so on of the source folder."""
MODEL_FILES = "model_files"
"""Folder with the same files next to the checkpoints of a run."""


def open_hf(folder: str | Path, *, allow_pickle: bool = False, predictions: bool = False) -> LinkedWeights:
    """The weights of a Hugging Face folder.

    Args:
        folder: with ``config.json`` and safetensors files.
        allow_pickle: read ``pytorch_model*.bin`` when there are no safetensors files, without running what they hold.
        predictions: with the layers of multi-token prediction, where there are any; else they are left out.

    Raises:
        CheckpointError: files are missing or damaged, or tensors are not those of the architecture.
        ConfigError: the architecture is not supported.
    """
    folder = Path(folder)
    content, where = read_hf_config(folder), str(folder / CONFIG)
    family, config = family_of(content, where), from_hf(content, where)
    store = open_store(folder, allow_pickle)
    keep_text(store)
    # Old files have a tensor for each expert, newer ones a stack.
    stacked = any(name.endswith(_STACKED) for name in store.tensors)
    quantized = any(name.endswith(BLOCKS) for name in store.tensors) and family.quantized is not None
    # Stores wrap stores: each shows the tensors in the form that the tables know.
    store, table = (Mxfp4Store(store), family.quantized or family.table) if quantized else (store, family.table)
    in_fp8 = any(stored.dtype == torch.float8_e4m3fn for stored in store.tensors.values())
    if in_fp8:
        store = Fp8BlockStore(store, block_of(content.get("quantization_config") or {}, where))
    config, missing = _with_predictions(config, store, family, predictions)
    found = _spelled(links(table, config, stacked=stacked), store, family)
    # Copies of embedding and head in multi-token prediction layers are compared, not loaded.
    copied = _spelled(copies_in_predictions(table, config), store, family)
    weights = LinkedWeights(store, found, config)
    weights.notes += store.notes
    weights.notes += ["experts in MXFP4 are read as bf16"] if quantized else []
    weights.notes += ["weights in FP8 are read as bf16"] if in_fp8 else []
    embedding = weights.links["embedding.weight"][0].external_name
    _check_copies(weights, copied)
    predicting = _predicting_layers(store, config)
    left_out = predicting if family.predicts and config.mtp_num_layers is None else ()
    left_out += tuple(name for name in store.tensors if family.skipped and name.startswith(family.skipped))
    # A tensor that no table names would be lost in silence: it is an error.
    copies = weights.refuse_extra(
        embedding,
        ("lm_head.weight", "embed_out.weight"),
        (*family.ignored, *left_out, *(link.external_name for link in copied)),
    )
    weights.notes += [f"{name} is left out: it is {embedding} again" for name in copies]
    weights.notes += missing
    if left_out:
        weights.notes.append(f"{len(left_out)} tensors of layers of multi-token prediction are left out")
    return weights


def _with_predictions(
    config: ModelConfig, store: PieceStore, family: Family, wanted: bool
) -> tuple[ModelConfig, list[str]]:
    """The settings with as many layers of multi-token prediction as are read, and what the user should hear: files
    that transformers saved lack them."""
    number = config.mtp_num_layers
    if not wanted or number is None:
        return replace(config, mtp_num_layers=None), []
    # eh_proj joins the hidden state and the next embedding: each such layer has one.
    first = family.table.block.format(config.num_layers) + "eh_proj.weight"
    if any(name in store.tensors for name in (first, first.removeprefix("model."))):
        return config, []
    return replace(config, mtp_num_layers=None), [f"{NEXT_N} is {number}, and the files have no such layer"]


def _check_copies(weights: LinkedWeights, copied: Iterable[Link]) -> None:
    """Raise CheckpointError if an embedding or output matrix of a multi-token prediction layer is not a copy of the
    model's own."""
    for link in copied:
        store, name = weights.store, link.external_name
        own = weights.links[link.smp_name][0].external_name
        if name in store.tensors and not same_bits(store, name, own):
            raise CheckpointError(f"{store.where(name)}: tensor {name} differs from {own}, which it is a copy of")


_STACKED = tuple(f".{module}.experts.down_proj" for module in ("mlp", "mixer", "block_sparse_moe"))
"""Ends of names in files that stack all experts of a layer in one tensor."""


def _predicting_layers(store: PieceStore, config: ModelConfig) -> tuple[str, ...]:
    """Names of tensors of layers after the last (multi-token prediction), which the model's own computation does not
    use."""
    numbers = ((name, re.match(r"(?:model\.)?layers\.(\d+)\.", name)) for name in store.tensors)
    return tuple(name for name, found in numbers if found is not None and int(found[1]) >= config.num_layers)


def _spelled(wanted: Iterable[Link], store: PieceStore, family: Family) -> list[Link]:
    """Links with the names that this folder's files have: base models omit the first word, and some names have changed
    over time."""
    first = family.table.block.split(".")[0] + "."
    # Files of a base model, which transformers saves without the head, lack the model's name in front.
    fronts = first, *(f"{new}." for new in family.renamed.values() if not new.startswith("."))
    bare = not any(name.startswith(fronts) for name in store.tensors)

    def rename(name: str) -> str:
        if bare:
            name = name.removeprefix(first)
        for old, new in family.renamed.items():
            if name in store.tensors:
                break
            if old.startswith(".") and (other := name.replace(old, new)) in store.tensors:
                return other
            if name.startswith(f"{old}."):
                return new + name.removeprefix(old)
        # ``break`` where the name is there as it is.
        return name

    return [replace(link, external_name=rename(link.external_name)) for link in wanted]


class HFTarget:
    """A Hugging Face folder to be written. See ``formats.make_target``."""

    def __init__(
        self, weights: Weights, dtype: torch.dtype | None, reference: Path | None, shard_size: int = 5 * 10**9
    ) -> None:
        self.reference = reference
        base = read_hf_config(reference) if reference is not None and is_hf_folder(reference) else None
        tensors_of = {n: t for n, t in weights.tensors.items() if not n.endswith(f".{EXPERT_BIAS}")}
        # The biases that balance experts keep their dtype, and do not count.
        kinds = sorted({str(dtype or t.dtype).removeprefix("torch.") for t in tensors_of.values()})
        # to_hf refuses a model that no family expresses, before anything is written.
        self.content = to_hf(weights.config, _said_dtype(kinds, base), base)
        family = family_of(self.content, CONFIG)
        found = links(family.table, weights.config) + copies_in_predictions(family.table, weights.config)
        fused = by_external_name(found)
        tensors = [plan(weights, name, parts, dtype) for name, parts in fused.items()]
        grouped = in_files(tensors, shard_size)
        names = [f"model-{i + 1:05d}-of-{len(grouped):05d}.safetensors" for i in range(len(grouped))]
        # One file has transformers' plain name, several an index.
        self.files: dict[str, list[Planned]] = dict(zip(names if len(grouped) > 1 else [SINGLE], grouped, strict=True))

    def write(self, folder: Path, file: str, feed: Feed) -> Any:
        """One file."""
        planned = {tensor.name: tensor for tensor in self.files[file]}
        # Meta tensors: only sizes are needed for the layout.
        metas = {n: torch.empty(t.stored.shape, dtype=t.stored.dtype, device="meta") for n, t in planned.items()}
        # transformers wants the format "pt" in the metadata.
        layout = lay_out(metas, {"format": "pt"})
        stream = ((slot.key, piece) for slot in layout.slots for piece in feed.stream(planned[slot.key]))
        write_file(LocalFolder(folder), file, layout, stream)
        return None

    def finish(self, folder: Path, records: Mapping[str, Any]) -> None:
        """Write the index, the configuration, and the companion files."""
        if list(self.files) != [SINGLE]:
            total = sum(tensor.stored.nbytes for tensors in self.files.values() for tensor in tensors)
            where = {tensor.name: file for file, tensors in self.files.items() for tensor in tensors}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        (folder / CONFIG).write_text(json.dumps(self.content, indent=2) + "\n")
        copy_companions(self.reference, folder)


def _said_dtype(kinds: list[str], base: Mapping[str, Any] | None) -> str:
    """The dtype for config.json: that of the tensors, or with several dtypes the one that ``base`` had, if it is one of
    them."""
    said = next((base[key] for key in ("dtype", "torch_dtype") if base is not None and key in base), None)
    if len(kinds) > 1:
        return str(said) if said in kinds else "float32"
    return kinds[0]


def companions(folder: Path | None) -> list[str]:
    """Names of the companion files in a folder."""
    return [] if folder is None else [name for name in COMPANIONS if (folder / name).exists()]


def copy_companions(source: Path | None, target: Path) -> None:
    """Copy tokenizer, chat template and generation settings, byte for byte."""
    for name in companions(source):
        assert source is not None
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, dirs_exist_ok=True)
        else:
            shutil.copyfile(source / name, target / name)


def end_ids(folder: Path | None) -> list[int]:
    """Ids that end a text, from generation_config.json or else config.json; none where they say nothing.

    Raises:
        ConfigError, DamageError: as ``read_json``.
        ValueError: they say something else.
    """
    for name in (GENERATION, CONFIG):
        if folder is None or not (folder / name).is_file():
            continue
        content = read_json(folder / name)
        said = content.get("eos_token_id") if isinstance(content, dict) else None
        ids = said if isinstance(said, list) else [] if said is None else [said]
        if not all(type(i) is int for i in ids):
            raise ValueError(f"{folder / name}: eos_token_id {said!r} is no token id")
        if ids:
            return ids
    return []


def add_ends(folder: Path, ends: Collection[int]) -> None:
    """Let generation_config.json of ``folder`` name ``ends`` as ids that end a text, after those that the files name.
    Does nothing where these are all.

    Raises:
        ConfigError, DamageError, ValueError: as :func:`end_ids`.
    """
    known = end_ids(folder)
    if not (new := sorted(set(ends) - {*known})):
        return
    file, content = folder / GENERATION, dict[str, Any]()
    if file.is_file():
        content |= read_json(file)
    elif (folder / CONFIG).is_file():  # as transformers makes one where there is none
        config = read_json(folder / CONFIG)
        text = {**config, **(config.get("text_config") or {})}
        content = {key: value for key, value in text.items() if key.endswith("_token_id") and value is not None}
    every = [*known, *new]
    content["eos_token_id"] = every if len(every) > 1 else every[0]
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def carry(reference: Path | None, folder: Path) -> None:
    """Copy the companion files, config.json included, into a folder of their own inside of ``folder``."""
    if reference is None:
        return
    (folder / CARRIED).mkdir(exist_ok=True)
    copy_companions(reference, folder / CARRIED)
    if (reference / CONFIG).is_file():
        shutil.copyfile(reference / CONFIG, folder / CARRIED / CONFIG)


def carried(folder: Path) -> Path | None:
    """The folder that :func:`carry` or a run has left in or next to a checkpoint; None: there is none."""
    run = folder.parent if ITERATION.fullmatch(folder.name) else folder
    return next((found for found in (folder / CARRIED, run / MODEL_FILES) if found.is_dir()), None)
