"""Generation with kept keys and values against running the whole sequence every time, and how tokens are chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smp.config import Layout, ModelConfig
from smp.kernels.token_layout import TokenLayout
from smp.layers import init_weights, local
from smp.models import generation
from smp.models.generation import Sampling, choose, generate
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from smp.parallel.context import build_context
from tests.distributed import run_distributed

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
SIZES |= {"kv_channels": 8, "ffn_hidden_size": 64, "vocab_size": 50, "max_position_embeddings": 40}
SIZES |= {"make_vocab_size_divisible_by": 2, "init_method_std": 0.3}
GPT2 = {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "swiglu": False}
LATENT: dict[str, Any] = {"multi_latent_attention": True, "qk_layernorm": True, "q_lora_rank": 10, "kv_lora_rank": 12}
LATENT |= {"qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 7, "kv_channels": 10, "num_query_groups": 4}
MODELS = {
    "rope": SIZES,
    "latent": SIZES | LATENT,
    "window": SIZES | {"window_size": 5},
    "longrope": SIZES  # the text grows past 22 tokens, also where it goes through in pieces
    | {
        **{"use_rope_scaling": True, "rope_scaling_type": "longrope", "rope_original_max_position": 22},
        **{"longrope_short_factor": "1 1 1.5 2", "longrope_long_factor": "1 2 4 8"},
    },
    "learned positions": SIZES | GPT2,
    "gemma": SIZES
    | {
        **{"apply_layernorm_1p": True, "norm_placement": "sandwich", "swiglu": False, "geglu": True},
        **{"attn_logit_softcapping": 2.0, "window_size": 5, "window_attn_skip_freq": "2", "rotary_base_local": 50.0},
    },
    "gpt-oss": SIZES
    | {
        **{"softmax_type": "learnable", "window_size": 5, "window_attn_skip_freq": "2", "disable_bias_linear": False},
        **{"swiglu": False, "quick_geglu": True, "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
        **{"num_experts": 4, "moe_ffn_hidden_size": 24},
    },
    "llama4": SIZES
    | {
        **{"rotary_interleaved": True, "no_rope_freq": "2", "attention_chunk_size": 6, "qk_l2_norm": True},
        **{"attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.5},
        **{"num_experts": 4, "moe_router_topk": 1, "moe_ffn_hidden_size": 24, "moe_apply_probs_on_input": True},
        **{"moe_router_score_function": "sigmoid"},
    },
    "olmo": SIZES | {"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_across_heads": True},
    "command": SIZES | {"rotary_interleaved": True, "no_rope_freq": "2", "logit_scale": 2.0},
    "bloom": SIZES | GPT2 | {"position_embedding_type": "alibi", "embedding_layernorm": True},
    "opt": SIZES | GPT2 | {"position_embedding_offset": 2, "relu": True},
}
GREEDY = Sampling(temperature=0)


def texts(rank: int, world: int) -> dict[str, tuple[list[int], list[int], list[int], list[int]]]:
    """Of each model: with the cache, without it, with an end, and with a prompt that goes through in pieces."""
    out = {}
    for name, settings in MODELS.items():
        mesh = build_context(Layout(tp=world), "cpu").tp
        model = GPT(ModelConfig(**settings), mesh, device="cpu").eval()
        init_weights(model, 1)
        prompt = [3, 1, 4, 1, 5]
        slow = list(prompt)
        with torch.no_grad():
            while len(slow) < 30:
                slow.append(int(model(MicroBatch(torch.tensor([slow]))).logits[0, -1].argmax()))
        fast = list(generate(model, prompt, 25, GREEDY, ends=[]))
        ended = list(generate(model, prompt, 25, GREEDY, ends=[fast[9]]))
        whole, generation.PIECE = generation.PIECE, 7
        pieces = list(generate(model, prompt + fast[:15], 10, GREEDY, ends=[]))
        generation.PIECE = whole
        out[name] = fast, slow[5:], ended, pieces
    return out


@pytest.mark.parametrize("tp", [1, 2])
def test_kept_keys_and_values_change_nothing(tp: int) -> None:
    for rank in run_distributed(texts, tp):
        for name, (fast, slow, ended, pieces) in rank.items():
            assert fast == slow, name
            assert pieces == fast[15:], name
            assert ended == fast[: fast.index(fast[9])]


def limits(rank: int, world: int) -> tuple[int, list[str]]:
    """How many tokens fit behind a prompt of 30, and what is wrong with other prompts."""
    model = GPT(ModelConfig(**SIZES), build_context(Layout(), "cpu").tp, device="cpu").eval()
    init_weights(model, 1)
    messages = []
    for prompt, tokens in (([], 1), ([0] * 41, 1), ([50], 1), ([0], -1)):
        with pytest.raises(ValueError) as error:
            generate(model, prompt, tokens, GREEDY, ends=[])  # at once, before anything is shown
        messages.append(str(error.value))
    with torch.no_grad():
        local(model.head.weight)[3] = torch.nan  # type: ignore[union-attr, arg-type]
    with pytest.raises(ValueError) as error:
        next(generate(model, [7], 1, GREEDY, ends=[]))
    messages.append(str(error.value))
    init_weights(model, 1)
    return len(list(generate(model, [7] * 30, 99, GREEDY, ends=[]))), messages


def test_the_longest_sequence_is_the_models() -> None:
    ((count, messages),) = run_distributed(limits, 1)
    assert count == 10
    assert messages == [
        "the prompt has 0 tokens, this model takes 1 to 40",
        "the prompt has 41 tokens, this model takes 1 to 40",
        "token ids 50..50 are outside of the model's vocabulary of 50",
        "-1 new tokens cannot be: give 0 or more",
        "the model's logits are not finite: its weights are damaged, or too large for this dtype",
    ]


def masks(rank: int, world: int) -> list[tuple[int, ...]]:
    """Shapes of the masks of attention's layers, while a prompt of 30 goes through in pieces and 3 tokens follow."""
    model = GPT(ModelConfig(**SIZES), build_context(Layout(), "cpu").tp, device="cpu").eval()
    init_weights(model, 1)
    shapes, made = [], TokenLayout.make_mask

    def noted(self: TokenLayout, *args: Any) -> torch.Tensor:
        mask = made(self, *args)
        shapes.append(tuple(mask.shape[2:]))
        return mask

    TokenLayout.make_mask, generation.PIECE = noted, 12  # type: ignore[method-assign]
    list(generate(model, [7] * 30, 3, GREEDY, ends=[]))
    return shapes[::2]  # of the first of two layers


