"""Our decoder against transformers' models of seven families with the same weights, fp32."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from smp.config import ModelConfig
from tests.distributed import run_distributed

transformers = pytest.importorskip("transformers")

VOCAB, HIDDEN, LAYERS, HEADS, HEAD_DIM = 99, 32, 2, 4, 8
LLAMA_NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
LLAMA_ENDS = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
GPT2_NAMES = {
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attention.output": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
GPT2_ENDS = {"embedding": "transformer.wte", "positions": "transformer.wpe", "final_norm": "transformer.ln_f"}
NEOX_NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.output": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
NEOX_ENDS = {"embedding": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm", "head": "lm_head"}


@dataclass
class Family:
    """How one of their models is made, what it is called here, and where its tensors are.

    Attributes:
        model, config: names of their classes.
        theirs, ours: settings beside the shared ones.
        block, names, ends: their module names: of a block, within it and outside, by ours.
        fused: their name of one matrix for query, key and value.
        by_head: that matrix holds (q, k, v) of one head after the other, instead of all q, all k, all v.
        transposed: linear weights are (in, out).
    """

    model: str
    config: str
    theirs: dict[str, Any]
    ours: dict[str, Any] = field(default_factory=dict)
    block: str = "model.layers.{}."
    names: dict[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    ends: dict[str, str] = field(default_factory=lambda: LLAMA_ENDS)
    fused: str = ""
    by_head: bool = False
    transposed: bool = False


def rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 500.0, "rope_type": kind, **more}}


SIZES = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
SIZES |= {"max_position_embeddings": 64, "initializer_range": 0.5}
NO_IDS = {"bos_token_id": None, "eos_token_id": None}  # the defaults are outside of this vocabulary
LLAMA_SIZES = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "tie_word_embeddings": False}
OURS: dict[str, Any] = {"ffn_hidden_size": 64, "num_query_groups": 2, "rotary_base": 500.0}
LAYERNORM: dict[str, Any] = {"normalization": "LayerNorm", "swiglu": False, "disable_bias_linear": False}
LAYERNORM |= {"num_query_groups": 4, "ffn_hidden_size": 128}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}

FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", {**LLAMA_SIZES, "rms_norm_eps": 1e-5, **rope()}, OURS),
    "llama3": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**LLAMA_SIZES, "rms_norm_eps": 1e-5, **rope("llama3", **LLAMA3)},
        {**OURS, "use_rope_scaling": True, "rope_original_max_position": 16},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**LLAMA_SIZES, "rms_norm_eps": 1e-6, **rope()},
        {**OURS, "norm_epsilon": 1e-6, "add_qkv_bias": True},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**LLAMA_SIZES, "head_dim": 16, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, **rope()},
        {
            **OURS,
            "kv_channels": 16,
            "norm_epsilon": 1e-6,
            "qk_layernorm": True,
            "untie_embeddings_and_output_weights": False,
        },
    ),
    "mistral": Family(
        "MistralForCausalLM",
        "MistralConfig",
        {**LLAMA_SIZES, "sliding_window": 7, "rms_norm_eps": 1e-5, **rope()},
        {**OURS, "window_size": 7},
    ),
    "neox": Family(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**SIZES, **NO_IDS, "intermediate_size": 128, "layer_norm_eps": 1e-5, **rope(partial_rotary_factor=0.25)},
        {**OURS, **LAYERNORM, "rotary_percent": 0.25, "parallel_residual": True},
        block="gpt_neox.layers.{}.",
        names=NEOX_NAMES,
        ends=NEOX_ENDS,
        fused="attention.query_key_value",
        by_head=True,
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCAB, "n_positions": 64, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, **NO_IDS},
        {
            **LAYERNORM,
            "position_embedding_type": "learned_absolute",
            "tanh_gelu": True,
            "untie_embeddings_and_output_weights": False,
        },
        block="transformer.h.{}.",
        names=GPT2_NAMES,
        ends=GPT2_ENDS,
        fused="attn.c_attn",
        transposed=True,
    ),
}


def our_config(family: Family) -> ModelConfig:
    sizes: dict[str, Any] = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS}
    sizes |= {"kv_channels": HEAD_DIM, "vocab_size": VOCAB, "make_vocab_size_divisible_by": 8}
    return ModelConfig(**{**sizes, "max_position_embeddings": 64, **family.ours})


def their_model(family: Family) -> Any:
    """All parameters drawn: theirs start with biases of 0 and norms of 1, which would hide what is left out."""
    model = getattr(transformers, family.model)(getattr(transformers, family.config)(**family.theirs)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.normal_(mean=1.0 if norm else 0.0, std=0.3, generator=generator)
    return model


def weights_of(family: Family, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Their tensors under our names; takes each out of ``state``."""

    def take(name: str) -> torch.Tensor:
        tensor = state.pop(name)
        return tensor.t() if family.transposed and tensor.ndim == 2 and ".h." in name else tensor

    out = {}
    modules = dict(family.ends)
    for i in range(LAYERS):
        block = family.block.format(i)
        modules |= {f"layers.{i}.{a}": block + b for a, b in family.names.items()}
        for part in ("weight", "bias") if family.fused else ():
            fused = take(f"{block}{family.fused}.{part}")
            cut = fused.unflatten(0, (HEADS, 3, HEAD_DIM) if family.by_head else (3, HEADS, HEAD_DIM))
            for name, tensor in zip(("query", "key", "value"), cut.unbind(1 if family.by_head else 0), strict=True):
                out[f"layers.{i}.attention.{name}.{part}"] = tensor.flatten(0, 1)
    for ours, theirs in modules.items():
        out |= {
            f"{ours}.{part}": take(f"{theirs}.{part}") for part in ("weight", "bias") if f"{theirs}.{part}" in state
        }
    return out


