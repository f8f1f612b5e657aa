"""``smp.compat.install()``: ``import torch.sagemaker as tsm`` finds this project, in scripts written for SMP v2.

What a script imports is there. What does not exist here can be imported, and says when it is used what to use.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
from abc import ABC
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch.distributed as dist

from smp.config.schema import ConfigError
from smp.hf.sagemaker import fsdp1

NAME = "torch.sagemaker"
_CHECKPOINT = "distributed.checkpoint"
_OURS = "smp.hf.sagemaker.checkpoint"
_GLOBAL = f"{_CHECKPOINT}.state_dict_saver.async_save, whose folders any layout loads"

HERE = {
    "init": "smp.hf.state:init",
    "is_initialized": "smp.hf.state:is_initialized",
    "state": "smp.hf.state:state",
    "transform": "smp.hf.transform:transform",
    "grad_norm.clip_grad_norm_": "smp.hf.clip:clip_grad_norm_",
    "delayed_param.DelayedParamIniter": "smp.hf.loading.delayed:DelayedParamIniter",
    "moe.moe_config.MoEConfig": "smp.hf.experts:MoEConfig",
    "logger.get_logger": "smp.hf.sagemaker.compat:get_logger",
    "tensor_parallel.transformer.TransformerLayer": "smp.hf.sagemaker.compat:TransformerLayer",
    "tensor_parallel.transformer.TETransformerLayer": "smp.hf.sagemaker.compat:TransformerLayer",
    "utils.process_group_utils.get_global_ranks": "smp.hf.sagemaker.compat:get_global_ranks",
    "utils.utils.timeit": "smp.hf.sagemaker.compat:timeit",
    f"{_CHECKPOINT}.async_utils.AsyncCallsQueue": f"{_OURS}:AsyncCallsQueue",
    f"{_CHECKPOINT}.filesystem.DistributedFileSystemReader": f"{_OURS}:DistributedFileSystemReader",
    f"{_CHECKPOINT}.filesystem.DistributedFileSystemWriter": f"{_OURS}:DistributedFileSystemWriter",
    f"{_CHECKPOINT}.s3_filesystem.is_s3_uri": "smp.hf.sagemaker.compat:is_s3_uri",
    f"{_CHECKPOINT}.state_dict_loader.load": f"{_OURS}:load",
    f"{_CHECKPOINT}.state_dict_saver.async_save": f"{_OURS}:async_save",
    f"{_CHECKPOINT}.state_dict_saver.maybe_finalize_async_calls": f"{_OURS}:maybe_finalize_async_calls",
    f"{_CHECKPOINT}.state_dict_saver.save": f"{_OURS}:save",
    f"{_CHECKPOINT}.state_dict_utils.init_optim_state": f"{_OURS}:init_optim_state",
    "checkpoint.utils.SORT_BY_LAST_INT": f"{_OURS}:SORT_BY_LAST_INT",
    "checkpoint.utils.limit_num_subdirs": f"{_OURS}:limit_num_subdirs",
}
"""SMP v2's symbols that work, with their implementation here."""

_S3 = "smp writes to folders: mount the bucket, or copy the folder when it is complete"
_EXPERTS = "transform keeps the model's own experts and router: smp.MoEConfig is given to transform(config=)"
INSTEAD = {
    f"{_CHECKPOINT}.state_dict_saver.PyTorchDistSaveShardedStrategy": _GLOBAL,
    f"{_CHECKPOINT}.state_dict_utils.SMStateDictType": _GLOBAL,
    f"{_CHECKPOINT}.state_dict_utils.sm_state_dict_type": _GLOBAL,
    f"{_CHECKPOINT}.s3_filesystem.S3StorageReader": _S3,
    f"{_CHECKPOINT}.s3_filesystem.S3StorageWriter": _S3,
    "distributed.fsdp.checkpoint.load_model_checkpoint": f"{_CHECKPOINT}.state_dict_loader.load",
    "distributed.fsdp.checkpoint.save_model_checkpoint": _GLOBAL,
    "moe.moe_layer.MoELayer": _EXPERTS,
    "nn.attn.FlashSelfAttention": "torch's scaled_dot_product_attention",
    "nn.attn.FlashGroupedQueryAttention": "torch's scaled_dot_product_attention with enable_gqa=True",
    "nn.huggingface.llama_flashattn.LlamaFlashAttention": 'attn_implementation="sdpa" or "flash_attention_2"',
    "tensor_parallel.transformer.TransformerLMHead": "transform returns the Hugging Face model itself: use its class",
}
"""SMP v2's symbols that do not work, with what to use instead. Of all others the error says that they do not exist."""
_SMDISTRIBUTED = "smdistributed"
"""SMDDP's modules, and those of SMP v1, whose scripts are different."""


