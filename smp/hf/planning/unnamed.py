"""Rows for modules that no plan names: the embedding table, the head, and other linear layers.

Of such a layer each rank has a part of the weight, and all have all of the result. A row like that needs to know
nothing of the module around it: what goes in and what comes out are whole. Weights, their gradients, optimizer states
and matrix products are cut, at the price of an exchange for each layer; attention between them is computed by every
rank. Layers whose results go to the residual stream are cut by columns of their input, others by columns of their
output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from smp.hf.adapters import is_adapter, layer_under, target_of
from smp.hf.experts import are_experts
from smp.hf.planning.borrowed import children_read, read_from_above
from smp.hf.planning.rows import COLUMN, EMBEDDING, EXPERTS, LATENT, REPLICATE, is_conv1d, is_linear, pattern_of

_OUTPUTS = """
    o_proj out_proj down_proj c_proj proj_out out_lin lin2 linear2 fc2 fc_out wo w2 o attn_out ff_out dense_4h_to_h
    output_linear output_projection to_out
"""
"""Last words of the names of layers that end an attention or an MLP: their outputs go to the residual stream."""
# Modules of MLA in front of its per-head layers (and DeepSeek-V3.2's indexer).
_BEFORE_HEADS = ("q_a_proj", "q_a_layernorm", "kv_a_layernorm", "indexer")
# Layers below 1/16 of the largest of their stack stay whole: an exchange costs more than it saves.
_SMALL = 16


def unnamed_rows(model: nn.Module, rows: Mapping[str, str], tp_size: int, ep_size: int) -> dict[str, str]:
    """Rows for all in ``model`` that ``rows`` do not mention; what the number of ranks does not divide stays whole."""
    found = _end_rows(model) | _latent_rows(model, rows) | unnamed_experts(model, rows, tp_size * ep_size)
    return _linear_rows(model, found | dict(rows), tp_size) | found


def _end_rows(model: nn.Module) -> dict[str, str]:
    """Rows for the embedding table, the head and modules that share parameters with them; whole where one of them is
    neither a table nor linear."""
    users = _users_of_ends(model)
    whole = not all(isinstance(user, nn.Embedding) or is_linear(user) for user in users.values())
    rows = {}
    for name, user in users.items():
        cut = EMBEDDING if isinstance(user, nn.Embedding) else "colwise_gather_output"
        rows[pattern_of(name)] = REPLICATE if whole else cut
    return rows


def lent_rows(model: nn.Module) -> dict[str, str]:
    """Rows that keep table and head whole, whatever a plan says, where a module reads their parameters (Gemma 4)."""
    users = _users_of_ends(model)
    return {pattern_of(name): REPLICATE for name in users} if read_from_above(model, users.values()) else {}


def _users_of_ends(model: nn.Module) -> dict[str, nn.Module]:
    """The embedding table, the head, and other modules that share one of their parameters (T5's second table, BERT's
    bias of the head)."""
    ends = [_call(model, f"get_{end}_embeddings") for end in ("input", "output")]
    shared = {id(p) for end in ends if end is not None for p in end.parameters(recurse=False)}
    return {
        name: module
        for name, module in model.named_modules()
        if module in ends or any(id(p) in shared for p in module.parameters(recurse=False))
    }


def unnamed_experts(model: nn.Module, rows: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Rows for stacks of experts with transformers' interface (``smp.hf.experts``)."""
    whole = tuple(f"{pattern}." for pattern, style in rows.items() if style == REPLICATE)
    names = {pattern_of(name): module for name, module in model.named_modules()}
    found = {name for name, module in names.items() if not f"{name}.".startswith(whole) and are_experts(module, ranks)}
    return dict.fromkeys(found, EXPERTS)


def _latent_rows(model: nn.Module, rows: Mapping[str, str]) -> dict[str, str]:
    """Rows for latent attention with a row for its keys: modules in front of the layers that are cut by heads give
    whole outputs."""
    tops = tuple(pattern.rpartition(".")[0] for pattern, style in rows.items() if style == LATENT)
    found = {}
    for name, module in model.named_modules():
        pattern, _, last = pattern_of(name).rpartition(".")
        if pattern in tops and last in _BEFORE_HEADS:
            found[pattern_of(name)] = "colwise_gather_output" if is_linear(module) else REPLICATE
    return found


def _linear_rows(model: nn.Module, rows: Mapping[str, str], tp_size: int) -> dict[str, str]:
    """Rows for the linear layers that ``rows`` do not mention, without small ones."""
    whole = [f"{pattern}." for pattern, style in rows.items() if style == REPLICATE]
    # Inside a region whose columns stay cut, inputs are parts: guessing there would be wrong.
    regions = [f"{name.rpartition('.')[0]}." for name, style in rows.items() if style == "colwise"]
    left, others, found = set(rows), set(), {}
    for name, module in model.named_modules():
        pattern = pattern_of(target_of(name))
        left |= {pattern_of(f"{name}.{child}" if name else child) for child, _ in children_read(module)}
        if not is_linear(module):
            others |= {pattern_of(name)} if layer_under(module) is module else set()
        elif not is_adapter(name) and not any(f"{pattern}.".startswith(top) for top in (*whole, *regions)):
            found[name] = pattern, module
    # A tied weight is cut by its table's row or not at all.
    shared = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    largest: Counter[str] = Counter()  # of a stack, or of the layers outside of stacks
    for pattern, module in found.values():
        largest[_stack(pattern)] = max(largest[_stack(pattern)], module.get_parameter("weight").numel())
    added = {}
    for name, (pattern, module) in found.items():
        style, weight = _style(pattern), module.get_parameter("weight")
        divisible = weight.shape[(style in COLUMN) == is_conv1d(module)] % tp_size == 0
        large = weight.numel() * _SMALL >= largest[_stack(pattern)]
        if divisible and large and pattern not in left and shared[id(weight)] == 1:
            added[target_of(name) if pattern in others else pattern] = style
    return added


def _stack(pattern: str) -> str:
    # Everything before the first layer number, such as model.layers.
    return pattern.partition("*")[0] if "*" in pattern else ""


def _style(pattern: str) -> str:
    # By name: whether a layer ends a block cannot be seen from its shape.
    words = [word for word in pattern.split(".") if word != "*"]
    return "rowwise_split_input" if words[-1].lower() in _OUTPUTS.split() else "colwise_gather_output"


def _call(model: Any, method: str) -> nn.Module | None:
    """What ``get_input_embeddings`` or ``get_output_embeddings`` returns; None where a model lacks it or raises."""
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None
