"""Collectives as schedules: complete, free of deadlock, equal to the flat result, and as few bytes as can be.

All ranks run in one process, so that any world of any nodes can be tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smp.parallel.network.collective_schedule import Action, Op, Route, Schedule, even_sizes
from smp.parallel.network.run import add_up
from smp.parallel.network.schedules import actions_of, all_gather, all_reduce, reduce_scatter
from smp.parallel.network.simulate_collective import simulate
from smp.parallel.network.topology import Link, Links, Topology
from smp.parallel.network.validate_collective import ScheduleError, validate
from tests.parallel.network_lab import run_together

ROUTES: tuple[Route, ...] = ("mesh", "ring")
MAKERS: tuple[Callable[..., Schedule], ...] = (all_gather, reduce_scatter, all_reduce)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)


@st.composite
def topologies(draw: st.DrawFn, most: int = 9) -> Topology:
    """Unequal nodes, whose ranks need not be neighbours."""
    return Topology.of([f"node{n}" for n in draw(st.lists(st.integers(0, 3), min_size=1, max_size=most))])


@st.composite
def problems(draw: st.DrawFn) -> tuple[Topology, list[int], list[int], Route]:
    """(topology, sizes of pieces, their chunks, route)."""
    topology = draw(topologies())
    sizes = [draw(st.sampled_from((0, 1, 2, 7, 16))) for _ in range(topology.size)]
    chunks = [min(size, draw(st.integers(1, 10))) for size in sizes]
    return topology, sizes, chunks, draw(st.sampled_from(ROUTES))


def numbers(seed: int, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in any order and dtype."""
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 8, (count,), generator=draw).to(dtype)


@settings(max_examples=120)
@given(problems(), st.sampled_from(DTYPES), st.integers(0, 9))
def test_every_world_gives_the_flat_result(
    problem: tuple[Topology, list[int], list[int], Route], dtype: torch.dtype, seed: int
) -> None:
    topology, sizes, chunks, route = problem
    whole = [numbers(seed, rank, sum(sizes), dtype) for rank in range(topology.size)]
    total = torch.stack(whole).sum(0).to(dtype)
    starts = [sum(sizes[:rank]) for rank in range(topology.size)]
    gathered = torch.cat([w[s : s + n] for w, s, n in zip(whole, starts, sizes, strict=True)])
    for make in MAKERS:
        schedule = make(topology, chunks, route)
        validate(schedule)
        assert actions_of(schedule.kind, topology, chunks, route, topology.size - 1) == schedule.actions[-1]
        found = run_together(schedule, whole, sizes)
        for rank, tensor in enumerate(found):
            want = {"all-gather": gathered, "all-reduce": total}.get(schedule.kind)
            want = total[starts[rank] :][: sizes[rank]] if want is None else want
            assert torch.equal(tensor, want), (schedule, rank)


@settings(max_examples=60)
@given(topologies(), st.integers(0, 5), st.integers(2, 9), st.sampled_from(ROUTES))
def test_bits_of_sums_depend_on_nodes_alone(topology: Topology, seed: int, chunks: int, route: Route) -> None:
    """Not on chunks; all ranks have the same; near the sum in fp64, by the stated bound."""
    draw = torch.Generator().manual_seed(seed)
    size = 12 * topology.size
    sizes = even_sizes(size, topology.size)
    for dtype in (torch.float32, torch.bfloat16):
        whole = [torch.randn(size, generator=draw).to(dtype) for _ in range(topology.size)]
        runs = [run_together(all_reduce(topology, [k] * topology.size, route), whole, sizes) for k in (1, chunks)]
        assert all(torch.equal(tensor, runs[0][0]) for run in runs for tensor in run)
        exact, scale = torch.stack(whole).double().sum(0), torch.stack(whole).double().abs().sum(0)
        hops = len(topology.nodes) + 1 if dtype is torch.bfloat16 else topology.size
        bound = hops * torch.finfo(dtype).eps / 2 * 1.02 * scale
        assert ((runs[0][0].double() - exact).abs() <= bound).all()


def test_less_than_32_bits_are_added_in_fp32() -> None:
    parts = [torch.tensor([256.0], dtype=torch.bfloat16), *[torch.tensor([1.0], dtype=torch.bfloat16)] * 4]
    assert add_up(parts).item() == 260.0, "bf16 would stay at 256"
    assert add_up(parts).dtype is torch.bfloat16


LINKS = Links(between=Link(1e-4, 12.5e6), inside=Link(2e-5, 500e6), call=0.0, add=1e30)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("nodes, local", [(2, 2), (2, 4), (4, 2), (3, 3), (5, 1)])
def test_bytes_of_uplinks_are_the_least_possible(make: Callable[..., Schedule], nodes: int, local: int) -> None:
    """(n - 1) / n of the buffer, both ways, twice for an all-reduce; by ring and by mesh, however many chunks."""
    ranks, piece = nodes * local, 1 << 12
    factor = 2 if make is all_reduce else 1
    for route in ROUTES:
        schedule = make(Topology.even(nodes, local), [5] * ranks, route)
        timeline = simulate(schedule, [piece] * ranks, LINKS)
        least = factor * (nodes - 1) * local * piece
        assert [timeline.sent[n] for n in range(nodes)] == [least] * nodes
        assert [timeline.received[n] for n in range(nodes)] == [least] * nodes


