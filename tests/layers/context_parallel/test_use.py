"""Context parallelism in a module of one's own, under recompute and under torch.compile."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from smp.kernels.attention_cores.fused_attention import FusedAttention
from smp.layers import DEFAULT_ATTENTION, AttentionSpec, TokenLayout, context_parallel_attention, cut_sequences
from smp.sharding.parallelize import _keep_expensive
from tests.distributed import run_distributed
from tests.layers.context_parallel.plain import CASES, Case
from tests.layers.context_parallel.test_methods import mesh_of, methods_of
from tests.layers.whole import beyond, draw, error


class Stranger(nn.Module):
    """A module that knows nothing of this package but ``smp.layers``: attention and a loss."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention
        self.qkv, self.out = nn.Linear(24, 3 * 24, bias=False), nn.Linear(24, 24, bias=False)
        for i, parameter in enumerate(self.parameters()):
            parameter.data.copy_(0.3 * draw(*parameter.shape, seed=i))

    def forward(self, x: torch.Tensor, target: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        q, k, v = self.qkv(x).view(-1, 3, 4, 6).unbind(1)  # (tokens, heads, head_dim)
        y, _ = self.attention(q, k, v, layout, AttentionSpec())
        return (self.out(y.flatten(1)) - target).square().sum()


def whole_and_part(rank: int, ranks: int) -> dict[str, dict[str, float]]:
    documents = torch.tensor([[0] * 30 + [1] * 18])
    x, target = draw(48, 24, seed=10), draw(48, 24, seed=11)
    module = Stranger(DEFAULT_ATTENTION)
    loss = module(x, target, TokenLayout(1, 48, document_ids=documents))
    want = [loss.detach(), *torch.autograd.grad(loss, list(module.parameters()))]
    errors = {}
    for method in methods_of(ranks):
        cut = cut_sequences(1, 48, ranks, documents)
        mine = cut.index(rank)[0]
        module.attention = context_parallel_attention(DEFAULT_ATTENTION, mesh_of(method, ranks), method)
        loss = module(x[mine], target[mine], TokenLayout(1, len(mine), cut=cut))
        found = [loss.detach(), *torch.autograd.grad(loss, list(module.parameters()))]
        for value in found:
            dist.all_reduce(value)
        errors[method] = {str(i): error(a, b) for i, (a, b) in enumerate(zip(found, want, strict=True))}
    return errors


@pytest.mark.parametrize("ranks", [2, 4])
def test_anyones_module_trains_on_parts_of_a_sequence(ranks: int) -> None:
    for methods in run_distributed(whole_and_part, ranks):
        assert len(methods) == len(methods_of(ranks))
        assert all(beyond(errors, 1e-6) == {} for errors in methods.values())


def run(attend: Any, case: Case, rank: int, ranks: int, layout: TokenLayout) -> list[torch.Tensor]:
    rows = case.rows(case.cut(ranks), rank)
    *given, grad = (x[rows] for x in case.tensors(torch.float32))
    leaves = [x.clone().requires_grad_() for x in given]
    out = attend(*leaves, layout)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def attention_of(method: str, case: Case, rank: int, ranks: int) -> tuple[Any, TokenLayout]:
    """A function with something to recompute around attention, and its layout."""
    core = context_parallel_attention(FusedAttention(), mesh_of(method, ranks), method)
    cut = case.cut(ranks)
    layout = TokenLayout(case.batch, case.length // ranks, cut=cut, token_index=case.numbers()[case.rows(cut, rank)])
    layout = core.prepare(layout, [case.spec], torch.float32, torch.device("cpu"))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        return core(q.sin(), k.sin(), v.sin(), layout, case.spec, case.key)[0].sin()

    return attend, layout


def replayed(rank: int, ranks: int) -> bool:
    selective = functools.partial(create_selective_checkpoint_contexts, _keep_expensive)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    for method in methods_of(ranks):
        for name in ("GQA", "documents and a window", "dropout"):
            attend, layout = attention_of(method, CASES[name], rank, ranks)
            want = run(attend, CASES[name], rank, ranks, layout)
            for more in ({}, {"context_fn": selective}):
                again = functools.partial(checkpoint, attend, **options, **more)
                found = run(again, CASES[name], rank, ranks, layout)
                assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True)), (method, name)
    return True


@pytest.mark.parametrize("ranks", [2, 4])
def test_recompute_has_the_same_bits(ranks: int) -> None:
    assert all(run_distributed(replayed, ranks))


def compiled(rank: int, ranks: int) -> dict[str, tuple[int, dict[str, float]]]:
    """Number of compiled programs for two micro-batches, and errors against the same without a compiler."""
    found = {}
    for method, name in (("p2p", "GQA"), ("all_gather", "GQA"), ("a2a", "GQA"), ("a2a", "documents")):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        program: Any = None
        errors = {}
        for turn in range(2):
            case = CASES[name]
            if turn and case.documents is not None:
                case = Case(case.length, case.heads, case.groups, case.documents.flip(0))
            attend, layout = attention_of(method, case, rank, ranks)
            program = torch.compile(attend, fullgraph=True, backend=counter) if program is None else program
            want, got = (run(f, case, rank, ranks, layout) for f in (attend, program))
            errors |= {f"{turn} {i}": error(a, b) for i, (a, b) in enumerate(zip(got, want, strict=True))}
        found[f"{method}, {name}"] = counter.frame_count, errors
    return found


@pytest.mark.slow
def test_exchanges_compile_into_one_graph_that_fits_the_next_micro_batch() -> None:
    for part in run_distributed(compiled, 2):
        assert {name: count for name, (count, _) in part.items()} == dict.fromkeys(part, 1)
        assert all(beyond(errors, 1e-6) == {} for _, errors in part.values())
