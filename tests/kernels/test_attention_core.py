"""Every attention core against one oracle in fp64: out, log-sum-exps and gradients, whatever the tokens' layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from smp.kernels.attention_cores import sdpa
from smp.kernels.attention_cores.attention_core import AttentionSpec, merge
from smp.kernels.attention_cores.fused_attention import DefaultAttention, FusedAttention
from smp.kernels.attention_cores.math_attention import MathAttention
from smp.kernels.attention_cores.varlen import VarlenAttention
from smp.kernels.cpp.library import why_not
from smp.kernels.dropout import keyed_keep_mask
from smp.kernels.token_layout import TokenLayout
from tests.layers.whole import draw, error
from tests.plain_varlen import plain_varlen

CPU = torch.device("cpu")
KEY = torch.tensor(123456789)
MASKED: dict[str, Any] = {
    "math": MathAttention(),
    "flash, repeated": FusedAttention("flash"),
    "flash, grouped": FusedAttention("flash", grouped=True),
    "default": DefaultAttention(),
}
if not why_not(torch.bfloat16):  # the test of several blocks says why where it is skipped
    MASKED["cpp"] = FusedAttention("cpp", grouped=True)
MATH: Any = MathAttention()
VARLEN: Any = VarlenAttention()
FUSED: dict[str, Any] = {name: core for name, core in MASKED.items() if name.startswith(("flash", "cpp"))}
Tensors = list[torch.Tensor]


def seen(layout: TokenLayout, spec: AttentionSpec) -> torch.Tensor:
    """Boolean (batch, length, keys), query by query and key by key."""
    out = torch.zeros(layout.batch, layout.length, layout.keys, dtype=torch.bool)
    key_ids = layout.document_ids if layout.key_document_ids is None else layout.key_document_ids
    for b in range(layout.batch):
        for i in range(layout.length):
            for j in range(layout.keys):
                distance = layout.query_start + i - layout.key_start - j
                alike = layout.document_ids is None or bool(layout.document_ids[b, i] == key_ids[b, j])  # type: ignore
                near = spec.window is None or distance < spec.window
                out[b, i, j] = alike and near and (not spec.causal or distance >= 0)
    return out


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: TokenLayout, spec: AttentionSpec) -> Tensors:
    """out and lse in fp64, one sequence, head and query at a time."""
    tokens, heads, width = q.shape
    visible, scale = seen(layout, spec), width**-0.5 if spec.scale is None else spec.scale
    rows: list[list[torch.Tensor]] = []
    lse = torch.full((heads, tokens), -torch.inf, dtype=torch.float64)
    for row in range(layout.num_queries):
        b, i = divmod(row, layout.length)
        keys = torch.arange(layout.keys)[visible[b, i]] + b * layout.keys
        outs = []
        for head in range(heads):
            group = head // (heads // k.shape[1])
            scores = k[keys, group] @ q[row, head] * scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            if spec.alibi_heads is not None:  # a power of two of heads
                slope = 2 ** (-8 * (spec.first_head + head + 1) / spec.alibi_heads)
                scores = scores - slope * (
                    layout.query_start + i - layout.key_start - torch.arange(layout.keys)[visible[b, i]]
                )
            lse[head, row] = scores.detach().logsumexp(0) if len(keys) else -torch.inf
            outs.append(scores.softmax(0) @ v[keys, group])
        rows.append(outs)
    out = torch.stack([torch.stack(outs) for outs in rows])
    return [torch.cat((out, out.new_zeros(layout.padding, heads, width))), lse]


def inputs(layout: TokenLayout, heads: int, groups: int, width: int = 8, dtype: torch.dtype = torch.float32) -> Tensors:
    """q, k, v and the gradient of out; the padding holds large numbers, which must show nowhere."""
    count, padding = layout.batch * layout.keys, layout.padding
    sizes = {1: (layout.num_queries, heads), 2: (count, groups), 3: (count, groups), 4: (layout.num_queries, heads)}
    parts = [draw(rows, n * width, seed=seed).view(rows, n, width) for seed, (rows, n) in sizes.items()]
    fill = (1e3, 1e3, 1e3, 0.0)
    whole = [torch.cat((x, torch.full((padding, *x.shape[1:]), y))) for x, y in zip(parts, fill, strict=True)]
    return [x.to(dtype) for x in whole]


def results(attend: Callable[..., Any], tensors: Tensors, *rest: Any) -> Tensors:
    """out, lse and the gradients of q, k and v."""
    *given, grad = tensors
    leaves = [x.clone().requires_grad_() for x in given]
    out, lse = attend(*leaves, *rest)
    assert not lse.requires_grad
    grads = torch.autograd.grad(out, leaves, grad, allow_unused=True)
    return [out.detach(), lse, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))]


def wide_of(core: Any) -> list[torch.dtype]:
    """fp64, but for the core that does not compute in it."""
    return [] if core.name == "cpp" else [torch.float64]


def check(core: Any, layout: TokenLayout, spec: AttentionSpec, heads: int = 4, groups: int = 2, **options: Any) -> None:
    tensors = inputs(layout, heads, groups, **options)
    want = results(oracle, [x.double() for x in tensors], layout, spec)
    prepared = core.prepare(layout, [spec], tensors[0].dtype, CPU)
    bound = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[tensors[0].dtype]
    for name, got, exact in zip("olqkv", results(core, tensors, prepared, spec), want, strict=True):
        assert torch.equal(got.isneginf(), exact.isneginf()), name
        assert got.isneginf().any() or got.isfinite().all(), name
        finite = [x.masked_fill(exact.isneginf(), 0.0) for x in (got, exact)]
        # Of one score softmax has no gradient. What is left is rounding, of eps times the norm of what there is.
        none = name in "qk" and bool((seen(layout, spec).sum(-1) <= 1).all())
        floor = torch.finfo(got.dtype).eps * want[4].norm().item() if none else 0.0
        assert error(*finite) < bound + floor, (name, error(*finite))
    assert got.dtype == tensors[0].dtype


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, -1], [5, 5, 5, 5, 5, 5, 5]])
LAYOUTS = {
    "plain": TokenLayout(2, 7),
    "padding": TokenLayout(3, 5, padding=2),
    "one token": TokenLayout(2, 1),
    "documents": TokenLayout(2, 7, padding=3, document_ids=DOCUMENTS),
    "documents that come back": TokenLayout(1, 5, document_ids=torch.tensor([[1, 2, 1, 2, 1]])),
    "cache": TokenLayout(2, 3, query_start=4, key_length=7),
    "cache, one query": TokenLayout(1, 1, query_start=6, key_length=7),
    "keys behind queries": TokenLayout(2, 4, key_start=2, key_length=5, padding=1),
    "keys out of sight": TokenLayout(1, 3, key_start=9, key_length=4),
    "other documents": TokenLayout(
        2, 3, document_ids=DOCUMENTS[:, :3], query_start=4, key_length=4, key_document_ids=DOCUMENTS[:, 2:6]
    ),
}
SPECS = {
    "causal": AttentionSpec(),
    "not causal": AttentionSpec(causal=False),
    "window": AttentionSpec(window=2),
    "window of 1": AttentionSpec(window=1),
    "long window": AttentionSpec(window=100),
    "scale": AttentionSpec(scale=0.7),
}


CHANGED = {
    "capped": AttentionSpec(softcap=0.6),
    "capped, in a window": AttentionSpec(softcap=0.6, window=2, scale=0.7),
    "capped, not causal": AttentionSpec(softcap=0.6, causal=False),
    "ALiBi": AttentionSpec(alibi_heads=4),
    "ALiBi of the second half of the heads": AttentionSpec(alibi_heads=8, first_head=4, window=3),
}
"""Specs whose scores are more than scale q k^T + mask."""


@pytest.mark.parametrize("core", [MATH, DefaultAttention()], ids=["math", "default"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_changed_scores_are_the_formula(core: Any, layout: TokenLayout) -> None:
    for spec in CHANGED.values():
        check(core, layout, spec)


@pytest.mark.parametrize("spec", CHANGED.values(), ids=CHANGED)
def test_the_backward_pass_of_a_block_knows_changed_scores(spec: AttentionSpec) -> None:
    layout = MATH.prepare(LAYOUTS["documents"], [spec], torch.float32, CPU)
    *given, grad = tensors = inputs(LAYOUTS["documents"], 4, 2)
    out, lse, *want = results(MATH, tensors, layout, spec)
    for got, exact in zip(MATH.backward(grad, *given, out, lse, layout, spec), want, strict=True):
        assert error(got, exact) < 2e-6


@pytest.mark.parametrize("core", [*FUSED.values(), VARLEN], ids=str)
def test_fused_cores_refuse_changed_scores(core: Any) -> None:
    *given, _ = inputs(LAYOUTS["plain"], 4, 4)
    for spec in CHANGED.values():
        with pytest.raises(ValueError, match="computes neither soft-capped scores nor ALiBi"):
            core(*given, LAYOUTS["plain"], spec)


@pytest.mark.parametrize("core", MASKED.values(), ids=MASKED)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_cores_are_the_formula(core: Any, layout: TokenLayout) -> None:
    for spec in SPECS.values():
        for groups in (1, 2, 4):
            check(core, layout, spec, groups=groups)


@pytest.mark.parametrize("core", MASKED.values(), ids=MASKED)
def test_cores_are_the_formula_in_other_dtypes_and_widths(core: Any) -> None:
    for dtype in (*wide_of(core), torch.bfloat16):
        for name in ("padding", "documents", "cache"):
            check(core, LAYOUTS[name], AttentionSpec(window=3), dtype=dtype)
    check(core, LAYOUTS["documents"], AttentionSpec(), width=5)


@st.composite
def layouts(draws: Any, contiguous: bool = False) -> TokenLayout:
    """Any; ``contiguous``: those that a variable-length kernel takes."""
    integer = lambda low, high: draws(st.integers(low, high))  # noqa: E731
    batch, length = integer(1, 3), integer(1, 9)
    keys, query_start = integer(1, 9), integer(0, 9)
    key_start = integer(0, 9)
    if contiguous:
        keys = length + integer(0, 4)
        key_start, query_start = 0, keys - length
    layout = TokenLayout(batch, length, integer(0, 3), query_start=query_start, key_start=key_start, key_length=keys)
    if not draws(st.booleans()):
        return layout
    ids = [draws(st.lists(st.integers(0, 2), min_size=keys, max_size=keys)) for _ in range(batch)]
    key_ids = torch.tensor([sorted(row) for row in ids] if contiguous else ids)
    if contiguous:
        return replace(layout, document_ids=key_ids[:, keys - length :], key_document_ids=key_ids)
    own = [draws(st.lists(st.integers(0, 2), min_size=length, max_size=length)) for _ in range(batch)]
    return replace(layout, document_ids=torch.tensor(own), key_document_ids=key_ids)


specs = st.builds(AttentionSpec, causal=st.booleans(), window=st.none() | st.integers(1, 10))


@settings(max_examples=60, deadline=None)
@given(layouts(), specs, st.sampled_from(sorted(MASKED)), st.sampled_from([1, 2, 4]))
def test_any_layout(layout: TokenLayout, spec: AttentionSpec, core: str, groups: int) -> None:
    check(MASKED[core], layout, replace(spec, window=spec.window if spec.causal else None), groups=groups)


@settings(max_examples=60, deadline=None)
@given(layouts(contiguous=True), specs, st.sampled_from([1, 2, 4]))
def test_any_layout_of_documents_in_a_row(layout: TokenLayout, spec: AttentionSpec, groups: int) -> None:
    with plain_varlen():
        check(VARLEN, layout, replace(spec, window=spec.window if spec.causal else None), groups=groups)


def parts(layout: TokenLayout, tensors: Tensors, cut: int) -> list[tuple[TokenLayout, Tensors]]:
    """The same queries with the first ``cut`` keys of each sequence, and with the others."""
    q, k, v, _ = tensors
    out = []
    for first, last in ((0, cut), (cut, layout.keys)):
        rows = torch.cat([torch.arange(b * layout.keys + first, b * layout.keys + last) for b in range(layout.batch)])
        ids = None if layout.document_ids is None else layout.document_ids[:, first:last]
        block = replace(layout, key_start=first, key_length=last - first, key_document_ids=ids)
        out.append((block, [q, k[rows], v[rows]]))
    return out


@pytest.mark.parametrize("core", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("spec", [AttentionSpec(), AttentionSpec(window=2), AttentionSpec(causal=False)])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "documents"])
def test_two_blocks_of_keys_merge_to_all_of_them(
    core: Any, spec: AttentionSpec, documents: torch.Tensor | None
) -> None:
    """Each block's backward pass takes out and lse of all keys; gradients of the queries add up."""
    layout = TokenLayout(2, 7, padding=2, document_ids=documents)
    for dtype in (torch.float32, *wide_of(core)):
        bound = 2e-6 if dtype == torch.float32 else 1e-12
        tensors = inputs(layout, 4, 2, dtype=dtype)
        want = results(oracle, [x.double() for x in tensors], layout, spec)
        blocks = parts(layout, tensors, 3)
        (one, two) = (core(*given, block, spec) for block, given in blocks)
        assert one[1].isneginf().any() or two[1].isneginf().any()  # some row sees nothing in a block
        out, lse = merge(*one, *two)
        grads = [core.backward(tensors[3], *given, out, lse, block, spec) for block, given in blocks]
        rows = [torch.arange(2 * n).view(2, n) for n in (3, 4)]
        order = torch.cat((rows[0], rows[1] + 6), dim=1).flatten()  # from block-major to sequence-major
        dk, dv = (torch.cat(pair)[order] for pair in list(zip(*grads, strict=True))[1:])
        found = [out, lse, grads[0][0] + grads[1][0], dk, dv]
        for got, exact in zip(found, want, strict=True):
            exact = exact[: len(got)] if got.dim() == 3 else exact
            finite = [x.masked_fill(exact.isneginf(), 0.0) for x in (got, exact)]
            assert torch.equal(got.isneginf(), exact.isneginf()) and error(*finite) < bound


