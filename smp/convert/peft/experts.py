"""Adapters of experts in peft's format, where transformers 5 has all experts of a layer in one tensor.

peft adapts such a tensor (experts, out, in), or of GPT-OSS (experts, in, out), as a whole (``target_parameters``): with
A (experts x rank, in), expert after expert, and B (out, rank x experts), in which the expert varies fastest. Gate and
up lie in one tensor, so their adapters become one, as those of fused matrices do. Several tensors of one module are
wrapped one inside the other: the last has the module's name, each before it one ``.base_layer`` more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from smp.config import ConfigError, ModelConfig
from smp.convert.huggingface.family import Family
from smp.convert.layout import Link, links
from smp.convert.peft.adapters import Adapter


@dataclass(frozen=True)
class ExpertTensor:
    """All experts' matrices of a layer in one tensor.

    Attributes:
        name: Hugging Face's.
        module: as peft names what it puts around it.
        members: by the name of this project's layer, where the matrix of the first expert lies in that of the tensor.
        count: number of experts.
    """

    name: str
    module: str
    members: Mapping[str, Link]
    count: int


def expert_tensors(config: ModelConfig, family: Family, chosen: Callable[[str, list[str]], bool]) -> list[ExpertTensor]:
    """The stacked tensors that ``chosen`` takes, by their name and the names of this project's layers in them."""
    found: dict[str, dict[str, Link]] = {}
    counts: dict[str, int] = {}
    for link in links(family.table, config, stacked=True) if config.num_experts is not None else ():
        # The first expert stands for all: they lie alike.
        if link.entry == 0 and link.leading and link.smp_name.endswith(".weight"):
            found.setdefault(link.external_name, {})[link.smp_name.removesuffix(".weight")] = link
            counts[link.external_name] = link.leading[0][1]
    names = [name for name, members in found.items() if chosen(name, list(members))]
    if names and not family.table.experts_in_peft:
        raise ConfigError(
            f"adapters of {family.architecture}'s experts are neither read nor written in peft's format; leave "
            "experts out of --lora-target-modules"
        )
    tensors = []
    for i, name in enumerate(names):
        module = name.rpartition(".")[0]
        # peft wraps one tensor after the other: the last is outermost, and has the module's own
        # name.
        after = sum(other.rpartition(".")[0] == module for other in names[i + 1 :])
        tensors.append(ExpertTensor(name, module + ".base_layer" * after, found[name], counts[name]))
    return tensors


def joined(tensor: ExpertTensor, adapters: Mapping[str, Adapter]) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(A, B, scale) of a tensor, from the adapters of some of its members."""
    members = [(link, adapters[name]) for name, link in tensor.members.items() if name in adapters]
    scale, rank = members[0][1].scale, sum(m.rank for _, m in members)
    # (experts, out, joined rank): each member's B has rows and columns of its own.
    b, column = torch.zeros(tensor.count, members[0][0].rows.external_rows, rank), 0
    for link, m in members:
        for row, at, count in link.rows.runs(0, link.rows.smp_rows):
            b[:, row : row + count, column : column + m.rank] = m.b[:, at : at + count] * (m.scale / scale)
        column += m.rank
    a = torch.cat([m.a for _, m in members], dim=1)  # (experts, rank, in)
    # (experts, rank, in) -> (experts x rank, in); (experts, out, rank) -> (out, rank x experts)
    return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1), scale


def parted(tensor: ExpertTensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> dict[str, Adapter]:
    """The adapters of all members by the name of their layer, from A and B in peft's form."""
    # The inverse of ``joined``'s reshapes.
    a, b = a.unflatten(0, (tensor.count, -1)), b.unflatten(1, (-1, tensor.count)).permute(2, 0, 1)
    out = {}
    for name, link in tensor.members.items():
        rows = [b[:, row : row + count] for row, _, count in link.rows.runs(0, link.rows.smp_rows)]
        # All members share A.
        out[name] = Adapter(a.contiguous(), torch.cat(rows, dim=1).contiguous(), scale)
    return out
