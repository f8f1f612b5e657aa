"""Muon: momentum whose matrices are orthogonalized before they are added to the weights.

For a matrix W (out, in) with gradient G, momentum mu and learning rate lr (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/; Liu et al. 2025, arXiv 2502.16982):

    B <- mu B + (1 - mu) G        U = mu B + (1 - mu) G, with Nesterov's momentum, else B
    W <- (1 - lr decay) W - lr scale(out, in) NS(U)

NS is a fixed number of Newton-Schulz steps, which bring all singular values of U / |U| near 1 without computing one. It
needs the whole matrix. Ranks that share matrices take turns: each gets one whole matrix at a time, by an all-to-all,
orthogonalizes it in fp32 and sends the parts back (``smp.parallel.owners``). So the result is that of one rank, up to
the rounding of the gradient. NS enlarges what is below |U| by at most 3.4445 a step, so five steps enlarge a relative
error of U by at most 485; what tests see is far less.

Bytes: a rank that has n elements of matrices sends (and receives) about 2 x 4 n of them per step, and works with one
whole matrix at a time, of which NS holds at most five copies. Every replica (dp_replicate) does the same work.

Muon is for the matrices of blocks: query, key, value, each expert's projections, each by itself. Embeddings, the output
matrix or a reward model's head, norms and biases get AdamW, with the same learning rate and --adam-beta1 and so on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from smp.config import OptimizerConfig
from smp.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from smp.layers.heads.head import VocabParallelHead
from smp.layers.heads.score import ScoreHead
from smp.parallel.dtensor_region import local_part
from smp.parallel.owners import on_owners

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Coefficients of the quintic that is applied to the singular values in each step (Jordan et al.)."""
_SMALLEST_NORM = 1e-7


def orthogonalized(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Newton-Schulz steps: U S V^T -> about U V^T, with singular values between about 0.7 and 1.2.

    Args:
        matrix: (..., out, in), each matrix by itself; computed with in its dtype.
        steps: 5 as published.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix  # the smaller Gram matrix
    # A matrix without a gradient stays zero and does not become NaN.
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.mT
        # a x + b (x x^T) x + c (x x^T)^2 x: the quintic, of singular values alone.
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def scale_of(mode: str, out_features: int, in_features: int) -> float:
    """How much an orthogonalized update is scaled by its shape (Megatron's names).

    - spectral: sqrt(max(out, in)). Times 0.2 the update has the size of AdamW's usual one, so that learning rate and
      weight decay of AdamW fit (Liu et al. 2025, arXiv 2502.16982; torch's ``match_rms_adamw``).
    - shape_scaling: sqrt(max(1, out / in)) (Jordan et al.; torch's ``original``).
    - unit_rms_norm: sqrt(out / in) (Bernstein & Newhouse 2024, arXiv 2409.20325).
    """
    if mode == "spectral":
        return max(out_features, in_features) ** 0.5
    ratio = out_features / in_features
    return (max(1.0, ratio) if mode == "shape_scaling" else ratio) ** 0.5


def matrices_of(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that Muon trains: matrices and stacks of experts' matrices. Not the embeddings of tokens and
    positions, the output matrix, a reward model's head (a single row), and convolution kernels, which are no matrices
    of a product."""
    kinds = PositionEmbedding | nn.Embedding | ScoreHead | nn.Conv1d
    at_the_ends = vocabulary_of(model) | {p for m in model.modules() if isinstance(m, kinds) for p in m.parameters()}
    of_channels = {p for name, p in model.named_parameters() if name.endswith("_conv")}
    return {p for p in model.parameters() if p.requires_grad} - at_the_ends - of_channels - vectors_of(model)


def vocabulary_of(model: nn.Module) -> set[nn.Parameter]:
    """The embedding of token ids and the output matrix."""
    tables = (VocabParallelEmbedding, VocabParallelHead)
    found = {p for m in model.modules() if isinstance(m, tables) for p in m.parameters(recurse=False)}
    for ask in ("get_input_embeddings", "get_output_embeddings"):  # a model of transformers says which they are
        with contextlib.suppress(AttributeError, NotImplementedError):  # one without it lacks the method, or raises
            module = getattr(model, ask)()
            found |= set() if module is None else set(module.parameters())
    return found


_QUERY_KEY_NORMS = ".query_norm.weight", ".key_norm.weight"


def vectors_of(model: nn.Module, *, query_key_norms: bool = True) -> set[nn.Parameter]:
    """Parameters without weight decay: those with one dimension, and experts' biases, which are stacked into
    matrices; norms of queries and keys only with ``query_key_norms``."""
    found = {name: p for name, p in model.named_parameters() if p.ndim <= 1 or name.endswith(".bias")}
    return {
        p for name, p in found.items() if query_key_norms or not name.endswith(_QUERY_KEY_NORMS) or ".indexer." in name
    }


class Muon(torch.optim.Optimizer):
    """Muon for some groups, and torch's fused AdamW for the others.

    State of a matrix: ``momentum_buffer``; of other parameters AdamW's.

    Args:
        groups: of parameters, each with ``use_muon`` and ``weight_decay``.
        config: of the optimizer.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], config: OptimizerConfig) -> None:
        groups = list(groups)
        betas = config.adam_beta1, config.adam_beta2
        super().__init__(groups, {"lr": config.lr})
        self.config = config
        others = [group for group in self.param_groups if not group["use_muon"]]
        self._adam: torch.optim.AdamW | None = None
        if others:
            # Its groups and its state are this optimizer's own, so that a learning rate or a checkpoint is set once.
            self._adam = torch.optim.AdamW(others, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)
            self._adam.param_groups, self._adam.state = others, self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            if group["use_muon"]:
                self._update(group)
        if self._adam is not None:
            self._adam.step()

    def new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of a matrix before its first step."""
        return {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}

    def _update(self, group: dict[str, Any]) -> None:
        trained = [p for p in group["params"] if p.grad is not None]
        momentum, lr = self.config.muon_momentum, group["lr"]

        def smoothed(number: int) -> torch.Tensor:
            # Momentum is element by element, so each rank computes it for its part; only the next
            # step needs whole matrices.
            p = trained[number]
            state, grad = self.state[p], local_part(p.grad)
            if not state:
                state.update(self.new_state(p))
            buffer = local_part(state["momentum_buffer"]).lerp_(grad, 1 - momentum)
            return grad.lerp(buffer, momentum) if self.config.muon_use_nesterov else buffer

        def direction(_: int, whole: torch.Tensor) -> torch.Tensor:
            return orthogonalized(whole, self.config.muon_num_ns_steps)

        def add(number: int, part: torch.Tensor) -> None:
            p = trained[number]
            scale = self.config.muon_extra_scale_factor * scale_of(self.config.muon_scale_mode, *p.shape[-2:])
            # Decay first, of the old weight, as AdamW's.
            local_part(p.detach()).mul_(1 - lr * group["weight_decay"]).add_(part, alpha=-lr * scale)

        # Collective: ranks that share matrices go through the same list in the same order.
        on_owners(trained, smoothed, direction, add)
