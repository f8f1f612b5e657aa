import gc
import time
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smp.config import Config, ConfigError, DataConfig, Layout, ModelConfig, OptimizerConfig, ParallelConfig, resolve
from smp.config.schema import TrainingConfig
from smp.layers.cross_entropy import VocabShard, linear_cross_entropy
from smp.models.arithmetic import (
    Tuned,
    _kept_per_token,
    count_parameters,
    count_part,
    estimate_memory,
    forward_flops,
    peak_flops,
    training_flops_per_token,
)
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from smp.models.part import ModelPart, whole
from smp.parallel.collectives import Group
from smp.parallel.context import build_context
from smp.sharding.parallelize import _wrapped
from tests.distributed import run_distributed

# 2 layers, 4 heads of 4 with 2 key/value heads, so q = 16 and k = 8
SMALL = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24)
GPT2_LIKE = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    max_position_embeddings=32,
    position_embedding_type="learned_absolute",
    normalization="LayerNorm",
    swiglu=False,
    disable_bias_linear=False,
    untie_embeddings_and_output_weights=False,
)


def test_parameters_by_hand() -> None:
    # a block: query and output 2 x 16 x 16, key and value 2 x 16 x 8, gate, up and down 3 x 16 x 24, two norms of 16
    layer = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 16
    count = count_parameters(SMALL, 100)
    assert (count.per_layer, count.non_embedding) == (layer, 2 * layer + 16)
    assert (count.embedding, count.total) == (2 * 100 * 16, 2 * 100 * 16 + 2 * layer + 16)
    # GPT-2: four 16 x 16 and two 16 x 64 matrices, their biases, two norms with bias; tied, 32 positions, a final norm
    layer = 4 * 16 * 16 + 2 * 16 * 64 + 4 * 16 + 64 + 16 + 4 * 16
    count = count_parameters(GPT2_LIKE, 100)
    assert (count.per_layer, count.total) == (layer, 100 * 16 + 32 * 16 + 2 * layer + 32)


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({"qk_layernorm": True}, 2 * 2 * 4),
        ({"add_qkv_bias": True}, 2 * (16 + 8 + 8)),
        ({"disable_bias_linear": False}, 2 * (16 + 8 + 8 + 16 + 24 + 24 + 16)),
        ({"kv_channels": 8}, 2 * (2 * 16 * 16 + 2 * 16 * 8)),
        ({"untie_embeddings_and_output_weights": False}, -100 * 16),
    ],
)
def test_each_part_of_the_architecture_counts(change: dict[str, bool | int], more: int) -> None:
    changed = replace(SMALL, **change)  # type: ignore[arg-type]
    assert count_parameters(changed, 100).total - count_parameters(SMALL, 100).total == more


def test_the_models_parameters_are_counted() -> None:
    assert run_distributed(_parameters_of_the_model, 1) == [[]]


def _parameters_of_the_model(rank: int, world_size: int) -> list[str]:
    wrong = []
    variants = (SMALL, GPT2_LIKE, replace(SMALL, qk_layernorm=True, add_qkv_bias=True, normalization="LayerNorm"))
    for model in variants:
        config = _config(model, vocab_size=128)  # a multiple of the padding
        built = GPT(config.model, build_context(Layout(), "cpu").tp)
        if sum(p.numel() for p in built.parameters()) != count_parameters(model, 128).total:
            wrong.append(str(model))
    return wrong


def test_sizes_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(ConfigError, match="--num-query-groups 3"):
        count_parameters(replace(SMALL, num_query_groups=3), 100)


def test_flops_by_hand() -> None:
    # forward, per token: 2 FLOPs per matrix element of 2 layers and of the output matrix,
    matrices = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) + 16 * 100
    # and for each of the (1 + 2 + ... + 8) / 8 = 4.5 tokens seen 2 x 16 for the score and 2 x 16 for the sum, 2 layers
    assert training_flops_per_token(SMALL, 8, 100) == 3 * (2 * matrices + 2 * 4 * 16 * 4.5)
    # a window of 3: (1 + 2 + 3 x 6) / 8 = 2.625 tokens seen
    windowed = replace(SMALL, window_size=3)
    assert training_flops_per_token(windowed, 8, 100) == 3 * (2 * matrices + 2 * 4 * 16 * 2.625)


def test_flops_of_llama2_7b_are_six_per_parameter_and_attention() -> None:
    model = ModelConfig(num_layers=32, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=11008)
    count = count_parameters(model, 32000)
    norms = (2 * 32 + 1) * 4096
    attention = 3 * 32 * 4 * 4096 * 2048.5
    # the lookup of the embedding is no product
    expected = 6 * (count.total - 32000 * 4096 - norms) + attention
    assert training_flops_per_token(model, 4096, 32000) == pytest.approx(expected, rel=1e-12)


def test_biases_norms_and_tying_do_no_flops() -> None:
    changed = replace(SMALL, disable_bias_linear=False, qk_layernorm=True, untie_embeddings_and_output_weights=False)
    assert training_flops_per_token(changed, 8, 100) == training_flops_per_token(SMALL, 8, 100)


