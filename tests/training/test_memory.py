import gc
import itertools
import time
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch

from smp.checkpoint.state import materialize_optimizer_state
from smp.config import Config, DataConfig, Layout, ModelConfig, OptimizerConfig, ParallelConfig, resolve
from smp.config.layers import layer_specs
from smp.config.objectives import ObjectiveConfig
from smp.config.rules.dsa import learns
from smp.config.schema import TrainingConfig
from smp.kernels import Kernels
from smp.kernels.attention_cores.fused_attention import FusedAttention
from smp.layers.heads.cross_entropy import VocabShard, linear_cross_entropy
from smp.models.arithmetic import count_parameters
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from smp.models.part import ModelPart
from smp.optim.optimizer import build_optimizer
from smp.parallel.collectives import Group
from smp.parallel.context import build_context
from smp.parallel.dtensor_region import local_part
from smp.pipeline.actions import Op
from smp.pipeline.validate_schedule import PassState
from smp.sharding.parallelize import _wrapped
from smp.training.cost.exchanged_keys import others_keys
from smp.training.cost.kept_memory import kept_per_token, masking_per_token
from smp.training.cost.memory import _kind, _most_in_passes, estimate_memory
from smp.training.cost.model_share import Tuned
from smp.training.cost.moments import Moments
from smp.training.cost.step_moments import PartBytes
from tests.distributed import run_distributed
from tests.fake_group import fake_context
from tests.models.test_arithmetic import GPT2_LIKE, SMALL


def _config(model: ModelConfig, vocab_size: int = 100, **parallel: object) -> Config:
    config = Config(
        model=replace(model, vocab_size=vocab_size),
        parallel=ParallelConfig(**parallel),  # type: ignore[arg-type]
        data=DataConfig(seq_length=32, micro_batch_size=2),
        training=TrainingConfig(dry_run=True),
    )
    tp = config.parallel.tensor_model_parallel_size
    return resolve(config, world_size=tp)


def test_memory_by_hand() -> None:
    estimate = estimate_memory(_config(SMALL), Layout(), chunk_bytes=4 * 128 * 10)
    layer, vocabulary = count_parameters(SMALL, 100).per_layer, 128 * 16  # 100 rows are padded to 128
    n = 2 * layer + 2 * vocabulary + 16
    assert (estimate.parameters, estimate.gradients, estimate.optimizer) == (4 * n, 4 * n, 8 * n)
    assert (estimate.gathered, estimate.reduced) == (0, 4 * max(layer, vocabulary)), "no FSDP: nothing is gathered"
    sharded = estimate_memory(_config(SMALL), Layout(dp_shard=2), chunk_bytes=4 * 128 * 10)
    assert (sharded.gathered, sharded.reduced) == (4 * (2 * layer + vocabulary), 8 * max(layer, vocabulary))
    # a block: 4 x 16 around norms, 2 x 16 + 2 x 8 in attention, 2 x 24 in the MLP, fp32; 4 log-sum-exps; 64 tokens;
    # two blocks, 4 x 16 at the output layer, and two tables of 4 for RoPE; gradients: 16 of the block's output, and
    # 4 x 24 in the MLP
    block = 4 * (4 * 16 + 2 * 16 + 2 * 8 + 2 * 24) + 4 * 4
    assert (estimate.activations, estimate.backward) == (
        64 * (2 * block + 4 * 4 * 16 + 2 * 4 * 4),
        64 * 4 * (16 + 4 * 24),
    )
    assert estimate.logits == 10 * 128 * 4 + vocabulary * 4
    always, behind = estimate.parameters + estimate.optimizer, 64 * 4 * 4 * 16
    last = estimate.activations - behind + estimate.backward + 4 * vocabulary + 4 * 16 * 24
    assert estimate.total == always + last, "in the last block"


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "muon"},
        {"exp_avg_dtype": "bf16"},
        {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "bf16"},
        {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"},
        {"optimizer": "sgd", "sgd_momentum": 0.9},
    ],
    ids=str,
)
def test_the_state_of_an_optimizer_has_the_bytes_of_the_formula(options: dict[str, Any]) -> None:
    model = replace(SMALL, hidden_size=128, kv_channels=32, ffn_hidden_size=256)  # rows of whole blocks
    config = replace(_config(model), optim=OptimizerConfig(**options))
    with fake_context() as context:
        gpt = GPT(config.model, context, device="cpu")
        optimizer = build_optimizer(gpt, config.optim, None)
        materialize_optimizer_state(optimizer)
        states = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
        held = sum(local_part(t).nbytes for t in states)
    assert estimate_memory(config, Layout(), 1 << 20).optimizer == held > 0


