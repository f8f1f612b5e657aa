"""One data-parallel rank: no FSDP, and layers that cast the master weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from smp.config import Layout, ModelConfig, ParallelConfig
from smp.layers import add_adapters, init_weights
from smp.layers.block import TransformerBlock
from smp.layers.linear import ColumnParallelLinear, RowParallelLinear
from smp.layers.norm import Norm
from smp.models.gpt import GPT
from smp.optim.optimizer import build_optimizer
from smp.sharding.parallelize import parallelize, shard
from smp.training.build import RunSetup, assemble, build_forward_backward, build_model, choose_backends
from smp.training.objectives.next_token import NextToken
from smp.training.trainer import Progress, Trainer
from tests.fake_group import fake_context, lone_context
from tests.parity.cases import case_of, config_of
from tests.parity.data import share
from tests.parity.result import TOLERANCE, Tensors, tensor_errors
from tests.sharding.model import MODEL, build, loss_of

GPT2_LIKE = replace(
    MODEL,
    normalization="LayerNorm",
    position_embedding_type="learned_absolute",
    disable_bias_linear=False,
    swiglu=False,
    untie_embeddings_and_output_weights=False,
)
MODELS = {
    "llama": MODEL,
    "gpt2": GPT2_LIKE,
    "qwen3": replace(MODEL, qk_layernorm=True, num_query_groups=2),
    "dropout": replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1),
    "parallel residual": replace(MODEL, parallel_residual=True),
    "gemma": replace(
        MODEL, apply_layernorm_1p=True, norm_placement="sandwich", swiglu=False, geglu=True, attn_logit_softcapping=2.0
    ),
    "1p with biases": replace(GPT2_LIKE, apply_layernorm_1p=True),
    "command": replace(MODEL, normalization="LayerNorm", layernorm_bias=False, logit_scale=0.25),
    "multi-token prediction": replace(MODEL, mtp_num_layers=2),
    "bloom": replace(GPT2_LIKE, position_embedding_type="alibi", embedding_layernorm=True),
}


def with_fsdp(config: ModelConfig, context: Any, sp: bool) -> GPT:
    """As a rank among several has it."""
    model = GPT(config, replace(context, sequence_parallel=sp), seed=1)
    shard(model, model.fsdp_units(), context.fsdp, bf16=True)
    model.to_empty(device="cpu")
    init_weights(model, seed=0)
    return model


def move_norms(model: GPT) -> None:
    """Away from their initial 0 or 1, which bf16 has."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                local = parameter.to_local()  # type: ignore[attr-defined]
                local.add_(torch.linspace(-0.05, 0.05, local.numel()))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_bf16_computes_what_fsdp_would(name: str, tp: int) -> None:
    """Two micro-batches, to the bit: what is rounded, and where, does not depend on the layout."""
    grads, losses = [], []
    parallel = ParallelConfig(tp, sequence_parallel=tp > 1, bf16=True)
    with fake_context(Layout(tp=tp)) as context:
        for model in (build(context, MODELS[name], parallel), with_fsdp(MODELS[name], context, tp > 1)):
            move_norms(model)
            for micro_batch in range(2):
                loss = loss_of(model) * (1 + micro_batch)
                loss.backward()
            losses.append(loss.item())
            grads.append({n: p.grad.to_local().clone() for n, p in model.named_parameters()})  # type: ignore[union-attr]
    assert losses[0] == losses[1]
    assert [parameter for parameter, grad in grads[0].items() if not torch.equal(grad, grads[1][parameter])] == []


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_bf16_reaches_every_layer(name: str, tp: int) -> None:
    """A bias or a norm that kept its fp32 would turn all that follows into fp32, and nothing would say so."""
    seen: dict[str, set[torch.dtype]] = {}
    with fake_context(Layout(tp=tp)) as context:
        model = build(context, MODELS[name], ParallelConfig(tp, sequence_parallel=tp > 1, bf16=True))
        for path, module in model.named_modules():
            if isinstance(module, (TransformerBlock, ColumnParallelLinear, RowParallelLinear, Norm)):
                module.register_forward_hook(
                    lambda m, args, out, path=path: seen.setdefault(path, set()).add(_tensor(out).dtype)
                )
        loss_of(model).backward()
    assert seen and set.union(*seen.values()) == {torch.bfloat16}, seen
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())  # type: ignore[union-attr]


