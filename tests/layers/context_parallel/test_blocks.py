"""Which blocks a rank computes, and their merged results, without other processes: keys of all ranks are at hand."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smp.kernels.attention_cores.attention_core import AttentionSpec
from smp.kernels.attention_cores.fused_attention import FusedAttention
from smp.kernels.attention_cores.math_attention import MathAttention
from smp.kernels.attention_cores.varlen import VarlenAttention
from smp.kernels.token_layout import TokenLayout
from smp.layers.context_parallel.blocks import Block, blocks_of, runs_of
from smp.layers.context_parallel.gather import AllGatherAttention
from smp.layers.context_parallel.partial import Layer, finished
from smp.layers.context_parallel.ring import RingAttention, _halves
from smp.parallel.collectives import Group
from tests.layers.context_parallel.plain import CASES, CPU, NAMES, PLAIN, Case
from tests.layers.whole import beyond, error
from tests.plain_varlen import plain_varlen

CORES: dict[str, Any] = {
    "flash": FusedAttention("flash"),
    "math": MathAttention(),
    "variable lengths": VarlenAttention(),
}


@st.composite
def cases(draws: Any) -> tuple[Case, int]:
    """A case and the number of ranks."""
    ranks, batch, heads = (draws(st.integers(1, high)) for high in (4, 2, 3))
    groups = draws(st.sampled_from([n for n in (1, 2, 3) if heads % n == 0]))
    if draws(st.booleans()):
        length = ranks * draws(st.integers(1, 8))
        ids = st.lists(st.integers(0, 3), min_size=length, max_size=length)
        documents = torch.tensor([sorted(draws(ids)) for _ in range(batch)])
    else:
        length, documents = 2 * ranks * draws(st.integers(1, 5)), None
    window, causal = draws(st.none() | st.integers(1, 12)), draws(st.booleans())
    case = Case(length, heads, groups, documents, window if causal else None, causal=causal, batch=batch, width=4)
    return replace(case, dropout=draws(st.sampled_from([0.0, 0.3]))), ranks


def pairs_of(block: Block, keys_at: list[tuple[int, int]], queries_at: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    """(sequence, query column, key column) of what the block says is seen."""
    queries = [row for a, b in block.queries for row in range(a, b)]
    keys = [row for a, b in block.keys for row in range(a, b)]
    found = []
    for i, query in enumerate(queries):
        for j, key in enumerate(keys):
            distance = block.distance + i - j
            hidden = (block.causal and distance < 0) or (block.window is not None and distance >= block.window)
            if not hidden:
                assert queries_at[query][0] == keys_at[key][0], "of one sequence"
                found.append((*queries_at[query], keys_at[key][1]))
    return found


def places(case: Case, ranks: int, rank: int | None) -> list[tuple[int, int]]:
    """(sequence, column) of the rows of a rank, or of all in order."""
    rows = torch.arange(case.batch * case.length) if rank is None else case.rows(case.cut(ranks), rank)
    return [divmod(row, case.length) for row in rows.tolist()]


def visible(case: Case, ranks: int, rank: int) -> list[tuple[int, ...]]:
    found = []
    for sequence, i in places(case, ranks, rank):
        for j in range(case.length):
            alike = case.documents is None or bool(case.documents[sequence, i] == case.documents[sequence, j])
            near = case.window is None or i - j < case.window
            if alike and near and (not case.causal or j <= i):
                found.append((sequence, i, j))
    return sorted(found)


@settings(max_examples=60, deadline=None)
@given(cases(), st.booleans(), st.booleans())
def test_every_pair_that_is_seen_is_computed_once(drawn: tuple[Case, int], tile: bool, join: bool) -> None:
    case, ranks = drawn
    cut, pattern = case.cut(ranks), (case.causal, case.window)
    for rank in range(ranks):
        want, mine = visible(case, ranks, rank), places(case, ranks, rank)
        for sources in ([None], range(ranks)):
            found = []
            for source in sources:
                blocks = blocks_of(runs_of(cut, rank), runs_of(cut, source), pattern, tile=tile, join=join)
                for block in blocks:
                    found += pairs_of(block, places(case, ranks, source), mine)
            assert sorted(found) == want


def simulated(case: Case, core: Any, ranks: int, kind: Any, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """out, lse and gradients of all ranks, in rows of whole sequences."""
    cut, rows = case.cut(ranks), case.batch * case.length
    q, k, v, dout = case.tensors(dtype)
    out, lse = torch.empty_like(q), torch.empty(rows, case.heads, dtype=torch.promote_types(dtype, torch.float32))
    grads = [torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v)]
    layer = Layer(core, case.spec, case.key)
    held = [case.rows(cut, rank) for rank in range(ranks)]
    for rank, mine in enumerate(held):
        layout = TokenLayout(case.batch, case.length // ranks, token_index=case.numbers()[mine], cut=cut)
        plan = kind(core, Group("none", ranks, rank)).prepare(layout, [case.spec], dtype, CPU).plan
        (steps,) = plan.values()
        sources = [held[(rank - step) % ranks] for step in range(len(steps))]
        if kind is AllGatherAttention:
            steps, sources = [steps], [torch.cat(held)]
        sums = None
        for calls, source in zip(steps, sources, strict=True):
            sums = layer.attend(q[mine], k[source], v[source], calls, sums)
        out[mine], found = finished(sums, q[mine], len(mine))
        lse[mine] = found.t()
        for calls, source in zip(steps, sources, strict=True):
            empty = tuple(torch.zeros_like(x, dtype=lse.dtype) for x in (q[mine], k[source], v[source]))
            given = dout[mine], q[mine], out[mine], found
            parts = layer.backward(given, k[source], v[source], calls, empty)
            for grad, index, part in zip(grads, (mine, source, source), parts, strict=True):
                grad[index] += part
    return [out, lse, *grads]


def errors(found: list[torch.Tensor], want: list[torch.Tensor]) -> dict[str, float]:
    """Of tensors that are finite in the same places."""
    for got, exact in zip(found, want, strict=True):
        assert torch.equal(got.isneginf(), exact.isneginf()) and not got.isnan().any()
    pairs = zip(NAMES, found, want, strict=True)
    return {name: error(x.masked_fill(y.isneginf(), 0.0), y.masked_fill(y.isneginf(), 0.0)) for name, x, y in pairs}


@settings(max_examples=80, deadline=None)
@given(cases(), st.sampled_from([RingAttention, AllGatherAttention]), st.sampled_from(sorted(CORES)))
def test_blocks_merge_to_the_whole(drawn: tuple[Case, int], kind: Any, core: str) -> None:
    case, ranks = drawn
    if core == "variable lengths" and case.dropout:
        core = "math"  # which computes probabilities that are dropped for all cores
    with plain_varlen() if core == "variable lengths" else nullcontext():
        found = simulated(case, CORES[core], ranks, kind)
    assert beyond(errors(found, case.exact()), 1e-12) == {}


@pytest.mark.parametrize("kind", [RingAttention, AllGatherAttention])
@pytest.mark.parametrize("name", CASES)
def test_the_variable_length_kernel_takes_all_blocks_of_a_kind_at_once(kind: Any, name: str) -> None:
    case = CASES[name]
    if case.dropout:
        pytest.skip("probabilities that are dropped are materialised")
    with plain_varlen() as calls:
        found = simulated(case, CORES["variable lengths"], 2, kind)
    assert beyond(errors(found, case.exact()), 1e-12) == {}
    if case.documents is not None:
        assert max(calls) > 2  # documents of a call


def test_a_row_that_sees_no_key_is_nothing() -> None:
    """Of the second rank's keys a first query sees none; alone it has out 0 and lse -inf, merged it has no part."""
    case, core = Case(8, 2, 2, batch=1, width=4), FusedAttention("flash")
    layer, cut = Layer(core, AttentionSpec()), case.cut(2)
    q, k, v, dout = case.tensors(torch.float64)
    runs = [runs_of(cut, rank) for rank in range(2)]
    layout = TokenLayout(1, 4, cut=cut)
    plan = RingAttention(core, Group("none", 2, 0)).prepare(layout, [AttentionSpec()], torch.float64, CPU).plan
    (steps,) = plan.values()
    assert len(steps) == 2 and len(runs[0]) == 2
    mine, other = (case.rows(cut, rank) for rank in range(2))
    out, lse = finished(layer.attend(q[mine], k[other], v[other], steps[1]), q[mine], 5)
    assert not out[:2].any() and lse[:, :2].isneginf().all()  # columns 0 and 1 stand before 2 to 5
    assert out[2:4].any() and lse[:, 2:4].isfinite().all()
    assert not out[4:].any() and lse[:, 4:].isneginf().all()  # padding
    nothing = layer.attend(q[mine], k[other], v[other], ())
    assert nothing is None and not finished(nothing, q[mine], 4)[0].any()
    empty = torch.zeros_like(q[mine]), torch.zeros_like(k[other]), torch.zeros_like(v[other])
    dq, dk, dv = layer.backward((dout[mine], q[mine], out[:4], lse[:, :4]), k[other], v[other], steps[1], empty)
    assert not dq[:2].any() and all(x.isfinite().all() for x in (dq, dk, dv))