def test_a_merge_of_nothing_with_nothing_is_nothing() -> None:
    empty = torch.zeros(2, 3, 4), torch.full((3, 2), -torch.inf)
    full = draw(2, 12, seed=0).view(2, 3, 4), draw(3, 2, seed=1)
    out, lse = merge(*empty, *empty)
    assert not out.any() and lse.isneginf().all()
    for one, two in ((empty, full), (full, empty)):
        assert all(torch.equal(got, want) for got, want in zip(merge(*one, *two), full, strict=True))
    halves = full[0].bfloat16(), full[1]
    assert merge(*halves, *halves)[0].dtype == torch.bfloat16 and merge(*halves, *full)[0].dtype == torch.float32


def test_variable_lengths_have_a_backward_pass_of_their_own() -> None:
    layout, spec, core = TokenLayout(2, 7, padding=2, document_ids=DOCUMENTS), AttentionSpec(window=3), VARLEN
    tensors = inputs(layout, 4, 2)
    want = results(oracle, [x.double() for x in tensors], layout, spec)
    with plain_varlen():
        prepared = core.prepare(layout, [spec], torch.float32, CPU)
        out, lse = core(*tensors[:3], prepared, spec)
        grads = core.backward(tensors[3], *tensors[:3], out, lse, prepared, spec)
        assert all(error(got, exact) < 2e-6 for got, exact in zip(grads, want[2:], strict=True))
        plain = replace(layout, document_ids=None)
        assert core.prepare(plain, [AttentionSpec()], torch.float32, CPU).cu_seqlens_q is None
        out, lse = core(*tensors[:3], plain, AttentionSpec())
        grads = core.backward(tensors[3], *tensors[:3], out, lse, plain, AttentionSpec())
    want = results(oracle, [x.double() for x in tensors], plain, AttentionSpec())
    assert all(error(got, exact) < 2e-6 for got, exact in zip(grads, want[2:], strict=True))


