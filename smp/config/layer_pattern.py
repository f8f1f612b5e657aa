"""What differs between the layers of a model: Megatron's notation of patterns, and which layers' attention has a
window, chunks and RoPE."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from smp.config.fields import require
from smp.config.model import ModelConfig
from smp.config.schema import ConfigError

_MOST_LAYERS = 10_000


@dataclass(frozen=True)
class LayerAttention:
    """What one layer's attention is.

    Attributes:
        window: a token sees itself and the window - 1 tokens before it; None: all before it.
        rope: which table rotates queries and keys: of --rotary-base, or of --rotary-base-local; None: nothing does.
        chunk: a token sees those before it in its own chunk of so many; None: chunks do not matter.
    """

    window: int | None = None
    rope: Literal["global", "local"] | None = None
    chunk: int | None = None


def layer_attention(model: ModelConfig, layer: int) -> LayerAttention:
    """Of one layer of a resolved model, by its number in the whole model. Layers behind the last are as it is."""
    layer = min(layer, model.num_layers - 1)
    windowed = model.window_size is not None and _windowed(model.window_attn_skip_freq, model.num_layers)[layer]
    window = model.window_size if windowed else None
    turned = model.position_embedding_type == "rope" and not _no_rope(model.no_rope_freq, model.num_layers)[layer]
    if not turned:
        return LayerAttention(window)
    rope: Literal["global", "local"] = "local" if windowed and model.rotary_base_local is not None else "global"
    return LayerAttention(window, rope, model.attention_chunk_size)


def layer_attentions(model: ModelConfig) -> list[LayerAttention]:
    """Of all layers."""
    return [layer_attention(model, layer) for layer in range(model.num_layers)]


def hides_tokens(model: ModelConfig, length: int | None = None) -> bool:
    """Whether some layer has a window or chunks that hide earlier tokens of sequences of ``length``; None: of long
    ones."""
    sizes = {model.window_size, model.attention_chunk_size} - {None}
    return any(length is None or size < length for size in sizes if size is not None)


def scores_flag(model: ModelConfig) -> str:
    """The flag that makes attention's scores more than scale q k^T + mask, which only --attention-backend math
    computes; "": there is none."""
    if model.attn_logit_softcapping is not None:
        return f"--attn-logit-softcapping {model.attn_logit_softcapping:g}"
    return "--position-embedding-type alibi" if model.position_embedding_type == "alibi" else ""


@cache
def _windowed(text: str | None, num_layers: int) -> tuple[bool, ...]:
    if text is None:
        return (True,) * num_layers
    value = pattern_value("--window-attn-skip-freq", text, num_layers)
    found = tuple(bool(v) for v in value) if isinstance(value, list) else _all_but_every(value, num_layers)
    require(any(found), f"--window-attn-skip-freq {text} leaves no layer with a window; leave out --window-size")
    return found


@cache
def _no_rope(text: str | None, num_layers: int) -> tuple[bool, ...]:
    if text is None:
        return (False,) * num_layers
    value = pattern_value("--no-rope-freq", text, num_layers)
    if not isinstance(value, list):
        return tuple(not rope for rope in _all_but_every(value, num_layers))
    return tuple(bool(v) for v in value)


def _all_but_every(number: int, num_layers: int) -> tuple[bool, ...]:
    """False for every ``number``-th layer, from the ``number``-th on."""
    return tuple((layer + 1) % number != 0 for layer in range(num_layers))


def skip_pattern(kept: Sequence[bool], *, ones: bool) -> str | None:
    """The shortest text for which all but every n-th layer is ``kept``, else the list, whose 1 means ``ones`` of it;
    None: all are."""
    if all(kept):
        return None
    first = list(kept).index(False) + 1
    if tuple(kept) == _all_but_every(first, len(kept)):
        return str(first)
    return str([int(keeps == ones) for keeps in kept]).replace(" ", "")


def pattern_value(flag: str, text: str, num_layers: int) -> int | list[int]:
    """A number above 0, or a 0 or 1 for each layer.

    Raises:
        ConfigError: it is neither.
    """
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ConfigError(f"{flag} {text}: expected a number, or a list of 0 and 1 such as [0]*1+[1]*3") from None
    if isinstance(value, int):
        require(value > 0, f"{flag} {text} must be above 0")
        return value
    require(set(value) <= {0, 1}, f"{flag} {text}: a list is made of 0 and 1")
    require(len(value) == num_layers, f"{flag} {text} names {len(value)} layers of {num_layers} (--num-layers)")
    return value


def _value(node: ast.expr) -> int | list[int]:
    """Of whole numbers, lists of them, + of two lists, and a list times a number."""
    match node:
        case ast.Constant(value=int(number)) if not isinstance(node.value, bool):
            return number
        case ast.List(elts=elements):
            numbers = [_value(element) for element in elements]
            return [number for number in numbers if isinstance(number, int)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            one, two = _value(left), _value(right)
            if isinstance(one, list) and isinstance(two, list) and len(one) + len(two) <= _MOST_LAYERS:
                return one + two
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            one, two = _value(left), _value(right)
            if isinstance(one, list) and isinstance(two, int) and len(one) * two <= _MOST_LAYERS:
                return one * two
    raise ValueError
