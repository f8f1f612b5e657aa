"""A step (forward and backward) of a layer of a hybrid beside that of transformers' PyTorch path, in turns.

    python benchmarks/hybrids.py    # Qwen3-Next's gated delta net and attention with experts behind, Mamba-2 layers
    python benchmarks/hybrids.py --tokens 2048 --only Kimi

Both compute the same from the same weights, in fp32, which is checked first. Processor time, medians over rounds and
the median of each round's ratio: waiting for a busy machine does not count. Beside it what the matrix products alone
take.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    NemotronHConfig,
    Qwen3NextConfig,
)
from transformers.utils import logging

from smp.config import Layout
from smp.convert.describe import read_architecture
from smp.convert.huggingface.config import resolved
from smp.convert.load import load_hf
from smp.models.arithmetic import forward_flops
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from smp.parallel.context import ParallelContext, build_context

SIZES: dict[str, Any] = {
    **{"hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
    **{"shared_expert_intermediate_size": 256, "vocab_size": 512, "intermediate_size": 512},
}
"""A quarter of Qwen3-Next's widths; its head widths."""
_GRANITE: dict[str, Any] = {
    **{"hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "vocab_size": 512},
    **{"num_local_experts": 0, "shared_intermediate_size": 2048, "layer_types": ["linear_attention"]},
}
"""A quarter of Granite 4.0 H Micro's widths."""
_NEMOTRON: dict[str, Any] = {
    **{"hidden_size": 1024, "mamba_num_heads": 32, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128},
    **{"vocab_size": 512, "layers_block_type": ["linear_attention"]},
}
"""A quarter of Nemotron-H 8B's widths, all its groups."""
_KIMI: dict[str, Any] = {
    **{"hidden_size": 576, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8},
    **{"linear_num_heads": 8, "linear_head_dim": 128, "layer_types": ["linear_attention"]},
    **{"mlp_layer_types": ["sparse"], "num_experts": 16, "num_experts_per_token": 4, "moe_intermediate_size": 256},
    **{"vocab_size": 512, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
}
"""A quarter of Kimi-Linear's widths; its head widths."""
MODELS: dict[str, Any] = {
    "Qwen3-Next, gated delta net and experts": lambda: Qwen3NextConfig(**SIZES, layer_types=["linear_attention"]),
    "Qwen3-Next, gated attention and experts": lambda: Qwen3NextConfig(**SIZES, layer_types=["full_attention"]),
    "Granite 4, Mamba-2 and MLP": lambda: GraniteMoeHybridConfig(**_GRANITE),
    "Kimi-Linear, delta attention and experts": lambda: KimiLinearConfig(**_KIMI),
    "Nemotron-H, Mamba-2 alone": lambda: NemotronHConfig(**_NEMOTRON),
}


def models(kind: str, folder: str, context: ParallelContext) -> tuple[Any, Any]:
    """Theirs, and ours with the same weights."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(MODELS[kind](), dtype=torch.float32)
    theirs.save_pretrained(folder)
    ours = GPT(resolved(**(read_architecture(folder) or {})), context, device="cpu")
    load_hf(ours, folder)
    return theirs, ours


def step_of_theirs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def step_of_ours(model: Any, ids: torch.Tensor) -> torch.Tensor:
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    weights = (labels != -100).float() / (labels != -100).sum()
    return model(MicroBatch(ids, labels, weights)).loss


def seconds(model: Any, loss: Callable[[Any, torch.Tensor], torch.Tensor], ids: torch.Tensor) -> float:
    """Processor time of one step."""
    model.zero_grad(set_to_none=True)
    begin = time.process_time()
    loss(model, ids).backward()
    return time.process_time() - begin


def of_products(model: GPT, tokens: int) -> float:
    """Seconds that the model FLOPs of a step take in large matrix products."""
    size, begin = 768, time.process_time()
    a, b = torch.randn(size, size), torch.randn(size, size)
    for _ in range(10):
        a @ b
    rate = 10 * 2 * size**3 / (time.process_time() - begin)
    flops = forward_flops(model.config, tokens)
    return 3 * tokens * (sum(flops.layers) + flops.head) / rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="models whose name has this in it")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    context, ids = build_context(Layout(), "cpu"), torch.randint(0, SIZES["vocab_size"], (1, arguments.tokens))
    print(f"{arguments.tokens} tokens, fp32, {arguments.rounds} rounds, 1 thread, torch {torch.__version__}")
    for kind in (name for name in MODELS if arguments.only in name):
        with tempfile.TemporaryDirectory() as folder:
            theirs, ours = models(kind, folder, context)
        losses = step_of_theirs(theirs, ids).item(), step_of_ours(ours, ids).item()
        assert abs(losses[0] / losses[1] - 1) < 1e-5, losses
        rows = [
            (seconds(theirs, step_of_theirs, ids), seconds(ours, step_of_ours, ids))
            for _ in range(arguments.rounds + 1)
        ][1:]
        their, our = (statistics.median(column) for column in zip(*rows, strict=True))
        ratio = statistics.median(a / b for a, b in rows)
        limit = of_products(ours, arguments.tokens)
        print(f"{kind:<40} transformers {their:.3f} s, smp {our:.3f} s, {ratio:.2f}x; products alone {limit:.3f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
