"""FP8 linear layers: where the scales of their operands come from, so that every layout has the same.

scaling.py         the recipes: which numbers share a scale, and which ranks have to agree on it
history.py         delayed scaling's memory: maxima of the last steps
scales.py          which of them a layer has
traced.py          the same in compiled code
grouped.py         experts' projections
apply.py           which layers of a model compute in FP8

The arithmetic is in ``smp.kernels.precision.fp8``, the products are in ``smp.kernels.product``.
"""
