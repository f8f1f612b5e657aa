"""Weights of a transformed model built on the meta device: drawn, or read from a folder, part by part.

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    smp.transform(model)  # stays on the meta device; then fully_shard, if there is sharding
    smp.load_weights(model, folder)  # or DelayedParamIniter(model).init()

A rank never holds more than its parts and one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smp.checkpoint import CheckpointError
from smp.checkpoint.all_ranks import on_all_ranks
from smp.config.schema import ConfigError
from smp.convert.huggingface.store import open_store
from smp.convert.store import PieceStore
from smp.hf.adapters import base_of
from smp.hf.loading.first_values import FirstValues
from smp.hf.loading.stored_names import Source, rules_of, sources_of
from smp.hf.loading.twins import twin_of
from smp.hf.sagemaker.fsdp1 import root_of
from smp.hf.state import state
from smp.parallel.agree import gather
from smp.parallel.dtensor_region import local_part, local_region


def load_weights(model: nn.Module, folder: str | Path, leave: Collection[str] = ()) -> None:
    """Fill ``model``, on the meta device or not, with the safetensors of a Hugging Face folder. Every rank calls this,
    before or after ``fully_shard``, and reads its own parts. What transformers renames, merges or splits on loading is
    so here, too; of tensors that a rule takes together (not stacks of experts) a rank reads all. Tensors of the
    model in ``leave`` keep their values.

    Raises:
        CheckpointError: on all ranks, for files that are damaged or lack a tensor.
    """
    base, _ = base_of(model)
    if base is not model:
        raise ConfigError("load_weights: not with adapters of peft; load the model before get_peft_model")
    allocate(model)

    def fill() -> list[str]:
        store = open_store(Path(folder), False)
        try:
            return _fill(model, store, leave)
        finally:
            store.files.close()

    # Every rank learns of an error on any rank.
    unknown = on_all_ranks("load_weights: ", fill, lambda found: found[0])
    if unknown and state.rank == 0:
        print(
            f"smp.load_weights: {len(unknown)} tensors of {folder} are not in the model: {unknown[0]} ...", flush=True
        )


@torch.no_grad()
def _fill(model: Any, store: PieceStore, leave: Collection[str]) -> list[str]:
    """Fill the parameters from ``store``; returns names that are stored and have no place in the model."""
    twin = twin_of(model)
    rules = rules_of(twin)
    # Rules are asked of a twin: names and shapes in the model itself are those of parts.
    sources = sources_of(twin, rules, store.tensors)
    tensors = {name: t for name, t in model.state_dict(keep_vars=True).items() if name not in leave}
    _check_complete(model, tensors, {name for source in sources for name in source.targets}, store)
    filled: set[int] = set()  # tied parameters may be in the files twice
    for source in sources:
        if not filled.issuperset(id(tensors[name]) for name in source.targets if name in tensors):
            _fill_from(source, twin, tensors, store)
            filled |= {id(tensors[name]) for name in source.targets if name in tensors}
    model._weight_conversions = [rule for rule in rules if rule.was_used()]  # save_pretrained reverses these
    used = {name for source in sources for names in source.stored.values() for name in names}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return [name for name in store.tensors if name not in used and not any(re.search(key, name) for key in ignored)]


def _check_complete(model: Any, tensors: Mapping[str, Any], found: set[str], store: PieceStore) -> None:
    """Raise CheckpointError unless every tensor of the model is found, a tied one under any of its names."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    optional = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    for shared in names.values():
        # A buffer that transformers lists as computed need not be stored.
        computed = not isinstance(tensors[shared[0]], nn.Parameter) and any(re.search(k, shared[0]) for k in optional)
        if found.isdisjoint(shared) and not computed:
            raise CheckpointError(f"{store.where('')} has no tensor {shared[0]}")


