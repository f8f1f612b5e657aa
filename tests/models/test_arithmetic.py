from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smp.config import ConfigError, ModelConfig, resolve_model
from smp.models.arithmetic import count_parameters, count_part, forward_flops, training_flops_per_token
from smp.models.gpt import GPT
from smp.models.part import ModelPart, whole
from tests.fake_group import fake_context

# 2 layers, 4 heads of 4 with 2 key/value heads, so q = 16 and k = 8
SMALL = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24)
GPT2_LIKE = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    max_position_embeddings=32,
    position_embedding_type="learned_absolute",
    normalization="LayerNorm",
    swiglu=False,
    disable_bias_linear=False,
    untie_embeddings_and_output_weights=False,
)


def test_parameters_by_hand() -> None:
    # a block: query and output 2 x 16 x 16, key and value 2 x 16 x 8, gate, up and down 3 x 16 x 24, two norms of 16
    layer = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 16
    count = count_parameters(SMALL, 100)
    assert (count.per_layer, count.non_embedding) == (layer, 2 * layer + 16)
    assert (count.embedding, count.total) == (2 * 100 * 16, 2 * 100 * 16 + 2 * layer + 16)
    # GPT-2: four 16 x 16 and two 16 x 64 matrices, their biases, two norms with bias; tied, 32 positions, a final norm
    layer = 4 * 16 * 16 + 2 * 16 * 64 + 4 * 16 + 64 + 16 + 4 * 16
    count = count_parameters(GPT2_LIKE, 100)
    assert (count.per_layer, count.total) == (layer, 100 * 16 + 32 * 16 + 2 * layer + 32)


def test_a_layer_that_predicts_further_is_a_block_a_projection_and_three_norms() -> None:
    ahead = replace(SMALL, mtp_num_layers=2)
    layer = count_parameters(SMALL, 100).per_layer
    assert count_parameters(ahead, 100).total - count_parameters(SMALL, 100).total == 2 * (layer + 2 * 256 + 3 * 16)
    plain, flops = (forward_flops(resolve_model(replace(m, vocab_size=100)), 8) for m in (SMALL, ahead))
    assert flops.layers == plain.layers and plain.head == 2 * 16 * 100
    assert flops.mtp == 2 * plain.layers[-1] and plain.mtp == plain.around == 0
    assert flops.around == 2 * 2 * 2 * 256 and flops.head == 3 * plain.head
    per_token = [training_flops_per_token(m, 8, 100) for m in (SMALL, ahead)]
    assert per_token[1] - per_token[0] == 3 * (flops.mtp + flops.around + flops.head - plain.head)


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({"qk_layernorm": True}, 2 * 2 * 4),
        ({"add_qkv_bias": True}, 2 * (16 + 8 + 8)),
        ({"disable_bias_linear": False}, 2 * (16 + 8 + 8 + 16 + 24 + 24 + 16)),
        ({"kv_channels": 8}, 2 * (2 * 16 * 16 + 2 * 16 * 8)),
        ({"untie_embeddings_and_output_weights": False}, -100 * 16),
    ],
)
def test_each_part_of_the_architecture_counts(change: dict[str, bool | int], more: int) -> None:
    changed = replace(SMALL, **change)  # type: ignore[arg-type]
    assert count_parameters(changed, 100).total - count_parameters(SMALL, 100).total == more


def test_the_models_parameters_are_counted() -> None:
    variants = (SMALL, GPT2_LIKE, replace(SMALL, qk_layernorm=True, add_qkv_bias=True, normalization="LayerNorm"))
    with fake_context() as context:
        for model in variants:
            built = GPT(resolve_model(replace(model, vocab_size=128)), context.tp)  # a multiple of the padding
            assert sum(p.numel() for p in built.parameters()) == count_parameters(model, 128).total, str(model)


def test_sizes_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(ConfigError, match="--num-query-groups 3"):
        count_parameters(replace(SMALL, num_query_groups=3), 100)


def test_flops_by_hand() -> None:
    # forward, per token: 2 FLOPs per matrix element of 2 layers and of the output matrix,
    matrices = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) + 16 * 100
    # and for each of the (1 + 2 + ... + 8) / 8 = 4.5 tokens seen 2 x 16 for the score and 2 x 16 for the sum, 2 layers
    assert training_flops_per_token(SMALL, 8, 100) == 3 * (2 * matrices + 2 * 4 * 16 * 4.5)
    # a window of 3: (1 + 2 + 3 x 6) / 8 = 2.625 tokens seen
    windowed = replace(SMALL, window_size=3)
    assert training_flops_per_token(windowed, 8, 100) == 3 * (2 * matrices + 2 * 4 * 16 * 2.625)


