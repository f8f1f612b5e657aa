"""LongRoPE (Phi-3.5, Phi-4-mini) by the length of each text, as this project's decoder has it.

transformers chooses between the factors of short and of long texts once for a whole micro-batch, by its longest one, or
by its padding. So losses would depend on which texts are together, and on the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class TextLengths:
    """Of the micro-batch that is computed.

    Attributes:
        of_tokens: int64 (batch, length), tokens of the text that each belongs to; None: rows are whole texts.
    """

    of_tokens: torch.Tensor | None = None


def choose_by_text(module: nn.Module, lengths: TextLengths) -> None:
    """Let every rotary embedding of ``module`` with LongRoPE choose by ``lengths``."""
    for part in module.modules():
        if "longrope" in _kinds(part):
            part.forward = MethodType(_Chosen(lengths), part)


def _kinds(part: Any) -> tuple[str, ...]:
    kind = getattr(part, "rope_type", None)
    return tuple(kind.values()) if isinstance(kind, dict) else (kind,) if isinstance(kind, str) else ()


@dataclass(frozen=True)
class _Chosen:
    """The forward pass of a rotary embedding: the class's own, once with the short texts and once with the long ones.

    Attributes:
        lengths: of the micro-batch.
    """

    lengths: TextLengths

    def __call__(self, rotary: Any, x: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        own, lengths = type(rotary).forward, self.lengths.of_tokens
        layer_type = kwargs.get("layer_type")
        kind = rotary.rope_type if layer_type is None else rotary.rope_type[layer_type]
        if lengths is None or kind != "longrope":
            return own(rotary, x, position_ids, **kwargs)
        settings = rotary.config.rope_parameters
        settings = settings if layer_type is None else settings[layer_type]
        # Padding that makes ranks even, and an image that stands in, are behind the texts and short.
        lengths = F.pad(lengths, (0, position_ids.shape[-1] - lengths.shape[-1]))
        limit = settings["original_max_position_embeddings"]
        long = lengths > limit
        # The class goes by the largest position. Those of padding behind a short text may be above the limit.
        places = position_ids.clamp(max=limit - 1), torch.where(long, position_ids, 0)
        parts = (own(rotary, x, positions, **kwargs) for positions in places)
        return tuple(torch.where(long[..., None], b, a) for a, b in zip(*parts, strict=True))
