"""One transformer block: the unit of FSDP, recompute and torch.compile. Pipelines split the model between blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smp.kernels.dropout import keyed_dropout
from smp.kernels.token_layout import TokenLayout
from smp.layers.mixer import Mixer
from smp.layers.mlp import MLP
from smp.layers.moe.layer import MoE
from smp.layers.moe.router import Balance, Counted
from smp.layers.norm import Norm, Own, local_weights

_NORMS = "attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"
DROPOUT_SITES = 3
"""Dropout sites of a block: the mixer's own (attention probabilities), the mixer's output, and the feed-forward
network's output."""
Run = Callable[..., Any]
"""Type of a block's computation: the arguments of ``forward`` to its result."""


class TransformerBlock(nn.Module):
    """A mixer and an MLP with norms and residual connections, one after the other or side by side; or one of them.

    Args:
        attention, mlp: the mixer, which is attention or another one, and the MLP or mixture of experts; one may be
            None.
        attention_norm, mlp_norm: the normalizations in front of them; None: there is none.
        attention_post_norm, mlp_post_norm: those of what they give; None: there is none.
        parallel_residual: both read the block's input and are added to it together (GPT-NeoX). Without ``mlp_norm`` the
            MLP reads what attention reads (Falcon, Cohere). Norms after them are for one after the other.
        multiplier: of what each part adds to the residual stream.
        dropout: on what each part adds to the residual stream.

    Shapes: (tokens [/p], hidden) -> the same; with a mixer that ``measures``, (output, the mixer's own loss or None).

    Raises:
        ValueError: when the parts differ in ``sequence_parallel``, or there is none; on use, when dropout in training
            mode lacks the keys or ``token_index``.
    """

    def __init__(
        self,
        attention: Mixer | None,
        mlp: MLP | MoE | None,
        attention_norm: Norm | None,
        mlp_norm: Norm | None,
        *,
        attention_post_norm: Norm | None = None,
        mlp_post_norm: Norm | None = None,
        parallel_residual: bool = False,
        multiplier: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        parts: dict[str, Mixer | MLP | MoE | Norm | None] = {
            "attention": attention,
            "mlp": mlp,
            "attention_norm": attention_norm,
            "mlp_norm": mlp_norm,
            "attention_post_norm": attention_post_norm,
            "mlp_post_norm": mlp_post_norm,
        }
        # Said here, where the names are known: a mixture of layouts would fail later in a sum of shapes.
        if attention is None and mlp is None:
            raise ValueError("a block needs a mixer or an MLP")
        split = {name: part.sequence_parallel for name, part in parts.items() if part is not None}
        if len(set(split.values())) > 1:
            raise ValueError(f"the parts of a block differ in sequence_parallel: {split}")
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.attention_post_norm, self.mlp_post_norm = attention_post_norm, mlp_post_norm
        self.parallel_residual, self.multiplier, self.dropout = parallel_residual, multiplier, dropout
        self.measures: bool = getattr(attention, "measures", False)
        # Recompute, compile and offload replace this attribute: parameters and their names stay as they are.
        self.run: Run = self._run

    def forward(self, x: torch.Tensor, layout: TokenLayout, keys: torch.Tensor | None = None) -> Any:
        """Apply the block; ``keys`` are its three dropout keys, int64 (3,).

        Goes through ``self.run``: recompute and compile wrap that, inside of FSDP's hooks, which stay on ``forward``.
        """
        return self._chosen(layout)(x, layout, keys)

    def _chosen(self, layout: TokenLayout) -> Run:
        """The computation to run. Not the compiled one while text is generated: it would be compiled for every
        length."""
        return self.run if layout.cache is None else self._run

    def _run(self, x: torch.Tensor, layout: TokenLayout, keys: torch.Tensor | None) -> Any:
        x, measured = self._computed(x, layout, keys, self.mlp)
        return (x, measured) if self.measures else x

    def _computed(
        self, x: torch.Tensor, layout: TokenLayout, keys: torch.Tensor | None, mlp: Callable[..., torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The block's output, and what its mixer measured."""
        # Before the norms run, so that in the backward pass this comes after all of them, and their
        # gradients are summed at once.
        own = self._own_of_norms(x.dtype)
        if self.attention is None:
            assert mlp is not None, "a block has one of them"
            normed = x if self.mlp_norm is None else self.mlp_norm(x, own["mlp_norm"])
            return x + self._fed(mlp, normed, layout, keys, own), None
        # Without a norm in front the mixer reads the residual stream itself (post-norm, OLMo 2).
        normed = x if self.attention_norm is None else self.attention_norm(x, own["attention_norm"])
        attended, measured = self._mixed(self.attention, normed, layout, None if keys is None else keys[0])
        if self.attention_post_norm is not None:
            attended = self.attention_post_norm(attended, own["attention_post_norm"])
        attended = self._added(attended, layout, keys, 1)
        if mlp is None:
            return x + attended, measured
        if self.parallel_residual:
            normed = normed if self.mlp_norm is None else self.mlp_norm(x, own["mlp_norm"])
            # The order of the sum is fixed: x, attention, MLP, in every layout.
            return x + attended + self._fed(mlp, normed, layout, keys, own), measured
        if self.mlp_norm is None:
            normed = x = x + attended
        else:
            # The addition belongs to the norm's kernel: the sum is read once instead of twice.
            normed, x = self.mlp_norm.after_addition(x, attended, own["mlp_norm"])
        return x + self._fed(mlp, normed, layout, keys, own), measured

    def _mixed(
        self, mixer: Mixer, x: torch.Tensor, layout: TokenLayout, key: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        mixed: Any = mixer(x, layout, key)
        return mixed if self.measures else (mixed, None)

    def _fed(
        self,
        mlp: Callable[..., torch.Tensor],
        normed: torch.Tensor,
        layout: TokenLayout,
        keys: torch.Tensor | None,
        own: dict[str, Own],
    ) -> torch.Tensor:
        """The MLP's contribution to the residual stream, after its post-norm, dropout and multiplier."""
        fed = mlp(normed, layout.token_index, layout.local_token_index)
        if self.mlp_post_norm is not None:
            fed = self.mlp_post_norm(fed, own["mlp_post_norm"])
        return self._added(fed, layout, keys, 2)

    def _own_of_norms(self, dtype: torch.dtype) -> dict[str, Own]:
        """Weights and biases of the norms, by name; their gradients are summed in one all-reduce."""
        norms = {name: getattr(self, name) for name in _NORMS if getattr(self, name) is not None}
        return dict(zip(norms, local_weights(list(norms.values()), dtype), strict=True)) if norms else {}

    def _added(self, y: torch.Tensor, layout: TokenLayout, keys: torch.Tensor | None, site: int) -> torch.Tensor:
        """The contribution of an output ``y`` to the residual stream: after dropout and multiplier."""
        y = self._drop(y, layout, keys, site)
        return y if self.multiplier == 1.0 else y * self.multiplier

    def _drop(self, x: torch.Tensor, layout: TokenLayout, keys: torch.Tensor | None, site: int) -> torch.Tensor:
        if self.dropout == 0.0 or not self.training:
            return x
        index = layout.local_token_index
        # Numbers of the wrong tokens would be a wrong mask without an error.
        if keys is None or index is None or index.shape[0] != x.shape[0]:
            raise ValueError(
                "dropout needs keys and TokenLayout.token_index, under sequence parallelism local_token_index: "
                "its masks are keyed by them"
            )
        return keyed_dropout(x, keys[site], index, self.dropout)


class MoEBlock(TransformerBlock):
    """A block whose MLP is a mixture of experts, which also measures how its loads are balanced.

    Returns (x, balance), and with a mixer that ``measures`` (x, balance, what that measured).
    """

    def forward(
        self,
        x: torch.Tensor,
        layout: TokenLayout,
        keys: torch.Tensor | None = None,
        counted: Counted | None = None,
    ) -> Any:
        """The output of :class:`TransformerBlock`, and the balance that :class:`MoE` measures with ``counted``, the
        counts and weights of the tokens in ``x``."""
        assert isinstance(self.mlp, MoE)
        # Through ``Experts.forward``, on which FSDP's hooks for experts sit: their weights are
        # gathered before the block runs, and recompute replays the block without gathering them again.
        return self.mlp.experts(self._chosen(layout), x, layout, keys, counted)

    def _run(  # type: ignore[override]
        self, x: torch.Tensor, layout: TokenLayout, keys: torch.Tensor | None, counted: Counted | None
    ) -> Any:
        # ``_computed`` knows one output of an MLP. What the experts measured takes this way around it.
        measured: list[Balance | None] = []
        moe = self.mlp
        assert moe is not None

        def mlp(x: torch.Tensor, *index: torch.Tensor | None) -> torch.Tensor:
            y, found = moe(x, *index, counted, layout)
            measured.append(found)
            return y

        x, of_mixer = self._computed(x, layout, keys, mlp)
        return (x, measured[0], of_mixer) if self.measures else (x, measured[0])