class TransformerLayer(ABC):  # noqa: B024 (layers of transformers are its subclasses by a hook)
    """``isinstance`` tells whether a module is a layer of a transformers model; for wrapping policies and activation
    checkpointing."""

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        # By name: transformers need not be importable here.
        return any(kind.__name__ == "GradientCheckpointingLayer" for kind in other.__mro__) or NotImplemented


def get_global_ranks(group: Any) -> list[int]:
    """Global ranks of a process group."""
    return dist.get_process_group_ranks(group)


def is_s3_uri(path: str) -> bool:
    """Whether a path names an object of S3."""
    return str(path).startswith("s3://")


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

    FullyShardedDataParallel, which SMP v2's scripts wrap models in, then takes transformed ones
    (:mod:`smp.hf.sagemaker.fsdp1`).

    Raises:
        ConfigError: SMP v2 is installed here.
    """
    if isinstance(sys.modules.get(NAME), _Module):
        return
    if importlib.util.find_spec(NAME) is not None:
        raise ConfigError(f"smp.compat.install: {NAME} is installed: uninstall it, or use it")
    import_module("smp.parallel.backend")  # which knows "smddp", what importing torch_smddp is for
    # At the end of meta_path: finders of installed packages are asked first.
    sys.meta_path.append(_Finder())
    for symbol, where in HERE.items():
        path, _, name = f"{NAME}.{symbol}".rpartition(".")
        vars(import_module(path))["smp_where"][name] = where
    fsdp1.install()


class _Finder(MetaPathFinder, Loader):
    """Finds every module below SMP v2's: what it had differs between its versions, and a script's imports say nothing
    of what is used. It comes last, so that an installed package wins."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if f"{name}.".startswith((f"{NAME}.", f"{_SMDISTRIBUTED}.")):
            # is_package: submodules are looked up again by this finder.
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["smp_where"] = {}


class _Module(ModuleType):
    """A module whose symbols are looked up on use."""

    def __getattr__(self, name: str) -> Any:
        where = vars(self).get("smp_where", {}).get(name)
        if where is not None:
            module, _, attribute = where.partition(":")
            return getattr(import_module(module), attribute)
        # AttributeError for dunder names: import machinery and inspect probe modules by them.
        if self.__name__ == NAME or name.startswith("_"):
            raise AttributeError(f"smp has no {self.__name__}.{name}: see 'From SMP v2' in docs/transform.md")
        symbol = f"{self.__name__}.{name}"
        is_v1 = self.__name__.startswith(f"{_SMDISTRIBUTED}.modelparallel")
        elsewhere = f"{'it is of SMP v1; ' if is_v1 else ''}see 'From SMP v2' in docs/transform.md"
        instead = INSTEAD.get(symbol.removeprefix(f"{NAME}."), elsewhere)
        return _Gone(f"{symbol} does not exist here: {instead}")


class _Gone:
    """A symbol that can be imported but not used: calling it, inheriting from it, or reading an attribute raises."""

    def __init__(self, why: str) -> None:
        self._why = why

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(self._why)

    __call__ = __mro_entries__ = __instancecheck__ = __subclasscheck__ = __str__ = __fspath__ = __iter__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # of inspect, pickle and the like
        self._refuse()
