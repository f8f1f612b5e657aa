"""Every layout trains like one process: loss, gradient norm, every full gradient and the final weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from smp.config import Config, DataConfig, Layout, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig, resolve
from tests.distributed import run_distributed

STEPS, BATCH, LENGTH, VOCAB = 10, 8, 9, 33
LLAMA = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=VOCAB,
    make_vocab_size_divisible_by=8,
    max_position_embeddings=16,
    qk_layernorm=True,
)
GPT2 = replace(
    LLAMA,
    num_query_groups=4,
    qk_layernorm=False,
    normalization="LayerNorm",
    swiglu=False,
    tanh_gelu=True,
    position_embedding_type="learned_absolute",
    disable_bias_linear=False,
    untie_embeddings_and_output_weights=False,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
MODELS = {"llama": LLAMA, "gpt2": GPT2}

# name -> (processes, tp, shard degree, sequence parallel, micro-batch size, recompute)
LAYOUTS: dict[str, tuple[int, int, int, bool, int, str]] = {
    "one": (1, 1, 1, False, 8, "none"),
    "one, accumulated": (1, 1, 1, False, 2, "none"),
    "tp2": (2, 2, 1, False, 8, "none"),
    "tp2 sp, accumulated, full recompute": (2, 2, 1, True, 2, "full"),
    "shard2, accumulated": (2, 1, 2, False, 1, "none"),
    "replicate2, accumulated": (2, 1, 1, False, 2, "none"),
    "tp4 sp, kv heads < tp": (4, 4, 1, True, 8, "none"),
    "tp2 sp x shard2, selective": (4, 2, 2, True, 2, "selective"),
    "tp2 x replicate2, accumulated": (4, 2, 1, False, 2, "none"),
    "shard2 x replicate2, accumulated": (4, 1, 2, False, 1, "none"),
}


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels of every step; samples have very different numbers of valid tokens, one has none."""
    generator = torch.Generator().manual_seed(0)
    out = []
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < torch.linspace(0, 0.8, BATCH)[:, None]] = -100
        labels[5] = -100
        out.append((tokens[:, :-1], labels))
    return out


def train(model_name: str, layout_name: str) -> dict[str, Any]:
    from smp.data.loader import GlobalBatch
    from smp.layers import init_weights
    from smp.models.gpt import GPT
    from smp.optim.optimizer import build_optimizer
    from smp.parallel.mesh import build_mesh, data_rank
    from smp.sharding.parallelize import parallelize
    from smp.training.trainer import Progress, Trainer

    world, tp, degree, sequence_parallel, micro, recompute = LAYOUTS[layout_name]
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        hybrid_shard_degree=degree,
        sequence_parallel=sequence_parallel,
        recompute_granularity=recompute,  # type: ignore[arg-type]
    )
    config = Config(
        model=MODELS[model_name],
        parallel=parallel,
        data=DataConfig(mock_data=True, seq_length=LENGTH, micro_batch_size=micro, global_batch_size=BATCH),
        optim=OptimizerConfig(optimizer="sgd", lr=0.1, clip_grad=0.5, weight_decay=0.0, lr_decay_style="constant"),
        training=TrainingConfig(train_iters=STEPS),
    )
    config = resolve(config, world)
    layout = Layout.from_config(parallel, world)
    mesh = build_mesh(layout, "cpu")
    model = GPT(config.model, mesh["tp"], sequence_parallel=sequence_parallel, seed=1)
    parallelize(model, mesh, parallel)
    model.to_empty(device="cpu")
    init_weights(model, seed=7)
    initial = full(model, lambda p: p)
    optimizer = build_optimizer(model, config.optim)
    grads: list[dict[str, torch.Tensor]] = []
    optimizer.register_step_pre_hook(lambda *_: grads.append(full(model, lambda p: p.grad)))
    trainer = Trainer(config, model, optimizer, mesh, torch.device("cpu"), Progress())
    results = []
    for step, (tokens, labels) in enumerate(batches()):
        shape = (-1, layout.data_parallel, micro)
        index = torch.arange(BATCH).view(shape)[:, data_rank(mesh)]
        results.append(trainer.train_step(GlobalBatch(tokens[index], labels[index], index + step * BATCH)))
    losses = [(r.loss, r.grad_norm) for r in results]
    return {"initial": initial, "losses": losses, "grads": grads, "final": full(model, lambda p: p)}


def full(model: torch.nn.Module, pick: Any) -> dict[str, torch.Tensor]:
    """Whole tensors by name, without vocabulary padding."""
    out = {}
    for name, parameter in model.named_parameters():
        whole = pick(parameter).detach().full_tensor().clone()
        out[name] = whole[:VOCAB] if name in ("embedding.weight", "head.weight") else whole
    return out


def train_all(rank: int, world: int) -> dict[tuple[str, str], dict[str, Any]] | None:
    import logging

    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # full_tensor in two steps: fine here
    names = [n for n, layout in LAYOUTS.items() if layout[0] == world]
    results = {(m, n): train(m, n) for m in MODELS for n in names}
    return results if rank == 0 else None


@pytest.fixture(scope="module")
def trained() -> dict[tuple[str, str], dict[str, Any]]:
    out: dict[tuple[str, str], dict[str, Any]] = {}
    for world in sorted({layout[0] for layout in LAYOUTS.values()}):
        out |= run_distributed(train_all, world)[0]
    return out


def relative_errors(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    """Norm of the difference / norm, per tensor, beyond eps x the norm of the tensor's layer: rounding of what it sums.

    GPT-2's key bias has a gradient of zero but for that rounding.
    """
    layers: dict[str, torch.Tensor] = {}
    for name, w in want.items():
        layers[_layer(name)] = layers.get(_layer(name), torch.zeros(())) + w.norm() ** 2
    errors = {}
    for name, w in want.items():
        beyond = (got[name] - w).norm() - torch.finfo(torch.float32).eps * layers[_layer(name)].sqrt()
        errors[name] = (beyond.clamp(min=0) / w.norm().clamp(min=1e-30)).item()
    return errors


def _layer(name: str) -> str:
    """The block a tensor belongs to, or its module."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_layout_equals_one_process(trained: dict[tuple[str, str], dict[str, Any]], model: str, layout: str) -> None:
    want, got = trained[model, "one"], trained[model, layout]
    for name, tensor in want["initial"].items():
        assert torch.equal(got["initial"][name], tensor), f"initial {name}"
    assert any(norm > 0.5 for _, norm in want["losses"]), "clipping never bit"
    for a, b in zip(got["losses"], want["losses"], strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    for a, b in zip(got["grads"], want["grads"], strict=True):
        assert max(relative_errors(a, b).values()) <= 1e-5
    assert max(relative_errors(got["final"], want["final"]).values()) <= 1e-5


def test_comparison_can_fail(trained: dict[tuple[str, str], dict[str, Any]]) -> None:
    want = trained["llama", "one"]["grads"][0]
    wrong = {name: g * 1.0001 if "final_norm" in name else g for name, g in want.items()}
    assert max(relative_errors(wrong, want).values()) > 1e-5