def test_flops_of_llama2_7b_are_six_per_parameter_and_attention() -> None:
    model = ModelConfig(num_layers=32, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=11008)
    count = count_parameters(model, 32000)
    norms = (2 * 32 + 1) * 4096
    attention = 3 * 32 * 4 * 4096 * 2048.5
    # the lookup of the embedding is no product
    expected = 6 * (count.total - 32000 * 4096 - norms) + attention
    assert training_flops_per_token(model, 4096, 32000) == pytest.approx(expected, rel=1e-12)


def test_biases_norms_and_tying_do_no_flops() -> None:
    changed = replace(SMALL, disable_bias_linear=False, qk_layernorm=True, untie_embeddings_and_output_weights=False)
    assert training_flops_per_token(changed, 8, 100) == training_flops_per_token(SMALL, 8, 100)


_SIZE = st.one_of(st.none(), st.integers(1, 50))


@given(length=st.integers(1, 40), size=_SIZE, chunks=st.booleans())
def test_tokens_seen_are_those_of_the_mask(length: int, size: int | None, chunks: bool) -> None:
    pairs = [(i, j) for i in range(length) for j in range(i + 1)]
    seen = sum(size is None or (i // size == j // size if chunks else i - j < size) for i, j in pairs)
    model = replace(SMALL, **{"attention_chunk_size" if chunks else "window_size": size})
    with_attention = training_flops_per_token(model, length, 100)
    without = 3 * 2 * (2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) + 16 * 100)
    assert with_attention - without == pytest.approx(3 * 2 * 4 * 16 * seen / length)


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_flops_are_what_torch_counts(family: str) -> None:
    """Torch counts all of the length x length scores, so the half that a causal mask hides is added."""
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    length, vocab, model = 8, 100, SMALL if family == "Llama" else GPT2_LIKE
    if family == "Llama":
        config = transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=vocab,
            attn_implementation="eager",
        )
    else:
        config = transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=4, n_positions=32, vocab_size=vocab, attn_implementation="eager"
        )
    network = transformers.AutoModelForCausalLM.from_config(config)
    counter = FlopCounterMode(display=False)
    with counter:
        network(torch.randint(0, vocab, (1, length))).logits.sum().backward()
    hidden = 3 * 2 * 4 * 16 * (length - (length + 1) / 2) * length
    ours = training_flops_per_token(model, length, vocab) * length
    # some versions of transformers make RoPE's angles, 32 FLOPs here, by a matrix product
    assert counter.get_total_flops() == pytest.approx(ours + hidden, rel=2e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_parts_add_up_to_the_model(tied: bool) -> None:
    model = replace(SMALL, vocab_size=100, num_layers=5, untie_embeddings_and_output_weights=not tied)
    model = resolve_model(model)
    parts = (ModelPart(0, 2, embedding=True), ModelPart(2, 0), ModelPart(2, 3, head=True))
    copies = 100 * model.hidden_size if tied else 0  # the matrix is at both ends
    whole_model = count_parameters(model, 100).total
    assert sum(count_part(model, part) for part in parts) == whole_model + copies
    assert count_part(model, whole(5)) == whole_model
    flops = forward_flops(model, 32)
    assert 3 * (5 * flops.layer + flops.head) == training_flops_per_token(model, 32, 100)


def test_of_experts_those_count_that_a_token_gets() -> None:
    """Mixtral 8x7B, whose authors say 46.7 and 12.9 billion (arXiv 2401.04088)."""
    sizes = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8}
    dense = ModelConfig(**sizes, ffn_hidden_size=14336)
    mixtral = replace(dense, num_experts=8, moe_router_topk=2)
    count, router = count_parameters(mixtral, 32000), 32 * 8 * 4096
    assert (round(count.total / 1e8), round(count.active / 1e8)) == (467, 129)
    assert count_parameters(dense, 32000).active == count_parameters(dense, 32000).total
    twice = replace(dense, ffn_hidden_size=2 * 14336)
    flops = [training_flops_per_token(model, 2048, 32000) for model in (mixtral, twice)]
    assert flops[0] - flops[1] == 3 * 2 * router
    every_second = count_parameters(replace(mixtral, moe_layer_freq="2"), 32000)
    assert every_second.per_layer == count.per_layer
    assert count.total - every_second.total == 16 * (7 * 3 * 4096 * 14336 + 8 * 4096)