def test_the_reference_has_the_gradients_of_its_formula() -> None:
    layout = replace(LAYOUTS["other documents"], token_index=torch.arange(6) + 100)
    q, k, v, _ = (x.double().requires_grad_() for x in inputs(layout, 2, 1, width=3))
    for spec, key in ((AttentionSpec(), None), (AttentionSpec(window=2, dropout=0.3), KEY)):
        assert torch.autograd.gradcheck(lambda *x, s=spec, d=key: MATH(*x, layout, s, d)[0], (q, k, v))


def dropped_oracle(tensors: Tensors, layout: TokenLayout, spec: AttentionSpec) -> torch.Tensor:
    """(tokens, heads, head_dim) in fp64, of layouts whose rows see a key."""
    q, k, v, _ = (x.double() for x in tensors)
    assert layout.token_index is not None
    visible, rows = seen(layout, spec), []
    for row in range(layout.num_queries):
        b, i = divmod(row, layout.length)
        keys = slice(b * layout.keys, (b + 1) * layout.keys)
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            scores = (k[keys, group] @ q[row, head] * q.shape[2] ** -0.5).masked_fill(~visible[b, i], -torch.inf)
            number = layout.token_index[row : row + 1] * 65536 + spec.first_head + head
            keep = keyed_keep_mask(KEY, number, layout.key_start + layout.keys, spec.dropout)[0, layout.key_start :]
            rows.append((scores.softmax(0) * keep / (1 - spec.dropout)) @ v[keys, group])
    return torch.stack(rows).view(layout.num_queries, *q.shape[1:])


