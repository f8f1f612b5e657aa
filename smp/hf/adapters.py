"""LoRA adapters of peft in a transformed model: ``transform(get_peft_model(model, LoraConfig(...)))``.

An adapter computes ``B A x`` next to a layer's ``W x``. Its factors are cut as the layer is, so what crosses links has
the adapter's rank, never the model's width:

====================  ============================  =======================================
layer                 A (rank, in)                  B (out, rank)
====================  ============================  =======================================
colwise               on every rank                 rows, as W
rowwise               columns, as W; summed         on every rank
others                on every rank                 on every rank
====================  ============================  =======================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from smp.config.schema import ConfigError

# PeftModel.base_model (a LoraModel) .model is the transformers model: names begin with this.
_PREFIX = "base_model.model."
# peft wraps a layer ``x`` as ``x.base_layer``, with factors in ``x.lora_A.<adapter>`` and
# ``x.lora_B.<adapter>``.
_INSIDE = re.compile(r"\.(base_layer|lora_[AB]\.[^.]+)$")
_KNOWN = {("tuners.lora.model", "LoraModel"), ("tuners.lora.layer", "Linear")}


def base_of(model: Any) -> tuple[Any, str]:
    """The transformers model inside peft's, and the prefix of its modules' names; without peft ``model`` and ""."""
    return (model.get_base_model(), _PREFIX) if _is_peft(model) else (model, "")


def faces_of(model: Any) -> list[Any]:
    """The modules that a script may call: the model, and with peft also the inner one, which ``merge_and_unload``
    returns. (peft calls the inner one's ``forward``, so hooks of that run only after unloading.)"""
    base, _ = base_of(model)
    return [model] if base is model else [model, base]


def target_of(name: str) -> str:
    """The layer that a part of an adapter belongs to, ``attn.q_proj.lora_A.default`` -> ``attn.q_proj``; other names
    are returned as they are."""
    return _INSIDE.sub("", name)


def is_adapter(name: str) -> bool:
    """Whether a module is a factor of an adapter."""
    return target_of(name) != name and not name.endswith(".base_layer")


def layer_under(module: nn.Module) -> nn.Module:
    """The layer that an adapted one wraps, whose weight and bias peft shows as its own; other layers are returned as
    they are."""
    base = module._modules.get("base_layer")
    return module if base is None or not type(module).__module__.startswith("peft.") else base


def in_adapter_file(model: Any) -> Callable[[str], bool]:
    """A predicate on tensor names: whether ``save_pretrained`` may write it. With peft the adapters, and the embedding
    and head, which peft adds when they have adapters; without peft all."""
    base, _ = base_of(model)
    if base is model:
        return lambda name: True
    # Tied tables are one module or two with one weight: both names count.
    tables = (base.get_input_embeddings(), base.get_output_embeddings())
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if module in tables)
    return lambda name: ".lora_A." in name or ".lora_B." in name or name.startswith(prefixes)


def with_adapters(model: nn.Module, rows: Mapping[str, str], pattern_of: Any) -> dict[str, str]:
    """``rows`` (pattern: style) of a model without adapters as the rows of ``model`` with them.

    Raises:
        ConfigError: as :func:`check`.
    """
    base, prefix = base_of(model)
    if base is model:
        return dict(rows)
    check(model)
    full = {prefix + pattern: style for pattern, style in rows.items()}
    for name, _ in model.named_modules():
        target = target_of(name)
        # Rows are written for the model without adapters: an adapter's part is looked up by the
        # layer it belongs to.
        style = rows.get(pattern_of(target.removeprefix(prefix)))
        if target == name or style is None:
            continue
        # The wrapped layer's row moves to its base_layer; the wrapper itself has no weight.
        full.pop(pattern_of(target), None)
        part = name.removeprefix(f"{target}.").partition(".")[0]
        # y = W x + B A x. Column-parallel: B is cut by rows as W, A is whole on every rank.
        # Row-parallel: A is cut by columns as W, and B is whole, applied after the sum.
        own = {"lora_A": "rowwise", "lora_B": "colwise"} if style in ("colwise", "rowwise") else {}
        whole = part != "base_layer" and own.get(part) != style
        full[pattern_of(name)] = "replicate" if whole else style
    return full


def check(model: Any) -> None:
    """Check that what peft has added can be cut and saved.

    Raises:
        ConfigError: for anything of peft's but plain LoRA on linear layers.
    """
    if not _is_peft(model):
        return
    for adapter, config in model.peft_config.items():
        bias = getattr(config, "bias", "none")
        if bias != "none":
            # bias "all" or "lora_only" trains biases of the base model, which the adapter file
            # would have to hold.
            raise ConfigError(f"adapter {adapter}: bias is {bias!r}: smp.transform takes LoraConfig(bias='none')")
    for name, module in model.named_modules():
        kind = type(module)
        if not kind.__module__.startswith("peft.") or kind.__module__ == "peft.peft_model":
            continue
        known = (kind.__module__.removeprefix("peft."), kind.__name__) in _KNOWN
        # peft has containers (ModuleDict of dropouts) without parameters, which need no cut.
        if not known and any(True for _ in module.parameters()):
            raise ConfigError(f"{name} ({kind.__name__}): of peft, smp.transform takes LoRA on linear layers")
        # lora_variant: DoRA, aLoRA and others compute more than B A x.
        if getattr(module, "lora_variant", None):
            raise ConfigError(f"{name}: smp.transform takes plain LoRA, without variants such as use_dora")
        if getattr(module, "merged_adapters", None):
            raise ConfigError(f"{name}: its adapter is merged: unmerge_adapter() before smp.transform")


def install(model: nn.Module) -> None:
    """Let adapters of ``model``, which is cut, merge into their layers in place."""
    for module in model.modules():
        if type(module).__module__.startswith("peft.tuners.") and hasattr(type(module), "merge"):
            # An instance attribute hides the class's method, which is called at the end.
            layer: Any = module
            layer.merge = partial(_merge, module, model)


def _merge(layer: Any, model: nn.Module, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
    # fully_shard keeps DTensors in the weights: B A of two sharded factors needs the whole of one.
    fsdp2 = any(isinstance(module, FSDPModule) for module in model.modules())
    if fsdp2 or not all(_is_whole_matrix(part) for part in _parts(layer)):
        raise ConfigError(
            "adapters in a model that FSDP has sharded are not merged: save_pretrained writes them; merge them "
            "in a model that is not sharded"
        )
    if safe_merge and any(isinstance(parameter, DTensor) for parameter in layer.parameters()):
        raise ConfigError(
            "safe_merge=True puts another tensor under the weight, and the part that a rank has would stay as it was: "
            "merge without it"
        )
    type(layer).merge(layer, safe_merge, adapter_names)


def _parts(layer: Any) -> list[Any]:
    """The linear layers of an adapted one."""
    return [layer.get_base_layer(), *layer.lora_A.values(), *layer.lora_B.values()]


def _is_whole_matrix(linear: Any) -> bool:
    """Whether a layer's weight is a matrix. FSDP1 leaves a piece of its flat tensor there, or no parameter: two pieces
    of equal size would multiply to a number without an error."""
    return isinstance(linear.weight, nn.Parameter) and linear.weight.ndim == 2


def _is_peft(model: Any) -> bool:
    return any(kind.__module__ == "peft.peft_model" for kind in type(model).__mro__)  # fully_shard makes a subclass