def test_parts_that_do_not_peak_at_once_are_not_added() -> None:
    parts = Moments(
        gradients=1 << 4,
        waiting=0,
        head_gradient=0,
        before_last=0,
        before=0,
        late=1 << 1,
        activations=1 << 5,
        kept_by_block=1 << 2,
        kept_by_head=0,
        to_the_end=0,
        at_last=0,
        at_copy=0,
        at_loss=1 << 6,
        in_blocks=1 << 7,
        in_next=1 << 7,
        in_first=1 << 8,
        logits=1 << 9,
        backward=1 << 10,
        input_part=1 << 14,
        weight_part=1 << 15,
        embedding=0,
        head=1 << 11,
        block=1 << 3,
        experts=0,
        own=1 << 0,
        own_first=0,
        ends=1 << 12,
        tied=0,
    )
    assert parts.most == (1 << 4) + (1 << 12), "behind the first block"
    parts = replace(parts, ends=0)
    assert parts.most == (1 << 5) + (1 << 7) + (1 << 10) + (1 << 11), "in the last block"
    assert replace(parts, kept_by_head=1 << 3).most == parts.most - (1 << 3)
    assert replace(parts, waiting=1 << 4).most == parts.most + (1 << 4)
    added = replace(parts, head_gradient=1 << 4, own_first=1 << 5, tied=1 << 6, before_last=9)
    assert added.most == parts.most + (7 << 4)
    parts = replace(parts, head=0)
    assert parts.most == (1 << 4) - (1 << 1) + (1 << 2) + (1 << 8) + (1 << 10) + (1 << 3), "in the first"
    assert replace(parts, to_the_end=1 << 4, own_first=1 << 5, tied=1 << 6).most == parts.most + (7 << 4)
    beside = (1 << 5) - (1 << 2) + (1 << 7) + (1 << 10) + (1 << 3)
    parts = replace(parts, in_first=0)
    assert parts.most == beside, "beside a reduction"
    assert replace(parts, in_next=0).most < beside
    each = replace(parts, head_gradient=1, before_last=2, kept_by_head=4, own_first=8, tied=16)
    assert each.most == beside + 1 + 2 - 4 + 24
    loss = replace(parts, logits=1 << 13)
    assert loss.most == (1 << 5) + (1 << 6) + (1 << 13), "at the loss"
    assert replace(loss, before=1 << 2).most == loss.most + (1 << 2)
    split = replace(parts, waiting=1 << 4, gradients=1 << 6)
    assert split.in_pass(Op.BACKWARD) == split.in_backward and split.in_pass(Op.FORWARD) == split.in_forward
    there = (1 << 4) + (1 << 7)
    assert split.in_pass(Op.BACKWARD_INPUT) == there + (1 << 14), "in the first block, and no gradient of a weight"
    assert replace(split, to_the_end=3).in_pass(Op.BACKWARD_INPUT) == there + (1 << 14) + 3
    assert replace(split, embedding=1 << 16).in_pass(Op.BACKWARD_INPUT) == there + (1 << 16), "but that"
    most = replace(split, input_part=1, kept_by_head=2)
    assert most.in_pass(Op.BACKWARD_INPUT) == there + (1 << 5) - 2 + (1 << 10), "in the last block"
    there = (1 << 5) + (1 << 7)
    assert split.in_pass(Op.BACKWARD_WEIGHT) == there + (1 << 15) + (1 << 6)
    assert replace(split, ends=1 << 16).in_pass(Op.BACKWARD_WEIGHT) == (1 << 16) + (1 << 6), "their reduction"