def _fill_from(source: Source, twin: Any, tensors: Mapping[str, Any], store: PieceStore) -> None:
    first = tensors[source.targets[0]]
    region, dtype = local_region(first), first.dtype
    if source.rule is None:
        _read_part(source.stored[""][0], source.targets[0], first, store)
        return
    # A stack of experts: only the rows of this rank's experts are read.
    stack = source.stacks(first.shape)
    if stack and region.empty:
        return
    rows = slice(region.offsets[0], region.offsets[0] + region.sizes[0]) if stack else slice(None)
    for name, made in source.made(twin, partial(_read_whole, store, dtype), rows).items():
        tensor, start = tensors.get(name), rows.start or 0
        if tensor is None:
            raise CheckpointError(
                f"{store.where('')}: transformers' rules make {name} of it, the model has no such tensor"
            )
        size = (tensor.shape[0] if stack else made.shape[0], *made.shape[1:]) if made.ndim else ()
        _check_shape(name, size, tensor)
        region = local_region(tensor)
        for dim, (offset, length) in enumerate(zip(region.offsets, region.sizes, strict=True)):
            # Dimension 0 of ``made`` begins at ``start``, which was read; the other dimensions are
            # whole.
            made = made.narrow(dim, offset - (start if dim == 0 else 0), length)
        if not region.empty:
            local_part(tensor).copy_(made)


def _check_shape(name: str, stored: Sequence[int], tensor: torch.Tensor) -> None:
    if tuple(stored) != tuple(tensor.shape):
        raise CheckpointError(f"{name} is {tuple(stored)} in the files, {tuple(tensor.shape)} in the model")


def _read_whole(store: PieceStore, dtype: torch.dtype, name: str) -> torch.Tensor:
    stored = store.tensors[name]
    read = torch.empty(stored.shape, dtype=stored.dtype)
    store.read_into(name, (0,) * read.ndim, read)
    return read.to(dtype)  # as transformers, before it merges


def _read_part(stored_name: str, name: str, tensor: torch.Tensor, store: PieceStore) -> None:
    stored, region, data = store.tensors[stored_name], local_region(tensor), local_part(tensor)
    _check_shape(name, stored.shape, tensor)
    if region.empty:
        return
    straight = data.is_cpu and data.dtype == stored.dtype and data.is_contiguous()
    # Without a copy, a tensor on the CPU is read into its own memory.
    read = data if straight else torch.empty(region.sizes, dtype=stored.dtype)
    store.read_into(stored_name, region.offsets, read)
    if not straight:
        data.copy_(read)


def allocate(model: nn.Module) -> None:
    """Allocate memory for all that is on the meta device; buffers get the values that their classes compute."""
    values = FirstValues(model)
    for name, module in model.named_modules():
        _allocate_own(values, name, module)


@torch.no_grad()
def _allocate_own(values: FirstValues, name: str, module: nn.Module) -> list[str]:
    """Allocate one module's tensors; returns which parameters were on the meta device. Parameter objects stay the same,
    so that ties and FSDP's lists of parameters hold."""
    missing = [own for own, p in module._parameters.items() if p is not None and p.is_meta]
    for own in missing:
        parameter = module._parameters[own]
        assert parameter is not None
        made = nn.Parameter(torch.empty_like(parameter, device=state.device_type), parameter.requires_grad)
        vars(made).update(vars(parameter))
        # swap_tensors exchanges the contents of two tensor objects and keeps every reference to the
        # first.
        torch.utils.swap_tensors(parameter, made)
    # Buffers are computed twice, from 0 and from 1: what differs was not written by any rule.
    first = _computed(values, name, module, 0)
    for own, again in _computed(values, name, module, 1).items():
        if not torch.equal(first[own], again):
            raise ConfigError(
                f"{name}.{own}: {type(module).__name__} does not compute this buffer again: build the model under "
                "accelerate's init_empty_weights(), which keeps buffers"
            )
        # Computed from 1s and from 0s alike: the rule has written all of it.
        module._buffers[own] = again
    for own, buffer in module._buffers.items():
        module._buffers[own] = buffer if buffer is None else buffer.to(state.device_type)
    return missing


