"""The real megatron-core on CPUs: a program that loads or saves checkpoints and writes down the logits.

    python -m tests.convert.megatron_core JOBS.json RANK WORLD STORE

It is a program of its own because megatron-core starts processes to write, changes torch.cuda and keeps global state.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 24
_OF_EXPERTS = (
    *("moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
    *("moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias"),
)


def run(jobs: list[dict[str, Any]], tp: int, folder: Path) -> None:
    """Do the jobs on ``tp`` processes.

    Args:
        jobs: each with ``action`` (load or save), ``settings`` (of ``ModelConfig``), ``padded`` (embedding's rows),
            ``checkpoint`` and ``logits`` (files); of saves ``metadata`` for its sharded state and ``args`` (whether
            the checkpoint is to hold arguments).
        tp: processes.
        folder: for scratch files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    (folder / "store").unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.convert.megatron_core", str(folder / "jobs.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tp), str(folder / "store")],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(tp)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(text[-4000:] for text in outputs)


class NoTracker:
    """Random numbers of megatron-core need CUDA; weights are drawn by hand here."""

    def fork(self, *_: Any) -> Any:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, Any]:
        return {}


def build(c: dict[str, Any], padded: int, tp: int) -> Any:
    """Their GPT with our settings."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    linear = c["rope_scaling_factor"] if c["use_rope_scaling"] and c["rope_scaling_type"] == "linear" else None
    gelu = functools.partial(torch.nn.functional.gelu, approximate="tanh" if c["tanh_gelu"] else "none")
    experts: dict[str, Any] = {}
    if c["num_experts"]:
        experts = {name: c[name] for name in _OF_EXPERTS} | {"num_moe_experts": c["num_experts"]}
        experts |= {"moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none"}
    config = TransformerConfig(
        num_layers=c["num_layers"],
        hidden_size=c["hidden_size"],
        num_attention_heads=c["num_attention_heads"],
        num_query_groups=c["num_query_groups"],
        ffn_hidden_size=c["ffn_hidden_size"],
        kv_channels=c["kv_channels"],
        normalization=c["normalization"],
        layernorm_epsilon=c["norm_epsilon"],
        gated_linear_unit=c["swiglu"],
        activation_func=torch.nn.functional.silu if c["swiglu"] else gelu,
        add_bias_linear=not c["disable_bias_linear"],
        add_qkv_bias=c["add_qkv_bias"],
        qk_layernorm=c["qk_layernorm"],
        rotary_interleaved=c["rotary_interleaved"],
        no_rope_freq=None if c["no_rope_freq"] is None else int(c["no_rope_freq"]),
        tensor_model_parallel_size=tp,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **experts,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(
            num_experts=c["num_experts"],
            moe_grouped_gemm=False,
            normalization=c["normalization"],
            qk_layernorm=c["qk_layernorm"],
        ),
        vocab_size=padded,
        max_sequence_length=c["max_position_embeddings"],
        position_embedding_type=c["position_embedding_type"],
        rotary_base=c["rotary_base"],
        rotary_percent=c["rotary_percent"],
        rope_scaling=c["use_rope_scaling"] and not linear,
        seq_len_interpolation_factor=linear,
        rope_scaling_factor=c["rope_scaling_factor"],
        share_embeddings_and_output_weights=not c["untie_embeddings_and_output_weights"],
        parallel_output=False,
    ).eval()


@torch.no_grad()
def draw(model: Any, rank: int) -> None:
    """Random weights: the same on all ranks where they are replicated, and different where they are cut."""
    for name, parameter in model.named_parameters():
        own = rank if getattr(parameter, "tensor_model_parallel", False) else 0
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {own}".encode()))
        norm = parameter.ndim == 1 and name.endswith("weight")
        parameter.normal_(mean=1.0 if norm else 0.0, std=0.3, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.normal_(std=0.1, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Of a fixed sequence, (1, length, padded vocabulary)."""
    tokens = torch.arange(LENGTH)[None] * 7 % 99
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    return model(tokens, torch.arange(LENGTH)[None], mask)


def arguments(c: dict[str, Any], padded: int) -> argparse.Namespace:
    """What Megatron-LM puts into its checkpoints, among much else."""
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    names += ("max_position_embeddings", "position_embedding_type", "normalization", "norm_epsilon", "swiglu")
    names += ("squared_relu", "untie_embeddings_and_output_weights", "add_qkv_bias", "qk_layernorm", "rotary_base")
    names += ("rotary_percent", "use_rope_scaling", "rope_scaling_factor", "vocab_size", "num_experts", *_OF_EXPERTS)
    linear = c["use_rope_scaling"] and c["rope_scaling_type"] == "linear"
    rope = {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": int(c["rope_scaling_factor"])}
    return argparse.Namespace(
        **{name: c[name] for name in names} | (rope if linear else {}),
        group_query_attention=c["num_query_groups"] != c["num_attention_heads"],
        add_bias_linear=not c["disable_bias_linear"],
        bias_gelu_fusion=c["tanh_gelu"],
        padded_vocab_size=padded,
        model_type=ModelType.encoder_or_decoder,
        attention_backend=AttnBackend.auto,
        params_dtype=torch.float32,
    )


def work(job: dict[str, Any], rank: int, tp: int) -> None:
    """One checkpoint."""
    from megatron.core import dist_checkpointing

    model, folder = build(job["settings"], job["padded"], tp), job["checkpoint"]
    if job["action"] == "load":
        if job["settings"]["num_experts"]:  # Transformer Engine's layers have a norm of their own in front of experts
            for layer in model.decoder.layers:
                layer.submodules_config.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
        state = model.sharded_state_dict()
        loaded = dist_checkpointing.load({"model": state}, folder)
        model.load_state_dict(loaded["model"])
        assert rank or vars(loaded["args"])["num_layers"] == job["settings"]["num_layers"]
    else:
        draw(model, rank)
        os.makedirs(folder, exist_ok=True)
        dist.barrier()
        state = {"model": model.sharded_state_dict(metadata=job["metadata"]), "iteration": 7}
        if job["args"]:
            state["args"] = arguments(job["settings"], job["padded"])
        dist_checkpointing.save(state, folder)
    out = logits(model)
    if rank == 0:
        torch.save(out, job["logits"])


def main(path: str, rank: int, world: int, store: str) -> None:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # a name that is not there without Transformer Engine
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = NoTracker(), True
    for job in json.loads(Path(path).read_text()):
        work(job, rank, world)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
