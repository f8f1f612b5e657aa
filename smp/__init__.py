"""smp: an open training stack for Llama/GPT-family language models.

``smp.init``, ``smp.transform`` and their companions are looked up when they are used: ``import smp`` loads no torch.
"""

from importlib import import_module
from typing import Any

from smp.backend_names import register

__version__ = "0.1.0"

_WHERE = {
    "MoEConfig": "smp.hf.experts",
    "clip_grad_norm_": "smp.hf.clip",
    "cut_sequence": "smp.hf.context",
    "init": "smp.hf.state",
    "is_initialized": "smp.hf.state",
    "load_weights": "smp.hf.loading.delayed",
    "state": "smp.hf.state",
    "transform": "smp.hf.transform",
}
_MODULES = {"compat": "smp.hf.sagemaker.compat", "delayed_param": "smp.hf.loading.delayed", "grad_norm": "smp.hf.clip"}
"""SMP v2's names of modules."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _WHERE:
        raise AttributeError(f"module 'smp' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_WHERE, *_MODULES]


register()
