"""Fused arithmetic on plain tensors, without process groups.

One file per operation: the formula, what it costs in bytes, the readable PyTorch version (what a CPU runs, and the
oracle of every faster one), the operator ``torch.ops.smp.*`` that graphs see, and the function that layers call.
Attention, experts, recurrences and low precision have packages of their own. Faster versions: ``triton/``
and ``csrc/`` (CUDA C++), imported when they are first used. :mod:`smp.kernels.dispatch` says which one a run uses.
"""

from smp.kernels.dispatch import TORCH, Backend, Kernels

__all__ = ["TORCH", "Backend", "Kernels"]
