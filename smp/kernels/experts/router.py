"""Top-k routing: from logits z (tokens, experts) each token's k experts C and their weights w.

Chosen are the k largest of what is compared, and of equal ones those with the lowest numbers. With factor f:

    softmax        compared z        w = f softmax(z of C)
    pre_softmax    compared z        w = f (softmax(z) of C)
    sigmoid        compared z        w = f s / (sum of s over C + 1e-20), s = sigmoid(z); with k = 1 f s

With a bias per expert the values that are compared are softmax(z) (pre_softmax), s (sigmoid) or z (softmax) plus that
bias. Callers that compute other values (groups, sinkhorn) pass them as ``compared``. The choice has no gradient. The
gradient of z, with g_e = f dw_e for the chosen experts and 0 for the others, is

    softmax, pre_softmax    dz = p (g - sum of p g)                p = w / f, or the softmax of all
    sigmoid                 dz = q (g - sum of q g) (1 - s)        q = w / f; with k = 1 dz = s (1 - s) g

where 1 - s is computed as sigmoid(-z): the difference loses digits near s = 1, where the chosen scores are. At s = 0.99
one ulp of s is an error of 6e-6 of the gradient, and devices differ in that ulp.

Bytes in fp32: forward 4 for a logit and 12 for a choice, backward 8 for a logit and 12 for a choice: each logit is read
once, where a sort and its softmax read and write it several times. Logits and experts are kept.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from smp.kernels.registry import accumulation_dtype, dispatched, first_derivative_only, register

Scores = Literal["softmax", "pre_softmax", "sigmoid"]
FLOOR = 1e-20
"""Added to a sum of sigmoids, which may all be 0."""


def choose_experts(
    logits: torch.Tensor,
    k: int,
    scores: Scores,
    factor: float = 1.0,
    *,
    bias: torch.Tensor | None = None,
    compared: torch.Tensor | None = None,
    backend: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts, weights), each (tokens, k), in descending order of the compared values.

    Args:
        logits: (tokens, experts).
        k: experts of a token.
        scores, factor: see above.
        bias: (experts,), without gradient.
        compared: (tokens, experts), without gradient: choose by these values instead of the scores.
        backend: torch or triton.
    """
    # Plain operations: autograd differentiates them, and a compiler fuses them.
    if backend == "torch":
        return _chosen(logits, compared, bias, k, scores, factor)
    return _ChooseExperts.apply(logits, compared, bias, k, scores, factor, backend)


def compared_values(logits: torch.Tensor, scores: Scores, bias: torch.Tensor | None) -> torch.Tensor:
    """(tokens, experts): the values of which the k largest are chosen."""
    return logits if bias is None else scores_of(logits, scores) + bias.to(logits.dtype)


def scores_of(logits: torch.Tensor, scores: Scores) -> torch.Tensor:
    """(tokens, experts): the scores, to which the expert bias is added."""
    if scores == "sigmoid":
        return logits.sigmoid()
    return logits.softmax(-1) if scores == "pre_softmax" else logits


def _chosen(
    logits: torch.Tensor,
    compared: torch.Tensor | None,
    bias: torch.Tensor | None,
    k: int,
    scores: Scores,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts, weights) by the formulas, in the dtype of the logits."""
    # Detached: which experts are chosen has no gradient.
    values = compared_values(logits.detach(), scores, bias) if compared is None else compared
    # A stable sort and not ``topk``, which leaves the order of equal values open.
    experts = values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return experts, _weights(logits, experts, scores) * factor


def _weights(logits: torch.Tensor, experts: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Weights of the chosen experts, without the factor."""
    if scores == "sigmoid":
        chosen = _of_experts(logits, experts).sigmoid()
        return chosen / (chosen.sum(-1, keepdim=True) + FLOOR) if experts.shape[1] > 1 else chosen
    if scores == "pre_softmax":
        # Over all experts, and not normalized again.
        return _of_experts(logits.softmax(-1), experts)
    # softmax over the chosen logits is the softmax over all of them, normalized again.
    return _of_experts(logits, experts).softmax(-1)


def _of_experts(values: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """``values`` (tokens, experts) at each token's ``experts``, int64 (tokens, k). One column is picked by a product,
    because torch 2.13 compiles a wrong gradient of its gather."""
    if experts.shape[1] > 1:
        return values.gather(1, experts)
    chosen = torch.zeros_like(values).scatter(1, experts, 1.0)
    return (values * chosen).sum(-1, keepdim=True)


class _ChooseExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        compared: torch.Tensor | None,
        bias: torch.Tensor | None,
        k: int,
        scores: Scores,
        factor: float,
        backend: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        compared = None if compared is None else compared.contiguous()
        experts, weights = _forward_op(logits.contiguous(), compared, bias, k, scores, factor, backend)
        ctx.save_for_backward(logits, experts)
        # Indices of experts have no gradient.
        ctx.mark_non_differentiable(experts)
        ctx.scores, ctx.factor, ctx.backend = scores, factor, backend
        return experts, weights

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, _: Any, dweights: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, experts = ctx.saved_tensors
        given = dweights.contiguous(), logits.contiguous(), experts
        return _backward_op(*given, ctx.scores, ctx.factor, ctx.backend), *(None,) * 6


def forward_reference(
    logits: torch.Tensor,
    compared: torch.Tensor | None,
    bias: torch.Tensor | None,
    k: int,
    scores: Scores,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts, weights) by the formulas."""
    z = logits.to(accumulation_dtype(logits.dtype))
    experts, weights = _chosen(z, compared, bias, k, scores, factor)
    return experts.contiguous(), weights.to(logits.dtype)


def backward_reference(
    dweights: torch.Tensor, logits: torch.Tensor, experts: torch.Tensor, scores: Scores, factor: float
) -> torch.Tensor:
    """dz by the formulas."""
    z = logits.to(accumulation_dtype(logits.dtype))
    chosen = torch.zeros_like(z, dtype=torch.bool).scatter_(1, experts, True)
    # (tokens, experts), 0 where an expert was not chosen
    g = torch.zeros_like(z).scatter_(1, experts, factor * dweights.to(z.dtype))
    if scores == "sigmoid":
        # 1 - s as sigmoid(-z), see the module docstring.
        s, rest = z.sigmoid(), (-z).sigmoid()
        if experts.shape[1] == 1:
            return (s * rest * g).to(logits.dtype)
        s = s.masked_fill(~chosen, 0)
        q = s / (s.sum(-1, keepdim=True) + FLOOR)
        return (q * (g - (q * g).sum(-1, keepdim=True)) * rest).to(logits.dtype)
    # Both kinds have one formula: what is not chosen has p = 0 (softmax), or g = 0 (pre_softmax).
    p = (z if scores == "pre_softmax" else z.masked_fill(~chosen, float("-inf"))).softmax(-1)
    return (p * (g - (p * g).sum(-1, keepdim=True))).to(logits.dtype)


def _forward_fake(
    logits: torch.Tensor, compared: torch.Tensor | None, bias: torch.Tensor | None, k: int, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = logits.shape[0], k
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape)


def _backward_fake(dweights: torch.Tensor, logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits.new_empty(logits.shape)


_forward_op = register(
    "choose_experts(Tensor logits, Tensor? compared, Tensor? bias, int k, str scores, float factor, str backend)"
    " -> (Tensor, Tensor)",
    dispatched("router", "forward", forward_reference),
    _forward_fake,
)
_backward_op = register(
    "choose_experts_backward(Tensor dweights, Tensor logits, Tensor experts, str scores, float factor, str backend)"
    " -> Tensor",
    dispatched("router", "backward", backward_reference),
    _backward_fake,
)
