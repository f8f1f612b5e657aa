"""What attention cores compute from the split of a sequence: once per micro-batch, for all layers."""

from __future__ import annotations

from smp.kernels.attention_cores.attention_core import AttentionSpec
from smp.kernels.sequence_cut import SequenceCut
from smp.kernels.token_layout import Pattern

Kind = tuple[Pattern, bool]
"""What layers share that have the same plan: the pattern, and whether probabilities are dropped."""


def kind_of(spec: AttentionSpec, cut: SequenceCut) -> Kind:
    """The kind of a layer. A window that reaches to the first token of a sequence counts as none."""
    hides = spec.window is not None and spec.window < cut.length
    return (spec.causal, spec.window if hides else None), spec.dropout > 0.0
