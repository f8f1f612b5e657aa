"""Triton kernels and their launchers, one file per operation; importing them needs triton.

Conventions: load in the tensors' dtype, compute in fp32, round once when storing. Hyper-parameters are ``tl.constexpr``
(a Python float may otherwise become fp64). Row numbers are int64 before they meet a stride. With TRITON_INTERPRET=1 in
the environment, when the file is imported, everything runs on a CPU, one program after the other.
"""