def test_memory_of_fine_tuning_by_hand() -> None:
    config = _config(SMALL, bf16=True)
    whole, lora, pairs = (
        estimate_memory(config, Layout(dp_shard=2), 1 << 20, tuned=tuned)
        for tuned in (Tuned(), Tuned(adapters=300), Tuned(rows=2, copies=1))
    )
    n = whole.parameters // 2
    assert (lora.parameters, lora.gradients, lora.optimizer) == (n + 2 * 300, 2 * 300, 4 * 300), "bf16 weights, sharded"
    assert lora.activations == whole.activations and lora.logits < whole.logits and lora.reduced < whole.reduced
    assert (pairs.parameters, pairs.gradients, pairs.optimizer) == (3 * n, 2 * n, 4 * n)
    assert pairs.activations == 2 * whole.activations


def test_stages_without_layers_train_nothing_of_adapters() -> None:
    """A layout may give embedding and output matrix stages of their own."""
    config, tuned = _config(SMALL, bf16=True), Tuned(adapters=300)
    for part in (ModelPart(0, 0, embedding=True, head=False), ModelPart(0, 0, embedding=False, head=True)):
        estimate = estimate_memory(config, Layout(pp=2), 1 << 20, [part], tuned=tuned)
        whole = estimate_memory(config, Layout(pp=2), 1 << 20, [part])
        assert (estimate.gradients, estimate.optimizer, estimate.reduced) == (0, 0, 0)
        assert estimate.parameters == whole.parameters // 2 > 0, "in bf16"
        assert estimate.total < whole.total


