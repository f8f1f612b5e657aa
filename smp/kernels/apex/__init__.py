"""Kernels of apex, used where it is installed with its CUDA extensions; it cannot be had from a package index."""