@pytest.mark.parametrize("make", MAKERS)
def test_chunks_bring_the_time_to_the_limit(make: Callable[..., Schedule]) -> None:
    """Within 10 % of what the uplink needs, on 2x2, 2x4 and 4x2; a flat ring needs what its bytes say."""
    for nodes, local in ((2, 2), (2, 4), (4, 2)):
        ranks, piece = nodes * local, (16 << 20) // (nodes * local)
        network = Topology.even(nodes, local)
        limit = (2 if make is all_reduce else 1) * (nodes - 1) * local * piece / LINKS.between.rate
        end = simulate(make(network, [8] * ranks), [piece] * ranks, LINKS).end
        assert limit <= end < 1.1 * limit
        flat = simulate(make(network.each_alone(), [8] * ranks, "ring"), [piece] * ranks, LINKS, network).end
        assert flat >= 0.99 * limit * (ranks - 1) / (ranks - local)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("nodes, local", [(2, 2), (2, 4), (4, 2)])
def test_what_crosses_first_is_not_held_up_inside(nodes: int, local: int, route: Route) -> None:
    """Until its first sum leaves the node, a rank of a reduction has given first chunks of what crosses, and no more:
    8 processes on two cores were 4 ms later with all parts on their way at once."""
    network = Topology.even(nodes, local)
    schedule = reduce_scatter(network, [4] * network.size, route)
    for rank, actions in enumerate(schedule.actions):
        home = network.locations[rank][0]
        sends = [action for action in actions if action.op is Op.SEND]
        first = next(i for i, action in enumerate(sends) if network.locations[action.peer][0] != home)
        before = sends[:first]
        assert before and all(action.chunk == 0 for action in before)
        assert all(network.locations[action.piece][0] != home for action in before)


def test_chunks_overlap_both_kinds_of_links() -> None:
    """Links inside that are twice as fast as the uplink: in one chunk their times add up."""
    links, network, piece = replace(LINKS, inside=Link(2e-5, 25e6)), Topology.even(2, 2), 4 << 20
    times = [simulate(all_gather(network, [k] * 4), [piece] * 4, links).end for k in (1, 16)]
    limit = 2 * piece / links.between.rate
    assert times[0] > 1.2 * limit and times[1] < 1.1 * limit


def test_scratch_memory_of_a_sum_is_bounded() -> None:
    """Receives of parts that were posted and not added yet: a window, not the whole buffer."""
    schedule = reduce_scatter(Topology.even(2, 4), [40] * 8)
    waiting, most = 0, 0
    for action in schedule.actions[0]:
        waiting += (action.op is Op.RECEIVE_PART) - (len(action.ranks) - 1) * (action.op is Op.REDUCE)
        most = max(most, waiting)
    assert 0 < most <= 8 * 3 and waiting == 0


def changed(schedule: Schedule, rank: int, change: Callable[[list[Action]], object]) -> Schedule:
    actions = [list(of) for of in schedule.actions]
    change(actions[rank])
    return replace(schedule, actions=tuple(map(tuple, actions)))


def test_broken_schedules_are_found() -> None:
    gather = all_gather(Topology.even(2, 2), [2] * 4)
    with pytest.raises(ScheduleError, match="message 3 from rank 0 to rank 1: None meets receive"):
        validate(changed(gather, 0, lambda actions: actions.pop()))
    scatter = reduce_scatter(Topology.even(2, 2), [1] * 4)
    validate(scatter)

    def forget(actions: list[Action]) -> None:
        found = next(i for i, action in enumerate(actions) if action.op is Op.REDUCE)
        actions[found] = replace(actions[found], ranks=(0,))

    with pytest.raises(ScheduleError, match="in the end rank"):
        validate(changed(scatter, 0, forget))

    def twice(actions: list[Action]) -> None:
        found = next(i for i, action in enumerate(actions) if action.op is Op.REDUCE)
        actions.insert(found + 1, actions[found])

    with pytest.raises(ScheduleError, match="is added twice"):
        validate(changed(scatter, 0, twice))

    def wait_first(actions: list[Action]) -> None:
        sends = [action for action in actions if action.op is Op.SEND]
        actions[:] = [action for action in actions if action.op is not Op.SEND] + sends

    stuck = changed(changed(reduce_scatter(Topology.even(1, 2), [1, 1]), 0, wait_first), 1, wait_first)
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0, position 1, reduce\(piece 0, chunk 0, 0, 1\); rank 1"):
        validate(stuck)
