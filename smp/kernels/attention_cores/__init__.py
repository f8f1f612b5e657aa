"""Attention as a kernel: out and log-sum-exp from queries, keys, values and a token layout.

Read :mod:`smp.kernels.attention_cores.attention_core` first: the interface. ``math_attention`` is the reference that
all others are compared with, ``fused_attention`` and ``sdpa`` are PyTorch's operators, ``varlen`` is FlashAttention;
``select_attention`` picks one for a run and says why.
"""