def _computed(values: FirstValues, name: str, module: nn.Module, start: int) -> dict[str, torch.Tensor]:
    """Buffers of ``module`` on the meta device, computed by transformers' rules from buffers full of ``start``."""
    meta = {own: buffer for own, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
    empty = {own: torch.full(buffer.shape, start, dtype=buffer.dtype, device="cpu") for own, buffer in meta.items()}
    return values.buffers(name, empty) if empty else {}


class DelayedParamIniter:
    """First values of a model on the meta device, the same bits in every layout.

    Each parameter is drawn whole by transformers' own rules (:mod:`smp.hf.loading.first_values`) from a generator keyed
    by (seed, name), and this rank keeps its part. They are not the bits of ``from_config`` on a CPU, which draws all
    parameters from one generator, one after the other, but numbers of the same distributions.

    Args:
        model: transformed, and sharded or not. After ``transform(load_state_dict_from_rank0=True)`` nothing is left to
            draw, and some ranks may do without.
        seed: of the numbers; None: ``random_seed`` of ``smp.init``, else torch's seed on rank 0.

    Raises:
        ConfigError: nothing is on the meta device; the model has adapters of peft; or a rule of its class needs values.
    """

    def __init__(self, model: nn.Module, seed: int | None = None) -> None:
        self.model, self.seed = model, 0
        self.names = {id(module): name for name, module in model.named_modules()}
        self.waiting = {name for name, parameter in model.named_parameters() if parameter.is_meta}
        self.values = FirstValues(model)
        if getattr(model, "smp_from_rank0", False):
            return  # SMP v2 sends the weights in FSDP, so its scripts call this on all ranks but 0: no collectives
        if not self.waiting:
            raise ConfigError("DelayedParamIniter: no parameter is on the meta device: nothing is delayed")
        seed = state.settings.random_seed if seed is None else seed
        self.seed = gather(torch.initial_seed())[0] if seed is None else seed
        if base_of(model)[0] is not model:
            raise ConfigError("DelayedParamIniter: not with adapters of peft: fill the model before get_peft_model")
        _ = self.values.writers  # of the whole model: FSDP1 takes it apart while it asks

    def init(self) -> None:
        """Draw all parameters of the model."""
        for module in self.model.modules():
            self._init(module)

    def get_param_init_fn(self) -> Callable[[nn.Module], None]:
        """The function that initializes the own parameters of one module (SMP v2's name; FSDP1's param_init_fn)."""
        return self._init

    def get_post_param_init_fn(self) -> Callable[..., None]:
        """SMP v2's hook to tie weights again. Nothing to do: ties stay."""
        return lambda *_: None

    def count_num_params(self, module: nn.Module, *_: Any) -> int:
        """Elements of all parameters of ``module``, whole."""
        return sum(p.numel() for p in module.parameters())

    @contextmanager
    def validate_params_and_buffers_inited(self, enabled: bool = True) -> Iterator[None]:
        """Check after the block that nothing is on the meta device, and that the model has as many parameters as
        before.

        Raises:
            AssertionError: in SMP's words, if not.
        """
        before = self.count_num_params(self.model)
        yield
        if enabled:
            left = [n for n, t in (*self.model.named_parameters(), *self.model.named_buffers()) if t.is_meta]
            assert not left, f"{left[0]} is still on the meta device"
            if root_of(self.model) is None:
                assert self.count_num_params(self.model) == before, "the number of parameters changed"
            else:  # FSDP1 keeps pieces, but had all of them drawn
                assert not self.waiting, f"{min(self.waiting)} was not drawn"

    @torch.no_grad()
    def _init(self, module: nn.Module) -> None:
        name = self.names.get(id(module))
        if name is None:
            raise ConfigError(f"{type(module).__name__} is no module of the model that DelayedParamIniter was given")
        for own in _allocate_own(self.values, name, module):
            parameter, full = module._parameters[own], f"{name}.{own}" if name else own
            region = local_region(parameter)  # type: ignore[arg-type]
            # Drawn whole on every rank, then cut: the bits do not depend on the layout.
            whole = self.values.draw(full, self.seed)
            # The same cut as of loaded weights: offsets and sizes of this rank's region.
            for dim, (first, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
                whole = whole.narrow(dim, first, size)
            if not region.empty:
                local_part(parameter).copy_(whole)  # type: ignore[arg-type]
            self.waiting.discard(full)
