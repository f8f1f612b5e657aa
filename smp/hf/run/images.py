"""Images in a forward pass of a transformers model, and positions of tokens next to them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from smp.models.foreign import tower_blocks, vision_part
from smp.models.micro_batch import MicroBatch


def with_filler(batch: MicroBatch) -> torch.Tensor:
    """int64 (batch, length), with the filler image's tokens appended where there are some."""
    filler = None if batch.images is None else batch.images.filler
    return batch.input_ids if filler is None else torch.cat((batch.input_ids, filler), 1)


def take_pixels(module: Any) -> None:
    """Let the vision tower take pixels of any dtype: Llama 4's processor gives 16-bit ones whatever the model computes
    in."""
    inside = {id(part) for layer in tower_blocks(module) for part in layer.modules()}
    for name, part in module.named_modules():
        # The tower's first layers (patch embedding), outside of its blocks, are given pixels.
        is_first = isinstance(part, nn.Linear | nn.Conv2d | nn.Conv3d) and id(part) not in inside
        if is_first and vision_part(f"{name}.weight") == "vision_model":
            part.register_forward_pre_hook(lambda layer, args: (args[0].to(layer.weight.dtype), *args[1:]))


def document_positions(module: Any, batch: MicroBatch) -> torch.Tensor:
    """Positions that begin anew in every document, (batch, length). For models with three-dimensional positions (M-RoPE
    of Qwen2-VL) (4, batch, length), as their decoder takes them: the plain ones, by which transformers tells documents
    apart, and those."""
    assert batch.position_ids is not None and batch.document_ids is not None
    ids = with_filler(batch)
    positions, documents = batch.position_ids, batch.document_ids
    if more := ids.shape[1] - positions.shape[1]:
        # The image that stands in is a document of the first row.
        positions, documents = F.pad(positions, (0, more)), F.pad(documents, (0, more), value=-1)
        positions[0, -more:] = torch.arange(more)
        documents[0, -more:] = documents.max() + 1
    in_three = getattr(module.base_model, "get_rope_index", None)
    if batch.images is None or in_three is None:
        return positions
    spans = _spans(documents)
    # get_rope_index counts on one sample per row: each document becomes a row.
    rows = [ids[row, first:last] for row, first, last in spans]
    kinds = batch.images.tokens["mm_token_type_ids"]
    index, _ = in_three(
        pad_sequence(rows, batch_first=True),
        mm_token_type_ids=pad_sequence([kinds[r, f:n] for r, f, n in spans], batch_first=True),
        image_grid_thw=batch.images.values["image_grid_thw"],
        attention_mask=pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
    )  # (3, documents, longest)
    out = torch.cat((positions[None], torch.zeros_like(positions).expand(3, -1, -1)))
    for number, (row, first, last) in enumerate(spans):
        out[1:, row, first:last] = index[:, number, : last - first]
    return out


def _spans(documents: torch.Tensor) -> list[tuple[int, int, int]]:
    """(row, first, last + 1) of each document; padding (-1) is left out."""
    out = []
    for row, numbers in enumerate(documents.tolist()):
        first = 0
        for i in range(1, len(numbers) + 1):
            if i == len(numbers) or numbers[i] != numbers[first]:
                out += [(row, first, i)] if numbers[first] >= 0 else []
                first = i
    return out
