"""Which rows of another program's tensors are which of this project's. Tables of families are written in these words.

Four things happen to a matrix on its way: several lie in one (fused query, key and value; gate and up), its dimensions
are swapped (GPT-2; GPT-OSS's experts), all layers or all experts lie in one tensor (Megatron's stacked checkpoints;
transformers 5), or each expert has a tensor of its own, where this project has one for all of them. Values are never
changed. ``smp_name`` is this project's name of a tensor, ``external_name`` Hugging Face's or Megatron's. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from smp.config import ModelConfig
from smp.config.layer_pattern import linear
from smp.config.rules.mtp import mtp_layers
from smp.models.inventory import weights_of

SCORE = "score"
"""transformers' name of the head of ...ForSequenceClassification, in all families."""

PREDICTIONS = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "norm": "shared_head.norm"}
"""Modules of a multi-token prediction layer in addition to its block, and Hugging Face's names for them."""

Fusion = Literal[
    "per_group", "stacked", "halves", "interleaved", "gated", "per_key_head", "recurrent", "mamba", "mamba_conv", "ones"
]
"""How matrices lie in a fused one, by rows:

per_group: for each key/value head its query heads, the key, the value (Megatron; Falcon; GPT-NeoX and BLOOM, where each
has one query).
stacked: all of query, then all of key, then all of value (GPT-2, Phi-3).
halves: all of gate, then all of up (Megatron, Phi-3).
interleaved: a row of gate, a row of up, and so on (GPT-OSS).
gated: for each head its query, then the gate of its output (Qwen3-Next).
per_key_head: of a recurrence, for each head of keys its query, its key, and the values and gates of the heads that it
serves; in a matrix of its own their rates, then their decays (Qwen3-Next).
recurrent: of a recurrence, all queries, then all keys, then all values (Qwen 3.5).
mamba: of Mamba-2, all gates, values, keys, queries and steps, one after the other; mamba_conv: of its convolution, all
values, keys and queries.
ones: a number for each head alone, between dimensions of one (Kimi-Linear).
"""


@dataclass(frozen=True)
class Fused:
    """One of the modules in a fused external one: ``member`` of the fusion ``kind``."""

    external_name: str
    kind: Fusion
    member: Literal["query", "key", "value", "gate", "up", "beta", "decay", "step"]


