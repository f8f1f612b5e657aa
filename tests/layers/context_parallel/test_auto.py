"""The model by which --cp-comm-type auto chooses, and bytes by formula beside bytes on the wire."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from smp.kernels.attention_core import FusedAttention
from smp.kernels.token_layout import TokenLayout
from smp.layers import context_parallel_attention
from smp.layers.context_parallel.auto import CPU, H100, attention_flops, choose_comm_type
from smp.layers.context_parallel.cost import Exchanged, bytes_sent
from smp.parallel import collectives
from tests.distributed import run_distributed
from tests.layers.context_parallel.plain import Case
from tests.layers.context_parallel.test_methods import mesh_of, methods_of

LLAMA = Exchanged(tokens=131072 // 8, heads=32, groups=8, head_dim=128, element=2, cp=8)


class Wire:
    """Stands for the collectives' operators and adds the bytes that leave this rank."""

    def __init__(self, operators: Any, rank: int) -> None:
        self.operators, self.rank, self.sent = operators, rank, 0
        self.shift = collectives._start_to_and_from

    def all_gather_into_tensor(self, x: torch.Tensor, size: int, name: str) -> torch.Tensor:
        self.sent += (size - 1) * x.numel() * x.element_size()
        return self.operators.all_gather_into_tensor(x, size, name)

    def reduce_scatter_tensor(self, x: torch.Tensor, op: str, size: int, name: str) -> torch.Tensor:
        self.sent += (size - 1) * x.numel() * x.element_size() // size
        return self.operators.reduce_scatter_tensor(x, op, size, name)

    def all_to_all_single(self, x: torch.Tensor, out: list[int], into: list[int], name: str) -> torch.Tensor:
        own = into[_rank_in(name, self.rank)]  # stays
        self.sent += (sum(into) - own) * x[0].numel() * x.element_size()
        return self.operators.all_to_all_single(x, out, into, name)

    def start_to_and_from(self, x: torch.Tensor, *ends: Any) -> torch.Tensor:
        self.sent += x.numel() * x.element_size()
        return self.shift(x, *ends)

    def wait_tensor(self, x: torch.Tensor) -> torch.Tensor:
        return self.operators.wait_tensor(x)


def _rank_in(name: str, rank: int) -> int:
    """This rank's index in a group."""
    return c10d.get_group_rank(c10d._resolve_process_group(name), rank)


def wire(rank: int, ranks: int) -> dict[tuple[str, int, str], list[tuple[int, int]]]:
    """(formula, counted) of the forward and of the backward pass."""
    found = {}
    operators = collectives._ops
    for method in methods_of(ranks):
        core = context_parallel_attention(FusedAttention(), mesh_of(method, ranks), method)
        for groups in (12, 4, 1):
            for dtype in (torch.float32, torch.bfloat16):
                case = Case(96, 12, groups)
                rows = case.rows(case.cut(ranks), rank)
                given = [x[rows].requires_grad_() for x in case.tensors(dtype)]
                layout = TokenLayout(case.batch, case.length // ranks, cut=case.cut(ranks))
                layout = core.prepare(layout, [case.spec], dtype, torch.device("cpu"))
                counter = collectives._ops = Wire(operators, rank)
                collectives._start_to_and_from = counter.start_to_and_from
                out, _ = core(*given[:3], layout, case.spec)
                forward = counter.sent
                out.sum().backward()
                collectives._ops, collectives._start_to_and_from = operators, counter.shift
                sizes = Exchanged(len(rows), 12, groups, case.width, dtype.itemsize, ranks, 2)
                formula = bytes_sent(method, sizes)
                counted = forward, counter.sent - forward
                found[method, groups, str(dtype)] = list(zip(formula, counted, strict=True))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_on_the_wire_are_those_of_the_formula(ranks: int) -> None:
    for part in run_distributed(wire, ranks):
        assert len(part) == len(methods_of(ranks)) * 6
        for key, pairs in part.items():
            assert all(formula == counted > 0 for formula, counted in pairs), (key, pairs)


def test_flops_are_those_of_the_pairs_that_are_seen() -> None:
    sizes = Exchanged(tokens=64, heads=2, groups=1, head_dim=8, element=2, cp=4)
    for window, ids, document in ((None, None, None), (10, None, None), (None, [64] * 4, 64), (10, [64] * 4, 64)):
        documents = None if ids is None else torch.arange(4).repeat_interleave(64)[None]
        pairs = Case(256, 2, 1, documents, batch=1).cut(4).work(window).double().mean()
        flops = attention_flops(sizes, 256, window=window, document=document)
        assert flops == pytest.approx(4 * 8 * 2 * float(pairs))


def chosen(of: Exchanged, length: int = 131072, machine: Any = H100, **options: Any) -> str:
    return choose_comm_type(of, length, machine, **options).best.kind


def test_the_choice_follows_heads_links_windows_and_documents() -> None:
    assert chosen(LLAMA) in ("p2p", "all_gather")  # hidden behind 131,072 tokens
    assert chosen(LLAMA, window=1024) == "a2a+p2p"  # little to hide behind: few bytes, part of them hidden
    assert chosen(LLAMA, window=16) == "a2a"  # nothing to hide behind: fewest bytes
    odd = replace(LLAMA, heads=12, groups=12)
    assert chosen(odd, window=1024) == "a2a+p2p"  # 8 ranks cannot share 12 heads, 4 can
    assert "a2a" not in {choose_comm_type(replace(LLAMA, heads=9, groups=9), 131072, H100, window=9).best.kind}
    many = chosen(replace(LLAMA, tokens=2048), 16384, CPU, document=64)
    assert many == "a2a"  # one call for all documents
    assert chosen(LLAMA, document=4096, compiled=True) == "a2a"
    with pytest.raises(ValueError, match="nothing takes documents under torch.compile"):
        choose_comm_type(odd, 131072, H100, document=4096, compiled=True)


def test_the_table_says_what_was_compared() -> None:
    choice = choose_comm_type(LLAMA, 131072, H100)
    assert choice.lines[0].startswith("context parallelism of 8, one layer: ")
    rows = {line.split()[0]: line for line in choice.lines[2:]}
    assert set(rows) == {"a2a", "all_gather", "p2p", "a2a+p2p"}
    assert [line for line in choice.lines if line.endswith("chosen")] == [rows[choice.best.kind]]
    assert f"{sum(bytes_sent('p2p', LLAMA)) / 2**20:.1f}" in rows["p2p"]
