"""Kernels of experts: ``router`` (logits to experts and weights), ``permute`` (rows to experts and back), ``grouped``
(products of rows with their experts' matrices; ``grouped_scaled``: in FP8)."""
