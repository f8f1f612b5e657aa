"""The weights of a model that trains, in Hugging Face's names: gathered one tensor after the other, without files.

A tensor is made whole by one sum over all ranks: each part of it is put in by one of the ranks that have it, and all
others add zeros. So nothing depends on what cut it (TP, FSDP, EP, stages of a pipeline), and a rank holds a few whole
tensors at a time. What then becomes of names, and of matrices that lie in one there, is what the converters' tables
say (``smp.convert``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp.checkpoint import collect_logical_rows, training_state
from smp.config import ModelConfig
from smp.convert.huggingface.folder import HFTarget
from smp.convert.peft.adapters import Adapter, Adapters, MergedWeights
from smp.convert.pieces import Feed, Room
from smp.convert.store import Stored
from smp.convert.weights import Weights
from smp.models.inventory import EXPERT_BIAS, weights_of
from smp.parallel.agree import gather, rank
from smp.parallel.dtensor_region import local_part, local_region
from smp.parallel.region import Region

_HELD = 3
"""Whole tensors that are kept: query, key and value may lie in one matrix."""
_ROOM = 1 << 30
"""Bytes of buffers on the CPU; a larger tensor gets a buffer of its own."""
_MODEL = "model."


class LiveWeights(Weights):
    """Weights under this project's names. Reading is collective: all ranks read the same ones in one order.

    Args:
        model: sharded, this rank's parts of it.
        config: of it.
        dtype: what is gathered; biases that balance experts keep theirs.
        device: of the model.
    """

    def __init__(self, model: nn.Module, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.notes, self._device, self._dtype = config, [], device, dtype
        # The sharded parameters themselves: FSDP puts others in their place while it has gathered them.
        self._own = {name.removeprefix(_MODEL): tensor for name, tensor in training_state(model)[0].items()}
        rows = {name.removeprefix(_MODEL): count for name, count in collect_logical_rows(model).items()}
        here = {name: (tuple(t.shape), rows.get(name), local_region(t)) for name, t in self._own.items()}
        self._mine, self._shapes = set[str](), dict[str, tuple[tuple[int, ...], int | None]]()
        # The first rank that has a shard contributes it; replicas add zeros.
        seen = set[tuple[str, Region]]()
        for other, said in enumerate(gather(here)):
            for name, (shape, real, region) in said.items():
                self._shapes[name] = (shape, real)
                if other == rank() and not region.empty and (name, region) not in seen:
                    self._mine.add(name)
                seen.add((name, region))
        self._held: dict[str, torch.Tensor] = {}
        self.tensors = {p.name: Stored(tuple(p.shape), self._kind(p.name)) for p in weights_of(config)}

    @property
    def names(self) -> list[str]:
        """Names of all tensors of the model and its adapters, on whichever rank they are; the same on all ranks."""
        return sorted(self._shapes)

    def _kind(self, name: str) -> torch.dtype:
        return torch.float32 if name.endswith(f".{EXPERT_BIAS}") else self._dtype

    def whole(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor, without padding, on the device."""
        shape, real = self._shapes[name]
        whole = torch.zeros(shape, dtype=dtype, device=self._device)
        if name in self._mine:
            region = local_region(self._own[name])
            where = tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))
            whole[where] = local_part(self._own[name]).detach().to(whole)
        # 0 + x is x: the sum is exact.
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(whole)
        # The vocabulary may be padded for tensor parallelism.
        return whole if real is None else whole[:real]

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        if name not in self._held:
            # The oldest goes: tensors of one matrix are asked for one after the other.
            while len(self._held) >= _HELD:
                del self._held[next(iter(self._held))]
            self._held[name] = self.whole(name, self._kind(name))
        out.copy_(self._held[name][tuple(slice(o, o + n) for o, n in zip(offsets, out.shape, strict=True))])

    def changed(self) -> None:
        """Forget gathered tensors: the weights have changed."""
        self._held.clear()

    def fingerprint(self) -> Any:
        raise TypeError("weights that change are no files")


class WeightStream:
    """All tensors of the model as another program's engine takes them, adapters added.

    Args:
        live: of the model.
        scales: of adapters, by the name of their layer, as ``smp.layers.adapters.lora`` has them.
        reference: a Hugging Face folder with the config.json that the model came with; None: there is none.
        progress: called as tensors go.
    """

    def __init__(
        self, live: LiveWeights, scales: Mapping[str, float], reference: Path | None, progress: Callable[[], None]
    ) -> None:
        self._live, self._scales, self._progress = live, dict(scales), progress
        self._target = HFTarget(live, None, reference)

    @property
    def content(self) -> dict[str, Any]:
        """config.json of the model."""
        return dict(self._target.content)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor on the CPU), whose memory is used again for the next one. Collective."""
        self._live.changed()
        weights: Weights = self._live
        if self._scales:
            weights = MergedWeights(self._live, Adapters({name: self._adapter(name) for name in self._scales}))
        feed = Feed(weights, Room(_ROOM), lambda count: self._progress())
        for planned in chain.from_iterable(self._target.files.values()):
            with feed.whole(planned) as tensor:
                yield planned.name, tensor
        self._live.changed()

    def _adapter(self, layer: str) -> Adapter:
        parts = {part: f"{layer}.lora.{part}" for part in ("a", "b", "magnitude")}
        known = {part: self._live.whole(name, torch.float32).cpu() for part, name in parts.items() if self._has(name)}
        return Adapter(known["a"], known["b"], self._scales[layer], known.get("magnitude"))

    def _has(self, name: str) -> bool:
        return name in self._live.names
