"""CUDA C++ kernels of ``csrc/``: built when asked for, loaded when first used."""
