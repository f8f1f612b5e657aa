"""Self-attention against its formula on whole weights in fp64, and dropout that no layout and no replay changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from smp.config import Layout
from smp.kernels import Kernels
from smp.kernels.attention_cores import sdpa
from smp.kernels.attention_cores.fused_attention import FusedAttention
from smp.kernels.dropout import keyed_keep_mask
from smp.layers import AttentionSpec, QueryKeyOptions, SelfAttention, TokenLayout, rope_frequencies, rope_table
from smp.parallel.context import ParallelContext, build_context
from tests.distributed import run_distributed
from tests.fake_group import fake_context
from tests.layers.test_rope import rotate
from tests.layers.whole import beyond, draw, error, gradient, leaf, load_all, part

BATCH, LENGTH, HIDDEN, HEADS, WIDTH, EPS = 3, 7, 10, 4, 6, 0.1
PADDED = 24  # 21 tokens and 3 of padding: what two ranks share is even
KEY, DROPOUT = torch.tensor(123456789), 0.3
NUMBERS = torch.arange(PADDED) + 1000

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "2 groups": {"num_groups": 2},
    "1 group": {"num_groups": 1},
    "window": {"num_groups": 2, "window": 3},
    "window of 1": {"window": 1},
    "window longer than the sequence": {"window": LENGTH},
    "not causal": {"num_groups": 2, "causal": False},
    "norms": {"num_groups": 1, "qk_norm_eps": EPS},
    "biases": {"num_groups": 1, "bias": True, "qkv_bias": True},
    "qkv biases": {"num_groups": 2, "qkv_bias": True, "qk_norm_eps": EPS},
    "2 groups as they are": {"num_groups": 2, "grouped": True},
    "1 group as it is": {"num_groups": 1, "grouped": True, "window": 3},
    "dropout": {"num_groups": 1, "dropout": DROPOUT},
    "dropout, not causal": {"dropout": DROPOUT, "causal": False},
    "dropout, window": {"num_groups": 2, "dropout": DROPOUT, "window": 3, "grouped": True},
}


def formula(x: torch.Tensor, w: dict[str, torch.Tensor], options: dict[str, Any], dropped: bool) -> torch.Tensor:
    """(tokens, hidden) -> the same, one head and one sequence at a time."""

    def linear(y: torch.Tensor, name: str) -> torch.Tensor:
        return y @ w[f"{name}.weight"].t() + w.get(f"{name}.bias", torch.zeros(()))

    def heads(name: str) -> torch.Tensor:
        y = linear(x, name).view(BATCH * LENGTH, -1, WIDTH)
        if "qk_norm_eps" in options and name != "value":
            y = y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * w[f"{name}_norm.weight"]
        return y if name == "value" else rotate(y, torch.arange(LENGTH).repeat(BATCH), 4, 100.0)

    q, k, v = heads("query"), heads("key"), heads("value")
    distance, rows = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH), []
    for sequence in range(BATCH):
        tokens = slice(sequence * LENGTH, (sequence + 1) * LENGTH)
        outs = []
        for head in range(HEADS):
            group = head // (HEADS // options.get("num_groups", HEADS))
            scores = q[tokens, head] @ k[tokens, group].t() / WIDTH**0.5
            unseen = distance >= options.get("window", LENGTH)
            if options.get("causal", True):
                unseen |= distance < 0
            scores = scores.masked_fill(unseen, -torch.inf)
            probabilities = scores.softmax(-1)
            if dropped:
                keep = keyed_keep_mask(KEY, NUMBERS[tokens] * 65536 + head, LENGTH, DROPOUT)
                probabilities = probabilities * keep / (1 - DROPOUT)
            outs.append(probabilities @ v[tokens, group])
        rows.append(torch.cat(outs, dim=-1))
    return linear(torch.cat(rows), "output")


def token_layout(tokens: int = PADDED) -> TokenLayout:
    positions = torch.arange(tokens) % LENGTH
    table = rope_table(positions, rope_frequencies(4, 100.0, None, torch.device("cpu")))
    return TokenLayout(BATCH, LENGTH, tokens - BATCH * LENGTH, prepared={"rope": table}, token_index=NUMBERS[:tokens])


def kernels(grouped: bool) -> Kernels:
    return Kernels(attention=FusedAttention("flash", grouped=grouped))


def padded(x: torch.Tensor, fill: float) -> torch.Tensor:
    return torch.cat((x, torch.full((PADDED - x.shape[0], HIDDEN), fill)))


def attention(options: dict[str, Any], context: ParallelContext) -> SelfAttention:
    """The layer that a case asks for."""
    names = ("num_groups", "bias", "qkv_bias")
    return SelfAttention(
        HIDDEN,
        HEADS,
        context,
        head_dim=WIDTH,
        query_key=QueryKeyOptions(norm_eps=options.get("qk_norm_eps"), rope="rope"),
        spec=AttentionSpec(
            causal=options.get("causal", True), window=options.get("window"), dropout=options.get("dropout", 0.0)
        ),
        kernels=kernels(options.get("grouped", False)),
        **{name: options[name] for name in names if name in options},
    )


def errors_of(mesh: Any, options: dict[str, Any], sp: bool, training: bool) -> dict[str, float]:
    """Errors of output and gradients; the padding holds large numbers, which must show nowhere."""
    layer = attention(options, ParallelContext.of(mesh, sequence_parallel=sp)).train(training)
    wholes = {name: leaf(w.double()) for name, w in load_all(layer).items()}
    x, target = draw(BATCH * LENGTH, HIDDEN, seed=1), draw(BATCH * LENGTH, HIDDEN, seed=2)
    exact = leaf(x.double())
    want = formula(exact, wholes, options, dropped=training and "dropout" in options)
    want.backward(target.double())
    mine = leaf(part(padded(x, 1e3), mesh, split=sp))
    got = layer(mine, token_layout(), KEY)
    got.backward(part(padded(target, 0.0), mesh, split=sp))
    assert exact.grad is not None
    rows = part(torch.arange(PADDED), mesh, split=sp)
    real = rows[rows < BATCH * LENGTH]
    errors = {
        "y": error(got[: len(real)], want[real]),
        "dx": error(mine.grad, part(padded(exact.grad, 0.0), mesh, split=sp)),
    }
    whole_norm = sum(w.grad.square().sum() for w in wholes.values() if w.grad is not None) ** 0.5
    for name, w in wholes.items():
        assert w.grad is not None
        # a gradient that is zero in theory (of queries that see one key) is noise of the size of the others
        scale = whole_norm if w.grad.norm() < 1e-9 * whole_norm else 1.0
        errors[name] = error(gradient(layer.get_parameter(name)) / scale, w.grad / scale)
    return errors


def measure(rank: int, world: int) -> dict[str, dict[str, float]]:
    """Errors by (layout and mode, case)."""
    out: dict[str, dict[str, float]] = {}
    for tp, sp, training in ((1, False, True), (2, False, True), (2, True, True), (2, True, False)):
        mesh = build_context(Layout(dp_replicate=world // tp, tp=tp), "cpu").tp
        name = f"tp {tp}{', sp' if sp else ''}, {'training' if training else 'evaluation'}"
        out[name] = {}
        for case, options in CASES.items():
            errors = errors_of(mesh, options, sp, training)
            out[name] |= {f"{case}: {tensor}": e for tensor, e in errors.items()}
    return out


def test_values_and_gradients_are_those_of_the_formula() -> None:
    for layouts in run_distributed(measure, 2):
        for errors in layouts.values():
            assert len(errors) > len(CASES) * 6
            assert beyond(errors, 5e-6) == {}


def one_rank_attention(context: Any, dropout: float = DROPOUT) -> SelfAttention:
    layer = SelfAttention(
        HIDDEN,
        HEADS,
        context.tp,
        head_dim=WIDTH,
        query_key=QueryKeyOptions(rope="rope"),
        spec=AttentionSpec(dropout=dropout),
    )
    load_all(layer)
    return layer


def output_and_gradients(layer: SelfAttention, key: torch.Tensor, *, replay: bool = False) -> list[torch.Tensor]:
    x, info = leaf(draw(BATCH * LENGTH, HIDDEN, seed=1)), token_layout(BATCH * LENGTH)
    if replay:
        y = checkpoint(layer, x, info, key, use_reentrant=False, preserve_rng_state=False)
    else:
        y = layer(x, info, key)
    y.square().sum().backward()
    assert x.grad is not None
    grads = [gradient(p) for p in layer.parameters()]
    layer.zero_grad()
    return [y.detach(), x.grad, *grads]


def test_dropout_is_the_same_again_and_under_recompute_and_another_with_another_key() -> None:
    with fake_context() as context:
        layer = one_rank_attention(context)
        torch.manual_seed(1)
        first = output_and_gradients(layer, KEY)
        torch.manual_seed(2)
        for other in (output_and_gradients(layer, KEY), output_and_gradients(layer, KEY, replay=True)):
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(first, output_and_gradients(layer, KEY + 1), strict=True))


def test_dropout_keeps_the_mean_over_keys() -> None:
    with fake_context() as context, torch.no_grad():
        layer, x, info = (
            one_rank_attention(context),
            draw(BATCH * LENGTH, HIDDEN, seed=1),
            token_layout(BATCH * LENGTH),
        )
        outs = torch.stack([layer(x, info, torch.tensor(key * 7919)) for key in range(400)])
        layer.eval()
        want = layer(x, info)
    deviations = (outs.mean(0) - want) / (outs.std(0) / 20)
    assert (outs.std(0) > 1e-2).all()
    assert deviations.abs().max() < 5  # standard errors, over 210 elements
    assert 0.6 < deviations.std() < 1.4


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((10, 6), {}, "6 heads do not split over 4 ranks and 6 key/value heads"),
        ((16, 8), {"num_groups": 3}, "8 heads do not split over 4 ranks and 3 key/value heads"),
        ((48, 24), {"num_groups": 6}, "12 outputs in 6 parts cannot be shared by 4 ranks"),
        ((16, 8), {"spec": AttentionSpec(window=3, causal=False)}, "a sliding window needs causal attention"),
        ((16, 8), {"spec": AttentionSpec(alibi_heads=4)}, "ALiBi's slopes of 4 heads are not those of 8 heads"),
    ],
)
def test_impossible_heads_are_named(arguments: tuple[int, int], options: dict[str, Any], message: str) -> None:
    with fake_context(Layout(tp=4)) as context, pytest.raises(ValueError) as raised:
        SelfAttention(*arguments, context.tp, **options)
    assert str(raised.value) == message


def test_a_width_that_the_heads_do_not_divide_is_refused() -> None:
    with fake_context() as context:
        with pytest.raises(ValueError, match="hidden size 10 is not divisible by 4 heads"):
            SelfAttention(10, 4, context.tp)
        assert SelfAttention(10, 4, context.tp, head_dim=3).head_dim == 3
        assert SelfAttention(12, 4, context.tp).head_dim == 3


@pytest.mark.parametrize("grouped", [False, True])
def test_key_value_heads_are_repeated_only_for_backends_that_need_it(
    grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, flash = [], sdpa.CPU["flash"]

    def noted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: sdpa.Scores) -> Any:
        seen.append((k.shape[1], v.shape[1]))
        return flash.forward(q, k, v, scores)

    monkeypatch.setitem(sdpa.CPU, "flash", replace(flash, forward=noted))
    with fake_context() as context:
        for groups in (2, HEADS):
            options: dict[str, Any] = {"num_groups": groups, "kernels": kernels(grouped)}
            SelfAttention(HIDDEN, HEADS, context.tp, head_dim=WIDTH, **options)(
                torch.randn(PADDED, HIDDEN), token_layout()
            )
    assert seen == [(2, 2) if grouped else (HEADS, HEADS), (HEADS, HEADS)]
