"""Exports a checkpoint of a model computed by transformers as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch

from smp.convert.huggingface.folder import copy_companions
from smp.convert.weights import Weights
from smp.hf.loading.stored_names import written_by
from smp.models.foreign import new_module


def write_folder(weights: Weights, folder: Path, reference: Path | None, dtype: torch.dtype | None = None) -> None:
    """Write config.json and weights by transformers' own ``save_pretrained``, which names, splits and cuts into files
    as it does by itself. All weights are in this process's memory meanwhile.

    Args:
        weights: of a model with ``transformers_config``.
        folder: is made.
        reference: a folder with tokenizer and generation settings, which go along; None: there is none.
        dtype: of floating-point tensors; None: as they are.

    Raises:
        CheckpointError: they cannot be read.
        OSError: the folder cannot be written.
    """
    content = weights.config.transformers_config
    assert content is not None, "the model of another implementation"
    module = new_module(content, scores=weights.config.scalar_head)
    whole: dict[str, torch.Tensor] = {}
    for name, stored in weights.tensors.items():
        read = torch.empty(stored.shape, dtype=stored.dtype)
        weights.read_into(name, (0,) * read.ndim, read)
        whole[name] = read if dtype is None or not read.is_floating_point() else read.to(dtype)
    # save_pretrained writes the module's dtype into config.json.
    module.to(next(iter(whole.values())).dtype)
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):  # checkpoints have tied ones once
        whole[name] = whole[names.setdefault(id(parameter), name)]
    written_by(module)
    module.save_pretrained(folder, state_dict=whole)
    copy_companions(reference, folder)
