"""Arithmetic on plain tensors, without process groups: what a fused kernel may replace."""
