"""Tiny models of many families, from transformers' own classes; and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCAB, HIDDEN, LAYERS, HEADS = 96, 32, 2, 4
_LLAMA_LIKE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
}
_KV = {**_LLAMA_LIKE, "num_key_value_heads": 2}  # fewer than the ranks at TP 4
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OPT = {**_LLAMA_LIKE, "ffn_dim": 64, "word_embed_proj_dim": HIDDEN, "dropout": 0.0}
del _OPT["intermediate_size"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_STARCODER = {**_KV, "residual_dropout": 0.0, "embedding_dropout": 0.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", _KV),
    "Llama, one key/value head, tied": ("LlamaConfig", {**_KV, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "Llama, vocabulary of 97": ("LlamaConfig", {**_KV, "vocab_size": 97}),
    "Mistral, sliding window": ("MistralConfig", {**_KV, "sliding_window": 4}),
    "Qwen2": ("Qwen2Config", {**_KV, "tie_word_embeddings": True}),
    "Qwen3": ("Qwen3Config", {**_KV, "head_dim": 16}),
    "Gemma 2": ("Gemma2Config", {**_KV, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}),
    "Gemma 3": ("Gemma3TextConfig", {**_KV, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}),
    "Phi 3": ("Phi3Config", _KV),
    "Phi": ("PhiConfig", _LLAMA_LIKE),
    "OLMo 2": ("Olmo2Config", {**_KV, "num_key_value_heads": 4}),
    "GPT-NeoX": ("GPTNeoXConfig", _LLAMA_LIKE),
    "Starcoder 2": ("Starcoder2Config", _STARCODER),
    "Granite": ("GraniteConfig", {**_KV, "attention_multiplier": 0.25, "logits_scaling": 2.0}),
    "Cohere": ("CohereConfig", _KV),
    "GLM 4": ("Glm4Config", {**_KV, "head_dim": 8}),
    "SmolLM 3": ("SmolLM3Config", _KV),
    "GPT-2": ("GPT2Config", _GPT2),
    "OPT": ("OPTConfig", _OPT),
    "Mixtral": ("MixtralConfig", {**_KV, "num_local_experts": 4}),
    "Qwen2 MoE": ("Qwen2MoeConfig", {**_KV, **_EXPERTS, "shared_expert_intermediate_size": 32}),
    "Qwen3 MoE": ("Qwen3MoeConfig", {**_KV, **_EXPERTS, "head_dim": 16}),
    "OLMoE": ("OlmoeConfig", {**_LLAMA_LIKE, **_EXPERTS}),
}


def build(family: str) -> Any:
    """A model with random weights, equal on every rank; biases and norms are not what they start with."""
    import transformers

    config, values = FAMILIES[family]
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**values))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def batch(seed: int, rows: int = 2, length: int = 10) -> dict[str, torch.Tensor]:
    """Ids, the first row padded on the left, and labels with ignored places."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[-1, 4] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients(model: nn.Module, micro_batches: int) -> dict[str, torch.Tensor]:
    """Accumulated over several micro-batches, whole."""
    model.zero_grad()
    device = next(model.parameters()).device
    for seed in range(micro_batches):
        model(**{name: x.to(device) for name, x in batch(seed).items()}).loss.backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def whole(tensor: Any) -> torch.Tensor:
    """All of it, on every rank."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error of a tensor. A gradient that is zero in theory (a key bias) is compared with the size
    of the others."""
    assert found.keys() == wanted.keys()
    floor = 1e-2 * max(float(g.norm()) for g in wanted.values())
    errors = {n: float((found[n] - g).norm()) / max(float(g.norm()), floor) for n, g in wanted.items()}
    name = max(errors, key=lambda n: errors[n])
    return errors[name], name


def pattern(name: str) -> str:
    """Of a parameter's name, that of its kind in all layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
