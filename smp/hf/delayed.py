"""Weights of a transformed model that was built on the meta device: drawn, or read from a folder, part by part.

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    smp.transform(model)  # stays on the meta device; then fully_shard, if there is sharding
    smp.load_weights(model, folder)  # or DelayedParamIniter(model).init()

A rank never holds more than its parts and one tensor.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from smp.checkpoint import CheckpointError
from smp.checkpoint.together import together
from smp.config.schema import ConfigError
from smp.convert.hf_store import open_store
from smp.convert.store import PieceStore
from smp.hf.adapters import base_of
from smp.hf.fsdp1 import root_of
from smp.hf.state import state
from smp.parallel.agree import gather
from smp.parallel.boxes import local_box, local_part
from smp.parallel.rng import stable_hash


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Fill ``model``, on the meta device or not, with the safetensors of a Hugging Face folder. Every rank calls this,
    before or after ``fully_shard``, and reads its own parts.

    Raises:
        CheckpointError: on all ranks, for files that are damaged or lack a tensor. transformers renames and merges some
            tensors while it loads (experts); such a folder lacks them, and goes through ``from_pretrained`` on rank 0
            and ``load_state_dict_from_rank0=True``.
    """
    base, _ = base_of(model)
    if base is not model:
        raise ConfigError("load_weights: not with adapters of peft; load the model before get_peft_model")
    _allocate(model)

    def fill() -> None:
        store = open_store(Path(folder), False)
        try:
            _fill(model, store)
        finally:
            store.files.close()

    together("load_weights: ", fill, lambda _: None)


@torch.no_grad()
def _fill(model: nn.Module, store: PieceStore) -> None:
    names: dict[int, list[str]] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)  # tied parameters are in the file once
    for shared in names.values():
        tensor = tensors[shared[0]]
        name = next((name for name in shared if name in store.tensors), "")
        if not name:
            raise CheckpointError(f"{store.where('')} has no tensor {shared[0]}")
        stored, box, data = store.tensors[name], local_box(tensor), local_part(tensor)
        if tuple(stored.shape) != tuple(tensor.shape):
            raise CheckpointError(f"{name} is {tuple(stored.shape)} in the files, {tuple(tensor.shape)} in the model")
        if box.empty:
            continue
        straight = data.is_cpu and data.dtype == stored.dtype and data.is_contiguous()
        read = data if straight else torch.empty(box.sizes, dtype=stored.dtype)
        store.read_into(name, box.offsets, read)
        if not straight:
            data.copy_(read)


def _allocate(model: nn.Module) -> None:
    """Memory for all that is on the meta device; buffers get the values that their classes compute."""
    for name, module in model.named_modules():
        _allocate_own(model, name, module)


@torch.no_grad()
def _allocate_own(model: nn.Module, name: str, module: nn.Module) -> list[str]:
    """For one module; returns which of its own parameters had none. Their objects stay, so ties and FSDP's lists do."""
    missing = [own for own, p in module._parameters.items() if p is not None and p.is_meta]
    for own in missing:
        parameter = module._parameters[own]
        assert parameter is not None
        made = nn.Parameter(torch.empty_like(parameter, device=state.device_type), parameter.requires_grad)
        vars(made).update(vars(parameter))
        torch.utils.swap_tensors(parameter, made)
    buffers = [own for own, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
    first = _computed(model, module, buffers, 0)
    for own, again in _computed(model, module, buffers, 1).items():
        if not torch.equal(first[own], again):
            raise ConfigError(
                f"{name}.{own}: {type(module).__name__} does not compute this buffer again: build the model under "
                "accelerate's init_empty_weights(), which keeps buffers"
            )
        module._buffers[own] = again
    for own, buffer in module._buffers.items():
        module._buffers[own] = buffer if buffer is None else buffer.to(state.device_type)
    return missing


def _computed(model: Any, module: nn.Module, buffers: list[str], start: int) -> dict[str, torch.Tensor]:
    """Buffers by transformers' rules for the module; what these leave out is ``start``."""
    if not buffers:
        return {}
    twin = _twin(module)
    for own in buffers:
        meta = module._buffers[own]
        assert meta is not None
        twin._buffers[own] = torch.full(meta.shape, start, dtype=meta.dtype, device="cpu")
    _init_weights(model, twin)
    return {own: twin._buffers[own] for own in buffers}  # type: ignore[misc]


def _twin(module: nn.Module) -> nn.Module:
    """A module of the same class and numbers, whose own parameters are whole, on the meta device and others."""
    kind = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))  # not of fully_shard
    twin = cast(nn.Module, object.__new__(kind))
    vars(twin).update(vars(module))
    vars(twin).pop("forward", None)
    whole = {own: None if p is None else torch.empty(p.shape, device="meta") for own, p in module._parameters.items()}
    twin._parameters = {own: None if p is None else nn.Parameter(p) for own, p in whole.items()}
    twin._buffers, twin._modules = dict(module._buffers), dict(module._modules)
    return twin


