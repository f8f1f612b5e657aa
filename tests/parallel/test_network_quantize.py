"""int8 between nodes: error bounds on random and on nasty numbers, bytes, and what is left exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smp.parallel.network.quantize import BLOCK, CodedBetweenNodes, Quantization, coded_bytes, decode, encode
from smp.parallel.network.schedules import reduce_scatter
from smp.parallel.network.topology import Topology
from tests.parallel.network_lab import run_together

SMALLEST = 2.0**-149
"""Of fp32. A scale that small is itself rounded by half of it, 127 times in a number."""


def bound(x: torch.Tensor, ulp: float) -> torch.Tensor:
    """What a number may be off, fp64: half a step of its block, and the rounding of scale and result."""
    count = x.numel()
    rows = torch.zeros(-(-count // BLOCK) * BLOCK, dtype=torch.float64)
    rows[:count] = x.double()
    largest = rows.view(-1, BLOCK).abs().amax(1, keepdim=True).expand(-1, BLOCK).reshape(-1)[:count]
    return largest * (1 / 254 + 2**-22) + ulp * x.double().abs() + (64 + 1 / ulp) * SMALLEST


def coded_and_back(x: torch.Tensor) -> torch.Tensor:
    coded, back = encode(x), torch.empty_like(x)
    assert coded.dtype is torch.uint8 and coded.numel() == coded_bytes(x.numel())
    decode(coded, back)
    return back


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(floats, min_size=0, max_size=300), st.integers(0, 2**31), st.integers(0, 300), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_number_is_off_by_half_a_step_of_its_block(said: list[float], seed: int, more: int, bf16: bool) -> None:
    """Numbers that hypothesis likes (largest, subnormal, alternating), then random ones of very different sizes."""
    draw = torch.Generator().manual_seed(seed)
    random = torch.randn(more, generator=draw) * 10 ** torch.empty(more).uniform_(-6, 6, generator=draw)
    x = torch.cat((torch.tensor(said, dtype=torch.float32), random))
    x = x.bfloat16() if bf16 else x
    x = x[x.isfinite()]  # bf16 rounds the largest up
    back = coded_and_back(x)
    assert back.dtype is x.dtype
    assert ((back.double() - x.double()).abs() <= bound(x, 2**-8 if bf16 else 2**-23)).all()


def test_the_bound_is_met_and_no_better_code_is_promised() -> None:
    """A number in the middle between two codes; broken rounding or another step would show."""
    x = torch.zeros(BLOCK)
    x[0], x[1] = 127.0, 0.5 - 1e-4
    assert coded_and_back(x)[1] == 0.0
    x[1] = 0.5 + 1e-4
    assert coded_and_back(x)[1] == 1.0


def test_what_is_not_finite_is_not_hidden() -> None:
    for nasty in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(3 * BLOCK)
        x[BLOCK + 5] = nasty
        back = coded_and_back(x)
        assert back[BLOCK : 2 * BLOCK].isnan().all(), "its block"
        assert torch.equal(back[:BLOCK], x[:BLOCK]) and torch.equal(back[2 * BLOCK :], x[2 * BLOCK :])


@given(
    st.sampled_from([(2, 2), (3, 2), (2, 3), (4, 1)]),
    st.integers(1, 700),
    st.integers(1, 4),
    st.integers(0, 2**31),
    st.sampled_from(["alike", "far apart", "opposite"]),
)
@settings(max_examples=60, deadline=None)
def test_a_sum_is_off_by_half_a_step_of_each_sum_that_crosses(
    nodes: tuple[int, int], size: int, chunks: int, seed: int, kind: str
) -> None:
    topology = Topology.even(*nodes)
    world, draw = topology.size, torch.Generator().manual_seed(seed)
    given = [torch.randn(size * world, generator=draw) for _ in range(world)]
    for rank, x in enumerate(given):
        if kind == "far apart":
            x *= 10.0 ** (rank - 2)
        elif kind == "opposite" and rank % 2:
            x.copy_(-given[rank - 1] * (1 + 1e-3))
    schedule = reduce_scatter(topology, [min(chunks, size)] * world)
    measured = [Quantization(gradients=True) for _ in range(world)]
    found = run_together(
        schedule,
        given,
        [size] * world,
        lambda rank, wire: CodedBetweenNodes(wire, topology.beyond(rank), measured[rank]),
    )
    for rank, result in enumerate(found):
        part = slice(rank * size, (rank + 1) * size)
        home = topology.locations[rank][0]
        sums = [torch.stack([given[r][part].double() for r in node]).sum(0) for node in topology.nodes]
        largest = sum(float(s.abs().max()) for node, s in enumerate(sums) if node != home)  # no block has a larger one
        rounding = 2**-22 * sum(float(x[part].abs().max()) for x in given) * world
        assert ((result.double() - torch.stack(sums).sum(0)).abs() <= largest / 254 + rounding).all()
    error = float(measured[0].relative(measured[0].taken()))
    assert error <= BLOCK**0.5 / 254 and (error > 0 or size < 8)


def test_bytes_of_uplinks_are_those_of_the_formula() -> None:
    """int8 and a scale for each block: (1 + 4 / BLOCK) / 4 of fp32's; inside of nodes all is exact."""
    topology, size = Topology.even(2, 2), 4 * BLOCK
    crossed = {True: 0, False: 0}
    inside = {True: 0, False: 0}

    class Counting:
        def __init__(self, wire: object, rank: int, coded: bool) -> None:
            self.wire, self.rank, self.coded = wire, rank, coded

        def send(self, tensor: torch.Tensor, to: int) -> object:
            (crossed if to in topology.beyond(self.rank) else inside)[self.coded] += tensor.nbytes
            return self.wire.send(tensor, to)  # type: ignore[attr-defined]

        def receive(self, into: torch.Tensor, source: int) -> object:
            return self.wire.receive(into, source)  # type: ignore[attr-defined]

    for coded in (True, False):
        run_together(
            reduce_scatter(topology, [2] * 4),
            [torch.ones(4 * size)] * 4,
            [size] * 4,
            lambda rank, wire, coded=coded: (  # type: ignore[misc]
                CodedBetweenNodes(Counting(wire, rank, coded), topology.beyond(rank), Quantization(gradients=True))  # type: ignore[arg-type]
                if coded
                else Counting(wire, rank, coded)
            ),
        )
    assert crossed[False] == 4 * size * 4, "each node's half of the buffer, fp32"
    assert crossed[True] == crossed[False] * (1 + 4 / BLOCK) / 4
    assert inside[True] == inside[False] > 0