@given(length=st.integers(1, 40), window=st.one_of(st.none(), st.integers(1, 50)))
def test_tokens_seen_are_those_of_the_mask(length: int, window: int | None) -> None:
    seen = sum(1 for i in range(length) for j in range(i + 1) if window is None or i - j < window)
    with_attention = training_flops_per_token(replace(SMALL, window_size=window), length, 100)
    without = 3 * 2 * (2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) + 16 * 100)
    assert with_attention - without == pytest.approx(3 * 2 * 4 * 16 * seen / length)


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_flops_are_what_torch_counts(family: str) -> None:
    """Torch counts all of the length x length scores, so the half that a causal mask hides is added."""
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    length, vocab, model = 8, 100, SMALL if family == "Llama" else GPT2_LIKE
    if family == "Llama":
        config = transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=vocab,
            attn_implementation="eager",
        )
    else:
        config = transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=4, n_positions=32, vocab_size=vocab, attn_implementation="eager"
        )
    network = transformers.AutoModelForCausalLM.from_config(config)
    counter = FlopCounterMode(display=False)
    with counter:
        network(torch.randint(0, vocab, (1, length))).logits.sum().backward()
    hidden = 3 * 2 * 4 * 16 * (length - (length + 1) / 2) * length
    ours = training_flops_per_token(model, length, vocab) * length
    # some versions of transformers make RoPE's angles, 32 FLOPs here, by a matrix product
    assert counter.get_total_flops() == pytest.approx(ours + hidden, rel=2e-4)


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
    assert estimate.units == 4 * max(layer, vocabulary), "no FSDP: nothing is gathered"
    sharded = estimate_memory(_config(SMALL), Layout(dp_shard=2), chunk_bytes=4 * 128 * 10)
    assert sharded.units == 4 * (2 * layer + vocabulary) + 8 * max(layer, vocabulary)
    # a block: 4 x 16 around norms, 4 x 16 in attention, 4 x 24 in the MLP, fp32; 4 log-sum-exps; 64 tokens;
    # two blocks, one more for gradients, and 4 x 16 at the output layer
    block = 4 * (4 * 16 + 4 * 16 + 4 * 24) + 4 * 4
    assert estimate.activations == 64 * (3 * block + 4 * 4 * 16)
    assert estimate.logits == 10 * 128 * 4 + vocabulary * 4
    parts = (estimate.parameters, estimate.gradients, estimate.optimizer)
    assert estimate.total == sum(parts) + estimate.units + estimate.activations + estimate.logits


def test_memory_of_fine_tuning_by_hand() -> None:
    config = _config(SMALL, bf16=True)
    whole, lora, pairs = (
        estimate_memory(config, Layout(dp_shard=2), 1 << 20, tuned=tuned)
        for tuned in (Tuned(), Tuned(adapters=300), Tuned(rows=2, copies=1))
    )
    n = whole.parameters // 2
    assert (lora.parameters, lora.gradients, lora.optimizer) == (n + 2 * 300, 2 * 300, 4 * 300), "bf16 weights, sharded"
    assert lora.activations == whole.activations and lora.logits < whole.logits and lora.units < whole.units
    assert (pairs.parameters, pairs.gradients, pairs.optimizer) == (3 * n, 2 * n, 4 * n)
    assert pairs.activations == 2 * whole.activations