@dataclass(frozen=True)
class Table:
    """External names of modules, by this project's names. Weight and bias follow after a dot, or after a name's last
    underscore.

    Attributes:
        block: the external prefix of a block's modules; ``{}`` is the number of the layer.
        modules: of a block, without the prefix. ``{}`` is the number of an expert, which has a tensor of its own.
            The name of a single tensor, with what follows the module, comes first.
        ends: outside of blocks.
        transposed: matrices of blocks are (in, out) there.
        experts_transposed: all experts' matrices of a layer are (experts, in, out) there.
        experts_in_peft: peft knows which way they lie, so that its adapters of them are those of (out, in) matrices.
        stacked: what is called otherwise in files in which all experts of a layer lie in one tensor.
        shared_norm: what is called otherwise where attention and MLP read the same norm.
        recurrent: what is called otherwise in layers with a linear recurrence.
    """

    block: str
    modules: Mapping[str, str | Fused]
    ends: Mapping[str, str]
    transposed: bool = False
    experts_transposed: bool = False
    experts_in_peft: bool = True
    stacked: Mapping[str, str | Fused] = field(default_factory=dict)
    shared_norm: Mapping[str, str | Fused] = field(default_factory=dict)
    recurrent: Mapping[str, str | Fused] = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    """``count x unit`` rows, from ``start x unit`` on, of every ``slots x unit`` external rows; ``blocks`` times."""

    blocks: int
    slots: int
    start: int
    count: int
    unit: int

    @property
    def whole(self) -> bool:
        """Whether these are all rows, in their order."""
        return self.slots == self.count

    @property
    def single(self) -> bool:
        """Whether these are every ``slots``-th row, from ``start`` on."""
        return self.count == self.unit == 1 and not self.whole

    @property
    def smp_rows(self) -> int:
        """Rows of this project's tensor."""
        return self.blocks * self.count * self.unit

    @property
    def external_rows(self) -> int:
        """Rows of the external tensor."""
        return self.blocks * self.slots * self.unit

    def runs(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(first external row, first row minus ``first``, rows) for each contiguous run of this project's rows
        ``first`` to ``first + count``."""
        if self.whole:
            yield first, 0, count
            return
        width, row = self.count * self.unit, first
        # From block to block of the fused matrix; a region may begin or end within one.
        while row < first + count:
            block, within = divmod(row, width)
            length = min(width - within, first + count - row)
            # Each block of external rows has ``slots x unit`` of them; this member's begin at
            # ``start x unit``.
            yield (block * self.slots + self.start) * self.unit + within, row - first, length
            row += length


@dataclass(frozen=True)
class Link:
    """One of this project's tensors, and where it is in an external one.

    Attributes:
        smp_name, external_name: of the two tensors.
        shape: of this project's, without a leading dimension that ``entry`` is of.
        rows: which external rows, counted before a transposition.
        transposed: the external tensor is (columns, rows).
        leading: index and size of its leading dimensions, of layers and of experts, if it has them.
        entry: index in the leading dimension of this project's tensor, of an expert; None: the link is of all of it.
        padded: its rows, when it is padded at the end.
        inner_one: the external tensor has a dimension of one after the rows, as of a convolution.
    """

    smp_name: str
    external_name: str
    shape: tuple[int, ...]
    rows: Rows
    transposed: bool = False
    leading: tuple[tuple[int, int], ...] = ()
    entry: int | None = None
    padded: int | None = None
    inner_one: bool = False

    @property
    def external_shape(self) -> tuple[int, ...]:
        """Shape of the whole external tensor."""
        rows = self.padded or self.rows.external_rows
        # Convolution weights: (channels, 1, kernel) in files, (channels, kernel) here.
        shape: tuple[int, ...] = (rows, *(1,) * self.inner_one, *self.shape[1:])
        # Rows are counted as this project has them; only the shape in the files is turned.
        if self.transposed:
            shape = shape[::-1]
        return (*(size for _, size in self.leading), *shape)


def links(table: Table, config: ModelConfig, *, stacked: bool = False) -> list[Link]:
    """The links of all tensors of a model; an expert's matrix has a link of its own.

    Args:
        table: of the family.
        config: of the model.
        stacked: the files have all experts of a layer in one tensor.

    Raises:
        KeyError: the family does not have such a module.
    """
    # Names for stacked experts replace those of single ones.
    if stacked:
        table = replace(table, modules={**table.modules, **table.stacked})
    if config.parallel_residual_shared_norm:
        table = replace(table, modules={**table.modules, **table.shared_norm})
    return [link for p in weights_of(config) for link in _links(table, config, p.name, p.shape)]


def copies_in_predictions(table: Table, config: ModelConfig) -> list[Link]:
    """Links of the embedding and output matrix, of which Hugging Face's multi-token prediction layers have copies."""
    shapes = {p.name: p.shape for p in weights_of(config)}
    head = "head.weight" if "head.weight" in shapes else "embedding.weight"
    names = (("embedding.weight", "embed_tokens.weight"), (head, "shared_head.head.weight"))
    return [
        Link(name, table.block.format(layer) + external, shapes[name], all_rows(shapes[name]))
        for layer in mtp_layers(config)
        for name, external in names
    ]


def _links(table: Table, config: ModelConfig, name: str, shape: tuple[int, ...]) -> list[Link]:
    # attention.query.weight -> module and part
    module, part = name.rsplit(".", 1)
    if module.startswith("predictions."):
        _, number, module = module.split(".")
        # Hugging Face counts prediction layers after the last block.
        front = table.block.format(config.num_layers + int(number))
        return [Link(name, f"{front}{PREDICTIONS[module]}.{part}", shape, all_rows(shape))]
    if not module.startswith("layers."):
        end = SCORE if module == "head" and config.scalar_head else table.ends[module]
        return [Link(name, f"{end}.{part}", shape, all_rows(shape))]
    _, number, module = module.split(".", 2)
    # Layers with a recurrence have names of their own in some families.
    if table.recurrent and linear(config)[int(number)]:
        table = replace(table, modules={**table.modules, **table.recurrent})
    # By the tensor's full name first: some external tensors are not the weight or bias of a module.
    front, whole = table.block.format(number), table.modules.get(f"{module}.{part}")
    if isinstance(whole, str):
        return [Link(name, front + whole, shape, all_rows(shape), inner_one=part.endswith("_conv"))]
    if whole is not None and whole.kind == "ones":
        # A_log is (1, 1, heads, 1) in files.
        around = ((0, 1), (0, 1))
        return [Link(name, front + whole.external_name, shape, all_rows(shape), leading=around, inner_one=True)]
    if whole is not None and part.endswith(("_conv", "_conv_bias")):
        rows, one = _fused_rows(whole, config, shape), part.endswith("_conv")
        return [Link(name, front + whole.external_name, shape, rows, inner_one=one)]
    # Weights of all experts: (experts, out, in).
    if len(shape) == 3:
        return [_expert_link(front, table, module, config, name, shape, e) for e in range(shape[0])]
    if whole is not None:  # biases of all experts, of two projections in one tensor
        return [_expert_link(front, table, f"{module}.{part}", config, name, shape, e) for e in range(shape[0])]
    target, rows = table.modules[module], all_rows(shape)
    if isinstance(target, Fused):
        rows, target = _fused_rows(target, config, shape), target.external_name
    # Transformer Engine joins a norm's name and "weight" by an underscore.
    external = f"{front}{target}{'' if target.endswith('_') else '.'}{part}"
    return [Link(name, external, shape, rows, transposed=table.transposed and len(shape) == 2)]


def _expert_link(
    front: str, table: Table, module: str, config: ModelConfig, name: str, shape: tuple[int, ...], expert: int
) -> Link:
    """The link of one expert of a tensor (experts, out, in) or (experts, out). A stacked external tensor's name has
    no ending."""
    count, inner, target = shape[0], shape[1:], table.modules[module]
    # Biases of experts, (out,), have nothing to transpose.
    rows, transposed = all_rows(inner), table.experts_transposed and len(inner) == 2
    if isinstance(target, Fused):
        rows, target = _fused_rows(target, config, inner), target.external_name
    if "{}" in target:
        return Link(name, f"{front}{target.format(expert)}.weight", inner, rows, entry=expert)
    # A stacked tensor: the expert's number is an index in it.
    return Link(name, front + target, inner, rows, transposed, leading=((expert, count),), entry=expert)


def all_rows(shape: tuple[int, ...]) -> Rows:
    """All rows of a tensor of this shape."""
    # One block that is one slot: all rows.
    return Rows(blocks=1, slots=1, start=0, count=1, unit=shape[0])


def _fused_rows(fused: Fused, config: ModelConfig, shape: tuple[int, ...]) -> Rows:
    heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
    assert groups and width, "resolved before"
    if fused.kind == "gated":
        return _in_turn({"query": width, "gate": width}, fused.member, heads)
    if fused.kind in ("per_key_head", "recurrent"):
        return _recurrent_rows(fused, config)
    if fused.kind in ("mamba", "mamba_conv"):
        return _mamba_rows(fused, config)
    if fused.kind in ("halves", "interleaved"):
        start = ("gate", "up").index(fused.member)
        if fused.kind == "interleaved":
            return Rows(blocks=shape[0], slots=2, start=start, count=1, unit=1)
        return Rows(blocks=1, slots=2, start=start, count=1, unit=shape[0])
    if fused.kind == "stacked":
        start, count = {"query": (0, heads), "key": (heads, groups), "value": (heads + groups, groups)}[fused.member]
        return Rows(blocks=1, slots=heads + 2 * groups, start=start, count=count, unit=width)
    # For each key/value head its queries, then key, then value (Megatron's order for grouped
    # queries).
    queries = heads // groups
    start, count = {"query": (0, queries), "key": (queries, 1), "value": (queries + 1, 1)}[fused.member]
    return Rows(blocks=groups, slots=queries + 2, start=start, count=count, unit=width)


def _recurrent_rows(fused: Fused, config: ModelConfig) -> Rows:
    """Rows of a projection of a recurrence, or of its convolution."""
    # Value heads of one key head are neighbours.
    heads, served = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim * served
    if fused.kind == "recurrent":
        # A single block: all heads of a kind together.
        return _in_turn({"query": heads * key, "key": heads * key, "value": heads * value}, fused.member, 1)
    # One row per value head.
    if fused.member in ("beta", "decay"):
        return _in_turn({"beta": served, "decay": served}, fused.member, heads)
    return _in_turn({"query": key, "key": key, "value": value, "gate": value}, fused.member, heads)


def _mamba_rows(fused: Fused, config: ModelConfig) -> Rows:
    """Rows of Mamba-2's projection of the input, or of its convolution."""
    heads = config.mamba_num_heads or 0
    values, keys = heads * config.mamba_head_dim, config.mamba_num_groups * config.mamba_state_dim
    widths = {"value": values, "key": keys, "query": keys}
    if fused.kind == "mamba":
        # z, x, B, C, dt; without z and dt for the convolution.
        widths = {"gate": values, **widths, "step": heads}
    return _in_turn(widths, fused.member, 1)


def _in_turn(widths: Mapping[str, int], member: str, blocks: int) -> Rows:
    """The rows of ``member`` where each block has all members one after the other, of these widths."""
    names = list(widths)
    start = sum(widths[name] for name in names[: names.index(member)])
    return Rows(blocks, slots=sum(widths.values()), start=start, count=widths[member], unit=1)


def by_external_name(found: Iterable[Link]) -> dict[str, list[Link]]:
    """Links by the name of their external tensor."""
    grouped: dict[str, list[Link]] = {}
    for link in found:
        grouped.setdefault(link.external_name, []).append(link)
    return grouped