def copy_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """This rank's parts; the padding of the vocabulary stays 0."""
    from smp.parallel.boxes import local_box

    names = set(dict(model.named_parameters()))
    assert names == set(weights), f"in one of the two only: {sorted(names ^ set(weights))}"
    for name, parameter in model.named_parameters():
        box, local, part = local_box(parameter), parameter.to_local().zero_(), weights[name]  # type: ignore[operator]
        for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            start = min(start, part.shape[dim])
            part = part.narrow(dim, start, min(size, part.shape[dim] - start))
        local[tuple(slice(0, size) for size in part.shape)] = part


@torch.no_grad()
def differences(rank: int, world: int) -> dict[str, tuple[float, float, float]]:
    """By family: largest difference of the logits, largest logit, relative difference of the loss."""
    from smp.config import Layout
    from smp.models.gpt import GPT
    from smp.parallel.mesh import build_mesh

    mesh, out = build_mesh(Layout(tp=world), "cpu"), {}
    tokens = torch.randint(0, VOCAB, (2, 41), generator=torch.Generator().manual_seed(1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    for kind, family in FAMILIES.items():
        theirs = their_model(family)
        ours = GPT(our_config(family), mesh["tp"], sequence_parallel=world > 1, device="cpu").eval()
        state = dict(theirs.named_parameters())
        copy_weights(ours, weights_of(family, state))
        assert state == {}, f"{kind}: left out {list(state)}"
        want, got = theirs(inputs).logits, ours(inputs)
        loss = ours(inputs, labels, torch.full(labels.shape, 1.0 / labels.numel()))
        reference = torch.nn.functional.cross_entropy(want.flatten(0, 1), labels.flatten())
        out[kind] = (got - want).abs().max().item(), want.abs().max().item(), abs(loss.item() / reference.item() - 1)
    return out


@pytest.fixture(scope="module", params=[1, 2], ids=["tp 1", "tp 2"])
def measured(request: pytest.FixtureRequest) -> list[dict[str, tuple[float, float, float]]]:
    return run_distributed(differences, request.param)


@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_and_loss_are_theirs(measured: list[dict[str, tuple[float, float, float]]], kind: str) -> None:
    for rank in measured:
        difference, largest, loss = rank[kind]
        assert largest > 1
        assert difference <= 1e-4
        assert loss <= 1e-5
