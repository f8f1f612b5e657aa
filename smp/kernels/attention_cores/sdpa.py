"""PyTorch's fused attention, called by its operators: they return the log-sum-exps that a merge of parts needs, and
take the merged ones in the backward pass.

A row's probabilities are p = exp(s - lse), so gradients of one block of keys are (Dao 2023, arXiv 2307.08691)
    D = rowsum(dout * out);  dv = p^T dout;  ds = p * (dout v^T - D);  dq = ds k * scale;  dk = ds^T q * scale,
right for any block of keys when ``out`` and ``lse`` are those of all keys.

Tensors are (batch, heads, length, head_dim), lse fp32 (batch, heads, length), of the natural logarithm. A forward
operator is differentiable by itself, but for lse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from smp.kernels.cpp.attention import DTYPES, attention, attention_backward

aten = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Scores:
    """Options of a call's scores.

    Attributes:
        causal: a query does not see later keys; only without a mask, and with as many keys as queries.
        mask: added to the scores, (batch or 1, 1, length, keys), in the dtype of the queries.
        scale: of q k^T; None: 1 / sqrt(head_dim).
    """

    causal: bool
    mask: torch.Tensor | None
    scale: float | None


@dataclass(frozen=True)
class Operator:
    """One backend on one kind of device.

    Attributes:
        forward: (q, k, v, scores) -> (out, lse).
        backward: (dout, q, k, v, out, lse, scores) -> (dq, dk, dv).
        multiple: head_dim has to be a multiple of this.
    """

    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Scores], Tensors]
    backward: Callable[..., Tensors]
    multiple: int = 1


def _cpu_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: Scores) -> Tensors:
    """Any dtype; fewer key/value heads than query heads. A row that sees no key has out 0 and lse 0."""
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, s.causal, attn_mask=s.mask, scale=s.scale)


def _cpu_flash_backward(*tensors: torch.Tensor, scores: Scores) -> Tensors:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, 0.0, scores.causal, attn_mask=scores.mask, scale=scores.scale
    )


def _cpp(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: Scores) -> Tensors:
    """fp32 and bf16; fewer key/value heads than query heads. A model that has got another dtype since it was built
    (``.double()``) goes to PyTorch's kernel."""
    if q.dtype not in DTYPES:
        return _cpu_flash(q, k, v, s)
    return attention(q, k, v, s.mask, s.causal, _scale(q, s))


def _cpp_backward(*tensors: torch.Tensor, scores: Scores) -> Tensors:
    dout, q, k, v, out, lse = tensors
    if q.dtype not in DTYPES:
        return _cpu_flash_backward(*tensors, scores=scores)
    return attention_backward(dout, q, k, v, out, lse, scores.mask, scores.causal, _scale(q, scores))


def _scale(q: torch.Tensor, scores: Scores) -> float:
    return q.shape[-1] ** -0.5 if scores.scale is None else scores.scale


def _cuda_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: Scores) -> Tensors:
    """Half precision, no mask; fewer key/value heads than query heads."""
    # The operator has no argument for a mask: it would be left out silently.
    _refuse_mask(s)
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, s.causal, False, scale=s.scale)
    return out, lse


def _cuda_flash_backward(*tensors: torch.Tensor, scores: Scores) -> Tensors:
    _refuse_mask(scores)
    dout, q, k, v, out, lse = (x.contiguous() for x in tensors)  # views of k, v and lse gave others wrong gradients
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is not used
    sizes = q.shape[2], k.shape[2]
    return aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, *sizes, 0.0, scores.causal, state, state.new_empty(()), scale=scores.scale
    )


def _efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: Scores) -> Tensors:
    """Any dtype except fp64, a mask; the operator pads lse to a multiple of 32 rows."""
    mask = _aligned(s.mask, q, k)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, s.causal, scale=s.scale)
    # Without the rows that the kernel added.
    return out, lse[:, :, : q.shape[2]]


def _efficient_backward(*tensors: torch.Tensor, scores: Scores) -> Tensors:
    dout, q, k, v, out, lse = tensors
    # As the forward operator would have given it, with rows up to a multiple of 32.
    lse = F.pad(lse, (0, -lse.shape[2] % 32)).contiguous()
    # ``state`` is that of dropout, which is not used.
    mask, state = _aligned(scores.mask, q, k), torch.zeros((), dtype=torch.int64, device=q.device)
    wanted = [True, True, True, False]  # no gradient of the mask
    *grads, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, mask, out, lse, state, state, 0.0, wanted, scores.causal, scale=scores.scale
    )
    return tuple(grads)


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: Scores) -> Tensors:
    """Half precision, a mask; fewer key/value heads than query heads; the operator's lse has a last dimension of size
    1."""
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, s.mask, True, 0.0, s.causal, False, scale=s.scale)
    return out, lse.reshape(q.shape[:3])


def _cudnn_backward(*tensors: torch.Tensor, scores: Scores) -> Tensors:
    dout, q, k, v, out, lse = tensors
    state, sizes = torch.zeros((), dtype=torch.int64, device=q.device), (q.shape[2], k.shape[2])
    # With the last dimension of 1 that the forward operator gives.
    lse, rest = lse.contiguous()[..., None], (state, state, scores.mask, None, None, *sizes)
    return aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, *rest, 0.0, scores.causal, scale=scores.scale
    )


CPU = {"flash": Operator(_cpu_flash, _cpu_flash_backward), "cpp": Operator(_cpp, _cpp_backward)}
CUDA = {
    "flash": Operator(_cuda_flash, _cuda_flash_backward, multiple=8),
    "efficient": Operator(_efficient, _efficient_backward, multiple=8),
    "cudnn": Operator(_cudnn, _cudnn_backward),
}


def operator_for(name: str, device: torch.device) -> Operator:
    """The operator of backend ``name``.

    Raises:
        RuntimeError: there is none on such a device.
    """
    known = CUDA if device.type == "cuda" else CPU
    if name not in known:
        needed = "CPU" if name in CPU else "CUDA device"
        raise RuntimeError(f"attention backend {name} needs a {needed}, these tensors are on {device}")
    return known[name]


def _refuse_mask(scores: Scores) -> None:
    if scores.mask is not None:
        raise RuntimeError("FlashAttention takes no mask on a GPU: use its variable-length kernel, or another backend")


def _aligned(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """The mask of all heads, with rows that begin at multiples of 8 elements: the kernel loads so many at a time."""
    if mask is None:
        return None
    keys = k.shape[2]
    # Padded in memory and cut off again as a view: the rows stay as long as they should look.
    if keys % 8:
        mask = F.pad(mask, (0, -keys % 8))[..., :keys]
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], keys)
