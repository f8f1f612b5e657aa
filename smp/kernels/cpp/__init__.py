"""Kernels in C++ for CPUs, from ``smp/kernels/csrc``."""
