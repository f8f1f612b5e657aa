"""The three formats side by side: told apart, opened as weights, written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch

from smp.checkpoint import CheckpointError, find
from smp.checkpoint.folders.latest import LATEST
from smp.checkpoint.format.manifest import MANIFEST
from smp.config import ConfigError, ModelConfig
from smp.config.command_line.hub import hub_hint
from smp.convert.convert import Target
from smp.convert.huggingface.config import from_hf as config_from_hf
from smp.convert.huggingface.config import is_hf_folder, read_hf_config
from smp.convert.huggingface.folder import HFTarget, carried, companions, open_hf
from smp.convert.megatron.read import TRACKER, is_megatron_folder, open_megatron
from smp.convert.megatron.write import MegatronTarget
from smp.convert.smp_format import SmpTarget, SmpWeights
from smp.convert.weights import Weights

Format = Literal["hf", "megatron", "smp"]
FORMATS: tuple[Format, ...] = get_args(Format)


def detect(path: Path) -> Format:
    """The format of what lies at a path.

    Raises:
        CheckpointError: nothing is there, or none of the three.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such folder{hub_hint(str(path), '--load')}")
    if is_hf_folder(path):
        return "hf"
    if is_megatron_folder(path):
        return "megatron"
    # A run's folder has manifests one level below.
    if (path / MANIFEST).is_file() or (path / LATEST).is_file() or any(path.glob(f"*/{MANIFEST}")):
        return "smp"
    raise CheckpointError(
        f"{path} is no checkpoint: it has neither config.json (Hugging Face), nor {TRACKER} or .metadata (Megatron), "
        f"nor {MANIFEST} (smp)"
    )


@dataclass(frozen=True)
class Opened:
    """Weights, and what came with them.

    Attributes:
        weights: of the model.
        reference: a folder with config.json, tokenizer and the like; None: there is none.
    """

    weights: Weights
    reference: Path | None


def open_checkpoint(
    path: Path,
    kind: Format | None = None,
    *,
    reference: Path | None = None,
    vocab_size: int | None = None,
    allow_pickle: bool = False,
) -> Opened:
    """Open a checkpoint of any of the formats.

    Args:
        path: its folder; a run's folder stands for its newest.
        kind: its format; None: found out.
        reference: a Hugging Face folder or a checkpoint of smp that says what does not lie in ``path``: the settings
            of a bare checkpoint of Megatron's, and the tokenizer.
        vocab_size: of a checkpoint of Megatron's: token ids without padding.
        allow_pickle: read ``.bin`` files of a Hugging Face folder.

    Raises:
        CheckpointError, ConfigError: as :func:`open_hf`, :func:`open_megatron` and :class:`SmpWeights`.
    """
    kind = kind or detect(path)
    if kind == "hf":
        return Opened(open_hf(path, allow_pickle=allow_pickle, predictions=True), _companions(reference) or path)
    if kind == "smp":
        folder = _own_folder(path)
        return Opened(SmpWeights(folder), _companions(reference) or carried(folder))
    companions = _companions(reference) or carried(path)
    config = None if reference is None else partial(_config, reference, vocab_size)
    return Opened(open_megatron(path, reference=config, vocab_size=vocab_size), companions)


def _companions(reference: Path | None) -> Path | None:
    """The folder with a reference's tokenizer: the reference itself, or what a checkpoint has carried along; None:
    neither."""
    if reference is None:
        return None
    if not reference.is_dir():
        raise ConfigError(f"--reference {reference}: there is no such folder")
    return reference if is_hf_folder(reference) or companions(reference) else carried(_own_folder(reference))


def _own_folder(path: Path) -> Path:
    """The checkpoint's own folder, for a path to it or to a run."""
    folder = find(path)
    assert folder.local is not None, "a path is not a URL"
    return folder.local


def _config(reference: Path, vocab_size: int | None) -> ModelConfig:
    if is_hf_folder(reference):
        config = config_from_hf(read_hf_config(reference), str(reference))
    else:
        config = SmpWeights(_own_folder(reference)).config
    # The padded size cannot be told from Megatron's files, so an explicit one must agree.
    if vocab_size not in (None, config.vocab_size):
        raise ConfigError(f"--vocab-size {vocab_size}: --reference {reference} has {config.vocab_size} token ids")
    return config


def make_target(
    kind: Format,
    opened: Opened,
    *,
    dtype: torch.dtype | None = None,
    shard_size: int | None = None,
    megatron_tp: int = 1,
) -> Target:
    """The target to write.

    Args:
        kind: the format.
        opened: the weights, and the Hugging Face folder whose config.json, tokenizer and so on are to go along.
        dtype: of floating-point tensors; None: as they are.
        shard_size: most bytes of a file; None: what suits the format.
        megatron_tp: tensor-parallel ranks that Megatron's padded vocabulary is to suit. Any number loads the rest.

    Raises:
        ConfigError: the format cannot say what this model does.
        CheckpointError: a fused tensor would have parts of different dtypes.
    """
    if opened.weights.config.is_foreign:
        raise ConfigError("this model is computed by transformers: tools/convert_checkpoint.py --to hf writes it")
    size = {} if shard_size is None else {"shard_size": shard_size}
    if kind == "hf":
        return HFTarget(opened.weights, dtype, opened.reference, **size)
    if kind == "smp":
        return SmpTarget(opened.weights, dtype, opened.reference, **size)
    return MegatronTarget(opened.weights, dtype, opened.reference, megatron_tp, **size)