def _tensor(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out[0]


def test_adapters_compute_in_bf16_beside_frozen_fp32_weights() -> None:
    with fake_context() as context:
        model = GPT(MODEL, context, seed=1, compute_dtype=torch.bfloat16)
        add_adapters(model, ["query", "down"], 2, 4.0)
        parallelize(model, context, ParallelConfig(bf16=True))
        model.to_empty(device="cpu")
        init_weights(model, seed=0)
        block = model.layers["0"]
        block.register_forward_hook(lambda m, args, out: outputs.append(_tensor(out).dtype))
        outputs: list[torch.dtype] = []
        loss_of(model).backward()
    assert outputs == [torch.bfloat16]
    trained = {name.rpartition(".")[2]: p.grad.dtype for name, p in model.named_parameters() if p.grad is not None}  # type: ignore[union-attr]
    assert trained == {"a": torch.float32, "b": torch.float32}


@pytest.mark.parametrize(
    ("layout", "unsharded"),
    [(Layout(), True), (Layout(tp=2), True), (Layout(dp_shard=2), False), (Layout(dp_replicate=2), False)],
)
def test_only_data_parallel_ranks_have_fsdp(layout: Layout, unsharded: bool) -> None:
    with fake_context(layout) as context:
        model = GPT(MODEL, context.tp)
        parallelize(model, context, ParallelConfig(layout.tp))
    assert isinstance(model, FSDPModule) is not unsharded


def test_a_parameter_that_is_not_ours_is_refused_beside_shared_ones() -> None:
    with fake_context(Layout(tp=2)) as context:
        model = GPT(MODEL, context.tp)
        model.extra = torch.nn.Linear(4, 4)
        with pytest.raises(ValueError, match="extra.weight is an ordinary parameter"):
            parallelize(model, context, ParallelConfig(2))


def two_steps(device: torch.device, values: dict[str, Any], fsdp: bool) -> tuple[list[float], list[Tensors]]:
    """Losses and gradients of two steps of the trainer on one rank, the second from weights that the first changed."""
    case, gradients = case_of(values), list[Tensors]()
    config = config_of(case)
    with lone_context(device.type) as context:
        kernels, _ = choose_backends(config, context, device, documents=False)
        setup = RunSetup(context, device, kernels)
        if fsdp:
            model = assemble(config, setup)
            shard(model, model.fsdp_units(), context.fsdp, bf16=config.parallel.bf16)
            model.to_empty(device=device)
            init_weights(model, config.training.seed)
        else:
            model = build_model(config, setup)
        assert isinstance(model, FSDPModule) is fsdp
        optimizer = build_optimizer(model, config.optim, context.fsdp)
        optimizer.register_step_pre_hook(
            lambda *_: gradients.append({n: p.grad.to_local().cpu().clone() for n, p in model.named_parameters()})  # type: ignore[union-attr]
        )
        forward_backward, objective = build_forward_backward(config, setup, model), NextToken(device)
        trainer = Trainer(config, model, forward_backward, objective, optimizer, context, device, Progress())
        losses = [trainer.train_step(share(case.problem, case.spread, 0, step)).loss for step in range(2)]
    return losses, gradients


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fsdp_on_one_rank_trains_as_a_model_without_it(device: str, bf16: bool) -> None:
    """All of FSDP that one rank has: gathers ahead, casts, reductions at the last of two micro-batches. On a GPU bf16
    may round sums in another order, as its attention adds in any."""
    values = {"accumulation": 2, "style": "llama", "unequal": True, "micro_batch": 3, "bf16": bf16}
    (losses, gradients), (expected, wanted) = (two_steps(torch.device(device), values, fsdp) for fsdp in (True, False))
    limit = 2**-7 if bf16 and device == "cuda" else TOLERANCE
    assert losses == pytest.approx(expected, rel=limit) and losses[0] != losses[1]
    assert len(gradients) == len(wanted) == 2
    for got, want in zip(gradients, wanted, strict=True):
        assert max(tensor_errors(got, want, want).values()) <= limit