def test_kernels_that_say_zero_for_nothing_do_not_show() -> None:
    """The CPU's FlashAttention gives lse 0, not -inf, where a window hides all keys of a block."""
    case = Case(64, 2, 1, window=5, batch=1, documents=torch.tensor([[0] * 31 + [1] * 33]))
    for ranks in (2, 4):
        found = simulated(case, FusedAttention("flash"), ranks, RingAttention)
        assert beyond(errors(found, case.exact()), 1e-12) == {}


def test_documents_that_end_at_a_chunks_border() -> None:
    """A key run that ends where queries begin: seen in full by the same document, not at all by the next."""
    for lengths in ((24, 24, 48), (12, 84), (48, 48)):
        ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
        case = replace(PLAIN, batch=1, groups=4, documents=ids)
        for kind in (RingAttention, AllGatherAttention):
            found = simulated(case, FusedAttention("flash"), 4, kind)
            assert beyond(errors(found, case.exact()), 1e-12) == {}


def test_the_math_core_and_the_fused_ones_agree_in_fp32_over_many_ranks() -> None:
    case = replace(PLAIN, groups=3, batch=1)
    for core in (FusedAttention("flash", grouped=True), MathAttention()):
        found = simulated(case, core, 8, RingAttention, torch.float32)
        assert beyond(errors(found, case.exact()), 2e-6) == {}


