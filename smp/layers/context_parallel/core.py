"""Base of all attention cores over split sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from smp.kernels.attention_cores.attention_core import AttentionCore, AttentionSpec, Pair
from smp.kernels.token_layout import TokenLayout
from smp.parallel.collectives import Group


@dataclass(frozen=True)
class CutAttention(ABC):
    """An attention core over sequences that are cut over ``group``; see
    :mod:`smp.kernels.attention_cores.attention_core`. Sequences that are whole go to ``core``.

    Attributes:
        core: computes what this rank has after the exchange.
        group: the ranks that hold parts of the same sequences.
    """

    core: AttentionCore
    group: Group

    @property
    def name(self) -> str:
        return self.core.name

    def prepare(
        self, layout: TokenLayout, specs: Iterable[AttentionSpec], dtype: torch.dtype, device: torch.device
    ) -> TokenLayout:
        """The layout with a plan for all layers."""
        if layout.cut is None:
            return self.core.prepare(layout, specs, dtype, device)
        return replace(layout, plan=self.plan(layout, specs, dtype, device))

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: TokenLayout,
        spec: AttentionSpec,
        dropout_key: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Pair:
        if layout.cut is None:
            return self.core(q, k, v, layout, spec, dropout_key, sinks)
        if layout.plan is None:
            # A caller without a model, such as a test or a layer of one's own, has prepared nothing.
            layout = self.prepare(layout, [spec], q.dtype, q.device)
        return self.exchange(q, k, v, layout, spec, dropout_key, sinks)

    @abstractmethod
    def plan(
        self, layout: TokenLayout, specs: Iterable[AttentionSpec], dtype: torch.dtype, device: torch.device
    ) -> Any:
        """The plan of exchanges and calls for a cut, once per micro-batch."""

    @abstractmethod
    def exchange(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: TokenLayout,
        spec: AttentionSpec,
        dropout_key: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> Pair:
        """Attention of cut sequences, whose layout has a plan."""