def _init_weights(model: Any, module: nn.Module) -> None:
    base, _ = base_of(model)
    if not hasattr(base, "_init_weights"):
        raise ConfigError(f"{type(base).__name__} has no _init_weights, transformers' rules for first values")
    base._init_weights(module)


class DelayedParamIniter:
    """First values of a model on the meta device, the same bits in every layout.

    Each module's parameters are drawn whole by transformers' own rules (``_init_weights``) from a generator keyed by
    (seed, name), and this rank keeps its part. They are not the bits of ``from_config`` on a CPU, which draws all
    parameters from one generator, one behind the other.

    Args:
        model: transformed, and sharded or not. After ``transform(load_state_dict_from_rank0=True)`` nothing is left to
            draw, and some ranks may do without.
        seed: of the numbers; None: ``random_seed`` of ``smp.init``, else torch's seed on rank 0.

    Raises:
        ConfigError: nothing is on the meta device; or the class initializes parameters from outside of their module.
    """

    def __init__(self, model: nn.Module, seed: int | None = None) -> None:
        self.model, self.seed = model, 0
        self.names = {id(module): name for name, module in model.named_modules()}
        self.waiting = {name for name, parameter in model.named_parameters() if parameter.is_meta}
        if getattr(model, "smp_from_rank0", False):
            return  # SMP v2 sends the weights in FSDP, so its scripts call this on all ranks but 0: no collectives
        if not self.waiting:
            raise ConfigError("DelayedParamIniter: no parameter is on the meta device: nothing is delayed")
        seed = state.settings.random_seed if seed is None else seed
        self.seed = gather(torch.initial_seed())[0] if seed is None else seed
        _check_rules(model)

    def init(self) -> None:
        """All of it."""
        for module in self.model.modules():
            self._init(module)

    def get_param_init_fn(self) -> Callable[[nn.Module], None]:
        """What initializes the own parameters of one module of the model."""
        return self._init

    def get_post_param_init_fn(self) -> Callable[..., None]:
        """What ties weights again: nothing is to do, ties stay."""
        return lambda *_: None

    def count_num_params(self, module: nn.Module, *_: Any) -> int:
        """Elements of all parameters of ``module``, whole."""
        return sum(p.numel() for p in module.parameters())

    @contextmanager
    def validate_params_and_buffers_inited(self, enabled: bool = True) -> Iterator[None]:
        """After the block nothing is on the meta device, and the model has as many parameters as before.

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
        missing = _allocate_own(self.model, name, module)
        if not missing:
            return
        twin = _twin(module)
        for own in missing:
            parameter = module._parameters[own]
            assert parameter is not None
            twin._parameters[own] = nn.Parameter(torch.full(parameter.shape, torch.nan, dtype=parameter.dtype))
        with torch.random.fork_rng(devices=[]):
            seed = stable_hash(self.seed, name) & 0xFFFFFFFF  # all that a CPU generator takes of it
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs too, for good
            _init_weights(self.model, twin)
        for own in missing:
            self._keep(f"{name}.{own}", module._parameters[own], twin._parameters[own])
            self.waiting.discard(f"{name}.{own}")

    def _keep(self, name: str, parameter: Any, whole: Any) -> None:
        if whole.isnan().any():
            raise ConfigError(f"{name}: transformers' rules give {type(self.model).__name__} no first value for it")
        box = local_box(parameter)
        for dim, (first, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            whole = whole.narrow(dim, first, size)
        if not box.empty:
            local_part(parameter).copy_(whole)


def _check_rules(model: Any) -> None:
    """Rules that reach from a module into its children need whole children."""
    base, _ = base_of(model)
    for kind in type(base).__mro__:
        rules = vars(kind).get("_init_weights")
        if rules is not None and kind.__name__ != "PreTrainedModel" and _reaches_down(inspect.getsource(rules)):
            raise ConfigError(
                f"DelayedParamIniter: {kind.__name__} gives first values from outside of the modules that have them; "
                "build the model on the CPU, the same on every rank, or on rank 0 with load_state_dict_from_rank0=True"
            )


def _reaches_down(source: str) -> bool:
    """Whether rules say ``module.child.weight`` or walk over children."""
    walks = any(part in source for part in ("named_parameters", ".modules()", ".children()"))
    return walks or re.search(r"\bmodule\.(\w+\.)+(weight|bias)\b", source) is not None
