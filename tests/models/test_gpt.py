"""What the decoder promises: what sees what, what counts, what has a name, whatever the configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smp.config import Layout, ModelConfig
from smp.config.layers import activation_of
from smp.kernels.token_layout import TokenLayout
from smp.layers import init_weights
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from tests.fake_group import fake_context
from tests.layers.whole import draw, error, load_all

LLAMA = ModelConfig(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    vocab_size=31,
    make_vocab_size_divisible_by=8,
    max_position_embeddings=16,
)
GPT2 = replace(
    LLAMA,
    normalization="LayerNorm",
    swiglu=False,
    position_embedding_type="learned_absolute",
    disable_bias_linear=False,
    untie_embeddings_and_output_weights=False,
)
MODELS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "neox": replace(LLAMA, parallel_residual=True, rotary_percent=0.5, swiglu=False, disable_bias_linear=False),
    "qwen3": replace(LLAMA, qk_layernorm=True, add_qkv_bias=True),
}
LENGTH = 10


def build(context: Any, config: ModelConfig) -> GPT:
    model = GPT(config, context.tp, seed=1, device="cpu")
    load_all(model)
    return model


def draw_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 31, shape, generator=torch.Generator().manual_seed(seed))


def numbered(model: GPT, tokens: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """Logits of tokens of the samples with these numbers."""
    length = tokens.shape[1]
    return model(MicroBatch(tokens, token_index=samples[:, None] * length + torch.arange(length))).logits


def logits(config: ModelConfig, tokens: torch.Tensor) -> torch.Tensor:
    with fake_context() as context, torch.no_grad():
        return build(context, config).eval()(MicroBatch(tokens)).logits


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@settings(deadline=None, max_examples=8)
@given(changed=st.integers(0, LENGTH - 1))
def test_a_token_changes_itself_and_what_follows_in_its_sample(config: ModelConfig, changed: int) -> None:
    tokens = draw_tokens(2, LENGTH)
    other = tokens.clone()
    other[1, changed] = (other[1, changed] + 1) % 31
    before, after = logits(config, tokens), logits(config, other)
    assert before.shape == (2, LENGTH, 31)
    same = (before == after).all(-1)
    assert same[0].all() and same[1, :changed].all()
    assert not same[1, changed:].any()


def test_a_window_reaches_one_token_less_than_its_size_per_block() -> None:
    config, tokens = replace(LLAMA, window_size=3), draw_tokens(1, LENGTH)
    other = tokens.clone()
    other[0, 1] = (other[0, 1] + 1) % 31
    same = (logits(config, tokens) == logits(config, other)).all(-1)[0]
    reach = 1 + 2 * LLAMA.num_layers
    assert not same[1 : reach + 1].any()
    assert same[reach + 1 :].all()


@pytest.mark.parametrize("kind", ["rope", "learned_absolute", "none"])
def test_the_order_of_earlier_tokens_shows_through_positions_alone(kind: Any) -> None:
    """One block without positions sees earlier tokens as a set."""
    config = replace(LLAMA, position_embedding_type=kind, num_layers=1)
    tokens = torch.tensor([[3, 7, 11, 5]])
    difference = (logits(config, tokens) - logits(config, tokens[:, [1, 0, 2, 3]]))[0, -1].abs().max()
    assert difference < 1e-4 if kind == "none" else difference > 1e-2


def gradients(config: ModelConfig, tokens: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> Any:
    with fake_context() as context:
        model = build(context, config)
        loss = model(MicroBatch(tokens, labels, weights)).loss
        loss.backward()
        return loss.detach(), {n: p.grad.to_local().clone() for n, p in model.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_loss_is_the_weighted_sum_over_tokens(config: ModelConfig) -> None:
    tokens, labels, weights = draw_tokens(3, LENGTH), draw_tokens(3, LENGTH, seed=1), draw(3, LENGTH, seed=2).abs()
    loss, _ = gradients(config, tokens, labels, weights)
    per_token = torch.nn.functional.cross_entropy(
        logits(config, tokens).flatten(0, 1), labels.flatten(), reduction="none"
    )
    assert error(loss, per_token @ weights.flatten()) < 1e-6


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_what_does_not_count_leaves_no_trace(config: ModelConfig) -> None:
    """Tokens of weight 0 at the end of a sample: neither they nor their labels move loss or gradients."""
    weights = torch.ones(2, LENGTH)
    weights[1, 6:] = 0
    tokens, labels = draw_tokens(2, LENGTH), draw_tokens(2, LENGTH, seed=1)
    other_tokens, other_labels = tokens.clone(), labels.clone()
    other_tokens[1, 6:], other_labels[1, 6:] = tokens[0, 0], -100
    loss, grads = gradients(config, tokens, labels, weights)
    other_loss, other_grads = gradients(config, other_tokens, other_labels, weights)
    assert loss == other_loss
    assert {n: e for n, g in grads.items() if (e := error(other_grads[n], g)) > 1e-6} == {}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_every_parameter_learns_and_vocabulary_padding_does_not(config: ModelConfig) -> None:
    _, grads = gradients(config, draw_tokens(4, LENGTH), draw_tokens(4, LENGTH, seed=1), torch.ones(4, LENGTH))
    assert [name for name, g in grads.items() if not g.isfinite().all() or g.norm() == 0] == []
    for name in ("embedding.weight", "head.weight"):
        if name in grads:
            assert grads[name].shape[0] == 32 and (grads[name][31] == 0).all()


def test_tied_model_has_one_matrix_and_adds_both_gradients() -> None:
    tokens, labels, weights = draw_tokens(2, LENGTH), draw_tokens(2, LENGTH, seed=1), torch.ones(2, LENGTH)
    tied = replace(LLAMA, untie_embeddings_and_output_weights=False)
    with fake_context() as context:
        one, two = build(context, tied), GPT(LLAMA, context.tp, device="cpu")
        assert set(dict(two.named_parameters())) - set(dict(one.named_parameters())) == {"head.weight"}
        values = dict(one.named_parameters()) | {"head.weight": one.embedding.weight}
        with torch.no_grad():
            for name, parameter in two.named_parameters():
                parameter.to_local().copy_(values[name].to_local())
        for model in (one, two):
            model(MicroBatch(tokens, labels, weights)).loss.backward()
        together: Any = one.embedding.weight.grad
        apart: Any = [two.embedding.weight.grad, two.head.weight.grad]  # type: ignore[union-attr]
        assert error(together.to_local(), sum(g.to_local() for g in apart)) < 1e-6


def test_dropout_needs_the_samples_numbers_and_depends_on_nothing_else() -> None:
    config, tokens = replace(LLAMA, hidden_dropout=0.3, attention_dropout=0.2), draw_tokens(3, LENGTH)
    without = logits(LLAMA, tokens)
    with fake_context() as context, torch.no_grad():
        model = build(context, config)
        with pytest.raises(ValueError, match="dropout needs token_index"):
            model(MicroBatch(tokens))
        numbers = torch.tensor([5, 6, 7])
        together = numbered(model, tokens, numbers)
        torch.manual_seed(99)
        alone = torch.cat([numbered(model, t[None], n[None]) for t, n in zip(tokens, numbers, strict=True)])
        assert error(alone, together) < 1e-6
        assert error(numbered(model, tokens, numbers + 1), together) > 0.1
        model.tokens.seed = 2
        assert error(numbered(model, tokens, numbers), together) > 0.1
        model.eval()
        assert torch.equal(model(MicroBatch(tokens)).logits, without)


@pytest.mark.parametrize("site", ["hidden_dropout", "attention_dropout"])
def test_each_dropout_acts(site: str) -> None:
    tokens, numbers = draw_tokens(2, LENGTH), torch.arange(2)
    with fake_context() as context, torch.no_grad():
        got = numbered(build(context, replace(LLAMA, **{site: 0.3})), tokens, numbers)
    assert error(got, logits(LLAMA, tokens)) > 0.1


def test_embedding_is_dropped_too() -> None:
    with fake_context() as context, torch.no_grad():
        model = build(context, replace(LLAMA, hidden_dropout=0.5))
        seen: list[torch.Tensor] = []
        model.layers["0"].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        numbered(model, draw_tokens(4, LENGTH), torch.arange(4))
    assert 0.4 < (seen[0] == 0).float().mean() < 0.6


def test_names_carry_the_global_number_of_a_block_and_nothing_is_a_buffer() -> None:
    with fake_context() as context:
        model = GPT(GPT2, context.tp)
        names = {name for name, _ in model.named_parameters()}
        assert all(p.is_meta for p in model.parameters())
        assert list(model.buffers()) == []  # meta-device init would lose them
    linear = ["attention.query", "attention.key", "attention.value", "attention.output", "mlp.up", "mlp.down"]
    modules = [f"layers.{i}.{m}" for i in range(2) for m in (*linear, "attention_norm", "mlp_norm")] + ["final_norm"]
    assert names == {f"{m}.{part}" for m in modules for part in ("weight", "bias")} | {
        "embedding.weight",
        "positions.weight",
    }


def test_residual_writers_start_smaller() -> None:
    with fake_context() as context:
        model = GPT(replace(LLAMA, init_method_std=0.1, num_layers=8), context.tp, device="cpu")
        init_weights(model, 0)
        block: Any = model.layers["3"]
        for linear, std in ((block.mlp.up, 0.1), (block.attention.output, 0.1 / 4), (block.mlp.down, 0.1 / 4)):
            assert linear.weight.to_local().std().item() == pytest.approx(std, rel=0.15)


def test_activation_is_the_one_that_is_named() -> None:
    plain = replace(LLAMA, swiglu=False)
    named = [LLAMA, plain, replace(plain, squared_relu=True), replace(plain, tanh_gelu=True)]
    assert [activation_of(config).kind for config in named] == ["swiglu", "gelu", "squared_relu", "tanh_gelu"]


def test_tokens_are_padded_for_sequence_parallelism_in_one_place() -> None:
    """5 tokens over 4 ranks: every rank's block gets 2 rows, and its attention is told of 5."""
    with fake_context(Layout(tp=4), sequence_parallel=True) as context, torch.no_grad():
        model = GPT(LLAMA, context, device="cpu")
        seen: list[Any] = []
        model.layers["0"].register_forward_pre_hook(lambda m, args: seen.append(args))
        model(MicroBatch(draw_tokens(1, 5), draw_tokens(1, 5), torch.ones(1, 5)))
    x, layout, _ = seen[0]
    assert x.shape == (2, 16)
    assert (layout.batch, layout.length, layout.padding, layout.num_tokens) == (1, 5, 3, 8)


