"""Layouts whose activations are offloaded, and what counts what is on the device."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch

from smp.config import ParallelConfig
from smp.kernels.copier import Copier
from smp.sharding.offload import Offload, _Block, _Saved, _Token
from tests.parity.cases import Case, Problem, Spread


class CountingOffload(Offload):
    """Also counts block inputs, which full recompute saves and nothing else does, by the life of their memory."""

    def __init__(self, config: ParallelConfig, copier: Copier) -> None:
        full = config.recompute_granularity == "full"
        size = 0 if full else config.min_offloaded_tensor_size
        super().__init__(copier, horizon=config.activation_loading_horizon, min_tensor_size=size)
        self.counts, self.pipeline = full, config.pipeline_model_parallel_size > 1
        self.most_alive = 0
        self._inputs: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._inputs[storage._cdata] = weakref.ref(storage)
        alive = [cdata for cdata, reference in self._inputs.items() if reference() is not None]
        self._inputs = {cdata: self._inputs[cdata] for cdata in alive}
        self.most_alive = max(self.most_alive, len(alive))

    def _pack(self, token: _Token, tensor: torch.Tensor) -> _Saved | torch.Tensor:
        saved = super()._pack(token, tensor)
        if isinstance(saved, _Saved):
            self._note(tensor)
        return saved

    def _fetch(self, block: _Block) -> None:
        super()._fetch(block)
        for storage in block.storages.values():
            assert storage.flat is not None
            self._note(storage.flat)

    def check(self, *, first: bool) -> None:
        """After a run: things went to the host and came back, at least of the ``first`` stage, which has most, and the
        horizon was kept. A stage of a pipeline is called with its input, which lives as long as the call."""
        assert self.copier.bytes_out >= self.copier.bytes_back >= first
        assert not self._live and not self._passes
        assert self.most_live <= self.horizon
        assert not self.counts or 0 < self.most_alive <= self.horizon + self.pipeline, self.most_alive


def _case(problem: dict[str, Any] | None = None, **spread: Any) -> Case:
    made = Spread(**({"horizon": 2, "recompute": "full"} | spread))
    own = {"steps": 2, "layers": 4, "kv_heads": 2, "micro_batches": made.data_parallel * made.accumulation}
    return Case(Problem(**(own | (problem or {}))), made)


_CLIP: dict[str, Any] = {"clip": True, "unequal": True}
_EVEN: dict[str, Any] = {"length": 16}
_EXPERTS: dict[str, Any] = {"experts": "mixtral", "micro_batch": 2}
_ADAM: dict[str, Any] = {"optimizer": "adam", "steps": 3}


def fast_cases() -> list[Case]:
    """Ways to split and schedules, with and without recompute; the last with Adam's steps on the host."""
    return [
        _case(_CLIP, tp=2, sp=True),
        _case(tp=2, recompute="none"),
        _case(_CLIP, shard=2, accumulation=3, bf16=True),
        _case(shard=2, recompute="none", horizon=3),
        _case(pp=2, schedule="gpipe", accumulation=3),
        _case(pp=2, schedule="1f1b", accumulation=4, recompute="none", horizon=1),
        _case(_CLIP, pp=2, schedule="interleaved", accumulation=4),
        _case({"mtp": 1}, pp=2, schedule="zb-h1", accumulation=4),
        _case({"style": "gpt2", "tied": True}, pp=2, schedule="zb-v", accumulation=4),
        _case(_EVEN, cp=2),
        _case(_EVEN, cp=2, exchange="a2a", recompute="none"),
        _case(_ADAM | _CLIP, shard=2, horizon=0, host_steps=True),
    ]


def more_cases() -> list[Case]:
    """Of experts, replicas, four processes, and of Adam's steps on the host beside the others."""
    return [
        _case({"dropout": True}, replicate=2, accumulation=2, horizon=1),
        _case(pp=2, schedule="1f1b", accumulation=4, horizon=3, reshard=True),
        _case(_EXPERTS, shard=2, ep=2),
        _case(_EXPERTS | {"mtp": 1}, shard=2, ep=2, recompute="none"),
        _case(_CLIP, tp=2, sp=True, pp=2, schedule="1f1b", accumulation=3, bf16=True),
        _case(_EVEN, shard=2, cp=2, recompute="none"),
        _case({"packed": True, "dropout": True}, tp=2, sp=True, shard=2, accumulation=2),
        _case(_ADAM, tp=2, sp=True, horizon=0, host_steps=True, bf16=True),
        _case(_ADAM, replicate=2, accumulation=2, host_steps=True),
        _case(_ADAM | _CLIP | {"tied": True}, pp=2, schedule="zb-v", accumulation=3, host_steps=True),
        _case(_ADAM | _EXPERTS, shard=2, ep=2, horizon=0, host_steps=True),
        _case(_ADAM | _CLIP, tp=2, shard=2, host_steps=True),
    ]


def without_offload(case: Case) -> Case:
    """The same on the device alone."""
    return replace(case, spread=replace(case.spread, horizon=0, host_steps=False))