@pytest.mark.parametrize("core", [*MASKED.values(), VARLEN], ids=[*MASKED, "variable lengths"])
def test_dropout_is_keyed_by_token_head_and_place_in_every_core(core: Any) -> None:
    spec = AttentionSpec(dropout=0.3, first_head=2)
    for name in ("padding", "documents", "cache"):
        layout = replace(LAYOUTS[name], token_index=torch.arange(LAYOUTS[name].num_tokens) + 1000)
        tensors = inputs(layout, 4, 2)
        out, lse = core(*tensors[:3], layout, spec, KEY)
        assert error(out[: layout.num_queries], dropped_oracle(tensors, layout, spec)) < 2e-6
        assert torch.equal(lse, MATH(*tensors[:3], layout, replace(spec, dropout=0.0), KEY)[1])
    with pytest.raises(ValueError, match=r"dropout needs TokenLayout\.token_index"):
        core(*tensors[:3], LAYOUTS["cache"], spec, KEY)


def test_fused_operators_have_the_bits_of_torchs_attention() -> None:
    """They are the same operators, called without its choice."""
    for layout in (TokenLayout(2, 33), LAYOUTS["documents"]):
        mask = layout.mask((True, None), torch.float32, CPU)
        q, k, v, _ = inputs(layout, 4, 2, width=20)
        for grouped in (False, True):
            out, _ = FusedAttention("flash", grouped)(q, k, v, layout, AttentionSpec())
            rows = [x[: layout.num_queries].unflatten(0, (layout.batch, -1)).transpose(1, 2) for x in (q, k, v)]
            queries, keys, values = rows
            want = torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
            assert torch.equal(out[: layout.num_queries], want.transpose(1, 2).flatten(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "groups", "length", "keys", "width"), [(4, 2, 130, 130, 20), (2, 1, 97, 333, 128)])