def test_what_is_measured_is_the_relative_error() -> None:
    measured = Quantization(weights=True, gradients=True)
    assert measured.names == ("weight quantization error", "gradient quantization error")
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    back = torch.empty_like(x)
    decode(measured.encoded(x, "weights"), back)
    weights, gradients = measured.relative(measured.taken()).tolist()
    assert weights == pytest.approx(float((back - x).norm() / x.norm()), rel=1e-5) and gradients == 0.0
    assert 0.004 < weights < 0.008, "numbers of a bell curve: 0.7 %"
    assert measured.taken().tolist() == [0.0] * 4, "it starts again at zero"


@pytest.mark.parametrize("size", [1e-38, 1e-25, 1.0, 1e25, 1e37])
def test_the_error_that_is_measured_does_not_depend_on_the_size_of_numbers(size: float) -> None:
    """Squares of such numbers are 0 or infinite in fp32, and so was the error."""
    measured = Quantization(gradients=True)
    measured.encoded(size * torch.randn(1000, generator=torch.Generator().manual_seed(0)), "gradients")
    measured.encoded(torch.zeros(BLOCK), "gradients")
    assert 0.004 < float(measured.relative(measured.taken())) < 0.008


@pytest.mark.parametrize("nasty", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_shows_in_the_sum_and_in_the_error(nasty: float) -> None:
    """On one rank of another node than the owner's; blocks without it stay as they are."""
    topology, size = Topology.even(2, 2), 3 * BLOCK
    given = [torch.ones(4 * size) for _ in range(4)]
    given[3][BLOCK + 5] = nasty  # of rank 0's piece
    measured = Quantization(gradients=True)
    found = run_together(
        reduce_scatter(topology, [1] * 4),
        given,
        [size] * 4,
        lambda rank, wire: CodedBetweenNodes(wire, topology.beyond(rank), measured),
    )
    rows = found[0].view(3, BLOCK)
    assert rows[1].isnan().all() and rows[::2].eq(4).all() and all(x.eq(4).all() for x in found[1:])
    assert measured.relative(measured.taken()).isnan().all()
