"""Which rows of another program's tensors are which of our tensors. Tables of families are written in these words.

Three things happen to a matrix on its way: several of ours lie in one of theirs (fused query, key and value; gate
and up), the two dimensions are swapped (GPT-2), or all layers lie in one tensor (Megatron's stacked checkpoints).
Values are never changed. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from smp.config import ModelConfig
from smp.models.inventory import inventory

Fusion = Literal["per_group", "thirds", "halves"]
"""How our matrices lie in one of theirs, by rows:

per_group: for each key/value head its query heads, the key, the value (Megatron; GPT-NeoX, where each has one query).
thirds: all of query, then all of key, then all of value, of equal sizes (GPT-2).
halves: all of gate, then all of up (Megatron).
"""


@dataclass(frozen=True)
class In:
    """The place of one of our modules within one of theirs: ``member`` of the fusion ``kind``."""

    theirs: str
    kind: Fusion
    member: Literal["query", "key", "value", "gate", "up"]


@dataclass(frozen=True)
class Table:
    """Names of modules, ours to theirs. What has weight and bias here has them there, behind a dot, or behind the
    underscore that a name ends with.

    Attributes:
        block: what stands in front of a block's modules there; ``{}`` is the number of the layer.
        modules: of a block, without what stands in front.
        ends: outside of blocks.
        transposed: matrices of blocks are (in, out) there.
    """

    block: str
    modules: Mapping[str, str | In]
    ends: Mapping[str, str]
    transposed: bool = False


@dataclass(frozen=True)
class Rows:
    """Of every ``slots x unit`` rows of theirs, the ``count x unit`` rows from ``start x unit`` on are ours."""

    blocks: int
    slots: int
    start: int
    count: int
    unit: int

    @property
    def whole(self) -> bool:
        """Whether all rows are ours, in their order."""
        return self.slots == self.count

    @property
    def ours(self) -> int:
        """Rows of our tensor."""
        return self.blocks * self.count * self.unit

    @property
    def theirs(self) -> int:
        """Rows of their tensor."""
        return self.blocks * self.slots * self.unit

    def runs(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(their first row, our first row minus ``first``, rows) of each stretch of our rows from ``first`` on."""
        if self.whole:
            yield first, 0, count
            return
        width, row = self.count * self.unit, first
        while row < first + count:
            block, within = divmod(row, width)
            length = min(width - within, first + count - row)
            yield block * self.slots * self.unit + self.start * self.unit + within, row - first, length
            row += length


@dataclass(frozen=True)
class Link:
    """One of our tensors and its place there.

    Attributes:
        ours, theirs: names of tensors.
        shape: of ours.
        rows: which of theirs, counted before a transposition.
        transposed: theirs is (columns, rows).
        layer: index in a leading dimension of ``layers`` entries; None: there is no such dimension.
        padded: rows of theirs, when it is padded at the end.
    """

    ours: str
    theirs: str
    shape: tuple[int, ...]
    rows: Rows
    transposed: bool = False
    layer: int | None = None
    layers: int = 0
    padded: int | None = None

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Of the whole tensor there."""
        shape: tuple[int, ...] = (self.padded or self.rows.theirs, *self.shape[1:])
        if self.transposed:
            shape = shape[::-1]
        return shape if self.layer is None else (self.layers, *shape)


def links(table: Table, config: ModelConfig) -> dict[str, Link]:
    """Where each of our tensors is, by our name.

    Raises:
        KeyError: the table has no place for one (the family does not have such a module).
    """
    return {p.name: _link(table, config, p.name, p.shape) for p in inventory(config)}


def _link(table: Table, config: ModelConfig, name: str, shape: tuple[int, ...]) -> Link:
    module, part = name.rsplit(".", 1)
    if not module.startswith("layers."):
        return Link(name, f"{table.ends[module]}.{part}", shape, whole(shape))
    _, number, module = module.split(".", 2)
    place = table.modules[module]
    front, transposed = table.block.format(number), table.transposed and len(shape) == 2
    if isinstance(place, str):
        return Link(name, f"{front}{place}{'' if place.endswith('_') else '.'}{part}", shape, whole(shape), transposed)
    return Link(name, f"{front}{place.theirs}.{part}", shape, fused_rows(place, config), transposed)


def whole(shape: tuple[int, ...]) -> Rows:
    """All rows of a tensor of this shape."""
    return Rows(1, 1, 0, 1, shape[0])


def fused_rows(place: In, config: ModelConfig) -> Rows:
    """The rows of a fused matrix that a member has."""
    heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
    assert groups and width and config.ffn_hidden_size, "resolved before"
    if place.kind == "halves":
        return Rows(1, 2, ("gate", "up").index(place.member), 1, config.ffn_hidden_size)
    if place.kind == "thirds":
        assert heads == groups, "checked with the configuration"
        return Rows(1, 3, ("query", "key", "value").index(place.member), 1, heads * width)
    queries = heads // groups
    start, count = {"query": (0, queries), "key": (queries, 1), "value": (queries + 1, 1)}[place.member]
    return Rows(groups, queries + 2, start, count, width)


def stacked(link: Link, theirs: str, layer: int, layers: int) -> Link:
    """The same place as entry ``layer`` of a tensor that holds all layers."""
    return replace(link, theirs=theirs, layer=layer, layers=layers)


def by_theirs(found: Mapping[str, Link]) -> dict[str, list[Link]]:
    """Their names, and what of ours lies there."""
    grouped: dict[str, list[Link]] = {}
    for link in found.values():
        grouped.setdefault(link.theirs, []).append(link)
    return grouped
