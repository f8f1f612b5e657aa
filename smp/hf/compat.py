"""``smp.compat.install()``: ``import torch.sagemaker as tsm`` finds this project, in scripts written for SMP v2.

What a script imports is there. What does not exist here can be imported, and says when it is used what to use.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
from abc import ABC
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from smp.config.schema import ConfigError
from smp.hf import fsdp1

NAME = "torch.sagemaker"
_CHECKPOINT = "distributed.checkpoint"
_OURS = "smp.hf.sagemaker_checkpoint"
_GLOBAL = f"{_CHECKPOINT}.state_dict_saver.async_save, whose folders any layout loads"

HERE = {
    "init": "smp.hf.state:init",
    "is_initialized": "smp.hf.state:is_initialized",
    "state": "smp.hf.state:state",
    "transform": "smp.hf.transform:transform",
    "grad_norm.clip_grad_norm_": "smp.hf.clip:clip_grad_norm_",
    "delayed_param.DelayedParamIniter": "smp.hf.delayed:DelayedParamIniter",
    "moe.moe_config.MoEConfig": "smp.hf.experts:MoEConfig",
    "logger.get_logger": "smp.hf.compat:get_logger",
    "tensor_parallel.transformer.TransformerLayer": "smp.hf.compat:TransformerLayer",
    "tensor_parallel.transformer.TETransformerLayer": "smp.hf.compat:TransformerLayer",
    "utils.process_group_utils.get_global_ranks": "smp.hf.compat:get_global_ranks",
    "utils.utils.timeit": "smp.hf.compat:timeit",
    f"{_CHECKPOINT}.async_utils.AsyncCallsQueue": f"{_OURS}:AsyncCallsQueue",
    f"{_CHECKPOINT}.filesystem.DistributedFileSystemReader": f"{_OURS}:DistributedFileSystemReader",
    f"{_CHECKPOINT}.filesystem.DistributedFileSystemWriter": f"{_OURS}:DistributedFileSystemWriter",
    f"{_CHECKPOINT}.state_dict_loader.load": f"{_OURS}:load",
    f"{_CHECKPOINT}.state_dict_saver.async_save": f"{_OURS}:async_save",
    f"{_CHECKPOINT}.state_dict_saver.maybe_finalize_async_calls": f"{_OURS}:maybe_finalize_async_calls",
    f"{_CHECKPOINT}.state_dict_saver.save": f"{_OURS}:save",
    f"{_CHECKPOINT}.state_dict_utils.init_optim_state": f"{_OURS}:init_optim_state",
    "checkpoint.utils.SORT_BY_LAST_INT": f"{_OURS}:SORT_BY_LAST_INT",
    "checkpoint.utils.limit_num_subdirs": f"{_OURS}:limit_num_subdirs",
}
"""SMP v2's symbols that work, by what they are here."""

INSTEAD = {
    f"{_CHECKPOINT}.state_dict_saver.PyTorchDistSaveShardedStrategy": _GLOBAL,
    f"{_CHECKPOINT}.state_dict_utils.SMStateDictType": _GLOBAL,
    f"{_CHECKPOINT}.state_dict_utils.sm_state_dict_type": _GLOBAL,
    "nn.attn.FlashSelfAttention": "torch's scaled_dot_product_attention",
    "nn.attn.FlashGroupedQueryAttention": "torch's scaled_dot_product_attention with enable_gqa=True",
    "nn.huggingface.llama_flashattn.LlamaFlashAttention": 'attn_implementation="sdpa" or "flash_attention_2"',
    "tensor_parallel.transformer.TransformerLMHead": "transform returns the Hugging Face model itself: use its class",
}
"""SMP v2's symbols that do not, by what to use."""


class TransformerLayer(ABC):  # noqa: B024 (layers of transformers are its subclasses by a hook)
    """``isinstance`` says whether a module is a layer of a transformers model; for wrapping policies and activation
    checkpointing."""

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        return any(kind.__name__ == "GradientCheckpointingLayer" for kind in other.__mro__) or NotImplemented


def get_global_ranks(group: Any) -> list[int]:
    """Ranks of a process group among all."""
    return dist.get_process_group_ranks(group)


def get_logger() -> logging.Logger:
    """The logger ``smp``."""
    return logging.getLogger("smp")


@contextmanager
def timeit(condition: bool, message: str, rank: int) -> Iterator[None]:
    """Rank 0 prints how long the block took, if ``condition``."""
    started = time.monotonic()
    yield
    if condition and rank == 0:
        print(f"{message}: {time.monotonic() - started:.3f} s", flush=True)


def install() -> None:
    """Make ``torch.sagemaker`` and its modules. Call it before the script imports them; a second call does nothing.

    FullyShardedDataParallel, which SMP v2's scripts wrap models in, then takes transformed ones (:mod:`smp.hf.fsdp1`).

    Raises:
        ConfigError: SMP v2 is installed here.
    """
    if isinstance(sys.modules.get(NAME), _Module):
        return
    if importlib.util.find_spec(NAME) is not None:
        raise ConfigError(f"smp.compat.install: {NAME} is installed: uninstall it, or use it")
    for symbol, where in HERE.items():
        _put(symbol, where)
    for symbol, instead in INSTEAD.items():
        _put(symbol, _refusing(symbol, instead))
    fsdp1.install()


class _Module(ModuleType):
    """A module whose symbols are looked up when they are used."""

    def __getattr__(self, name: str) -> Any:
        where = vars(self).get("smp_where", {}).get(name)
        if where is None:
            raise AttributeError(f"smp has no {self.__name__}.{name}: see 'From SMP v2' in docs/transform.md")
        module, _, attribute = where.partition(":")
        return getattr(import_module(module), attribute)


def _put(symbol: str, value: Any) -> None:
    path, _, name = f"{NAME}.{symbol}".rpartition(".")
    parent: Any = torch
    parts = path.split(".")
    for end in range(2, len(parts) + 1):
        full = ".".join(parts[:end])
        module = sys.modules.get(full)
        if module is None:
            module = sys.modules[full] = _Module(full)
            module.__path__ = []  # a package: others lie in it
            vars(module)["smp_where"] = {}
            setattr(parent, parts[end - 1], module)
        parent = module
    if isinstance(value, str):
        vars(parent)["smp_where"][name] = value
    else:
        setattr(parent, name, value)


def _refusing(symbol: str, instead: str) -> Callable[..., Any]:
    def refused(*_: Any, **__: Any) -> Any:
        raise ConfigError(f"{NAME}.{symbol} does not exist here: {instead}")

    refused.__name__ = symbol.rpartition(".")[2]
    return refused
