"""megatron-core's own layer of experts on a CPU, for the table of ``benchmarks/experts.py``.

megatron-core asks torch.cuda for streams and the current device wherever it is; here they are stand-ins that do
nothing. Without Transformer Engine its experts are computed one after the other (``SequentialMLP``).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn


class _Stream:
    """A stream of a machine without any."""

    def wait_stream(self, _: object) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


class _NoTracker:
    """Random numbers of megatron-core need CUDA; these weights are drawn by the caller."""

    def fork(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return True


def prepare(tp: int = 1) -> None:
    """Let megatron-core run in this process, with ``tp`` tensor-parallel ranks; the process group is there."""
    stream, cuda = _Stream(), torch.cuda
    cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    cuda.Stream = _Stream  # type: ignore[assignment, misc]
    cuda.current_stream = lambda *_: stream  # type: ignore[assignment, return-value]
    cuda.stream = lambda *_: contextlib.nullcontext()  # type: ignore[assignment, return-value]
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # a name that is not there without Transformer Engine
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = _NoTracker(), True


def megatron_layer(hidden: int, width: int, experts: int, topk: int, dispatcher: str, dtype: torch.dtype) -> nn.Module:
    """Softmax over a token's experts, router in fp32, SwiGLU, no auxiliary loss; weights without values."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=8,
        ffn_hidden_size=width,
        moe_ffn_hidden_size=width,
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type=dispatcher,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False)
    layer: nn.Module = build_module(spec.submodules.mlp, config=config)
    return layer
