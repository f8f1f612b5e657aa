"""A workaround for outputs of ``autograd.Function`` under torch.compile."""

from __future__ import annotations

import torch


def returned(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``x``, in ``dtype`` if given, as an ``autograd.Function`` may return it: in a graph a value that nothing else is.

    torch 2.11's compiler gives no gradient, and no error, to an output that is another value of the forward pass, too:
    one that was summed in place, or ``x.to(x.dtype)``. It returns both, and the gradient of the second, which nothing
    uses, counts. Compiled code fuses the copy with what makes ``x``."""
    if dtype is not None and dtype != x.dtype:
        return x.to(dtype)
    return x.clone() if torch.compiler.is_compiling() else x
