"""The protocol of a layer's mixer: the module that mixes tokens, such as attention."""

from __future__ import annotations

from typing import Protocol

import torch

from smp.kernels.token_layout import TokenLayout
from smp.layers.token_needs import TokenNeed


class Mixer(Protocol):
    """A ``torch.nn.Module`` with the following.

    Attributes:
        sequence_parallel: input and output are split over the TP ranks along dim 0.
        needs: what it finds prepared in ``layout.prepared``; equal needs of several layers are prepared once.

    A mixer whose class has ``measures = True`` returns a pair: its output, and a 0-dim loss of its own or None.
    Mixers that compute attention by ``kernels.attention`` also have ``spec`` (:class:`AttentionSpec`) and ``chunk``:
    the layout they get holds masks, document ends and plans of exchanges for these.
    """

    sequence_parallel: bool
    needs: tuple[TokenNeed, ...]

    def __call__(self, x: torch.Tensor, layout: TokenLayout, key: torch.Tensor | None = None) -> torch.Tensor:
        """(tokens [/p], hidden) -> (tokens [/p], hidden).

        Args:
            x: the layer's input, or its norm's result.
            layout: of the tokens: sequences, documents, padding, and what was prepared of them. While text is
                generated its ``cache`` (:mod:`smp.layers.kv_cache`) has what the layer kept of earlier tokens; a mixer
                that keeps nothing has to refuse it.
            key: int64, 0-dim, of the mixer's own dropout; None: nothing is dropped.
        """
