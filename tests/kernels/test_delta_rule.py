"""The gated delta rule and Mamba-2's recurrence in chunks against their definitions, and the convolution against
torch's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from smp.kernels.recurrences import delta_rule, state_space
from smp.kernels.recurrences.causal_conv import causal_conv
from smp.kernels.recurrences.chunks import CHUNK, Inputs, Pair


def one_by_one(rule: Callable[..., Pair]) -> Callable[..., Pair]:
    """The rule with tensors as arguments: q, k, v, g, rate, where documents begin, the state."""
    return lambda *given, **options: rule(Inputs(*given[:6]), *given[6:], **options)


step_by_step, chunked = one_by_one(delta_rule.step_by_step), one_by_one(delta_rule.chunked)
gated_delta_rule = one_by_one(delta_rule.gated_delta_rule)


def of_channels(rule: Callable[..., Pair]) -> Callable[..., Pair]:
    """The rule with a decay for each channel of the keys, which are parts and multiples of the head's."""

    def spread(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, *rest: Any) -> Pair:
        return rule(q, k, v, g[..., None] * torch.linspace(0.1, 1.7, KEY).to(g.dtype), *rest)

    return spread


RULES = {
    "delta rule": (step_by_step, chunked),
    "of channels": (of_channels(step_by_step), of_channels(chunked)),
    "state space": (one_by_one(state_space.step_by_step), one_by_one(state_space.chunked)),
}
of_each_rule = pytest.mark.parametrize("rule", RULES)
ROWS, KEY_HEADS, HEADS, KEY, VALUE = 2, 2, 4, 6, 5
LENGTHS = (1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7)


