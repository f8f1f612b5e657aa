"""Load a model of any format with adapters and tokenizer, for tools that generate or score text in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp.config import Config, ConfigError, Layout, ModelConfig
from smp.convert.formats import Opened, open_checkpoint
from smp.convert.huggingface.config import is_hf_folder
from smp.convert.huggingface.folder import end_ids
from smp.convert.huggingface.foreign import choose_model, read_model_config
from smp.convert.load import load_weights
from smp.convert.peft.adapters import MergedWeights
from smp.convert.weights import Weights
from smp.data.tokenizers.files import load_tokenizer, no_tokenizer, open_tokenizer_json, tokenizer_file
from smp.data.tokenizers.tokenizer import SentencePieceTokenizer, Tokenizer
from smp.data.tuning.tokenizer import PieceTokenizer, TuningTokenizer, begun, open_tokenizer, put_in_front
from smp.models.build import new_model
from smp.models.protocol import Model
from smp.parallel.context import ParallelContext, build_context
from smp.training.checkpoints.foreign_weights import fill_foreign
from smp.training.tuning.adapter_files import companions_of, open_adapters, require_adapter

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TokenizerFile:
    """A tokenizer.json, used as in fine-tuning: with the special tokens that it adds before a text, once, and without
    those after it, where the model continues."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = open_tokenizer_json(path)
        self._before = put_in_front(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids."""
        return begun(list(self._tokenizer.encode(text, add_special_tokens=False).ids), self._before)

    def decode(self, ids: list[int]) -> str:
        """Text, without special tokens."""
        return str(self._tokenizer.decode(ids))


def find_tokenizer(
    opened: Opened, given: Path | None, pattern: str | None = None
) -> tuple[TokenizerFile | Tokenizer, list[int]]:
    """Find the tokenizer and the ids that end a text.

    Raises:
        ValueError: there is none.
    """
    folder = opened.reference
    inside = [] if folder is None else [folder / name for name in ("tokenizer.json", "tokenizer.model")]
    path = tokenizer_file(given) if given else next((path for path in inside if path.is_file()), None)
    if path is None:
        raise ValueError(no_tokenizer(folder))
    ends = end_ids(folder)
    if path.suffix == ".json":
        return TokenizerFile(path), ends or [load_tokenizer(path, pattern).eod]
    tokenizer = load_tokenizer(path, pattern)
    if isinstance(tokenizer, SentencePieceTokenizer):  # a prompt's begin and end pieces, as in fine-tuning
        tokenizer = PieceTokenizer(path)
    return tokenizer, [*ends, tokenizer.eod]


def folder_tokenizer(opened: Opened, given: Path | None) -> TuningTokenizer:
    """The tokenizer of --tokenizer-model, or the one that came with the model, with special tokens and chat template.

    Raises:
        ValueError: there is none.
    """
    folder = given or opened.reference
    if folder is None:
        raise ValueError(no_tokenizer(None))
    return open_tokenizer(folder.parent if folder.name == "tokenizer.json" else folder)


def folder_of(config: Config) -> Path | None:
    """The folder whose files say which ids end a text."""
    return None if config.checkpoint.load is None else Path(config.checkpoint.load)


def open_model(load: Path, adapter: Path | None = None, reference: Path | None = None) -> Opened:
    """The language model in --load, with --adapter added, and the folder of its tokenizer.

    Raises:
        CheckpointError, ConfigError: as ``open_checkpoint`` and ``open_adapters``.
        ValueError: it is a reward model.
    """
    if adapter is not None:
        require_adapter(adapter)
    opened = _open(load, reference)
    said = "is a reward model: it scores answers and predicts no text"
    if opened.weights.config.scalar_head:
        raise ValueError(f"--load {load} {said}")
    if adapter is None:
        return opened
    if opened.weights.config.is_foreign:
        raise ConfigError(
            f"--adapter {adapter}: transformers computes the model in --load, and its adapters are not merged here: "
            "merge them by peft (docs/any-model.md), and --load the merged folder without --adapter"
        )
    # Added into the weights while they are read: the model then is a plain one.
    merged = MergedWeights(opened.weights, open_adapters(adapter, opened))
    if merged.config.scalar_head:
        raise ValueError(f"--adapter {adapter} {said}")
    companions = None if reference else companions_of(adapter)
    return replace(opened, weights=merged, reference=companions or opened.reference)


class TheirFolder(Weights):
    """A Hugging Face folder of a model that transformers computes. transformers reads it (``fill_foreign``), so it has
    no tensors here."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self.path, self.config, self.tensors, self.notes = path, config, {}, []

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        raise KeyError(name)

    def fingerprint(self) -> Any:
        return str(self.path)


def _open(load: Path, reference: Path | None) -> Opened:
    """A checkpoint of any format, or a folder of a model that transformers computes."""
    if is_hf_folder(load) and (config := choose_model(*read_model_config(load))).is_foreign:
        return Opened(TheirFolder(load, config), reference or load)
    return open_checkpoint(load, reference=reference)


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Context manager: a process group of this one process."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def load_model(opened: Opened, device: torch.device, dtype: torch.dtype = torch.float32) -> Model:
    """The model, in evaluation mode, in this one process."""
    context, weights = build_context(Layout(), device.type), opened.weights
    if weights.config.is_foreign:
        return _load_foreign(weights, context, device, dtype)
    model = new_model(opened.weights.config, context.tp).to(dtype).to_empty(device=device)
    load_weights(model, lambda: weights)
    return model.eval()


def _load_foreign(weights: Weights, context: ParallelContext, device: torch.device, dtype: torch.dtype) -> Model:
    if weights.config.reads_apart:
        raise ConfigError(
            "--load: the tools write no texts with an encoder and a decoder: load the folder that --save-hf writes by "
            "transformers' AutoModelForSeq2SeqLM"
        )
    # Here, because a model of this project's own needs none of that room.
    from smp.hf.run.model import TransformersModel

    with redirect_stdout(StringIO()):  # a report of how it is cut: nothing is
        model = TransformersModel(weights.config, context)
    made: dict[nn.Parameter, nn.Parameter] = {}  # shared ones stay shared; buffers stay in fp32
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                made[parameter] = nn.Parameter(parameter.to(dtype))
            setattr(module, name, made[parameter])
    model.allocate(device)
    fill_foreign(model, str(weights.path) if isinstance(weights, TheirFolder) else "", lambda: weights)
    return model.eval()
