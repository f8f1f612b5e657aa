"""Whether a transformers model keeps the documents of a packed sequence apart.

transformers finds documents by positions that start again (``masking_utils``), in models whose decoder makes its masks
there. What carries a state from token to token (a recurrence, a convolution) carries it over the border of documents.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import Any

from torch import nn

from smp.config import ConfigError, ModelConfig
from smp.hf.sources import source_of
from smp.models.foreign import blocks_of, new_module

_MASKS = re.compile(r"create_(causal|sliding_window_causal|chunked_causal)_mask|create_masks_for_generate")
"""Functions of transformers' ``masking_utils`` that make masks."""
_STATES = re.compile(
    "Mamba|SSM|DeltaNet|DeltaAttention|LinearAttention|Lightning|Rwkv|RWKV|Recurrent|ShortConv|LSTM|Retention"
)
"""Words in the names of classes that carry state from token to token."""
CACHES = ("past_key_values", "cache_params")
"""Names of the arguments by which a decoder takes a cache."""


def refusal_of_documents(module: Any) -> str:
    """Why a model cannot keep documents apart, in one line; "" if it can."""
    said = f"--packing best-fit (finetune.py's default) and --reset-attention-mask: {type(module).__name__}"
    more = "give --packing off, or leave --reset-attention-mask out"
    for _, block in blocks_of(module):
        for part in block.modules():
            kind = type(part).__name__
            # A convolution over tokens reads the end of the document before.
            if isinstance(part, nn.Conv1d) or _STATES.search(kind):
                return f"{said} has {kind}, which carries over from one document to the next; {more}"
    if "position_ids" not in inspect.signature(type(module).forward).parameters:
        return f"{said} takes no positions, by which transformers tells documents apart; {more}"
    decoder = next((m for m in module.modules() if any(c is blocks_of(module)[0][1] for c in _in_lists(m))), module)
    # Whether masks see positions is only in the source of the decoder's forward: read, not run.
    given = _positions_given(source_of(type(decoder).forward))
    if not given:
        return f"{said} makes its masks by itself, which know of no documents; {more}"
    if not all(given):
        return f"{said} makes its masks without positions, by which transformers tells documents apart; {more}"
    return ""


def require_documents_apart(model: ModelConfig) -> None:
    """Raise ConfigError where a run packs documents that ``model`` cannot keep apart. The module is built without
    memory."""
    assert model.transformers_config is not None, "the model of another implementation"
    if said := refusal_of_documents(new_module(model.transformers_config, scores=model.scalar_head)):
        raise ConfigError(said)


def refuse_new_caches(module: Any) -> None:
    """Let decoders raise ConfigError where they would make a cache of keys and values by themselves.

    Training needs none: recompute would write each layer's keys twice, and with a cache transformers makes masks that
    know of no documents.
    """
    blocks = {id(block) for _, block in blocks_of(module)}
    for part in module.modules():
        if any(id(layer) in blocks for layer in _in_lists(part)):
            part.register_forward_pre_hook(refuse_new_cache, with_kwargs=True)


def refuse_new_cache(decoder: Any, args: Any, given: dict[str, Any]) -> None:
    """A forward pre-hook of a decoder, see :func:`refuse_new_caches`."""
    if "use_cache" not in inspect.signature(type(decoder).forward).parameters:
        return
    asked = given.get("use_cache")
    makes = getattr(decoder.config, "use_cache", False) if asked is None else asked
    if makes and all(given.get(name) is None for name in CACHES):
        raise ConfigError(
            f"--model-implementation transformers: {type(decoder).__name__} makes a cache of keys and values in "
            "training, since its model does not pass on use_cache: set it to false in config.json"
        )


def _positions_given(source: str) -> list[bool]:
    """For each mask that a forward pass makes, whether position_ids are passed to it."""
    tree = ast.parse(textwrap.dedent(source))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    assigned = [(ast.unparse(node.targets[0]), node.value) for node in nodes]
    # Arguments are often collected in a dict first, mask_kwargs, and passed by **.
    arguments = {name: ast.unparse(value) for name, value in assigned if isinstance(value, ast.Dict)}
    copies = {name: ast.unparse(value).removesuffix(".copy()") for name, value in assigned}
    arguments |= {name: arguments[of] for name, of in copies.items() if of in arguments}
    # The function itself may be chosen first: mask_function = a if ... else b.
    others = {name for name, value in assigned if isinstance(value, ast.IfExp) and _MASKS.search(ast.unparse(value))}

    def is_given(call: ast.Call) -> bool:
        return any(
            word.arg == "position_ids"
            or (word.arg is None and "position_ids" in arguments.get(ast.unparse(word.value), ""))
            for word in call.keywords
        )

    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return [is_given(c) for c in calls if _MASKS.fullmatch(ast.unparse(c.func)) or ast.unparse(c.func) in others]


def _in_lists(module: nn.Module) -> list[nn.Module]:
    return [layer for child in module.children() if isinstance(child, nn.ModuleList) for layer in child]