def drawn(length: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v, g, beta and a first state."""
    made = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(ROWS, *shape, generator=made, dtype=torch.float64).to(dtype)

    q, k = (F.normalize(normal(length, KEY_HEADS, KEY), dim=-1) for _ in range(2))
    v, g, beta = normal(length, HEADS, VALUE), -normal(length, HEADS).abs(), normal(length, HEADS).sigmoid()
    return [q, k, v, g, beta, normal(HEADS, KEY, VALUE)]


def begins_of(length: int) -> torch.Tensor:
    """Documents of 1 to many tokens, other ones in each row."""
    begins = torch.rand(ROWS, length, generator=torch.Generator().manual_seed(3)) < 0.1
    begins[:, 0] = True
    return begins


def differentiated(
    rule: Callable[..., Pair], tensors: list[torch.Tensor], begins: torch.Tensor | None
) -> list[torch.Tensor]:
    """Results of the rule, then gradients of all that it takes."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out, last = rule(*leaves[:5], begins, *leaves[5:])
    weights = torch.Generator().manual_seed(9)
    loss = sum((y * torch.randn(y.shape, generator=weights, dtype=torch.float64)).sum() for y in (out, last))
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    return [out.detach(), last.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def errors(got: list[torch.Tensor], want: list[torch.Tensor]) -> list[float]:
    return [((a - b).norm() / b.norm().clamp(min=1e-12)).item() for a, b in zip(got, want, strict=True)]


@of_each_rule
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_are_steps(length: int, packed: bool, state: bool, rule: str) -> None:
    tensors, begins = drawn(length)[: 6 if state else 5], begins_of(length) if packed else None
    step_by_step, chunked = RULES[rule]
    want = differentiated(step_by_step, tensors, begins)
    assert len(want) == 2 + len(tensors)
    assert max(errors(differentiated(chunked, tensors, begins), want)) <= 1e-12


@of_each_rule
def test_a_state_is_carried_on(rule: str) -> None:
    """Of two halves the second begins with the first one's state."""
    *tokens, state = drawn(90)
    chunked = RULES[rule][1]
    whole, last = chunked(*tokens, None, state)
    first, between = chunked(*(x[:, :37] for x in tokens), None, state)
    second, end = chunked(*(x[:, 37:] for x in tokens), None, between)
    assert max(errors([torch.cat((first, second), 1), end], [whole, last])) <= 1e-12


@of_each_rule
def test_what_nothing_fades_in_and_what_writes_nothing(rule: str) -> None:
    """Decays of 1, as of a rule without a gate, and keys of 0, as of padding: fp32 results and gradients are those of
    the steps, and no NaN. (fla-org/flash-linear-attention#104, AI-Hypercomputer/maxtext#5295)"""
    step_by_step, chunked = RULES[rule]
    tokens = [x.float() for x in drawn(100)[:5]]
    tokens[3] = torch.zeros_like(tokens[3])
    for x in tokens[:2]:
        x[:, :30] = 0.0
    got = differentiated(chunked, tokens, None)
    want = differentiated(step_by_step, [x.double() for x in tokens], None)
    assert max(errors([x.double() for x in got], want)) <= 2e-6


@of_each_rule
def test_packed_documents_are_separate_ones(rule: str) -> None:
    chunked = RULES[rule][1]
    *tokens, _ = drawn(70)
    begins = torch.zeros(ROWS, 70, dtype=torch.bool)
    begins[:, [0, 11, 12]] = True
    packed = chunked(*tokens, begins)[0]
    for start, end in ((0, 11), (11, 12), (12, 70)):
        alone = chunked(*(x[:, start:end] for x in tokens))[0]
        assert errors([packed[:, start:end]], [alone])[0] <= 1e-12


@of_each_rule
def test_sums_are_in_fp32(rule: str) -> None:
    """Of bf16 inputs the result is as near as one rounding of the output."""
    step_by_step, chunked = RULES[rule]
    *rounded, _ = drawn(100, torch.bfloat16)
    exact = step_by_step(*(x.double() for x in rounded))[0]
    out, last = chunked(*rounded)
    assert out.dtype == torch.bfloat16 and last.dtype == torch.float32
    assert errors([out.double()], [exact])[0] <= 4e-3
    with pytest.raises(TypeError):
        chunked(*rounded[:4])


def forgetful(length: int, g: float) -> list[torch.Tensor]:
    """fp32, with ``g`` in every other half of a chunk, and mild decays in between."""
    *tokens, _ = drawn(length, torch.float32)
    strong = torch.arange(length) % CHUNK < CHUNK // 2
    tokens[3] = torch.where(strong[:, None], g, 0.1 * tokens[3])
    return tokens


@of_each_rule
@pytest.mark.parametrize("g", [-100.0, -1000.0])
def test_strong_forgetting_rounds_nothing_else(g: float, rule: str) -> None:
    """Sums of g are large then, and mild decays behind them are differences of sums."""
    step_by_step, chunked = RULES[rule]
    tokens = forgetful(150, g)
    want = differentiated(step_by_step, [x.double() for x in tokens], None)
    assert max(errors([x.double() for x in differentiated(chunked, tokens, None)], want)) <= 1e-6


@of_each_rule
@pytest.mark.parametrize("g", [-100.0, -1000.0])
def test_what_a_document_forgets_changes_no_other(g: float, rule: str) -> None:
    """Up to the order of sums in products: what a document's tokens are in a chunk depends on those before it."""
    chunked = RULES[rule][1]
    tokens, begins = forgetful(70, g), torch.zeros(ROWS, 70, dtype=torch.bool)
    begins[:, [0, 40]] = True
    packed = chunked(*tokens, begins)[0]
    for start, end in ((0, 40), (40, 70)):
        assert errors([packed[:, start:end]], [chunked(*(x[:, start:end] for x in tokens))[0]])[0] <= 5e-7


class Fla:
    """Stands for flash-linear-attention: takes what its kernels take, and computes it document by document."""

    def __init__(self) -> None:
        self.calls = 0

    def chunk_gated_delta_rule(
        self, q: Any, k: Any, v: Any, g: Any, beta: Any, *, scale: Any, initial_state: Any, **more: Any
    ) -> Pair:
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16 and g.dtype == beta.dtype == torch.float32
        assert q.shape == k.shape == (*v.shape[:3], KEY) and g.shape == beta.shape == v.shape[:3]
        assert scale == 1.0 and more["output_final_state"]
        self.calls += 1
        if (ends := more["cu_seqlens"]) is None:
            return chunked(q, k, v, g, beta, None, initial_state)
        assert len(v) == 1 and ends[-1] == v.shape[1]
        found = []
        for number, (start, end) in enumerate(pairwise(ends.tolist())):
            state = None if initial_state is None else initial_state[number : number + 1]
            found.append(chunked(*(x[:, start:end] for x in (q, k, v, g, beta)), None, state))
        return torch.cat([out for out, _ in found], 1), torch.cat([last for _, last in found])


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Fla:
    stand_in = Fla()
    module = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = stand_in.chunk_gated_delta_rule  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return stand_in


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_flash_linear_attention_gets_what_it_takes(packed: bool, state: bool, fla: Fla) -> None:
    *tokens, first = drawn(70, torch.float32)
    tokens[:3] = (x.bfloat16() for x in tokens[:3])
    begins = begins_of(70) if packed else None
    if begins is not None:
        begins[0, 0] = False  # goes on with its state
    arguments = (*tokens, begins, first if state else None)
    got, want = gated_delta_rule(*arguments, backend="fla"), chunked(*arguments)
    assert fla.calls == 1 and got[0].dtype == torch.bfloat16 and got[1].dtype == torch.float32
    assert errors([got[0].double()], [want[0].double()])[0] <= 4e-3 and errors([got[1]], [want[1]])[0] <= 1e-6


def test_flash_linear_attention_gets_nothing_in_fp32(fla: Fla) -> None:
    *tokens, _ = drawn(70, torch.float32)
    assert torch.equal(gated_delta_rule(*tokens, backend="fla")[0], chunked(*tokens)[0])
    mixed = [x.bfloat16() for x in tokens[:2]] + tokens[2:]
    assert torch.equal(gated_delta_rule(*mixed, backend="fla")[0], chunked(*mixed)[0])
    assert fla.calls == 0


@pytest.mark.parametrize(("size", "length", "biased"), [(2, 9, False), (4, 9, True), (4, 150, True), (4, 150, False)])
def test_the_convolution_is_torchs(size: int, length: int, biased: bool) -> None:
    draw: dict[str, Any] = {"generator": torch.Generator().manual_seed(1), "dtype": torch.float64}
    x, weight = torch.randn(ROWS, length, 7, **draw), torch.randn(7, size, **draw)
    results = []
    for ours in (True, False):
        leaves = [y.clone().requires_grad_() for y in (x, weight, *([weight[:, 0] + 1] if biased else []))]
        if ours:
            y = causal_conv(leaves[0], leaves[1], bias=leaves[2] if biased else None)
        else:
            bias = leaves[2] if biased else None
            whole = F.conv1d(leaves[0].transpose(1, 2), leaves[1][:, None], bias, padding=size - 1, groups=7)
            y = F.silu(whole[..., :length]).transpose(1, 2)
        (y * torch.arange(y.numel()).view(y.shape).cos()).sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert max(errors(*results)) <= 1e-12


def test_the_convolution_sees_its_document_and_what_is_before() -> None:
    draw: dict[str, Any] = {"generator": torch.Generator().manual_seed(1), "dtype": torch.float64}
    x, weight = torch.randn(1, 9, 3, **draw), torch.randn(3, 4, **draw)
    whole = causal_conv(x, weight)
    assert errors([causal_conv(x[:, 5:], weight, x[:, 2:5])], [whole[:, 5:]])[0] <= 1e-15
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 0, 1]])
    packed = causal_conv(x, weight, None, places)
    for start, end in ((0, 4), (4, 6), (6, 7), (7, 9)):
        assert errors([packed[:, start:end]], [causal_conv(x[:, start:end], weight)])[0] <= 1e-15


def test_inf_in_one_document_does_not_reach_another() -> None:
    """A mask by a product would make it NaN there, in both directions."""
    x, weight, places = torch.arange(1.0, 19.0).view(1, 6, 3), torch.ones(3, 4), torch.tensor([[0, 1, 2, 0, 1, 2]])
    x[0, 2] = torch.inf  # the last token of the first document, before the second one's
    y = causal_conv(x.requires_grad_(), weight, None, places)
    assert torch.equal(y[:, 3:], causal_conv(x[:, 3:], weight)) and y[0, 3:].isfinite().all()
    slopes = torch.ones_like(y)
    slopes[0, 3] = torch.inf  # of the second document's first token, which sees none of the first
    finite = torch.arange(1.0, 19.0).view(1, 6, 3).requires_grad_()
    (dx,) = torch.autograd.grad(causal_conv(finite, weight, None, places), finite, slopes)
    assert dx[0, :3].isfinite().all() and not dx[0, 3].isfinite().any()
