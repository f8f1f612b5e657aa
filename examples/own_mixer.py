"""A custom mixer in smp's decoder: an exponential moving average over the tokens of a document.

    torchrun --nproc-per-node 2 examples/own_mixer.py --mock-data --vocab-size 512 --train-iters 10 \
        --num-layers 4 --layer-types ema attention --tensor-model-parallel-size 2 --sequence-parallel

y_t = d y_{t-1} + (1 - d) v_t for each channel, v = W x, out = U y, with y = 0 before the first token of a document. The
decay d is the sigmoid of a learned number. Channels are split over the tensor-parallel ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

import pretrain_gpt
from smp.config import ConfigError
from smp.kernels.token_layout import TokenLayout
from smp.layers import ColumnParallelLinear, RowParallelLinear
from smp.layers.parameter import SHARD_ROWS, Constant, local, tp_parameter
from smp.models.build_layers import Build
from smp.models.inventory import Parameter, linear
from smp.models.mixers import register_mixer


@dataclass(frozen=True)
class Ema:
    """Settings of one such mixer."""

    width: int

    def __str__(self) -> str:
        return f"moving average of {self.width} channels"


@dataclass(frozen=True)
class DocumentStarts:
    """What the mixer needs of the tokens: where a document begins, bool (batch, length)."""

    key: str = "document starts"

    def prepare(self, layout: TokenLayout, sequence_lengths: Callable[[], torch.Tensor]) -> torch.Tensor:
        assert layout.position_ids is not None
        if layout.cut is not None:
            raise ConfigError("--context-parallel-size: a moving average does not pass its state between ranks")
        starts = torch.zeros(layout.batch, layout.length, dtype=torch.bool, device=layout.position_ids.device)
        starts[:, 0] = True
        if (ids := layout.document_ids) is not None:
            starts[:, 1:] = (ids[:, 1:] != ids[:, :-1]).to(starts.device)
        return starts


class MovingAverage(nn.Module):
    """(tokens [/p], hidden) -> the same, see :class:`smp.layers.mixer.Mixer`."""

    def __init__(self, spec: Ema, build: Build) -> None:
        super().__init__()
        self.sequence_parallel, self.needs = build.context.sequence_parallel, (DocumentStarts(),)
        # The first gathers the tokens that sequence parallelism splits, the second splits them again.
        self.value = ColumnParallelLinear(
            build.hidden_size, spec.width, build.context, bias=False, init_std=build.init_std
        )
        self.output = RowParallelLinear(
            spec.width, build.hidden_size, build.context, bias=False, init_std=build.output_std
        )
        self.decay = tp_parameter((spec.width,), SHARD_ROWS, build.context.tp)
        self.initializers = {"decay": Constant(0.0)}

    def forward(self, x: torch.Tensor, layout: TokenLayout, key: torch.Tensor | None = None) -> torch.Tensor:
        if layout.cache is not None:
            raise ConfigError("a moving average keeps nothing between tokens: it cannot generate text")
        values = self.value(x, layout.local_token_index)  # (tokens, width/p)
        decay, starts = local(self.decay, torch.float32).sigmoid(), layout.prepared[DocumentStarts.key]
        rows = values[: layout.num_queries].float().unflatten(0, (layout.batch, layout.length))
        state, states = torch.zeros_like(rows[:, 0]), []
        for t in range(layout.length):
            state = torch.where(starts[:, t, None], 0.0, state) * decay + (1 - decay) * rows[:, t]
            states.append(state)
        mixed = torch.stack(states, dim=1).flatten(0, 1).to(values.dtype)  # (batch x length, width/p)
        padding = values.new_zeros(layout.padding, values.shape[1])
        return self.output(torch.cat((mixed, padding)), token_index=layout.token_index)


def parameters(spec: Ema, hidden: int, name: str) -> Iterator[Parameter]:
    """What the inventory says of it."""
    yield from linear(f"{name}.value", hidden, spec.width, 0, False)
    yield from linear(f"{name}.output", spec.width, hidden, 1, False)
    yield Parameter(f"{name}.decay", (spec.width,), 0)


register_mixer(
    "ema", Ema, resolve=lambda model, layer: Ema(model.hidden_size), build=MovingAverage, parameters=parameters
)
if __name__ == "__main__":
    sys.exit(pretrain_gpt.main(sys.argv[1:]))