def test_memory_shrinks_with_the_layout_that_shares_it() -> None:
    config = _config(SMALL, bf16=True)
    whole, two, shared = (estimate_memory(config, Layout(dp_shard=d), chunk_bytes=1 << 20) for d in (1, 2, 4))
    assert (shared.parameters, shared.optimizer) == (whole.parameters // 4, whole.optimizer // 4)
    assert (shared.units, shared.activations) == (two.units, whole.activations)
    replicas, more = (estimate_memory(config, Layout(dp_replicate=d), chunk_bytes=1 << 20) for d in (2, 4))
    assert replicas == more
    assert (replicas.parameters, replicas.units) == (whole.parameters, two.units)
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


@pytest.mark.parametrize(("optimizer", "momentum", "size"), [("adam", 0.0, 8), ("sgd", 0.9, 4), ("sgd", 0.0, 0)])
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
    # 50 + 1 layers, 4 heads, 32 positions: 4 + 1 + 4 bytes each, instead of 4 bytes a head
    assert activations(dropout, "none") - none == 64 * 51 * 4 * (32 * 9 - 4)


# LayerNorm and GELU or SwiGLU: kernels that keep the same on a CPU as on a GPU
KEPT = [
    replace(SMALL, normalization="LayerNorm"),
    replace(GPT2_LIKE, ffn_hidden_size=48),
    replace(SMALL, normalization="LayerNorm", num_query_groups=1, position_embedding_type="none"),
    replace(SMALL, normalization="LayerNorm", attention_dropout=0.1),
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
                formula = _kept_per_token(config, tp, 2, recompute)  # type: ignore[arg-type]
                case = f"{model} {recompute} tp {tp} {parallel}"
                rows.append((_measure(config, tp), formula, case))
                if model.num_query_groups == 1:
                    saved = 2 * 2 * (4 // tp - 1) * 40 if recompute == "none" else 0
                    rows.append((_measure(config, tp, grouped=True), formula - saved, f"{case} grouped"))
    return rows


def _wide(model: ModelConfig) -> ModelConfig:
    """Ten times the width, so that statistics of norms (a number per token) do not show."""
    return replace(model, hidden_size=160, kv_channels=40, ffn_hidden_size=240)


def _measure(config: Config, tp: int, grouped: bool = False) -> float:
    """Bytes per token that exist after the forward pass of one block and did not before, its output left out."""
    model = GPT(
        config.model,
        build_context(Layout(tp=tp), "cpu", sequence_parallel=config.parallel.sequence_parallel),
        grouped=grouped,
        device="cpu",
    ).bfloat16()
    block = next(iter(model.layers.values()))
    block.run = _wrapped(block.run, config.parallel)  # type: ignore[method-assign]
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    micro_batch = MicroBatch(tokens, token_index=torch.arange(64).view(2, 32))
    places = model._position_ids(micro_batch, 0)
    info = model._sequence_info(micro_batch, 0, places)
    keys = model._dropout_keys(info, tokens.device)
    x = model._embed(tokens.flatten(), places, info, keys)
    known = {t.untyped_storage().data_ptr() for t in _living()} - {x.untyped_storage().data_ptr()}
    saved: list[torch.Tensor] = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        saved.append(t.to_local() if hasattr(t, "to_local") else t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = block(x, info, None if keys is None else keys[:3])
    if tp > 1:  # a collective's thread lets go of its tensors some time after the collective is done
        time.sleep(0.5)
    sizes = _sizes([*saved, *_living(), x])
    output = y.untyped_storage().data_ptr()
    return sum(size for where, size in sizes.items() if where not in known | {output}) / tokens.numel()


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


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12, 156e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 494.5e12),
        ("NVIDIA H100 PCIe", 756e12, 378e12),
        ("NVIDIA H200", 989e12, 494.5e12),
        ("NVIDIA B200", 2250e12, 1125e12),
        ("NVIDIA L40S", 362e12, 183e12),
        ("NVIDIA L4", 121e12, 60e12),
        ("AMD Instinct MI300X", 1307.4e12, 653.7e12),
    ],
)
def test_peak_of_known_devices(name: str, bf16: float, fp32: float) -> None:
    assert (peak_flops(name, "bf16"), peak_flops(name, "fp32")) == pytest.approx((bf16, fp32))


@pytest.mark.parametrize("name", ["cpu", "", "Tesla V100-SXM2-16GB", "NVIDIA H200 MIG 1g.18gb", "NVIDIA L40"])
def test_an_unknown_device_has_no_peak(name: str) -> None:
    assert peak_flops(name, "bf16") is None


@pytest.mark.parametrize("tied", [False, True])
def test_parts_add_up_to_the_model(tied: bool) -> None:
    model = replace(SMALL, vocab_size=100, num_layers=5, untie_embeddings_and_output_weights=not tied)
    model = _config(model).model
    parts = (ModelPart(0, 2, embedding=True), ModelPart(2, 0), ModelPart(2, 3, head=True))
    copies = 100 * model.hidden_size if tied else 0  # the matrix is at both ends
    whole_model = count_parameters(model, 100).total
    assert sum(count_part(model, part) for part in parts) == whole_model + copies
    assert count_part(model, whole(5)) == whole_model
    flops = forward_flops(model, 32)
    assert 3 * (5 * flops.layer + flops.head) == training_flops_per_token(model, 32, 100)


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
    assert one.units == 4 * n + 8 * max(layer, vocabulary) and one.logits == 0
    block = 4 * (4 * 16 + 4 * 16 + 4 * 24) + 4 * 4
    assert (one.activations, three.activations) == (64 * 3 * block, 64 * 7 * block)
    freed = replace(config, parallel=replace(config.parallel, pipeline_reshard=True))
    assert estimate_memory(freed, layout, 1, parts).units == 4 * (2 * layer + vocabulary) + 8 * max(layer, vocabulary)


@pytest.mark.parametrize("bf16", [False, True])
def test_each_loss_in_flight_keeps_a_gradient_of_the_output_matrix(bf16: bool) -> None:
    """The formula, and what autograd holds for three losses that have not gone backward."""
    config, vocabulary, b = _config(SMALL, bf16=bf16), 128 * 16, 2 if bf16 else 4
    one, three = (estimate_memory(config, Layout(), 1 << 20, losses=losses) for losses in (1, 3))
    assert three.logits - one.logits == 2 * vocabulary * b and replace(three, logits=one.logits) == one
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
