"""Mistakes around a tensor-parallel model that raise no error by themselves, refused in one line.

Ranks of one group compute one forward pass together. Other rows on one of them, or another draw while sampling, would
give numbers that belong to no batch; and what attention returns of its scores is about the heads of one rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smp.config.schema import ConfigError
from smp.hf import optimizers
from smp.hf.adapters import base_of, faces_of
from smp.hf.planning.module_plan import check_dropout, dropouts, heads_of
from smp.hf.sagemaker.fsdp1 import FSDP2
from smp.parallel.agree import gather
from smp.parallel.collectives import Group, gather_features

_SCORES = ("attentions", "cross_attentions", "decoder_attentions", "encoder_attentions")
# Integer types of the same width: sums of bits are exact, and NaNs compare.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def install(model: Any, group: Group, device_type: str) -> None:
    """Watch ``model``, which is cut over ``group`` and computes on devices of this type."""
    base, _ = base_of(model)
    if hasattr(base, "generate"):
        base.generate = MethodType(_Generate(group, device_type), base)
    heads = heads_of(base)
    for face in faces_of(model):
        face.register_forward_pre_hook(_FirstPass(group), with_kwargs=True)
        face.register_forward_hook(_WholeScores(group, heads), with_kwargs=True)
    for module in {module for module, _, _ in dropouts(model)}:  # of a model that is in evaluation now
        module.train = partial(_train, module, model)  # type: ignore[method-assign]


def _train(module: nn.Module, model: nn.Module, mode: bool = True) -> nn.Module:
    """``module.train`` of a module with dropout: checks when any part of ``model`` is set to training."""
    if mode:
        check_dropout(model)
    # The class's method: this function hides it on the instance.
    return type(module).train(module, mode)


def refuse_ddp(model: Any) -> None:
    """Let DistributedDataParallel around ``model``, which is cut, end in one line: it would average parts of different
    ranks. Its constructor iterates over this attribute of the module."""
    for face in faces_of(model):
        face._ddp_params_and_buffers_to_ignore = _NoDDP()


class _NoDDP:
    def __iter__(self) -> Iterator[str]:
        raise ConfigError(
            "DistributedDataParallel does not know of the cut of smp.transform and would average parts of different "
            f"ranks; instead of it: {FSDP2}"
        )


@dataclass
class _FirstPass:
    """Before the first forward pass in training and the first in evaluation: check that all ranks of the group were
    given the same tensors, and in training that nothing is dropped. Later passes are not compared, as each would cost a
    message.

    Attributes:
        group: the ranks of the model; ``smp.init`` may have divided ranks anew since.
    """

    group: Group
    seen: set[bool] = field(default_factory=set)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Once for training and once for evaluation. Collectives are not traced into compiled code.
        if model.training in self.seen or torch.compiler.is_compiling():
            return
        if model.training:
            check_dropout(model)  # which may have been set since
            optimizers.check(model)
        self.seen.add(model.training)
        named = {f"argument {index}": value for index, value in enumerate(args)} | kwargs
        mine = {name: _mark(value) for name, value in named.items() if isinstance(value, torch.Tensor)}
        # Marks, not tensors: a few numbers per argument travel.
        ranks = gather(mine, self.group.process_group)
        for rank, other in enumerate(ranks):
            for name in ranks[0].keys() | other.keys():
                if other.get(name) != ranks[0].get(name):
                    raise ConfigError(
                        f"{name} differs between ranks 0 and {rank} of one tensor-parallel group: they read the same "
                        "rows; share a batch out by smp.state.dp_rank of smp.state.dp_size"
                    )


def _mark(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, dtype, and the sum of the bits, each weighted by its position."""
    # Sharded inputs differ between ranks by design, and meta tensors have no bits.
    if isinstance(tensor, DTensor) or tensor.is_meta:
        return ()
    bits = tensor.detach().contiguous().flatten()
    if bits.dtype.is_complex:
        bits = torch.view_as_real(bits).flatten()
    bits = bits.view(_BITS[bits.element_size()]).long()
    # Weighted: a permutation of the same values must give another sum. int64 wraps around, the same
    # on every rank.
    indices = torch.arange(1, bits.numel() + 1, device=bits.device)
    return tuple(tensor.shape), str(tensor.dtype), int((bits * indices).sum())


@dataclass(frozen=True)
class _Generate:
    """The class's own ``generate``, with a check that ranks of a group draw the same tokens.

    Attributes:
        group: the ranks of the model.
        device_type: where it computes; its weights may wait elsewhere.
    """

    group: Group
    device_type: str

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        # Arguments by name, as the class's generate would read them.
        given = inspect.signature(type(model).generate).bind_partial(model, *args, **kwargs).arguments
        config = given.get("generation_config") or model.generation_config
        if kwargs.get("do_sample", getattr(config, "do_sample", False)):
            numbers = torch.get_rng_state()
            # Sampling draws on the device where the model computes: its generator counts, too.
            if self.device_type != "cpu":
                numbers = torch.cat((numbers, torch.get_device_module(self.device_type).get_rng_state()))
            if len(set(gather(_mark(numbers), self.group.process_group))) > 1:
                raise ConfigError(
                    "generate(do_sample=True): the ranks of a tensor-parallel group would draw different tokens: "
                    "torch.manual_seed() with the same number on all of them before it"
                )
        return type(model).generate(model, *args, **kwargs)


@dataclass(frozen=True)
class _WholeScores:
    """Forward hook: with ``output_attentions`` the scores of all heads are gathered.

    Attributes:
        group: the ranks that have some heads each.
        heads: of the whole model, None where its configuration does not say.
    """

    group: Group
    heads: int | None

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        config = getattr(model, "config", None)
        if not (kwargs.get("output_attentions") or getattr(config, "output_attentions", False)):
            return output
        if not hasattr(output, "keys"):
            raise ConfigError("output_attentions: call a transformed model without return_dict=False")
        for name in _SCORES:
            if output.get(name):
                output[name] = tuple(self._whole(scores) for scores in output[name])
        return output

    def _whole(self, scores: Any) -> Any:
        """(batch, heads/tp, queries, keys) -> (batch, heads, queries, keys)."""
        if not isinstance(scores, torch.Tensor) or (scores.ndim == 4 and scores.shape[1] == self.heads):
            return scores  # of attention that every rank computes whole
        if scores.ndim != 4 or scores.shape[1] * self.group.size != self.heads:
            raise ConfigError(
                f"output_attentions: {tuple(scores.shape)} is not of {self.heads} heads, of which a rank has some"
            )
        # gather_features joins the last dimension: heads are moved there and back.
        return gather_features(scores.movedim(1, -1), self.group).movedim(-1, 1)