def test_the_kernel_in_cpp_over_several_blocks_beside_its_twin(
    dtype: torch.dtype, causal: bool, heads: int, groups: int, length: int, keys: int, width: int
) -> None:
    """At most a little less exact than PyTorch's kernel, and the same bits with any number of threads."""
    if why := why_not(dtype):
        pytest.skip(why)
    if causal:
        keys = length
    layout, spec = TokenLayout(2, length, key_length=keys), AttentionSpec(causal=causal)
    if not causal:
        ids, seen_ids = (torch.arange(n)[None].expand(2, n) * 3 // n for n in (length, keys))
        layout = replace(layout, document_ids=ids, key_document_ids=seen_ids)
    tensors = inputs(layout, heads, groups, width=width, dtype=dtype)
    exact = results(MATH, [x.double() for x in tensors], layout, spec)
    cpp, twin = (results(FusedAttention(name, grouped), tensors, layout, spec) for name, grouped in BOTH)
    for name, got, plain, want in zip("olqkv", cpp, twin, exact, strict=True):
        assert error(got, want) < 2 * error(plain, want) + torch.finfo(got.dtype).eps, name
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        again = results(FusedAttention("cpp", True), tensors, layout, spec)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(cpp, again, strict=True))


BOTH = (("cpp", True), ("flash", False))