def test_memory_shrinks_with_the_layout_that_shares_it() -> None:
    config = _config(SMALL, bf16=True)
    whole, two, shared = (estimate_memory(config, Layout(dp_shard=d), chunk_bytes=1 << 20) for d in (1, 2, 4))
    assert (shared.parameters, shared.optimizer) == (whole.parameters // 4, whole.optimizer // 4)
    assert (shared.gathered, shared.activations) == (two.gathered, whole.activations)
    replicas, more = (estimate_memory(config, Layout(dp_replicate=d), chunk_bytes=1 << 20) for d in (2, 4))
    assert replicas == more
    assert (replicas.parameters, replicas.gathered) == (whole.parameters, two.gathered)
    split = _config(SMALL, bf16=True, tensor_model_parallel_size=2, sequence_parallel=True)
    split_estimate = estimate_memory(split, Layout(tp=2), chunk_bytes=1 << 20)
    assert 0.45 < split_estimate.activations / whole.activations < 0.6
    # 100 ids on two processes are 128 rows each: padding is what TP does not share here
    rows = 2 * 128 * 16
    blocks = count_parameters(SMALL, 100).non_embedding - 5 * 16
    assert split_estimate.parameters == 4 * (rows + blocks // 2 + 5 * 16)


def test_a_kv_head_that_ranks_share_is_stored_on_each() -> None:
    one_group = replace(SMALL, num_query_groups=1)
    config = _config(one_group, tensor_model_parallel_size=2)
    estimate = estimate_memory(config, Layout(tp=2), chunk_bytes=1 << 20)
    block = (2 * 16 * 16 + 3 * 16 * 24) // 2 + 2 * 16 * 4 + 2 * 16
    assert estimate.parameters == 4 * (2 * block + 2 * 128 * 16 + 16)


@pytest.mark.parametrize(
    ("optimizer", "momentum", "size"), [("adam", 0.0, 8), ("apex-adam", 0.0, 8), ("sgd", 0.9, 4), ("sgd", 0.0, 0)]
)
def test_optimizer_memory(optimizer: str, momentum: float, size: int) -> None:
    config = replace(_config(SMALL), optim=OptimizerConfig(optimizer=optimizer, sgd_momentum=momentum))  # type: ignore[arg-type]
    estimate = estimate_memory(config, Layout(), chunk_bytes=1 << 20)
    assert estimate.optimizer * 4 == estimate.parameters * size


def test_recompute_and_attention_dropout_change_the_activations() -> None:
    def activations(model: ModelConfig, recompute: str) -> int:
        return estimate_memory(_config(model, recompute_granularity=recompute), Layout(), 1 << 20).activations

    deep = replace(SMALL, num_layers=50)
    none, selective, full = (activations(deep, recompute) for recompute in ("none", "selective", "full"))
    assert full < selective < none
    dropout = replace(deep, attention_dropout=0.1)
    # 50 layers, 4 heads, 32 positions: 4 + 1 + 4 bytes each, instead of 4 bytes a head
    assert activations(dropout, "none") - none == 64 * 50 * 4 * (32 * 9 - 4)


# LayerNorm and GELU or SwiGLU: kernels that keep the same on a CPU as on a GPU
KEPT = [
    replace(SMALL, normalization="LayerNorm"),
    replace(GPT2_LIKE, ffn_hidden_size=48),
    replace(SMALL, normalization="LayerNorm", num_query_groups=1, position_embedding_type="none"),
    replace(SMALL, normalization="LayerNorm", attention_dropout=0.1),
    replace(SMALL, normalization="LayerNorm", attention_output_gate=True),
]
LAYOUTS = [(1, False), (2, False), (2, True)]


def test_a_block_keeps_what_the_formula_says() -> None:
    """Bytes that autograd and recompute hold for one block, against the estimate."""
    for tp in (1, 2):
        for measured, formula, case in run_distributed(_kept_by_a_block, tp)[0]:
            assert measured == pytest.approx(formula, rel=0.02), case


def _kept_by_a_block(rank: int, tp: int) -> list[tuple[float, int, str]]:
    rows = []
    gc.freeze()  # what is there now is not looked through each time
    for model in KEPT:
        for recompute in ("none", "selective"):
            for parallel in (flag for size, flag in LAYOUTS if size == tp):
                settings = {"tensor_model_parallel_size": tp, "sequence_parallel": parallel, "bf16": True}
                config = _config(_wide(model), recompute_granularity=recompute, **settings)
                formula = kept_per_token(config, Layout(tp=tp), 2, recompute, fused=False)  # type: ignore[arg-type]
                case = f"{model} {recompute} tp {tp} {parallel}"
                groups = model.num_query_groups or 4
                repeated = 2 * 2 * (4 // tp - max(groups // tp, 1)) * 40 if recompute == "none" else 0
                if model.attention_dropout == 0.0:
                    rows.append((_measure(config, tp, formula, grouped=True), formula, f"{case} grouped"))
                rows.append((_measure(config, tp, formula + repeated), formula + repeated, case))
    return rows


RECURRENT = replace(
    SMALL,
    **{"normalization": "LayerNorm", "linear_attention_type": "gated_delta_net", "max_position_embeddings": 64},
    **{"num_query_groups": None, "kv_channels": None},
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 24, "linear_value_head_dim": 40},
)


_MAMBA: dict[str, Any] = {"normalization": "LayerNorm", "max_position_embeddings": 64, "num_query_groups": None}
_MAMBA |= {"mamba_num_heads": 8, "mamba_num_groups": 2, "mamba_state_dim": 24, "mamba_head_dim": 40}
_MAMBA |= {"kv_channels": None}
RECURRENCES = {
    "delta net": RECURRENT,
    "Kimi delta": replace(RECURRENT, linear_attention_type="kda", linear_num_key_heads=8, linear_key_head_dim=40),
    "Mamba-2": replace(SMALL, linear_attention_type="mamba2", **_MAMBA),
    "Mamba-2 without a norm": replace(SMALL, linear_attention_type="mamba2", **_MAMBA, mamba_rms_norm=False),
    "Mamba-2 alone": replace(SMALL, hybrid_layer_pattern="M-", **_MAMBA),
    "Mamba-2 and attention": replace(
        SMALL, linear_attention_type="mamba2", linear_attention_parallel=True, mlp_multipliers="2 3", **_MAMBA
    ),
    "MLP alone": replace(SMALL, hybrid_layer_pattern="-M", **_MAMBA),
}


def test_a_recurrence_keeps_what_the_formula_says() -> None:
    for measured, formula, case in run_distributed(_kept_by_a_recurrence, 1)[0]:
        assert measured == pytest.approx(formula, rel=0.03), case


def _kept_by_a_recurrence(rank: int, world: int) -> list[tuple[float, int, str]]:
    rows = []
    gc.freeze()
    for name, model in RECURRENCES.items():
        for recompute in ("none", "selective"):
            config = _config(_wide(model), recompute_granularity=recompute, bf16=True)
            spec = layer_specs(config.model)[0]
            formula = kept_per_token(config, Layout(), 2, recompute, fused=False, **dict(_kind(spec)))  # type: ignore[arg-type]
            # Of one chunk there are two states; on a CPU the norm behind a delta rule keeps its input in fp32, too.
            more = 4 * spec.mixers[-1].key_dim * 40 * 8 // 64 if spec.mixers else 0
            more += {"delta net": 4, "Kimi delta": 6}.get(name, 0) * 8 * 40 if recompute == "none" else 0
            rows.append((_measure(config, 1, formula, length=64), formula + more, f"{name} {recompute}"))
    return rows


_INDEXER: dict[str, Any] = {"normalization": "LayerNorm", "multi_latent_attention": True, "qk_layernorm": True}
_INDEXER |= {"q_lora_rank": 40}
_INDEXER |= {"kv_lora_rank": 56, "qk_head_dim": 32, "qk_pos_emb_head_dim": 16, "v_head_dim": 24}
_INDEXER |= {"experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 4, "dsa_indexer_head_dim": 32}
_INDEXER |= {"kv_channels": None, "num_query_groups": None, "max_position_embeddings": 64}


def test_sparse_attention_keeps_what_the_formula_says() -> None:
    for measured, formula, case in run_distributed(_kept_by_sparse_attention, 1)[0]:
        assert measured == pytest.approx(formula, rel=0.04), case


def _kept_by_sparse_attention(rank: int, world: int) -> list[tuple[float, int, str]]:
    rows = []
    gc.freeze()
    for topk, more, recompute in itertools.product(
        (8, 64), ({"dsa_indexer_use_sparse_loss": True}, {"dsa_indexer_loss_coeff": 0.0}), ("none", "selective")
    ):
        model = replace(SMALL, hidden_size=160, ffn_hidden_size=240, **_INDEXER, dsa_indexer_topk=topk, **more)
        config = _config(model, recompute_granularity=recompute, bf16=True)
        config = replace(config, data=replace(config.data, seq_length=64))
        formula = kept_per_token(config, Layout(), 2, recompute, fused=False)  # type: ignore[arg-type]
        # The up projection as one matrix does not grow with tokens; on a CPU norms of latents keep inputs in fp32, too.
        formula += 2 * 56 * 4 * (32 + 24) // 128 if topk == 8 or "dsa_indexer_loss_coeff" not in more else 0
        formula += 4 * (56 + 40) if recompute == "none" else 0
        rows.append((_measure(config, 1, formula, length=64), formula, f"{topk} {more} {recompute}"))
    return rows


def _wide(model: ModelConfig) -> ModelConfig:
    """Ten times the width, so that statistics of norms (a number per token) do not show."""
    return replace(model, hidden_size=160, kv_channels=40, ffn_hidden_size=240)


def _measure(config: Config, tp: int, formula: float, grouped: bool = False, length: int = 32) -> float:
    """Bytes per token that exist after the forward pass of one block and did not before, its output left out."""
    model = GPT(
        config.model,
        build_context(Layout(tp=tp), "cpu", sequence_parallel=config.parallel.sequence_parallel),
        kernels=Kernels(attention=FusedAttention("flash", grouped=grouped)),
        device="cpu",
    ).bfloat16()
    block = next(iter(model.layers.values()))
    block.run = _wrapped(block.run, config.parallel, eager_rounding=False)  # type: ignore[method-assign]
    tokens = torch.zeros(2, length, dtype=torch.int64)
    micro_batch = MicroBatch(tokens, token_index=torch.arange(2 * length).view(2, length))
    made = model.tokens.of(micro_batch, training=True)
    x = model.embed(tokens, made)
    made = model.tokens.prepared(made, x, torch.ones(2, length))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(learns(config.model, name))
    layout, keys = made.layout, made.keys
    before = _living()  # kept, so that no new tensor gets the memory of an old one
    known = {t.untyped_storage().data_ptr() for t in before} - {x.untyped_storage().data_ptr()}
    saved: list[torch.Tensor] = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        saved.append(t.to_local() if hasattr(t, "to_local") else t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = block(x, layout, None if keys is None else keys[:3])
        y, *_losses = y if isinstance(y, tuple) else (y,)  # a model keeps an indexer's, too
    output = y.untyped_storage().data_ptr()

    def kept() -> int:
        sizes = _sizes([*saved, *_living(), x])
        return sum(size for where, size in sizes.items() if where not in known | {output})

    return _settled(kept, formula * tokens.numel()) / tokens.numel() if tp > 1 else kept() / tokens.numel()


def _settled(kept: Callable[[], int], expected: float) -> int:
    """What ``kept`` says once it stays the same: a collective's thread lets go of its tensors some time after the
    collective is done. More than expected gets more time."""
    last = [kept()]
    deadline = time.monotonic() + 5.0
    while len(last) < 5 or ((len(set(last[-5:])) > 1 or last[-1] > expected * 1.02) and time.monotonic() < deadline):
        time.sleep(0.02)
        last.append(kept())
    return last[-1]


def _sizes(tensors: list[torch.Tensor]) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def _living() -> list[torch.Tensor]:
    """All plain tensors that Python knows; recompute keeps its own in a dictionary, out of autograd's sight."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return [t for t in local if t.device.type == "cpu"]


def test_memory_of_a_pipeline_rank() -> None:
    """Its parts only; gradients are whole, weights stay gathered, activations wait for their backward pass."""
    model = replace(SMALL, num_layers=4)
    config = resolve(
        Config(
            model=replace(model, vocab_size=100),
            parallel=ParallelConfig(pipeline_model_parallel_size=2),
            data=DataConfig(seq_length=32, micro_batch_size=2, global_batch_size=8),
            training=TrainingConfig(dry_run=True),
        ),
        world_size=4,
    )
    layout, layer, vocabulary = Layout(pp=2, dp_shard=2), count_parameters(SMALL, 100).per_layer, 128 * 16
    parts = [ModelPart(0, 2, embedding=True)]
    one, three = (estimate_memory(config, layout, 4 * 128 * 10, parts, held) for held in (1, 3))
    n = 2 * layer + vocabulary
    assert (one.parameters, one.gradients, one.optimizer) == (2 * n, 4 * n, 4 * n)
    assert (one.gathered, one.reduced, one.logits) == (4 * n, 8 * max(layer, vocabulary), 0)
    block = 4 * (4 * 16 + 2 * 16 + 2 * 8 + 2 * 24) + 4 * 4
    in_flight = 4 * (16 + 4 * 24)
    between = 4 * 2 * 16
    rope = 2 * 4 * 4  # of each micro-batch
    kept = 64 * (2 * block + between + rope), 64 * (6 * block + between + 3 * rope)
    assert (one.activations, three.activations, one.backward) == (*kept, 64 * in_flight)
    freed = replace(config, parallel=replace(config.parallel, pipeline_reshard=True))
    assert estimate_memory(freed, layout, 1, parts).gathered == 4 * (2 * layer + vocabulary)


@pytest.mark.parametrize("bf16", [False, True])
def test_each_loss_in_flight_keeps_a_gradient_of_the_output_matrix(bf16: bool) -> None:
    """The formula, and what autograd holds for three losses that have not gone backward."""
    config, vocabulary, b = _config(SMALL, bf16=bf16), 128 * 16, 2 if bf16 else 4
    one, three = (estimate_memory(config, Layout(), 1 << 20, losses=losses) for losses in (1, 3))
    tokens = config.data.micro_batch_size * (config.data.seq_length or 0)
    # and the last norm's input and its gradient
    assert three.activations - one.activations == 2 * b * (vocabulary + 2 * 16 * tokens)
    assert replace(three, activations=one.activations, most=one.most) == one
    assert run_distributed(_kept_by_losses, 1, bf16) == [3 * vocabulary * b]


def _kept_by_losses(rank: int, world_size: int, bf16: bool) -> int:
    """Bytes of the size of the output matrix that three losses keep, the matrix itself left out."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    group = Group.of(build_context(Layout(), "cpu").tp)
    weight = torch.randn(128, 16, dtype=dtype, requires_grad=True)
    saved: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        if t.shape == weight.shape and t.data_ptr() != weight.data_ptr():
            saved[t.data_ptr()] = t.nbytes
        return t

    labels, losses = torch.arange(8), []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        for _ in range(3):
            hidden = torch.randn(8, 16, dtype=dtype, requires_grad=True)
            shard = VocabShard.of(group, 128, 100)
            losses.append(linear_cross_entropy(hidden, weight, labels, torch.ones(8), shard, chunk_tokens=4))
    return sum(saved.values())


def test_context_parallelism_divides_activations_and_shards_weights() -> None:
    config = _config(SMALL)
    alone, *cut = (estimate_memory(config, Layout(cp=cp), chunk_bytes=1 << 10) for cp in (1, 2, 4))
    for cp, estimate in zip((2, 4), cut, strict=True):
        assert estimate.activations == alone.activations // cp
        assert (estimate.parameters, estimate.optimizer) == (alone.parameters // cp, alone.optimizer // cp)
        assert estimate == estimate_memory(
            replace(config, data=replace(config.data, seq_length=32 // cp)), Layout(dp_shard=cp), chunk_bytes=1 << 10
        )


def test_a_pair_is_two_sequences_where_temporaries_depend_on_their_number() -> None:
    """Key/value heads that are gathered at once, and elements of a dropout's mask that are drawn at once."""

    def bytes_per_token(rows: int, objective: str | None) -> tuple[int, int]:
        config = _config(replace(SMALL, hidden_size=8192, hidden_dropout=0.1))
        parallel = config.parallel
        parallel.context_parallel_size, parallel.cp_comm_type, parallel.recompute_granularity = 8, "all_gather", "full"
        config.data = DataConfig(seq_length=131072, micro_batch_size=rows, global_batch_size=rows)
        config.objective = None if objective is None else ObjectiveConfig(objective=objective)  # type: ignore[arg-type]
        layout = Layout(cp=8)
        return (
            others_keys(config, layout, 2, heads=32, groups=8, width=128),
            masking_per_token(config, layout, 2, fused=True),
        )

    assert bytes_per_token(2, None) == bytes_per_token(1, "dpo") != bytes_per_token(1, None)
    assert all(two < one for two, one in zip(bytes_per_token(1, "dpo"), bytes_per_token(1, None), strict=True))


def test_what_waits_beside_a_pass_of_a_pipeline_is_counted_once() -> None:
    """Losses between their loss and their backward pass: all of them where the pass has none of its own."""
    asked: list[tuple[str, int, int, int]] = []

    def note(what: str, micro_batches: int, pending: int, waiting: int) -> int:
        asked.append((what, micro_batches, pending, waiting))
        return 100 * waiting

    moments = Moments(*[0] * len(fields(Moments)))
    own, none = frozenset({0}), frozenset[int]()
    passes = [PassState(0, Op.BACKWARD, has_loss, 3, 2, 1, 2, own, none, own, False) for has_loss in (True, False)]
    most = [
        _most_in_passes(moments, [one], [PartBytes(*[0] * 6)], partial(note, "kept"), partial(note, "at its end"))
        for one in passes
    ]
    assert asked == [("at its end", 2, 1, 1), ("kept", 3, 1, 1), ("at its end", 2, 1, 2), ("kept", 3, 1, 2)]
    assert most == [100, 200]
