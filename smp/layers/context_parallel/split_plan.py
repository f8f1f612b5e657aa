"""Kinds of layers that share a plan: attention cores make one per kind and micro-batch."""

from __future__ import annotations

from smp.kernels.attention_cores.attention_core import AttentionSpec
from smp.kernels.sequence_cut import SequenceCut
from smp.kernels.token_layout import Pattern

Kind = tuple[Pattern, bool]
"""(pattern, whether probabilities are dropped): layers of one kind share a plan."""


def kind_of(spec: AttentionSpec, cut: SequenceCut) -> Kind:
    """The kind of a layer. A window that reaches to the first token of a sequence counts as none."""
    hides = spec.window is not None and spec.window < cut.length
    return (spec.causal, spec.window if hides else None), spec.dropout > 0.0