def test_a_token_costs_memory_for_one_row_of_the_mask() -> None:
    """All pairs of 131072 tokens would be 137 GB in each layer, for each token."""
    assert run_distributed(masks, 1) == [[(12, 24), (6, 30), (1, 31), (1, 32)]]


LOGITS = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(temperature=0), {0}),
        (Sampling(temperature=1.0, top_k=0), {0, 1, 2, 3}),
        (Sampling(temperature=1.0, top_k=2), {0, 1}),
        (Sampling(temperature=1.0, top_k=0, top_p=0.5), {0}),
        (Sampling(temperature=1.0, top_k=0, top_p=0.6), {0, 1}),
        (Sampling(temperature=0.01, top_k=0), {0}),
        (Sampling(temperature=1e-40, top_k=0), {0}),
        (Sampling(temperature=1.0, top_k=3, top_p=0.8), {0, 1}),
    ],
)
def test_what_can_be_chosen(sampling: Sampling, possible: set[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    assert {choose(LOGITS, sampling, generator) for _ in range(400)} == possible


def test_choices_follow_the_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.tensor([choose(LOGITS, Sampling(temperature=1.0, top_k=0), generator) for _ in range(4000)])
    shares = chosen.bincount(minlength=4) / 4000
    assert (shares - LOGITS.exp()).abs().max() < 0.03


NAN = float("nan")
WRONG: list[dict[str, float]] = [{"temperature": -1.0}, {"temperature": NAN}, {"top_k": -1}, {"top_p": 0.0}]
WRONG += [{"top_p": 1.1}, {"top_p": NAN}, {"seed": 1 << 64}]


@pytest.mark.parametrize("wrong", WRONG)
def test_impossible_sampling_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        Sampling(**wrong)  # type: ignore[arg-type]