@pytest.mark.parametrize("core", MASKED.values(), ids=MASKED)
def test_cores_compile_into_one_graph(core: Any) -> None:
    torch._dynamo.reset()
    spec, layout = AttentionSpec(window=3), LAYOUTS["documents"]
    tensors, prepared = inputs(layout, 4, 2), core.prepare(layout, [spec], torch.float32, CPU)
    compiled = torch.compile(core.__call__, fullgraph=True, backend="aot_eager")
    for made in (prepared, layout):
        want = results(core, tensors, made, spec)
        assert all(
            error(a, b) < 1e-6 for a, b in zip(results(compiled, tensors, made, spec)[2:], want[2:], strict=True)
        )


@pytest.mark.parametrize("core", MASKED.values(), ids=MASKED)
def test_cores_know_the_shapes_of_tensors_that_are_not_there(core: Any) -> None:
    layout = LAYOUTS["documents"]
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k = torch.empty(layout.num_tokens, 4, 8, requires_grad=True), torch.empty(layout.num_tokens, 2, 8)
        out, lse = core(q, k, k, layout, AttentionSpec())
        out.sum().backward()
    assert out.shape == q.shape and lse.shape == (4, layout.num_tokens) and q.grad is not None


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("masked", [False, True])
def test_operators_of_a_gpu_have_these_arguments_and_shapes(name: str, masked: bool) -> None:
    """Without one: torch's own shapes of their results."""
    q, k = (torch.empty(2, 7, heads, 16, device="meta", dtype=torch.bfloat16).transpose(1, 2) for heads in (4, 4))
    mask = torch.empty(2, 1, 7, 7, device="meta", dtype=torch.bfloat16) if masked else None
    scores, operator = sdpa.Scores(mask is None, mask, None), sdpa.CUDA[name]
    if masked and name == "flash":
        with pytest.raises(RuntimeError, match="FlashAttention takes no mask on a GPU"):
            operator.forward(q, k, k, scores)
        return
    out, lse = operator.forward(q, k, k, scores)
    assert out.shape == q.shape and lse.shape == (2, 4, 7) and lse.dtype == torch.float32
    grads = operator.backward(out, q, k, k, out, lse, scores=scores)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


def test_backends_of_another_device_are_named() -> None:
    layout = TokenLayout(1, 3)
    q, k, v, _ = inputs(layout, 2, 2)
    with pytest.raises(RuntimeError, match="attention backend cudnn needs a CUDA device, these tensors are on cpu"):
        FusedAttention("cudnn")(q, k, v, layout, AttentionSpec())