def test_labels_without_weights_are_refused() -> None:
    """They would give logits where a loss is expected."""
    tokens, weights = draw_tokens(2, LENGTH), torch.ones(2, LENGTH)
    with fake_context() as context:
        model = build(context, LLAMA)
        for options in ({"labels": tokens}, {"loss_weights": weights}):
            with pytest.raises(ValueError, match="a loss needs labels and loss_weights"):
                model(MicroBatch(tokens, **options))
            flat: Any = {name: x.flatten() for name, x in options.items()}
            with pytest.raises(ValueError, match="a loss needs labels and loss_weights"):
                model.head(draw(2 * LENGTH, LLAMA.hidden_size, seed=0), **flat)  # type: ignore[misc]


def test_a_window_is_one_mask_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one sample, which all share: a mask has the size of the length squared."""
    seen: list[Any] = []
    made, make = [], TokenLayout.make_mask
    monkeypatch.setattr(TokenLayout, "make_mask", lambda *arguments: made.append(1) or make(*arguments))
    with fake_context() as context, torch.no_grad():
        model = build(context, replace(LLAMA, window_size=3))
        for layer in model.layers.values():
            layer.register_forward_pre_hook(lambda module, args: seen.append(args[1].masks.get((True, 3))))
        model(MicroBatch(draw_tokens(2, LENGTH)))
        assert len(made) == 1 and len(seen) == LLAMA.num_layers and all(mask is seen[0] for mask in seen)
        assert seen[0].shape == (1, 1, LENGTH, LENGTH) and (seen[0] == 0).sum(-1).max() == 3
        model(MicroBatch(draw_tokens(2, 3)))
        assert seen[-1] is None and len(made) == 1  # a window that holds the sequence hides nothing