def computed(case: Case, ranks: int, kind: Any, core: Any) -> list[int]:
    """Pairs of a query and a key that each rank computes."""
    counts = []
    for rank in range(ranks):
        layout = TokenLayout(case.batch, case.length // ranks, cut=case.cut(ranks))
        plan = kind(core, Group("none", ranks, rank)).prepare(layout, [case.spec], torch.float32, CPU).plan
        (steps,) = plan.values()
        calls = [call for step in steps for call in step] if kind is RingAttention else steps
        for call in calls:
            sizes = call.layout.batch, call.layout.length, call.layout.keys
            square = call.causal and call.window is None
            assert 2 * call.pairs == math.prod(sizes) + (sizes[0] * sizes[1] if square else math.prod(sizes))
        counts.append(sum(call.pairs for call in calls))
    return counts


@pytest.mark.parametrize("kind", [RingAttention, AllGatherAttention])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_all_ranks_compute_as_much_and_nothing_that_is_hidden(kind: Any, ranks: int) -> None:
    case = Case(48 * ranks, 1, 1, batch=1, width=1)
    counts = computed(case, ranks, kind, FusedAttention())
    assert max(counts) <= 1.01 * sum(counts) / ranks
    assert counts == case.cut(ranks).work().tolist()  # every pair is one that is seen
    generator = torch.Generator().manual_seed(ranks)
    for _ in range(5):
        ids = torch.randint(0, 6, (1, 48 * ranks), generator=generator).sort().values
        packed = replace(case, documents=ids)
        assert computed(packed, ranks, kind, FusedAttention()) == packed.cut(ranks).work().tolist()


@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_has_work_while_the_last_message_is_on_the_way(core: Any, ranks: int) -> None:
    """The last rank, whose two chunks are neighbours, as well: both wait for the message that it takes late."""
    case = Case(48 * ranks, 1, 1, batch=1, width=1)
    for rank in range(ranks):
        layout = TokenLayout(case.batch, case.length // ranks, cut=case.cut(ranks))
        plan = RingAttention(core, Group("none", ranks, rank)).prepare(layout, [case.spec], torch.float32, CPU).plan
        early, late = (sum(call.pairs for call in calls) for calls in _halves(plan[(True, None), False][0]))
        assert abs(early - late) <= 0.05 * (early + late)


@pytest.mark.parametrize("kind", [RingAttention, AllGatherAttention])
def test_a_window_costs_what_it_shows(kind: Any) -> None:
    case = Case(16384, 1, 1, batch=1, width=1, window=512)
    counts = computed(case, 4, kind, FusedAttention())
    seen = case.cut(4).work(512).tolist()
    assert all(most <= 1.6 * least for most, least in zip(counts, seen, strict=True))
    assert max(counts) <= 0.1 * sum(case.cut(4).work().tolist())


def test_a_ring_ends_when_nobody_sees_anything_more() -> None:
    """Documents that stay whole need no exchange at all."""
    ids = torch.arange(4).repeat_interleave(4)[None]
    layout = TokenLayout(1, 4, cut=Case(16, 1, 1, ids, batch=1).cut(4))
    ring = RingAttention(FusedAttention(), Group("none", 4, 1))
    (steps,) = ring.prepare(layout, [AttentionSpec()], torch.float32, CPU).plan.values()
    assert len(steps) == 1
    whole = replace(layout, cut=Case(16, 1, 1, batch=1).cut(4))
    (steps,) = ring.prepare(whole, [AttentionSpec()], torch.float32, CPU).plan.values()
    assert len(steps) == 4
