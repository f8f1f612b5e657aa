"""A training step by other programs, for the training table: transformers with Liger's kernels, megatron-core with its
local layers, torchtitan's layers under FSDP of one process. None of them is needed for anything else here; a row whose
package is not there says so. All train the same model, with fp32 master weights, fused AdamW and clipping.

megatron-core without Transformer Engine has its local layers: attention is products and a softmax, whose scores are
kept or computed again. torchtitan's loop reads a data set and needs a tokenizer; here its layers, its FSDP and its
compilation of blocks run in the table's loop.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron_experts import prepare
from training_step import Step, Work, transformers_step

NEED_GPU = {"liger_kernel": "what it adds", "torchtitan": "the backward pass of its attention"}
PACKAGES = {"liger_kernel": "liger-kernel", "megatron.core": "megatron-core", "torchtitan": "torchtitan"}
"""Module -> what pip calls it."""


def missing(module: str, device: str) -> str:
    """Why a row is left out; "": nothing."""
    if device == "cpu" and module in NEED_GPU:
        return f"left out: {NEED_GPU[module]} needs a GPU"
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        found = False
    return "" if found else f"left out: {PACKAGES[module]} is not installed"


def liger_step(work: Work, bf16: bool) -> Step:
    """Transformers' step with Liger's RoPE, norms, SwiGLU and output layer with its loss. Liger puts its functions into
    transformers' module; they are there in this step only, so that other rows stay transformers' own."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    plain = dict(vars(modeling_llama))
    step = transformers_step(work, bf16, change=lambda model: apply_liger_kernel_to_llama(model=model))
    changed = {name: value for name, value in vars(modeling_llama).items() if plain.get(name) is not value}
    before = {name: plain[name] for name in changed}

    def run() -> torch.Tensor:
        vars(modeling_llama).update(changed)
        try:
            return step()
        finally:
            vars(modeling_llama).update(before)

    vars(modeling_llama).update(before)
    return run


def _trained(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor]) -> Step:
    """A step of ``model``: loss, backward, clip, AdamW of its weights, or of fp32 copies where they are in bf16."""
    weights = list(model.parameters())
    low = [p for p in weights if p.dtype != torch.float32]
    masters = [torch.nn.Parameter(p.detach().float()) for p in low]
    trained = [*masters, *(p for p in weights if p.dtype == torch.float32)]
    decay, rest = ([p for p in trained if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)

    def step() -> torch.Tensor:
        loss = loss_of()
        loss.backward()
        for master, weight in zip(masters, low, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, weight in zip(masters, low, strict=True):
                weight.copy_(master)
        return loss.detach()

    return step


def megatron_gpt(work: Work, **settings: Any) -> Any:
    """megatron-core's GPT in its local layers, without dropout and fused extensions; ``settings`` go to its config."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = work.model
    config = TransformerConfig(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        ffn_hidden_size=sizes.ffn_hidden_size,
        num_attention_heads=sizes.num_attention_heads,
        num_query_groups=sizes.num_query_groups,
        kv_channels=sizes.kv_channels,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,  # of apex' extension
        gradient_accumulation_fusion=False,
        **settings,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        sizes.vocab_size,
        work.length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def megatron_step(work: Work, bf16: bool) -> Step:
    """Of megatron-core's GPT in its local layers. In bf16 its weights are in bf16, beside fp32 copies that are trained,
    as its optimizer has them."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not parallel_state.model_parallel_is_initialized():
        if work.device == "cpu":
            prepare()
        else:
            parallel_state.initialize_model_parallel()
            model_parallel_cuda_manual_seed(0)
    model = megatron_gpt(
        work,
        bias_activation_fusion=work.device == "cuda",
        recompute_granularity="selective" if work.device == "cuda" else None,
        use_cpu_initialization=work.device == "cpu",
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        bf16=bf16,
    )
    model = model.to(work.device, torch.bfloat16 if bf16 else torch.float32).train()
    (tokens, labels), places = work.data(), torch.arange(work.length, device=work.device).expand(work.batch, -1)
    hidden = torch.ones(1, 1, work.length, work.length, dtype=torch.bool, device=work.device).triu(1)

    def loss() -> torch.Tensor:
        return model(tokens, places, hidden, labels=labels).float().mean()

    return _trained(model, loss)


def torchtitan_step(work: Work, bf16: bool) -> Step:
    """Of torchtitan's Llama 3, each block compiled on a GPU, under its FSDP; in bf16 by that."""
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.models import llama3
    from torchtitan.models.common import Embedding, Linear, RMSNorm

    sizes = work.model
    vocabulary, width, head = sizes.vocab_size or 0, sizes.hidden_size, sizes.kv_channels or 0
    layers = llama3._build_llama3_layers(
        n_layers=sizes.num_layers,
        dim=width,
        n_heads=sizes.num_attention_heads,
        n_kv_heads=sizes.num_query_groups,
        hidden_dim=sizes.ffn_hidden_size,
        rope=llama3.ComplexRoPE.Config(dim=head, max_seq_len=work.length, theta=500_000, scaling="none"),
        attn_backend="flex",
    )
    config = llama3.Llama3Model.Config(
        dim=width,
        vocab_size=vocabulary,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=width, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=width, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=width, out_features=vocabulary, param_init=llama3._output_linear_init(width)),
        layers=layers,
    )
    with torch.device(work.device):
        model: Any = config.build()
        model.init_states()
    if work.device == "cuda":
        for block in model.layers.values():
            block.compile()
    mesh = dist.init_device_mesh(work.device, (1,), mesh_dim_names=("fsdp",))
    low = torch.bfloat16 if bf16 else torch.float32
    apply_fsdp_to_decoder(model, mesh, param_dtype=low, reduce_dtype=torch.float32, pp_enabled=False)
    (tokens, labels), places = work.data(), torch.arange(work.length, device=work.device).expand(work.batch, -1)
    mask = model.get_attention_masks(places)

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(tokens, places, mask).flatten(0, 1).float(), labels.flatten())

    return _trained(model, loss)


PEERS: dict[str, tuple[str, Callable[[Work, bool], Step]]] = {
    "transformers, Liger": ("liger_kernel", liger_step),
    "megatron-core, local layers": ("megatron.core", megatron_step),
    "torchtitan's layers, its FSDP": ("torchtitan", torchtitan_step),
}
"""Row -> (module that it needs, what builds its step)."""
