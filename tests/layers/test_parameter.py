"""Parameters on the mesh and their first values, which are the same bits in every layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from smp.config import Layout, ModelConfig, ParallelConfig
from smp.layers import ColumnParallelLinear, Constant, Normal, RMSNorm, VocabParallelEmbedding, init_weights
from smp.layers.parameter import local, tp_parameter
from smp.models.gpt import GPT
from smp.parallel.context import ParallelContext
from smp.sharding.parallelize import parallelize
from tests.fake_group import fake_context
from tests.layers.whole import load

LLAMA = ModelConfig(
    num_layers=2,
    hidden_size=10,
    ffn_hidden_size=12,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=6,
    vocab_size=37,
    make_vocab_size_divisible_by=1,
    qk_layernorm=True,
)
GPT2 = ModelConfig(
    num_layers=1,
    hidden_size=10,
    ffn_hidden_size=12,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=6,
    vocab_size=33,
    make_vocab_size_divisible_by=4,
    max_position_embeddings=7,
    normalization="LayerNorm",
    swiglu=False,
    position_embedding_type="learned_absolute",
    disable_bias_linear=False,
    untie_embeddings_and_output_weights=False,
)
MODELS = {"llama, odd vocabulary": LLAMA, "gpt2, tied": GPT2}
LAYOUTS = [
    Layout(tp=2),
    Layout(tp=4),  # more ranks than key/value heads
    Layout(dp_shard=2),
    Layout(dp_shard=3),  # uneven shards
    Layout(dp_shard=8),  # some are empty
    Layout(dp_replicate=2, dp_shard=2),
    Layout(dp_shard=3, tp=2),
    Layout(dp_replicate=2, dp_shard=2, tp=2),
]


def sharding_of(layout: Layout) -> ParallelConfig:
    return ParallelConfig(tensor_model_parallel_size=layout.tp, hybrid_shard_degree=layout.dp_shard)


def whole_weights(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Initial values of one rank without FSDP, vocabulary padding cut off."""
    with fake_context() as context:
        model = GPT(config, context.tp, device="cpu")
        init_weights(model, seed)
        wholes = {name: p.detach().to_local().clone() for name, p in model.named_parameters()}
    padded = ("embedding.weight", "head.weight")
    return {name: w[: config.vocab_size] if name in padded else w for name, w in wholes.items()}


def shards(
    config: ModelConfig, layout: Layout, rank: int, wholes: dict[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """What ``rank`` holds: of ``wholes``, as FSDP cuts them, or drawn into memory that FSDP has laid out."""
    with fake_context(layout, rank) as context:
        model = GPT(config, context.tp, device="meta" if wholes is None else "cpu")
        for name, parameter in model.named_parameters() if wholes else []:
            load(parameter, wholes[name])
        parallelize(model, context, sharding_of(layout))
        if wholes is None:
            model.to_empty(device="cpu")
            init_weights(model, seed=3)
        return {name: p.detach().to_local().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_initial_weights_are_the_same_bits_in_every_layout(config: ModelConfig, layout: Layout) -> None:
    wholes = whole_weights(config, seed=3)
    for rank in range(layout.world_size):
        want, got = shards(config, layout, rank, wholes), shards(config, layout, rank, None)
        assert set(got) == set(want)
        assert [name for name in want if not torch.equal(got[name], want[name])] == []


def test_initial_values_have_their_meaning() -> None:
    weights = whole_weights(LLAMA, seed=3) | {f"gpt2 {n}": w for n, w in whole_weights(GPT2, seed=3).items()}
    for name, w in weights.items():
        if w.ndim == 1:
            assert torch.equal(w, torch.full_like(w, "norm.weight" in name)), name
        else:  # matrices that write to the residual stream are smaller
            layers = 1 if name.startswith("gpt2") else 2
            std = 0.02 / (2 * layers) ** 0.5 if name.endswith(("output.weight", "down.weight")) else 0.02
            assert w.std().item() == pytest.approx(std, rel=0.25), name
    assert not torch.equal(weights["layers.0.mlp.up.weight"], weights["layers.1.mlp.up.weight"])
    assert not torch.equal(weights["layers.0.mlp.up.weight"], weights["layers.0.mlp.gate.weight"])


def test_another_seed_changes_every_matrix() -> None:
    a, b = whole_weights(LLAMA, seed=3), whole_weights(LLAMA, seed=4)
    assert not any(torch.equal(a[name], b[name]) for name in a if a[name].ndim > 1)


def test_vocabulary_padding_is_zero() -> None:
    with fake_context() as context:
        layer = VocabParallelEmbedding(5, 4, context.tp, divisible_by=8)
        init_weights(layer, 0)
        rows = layer.weight.to_local()
    assert torch.equal(rows[5:], torch.zeros(3, 4))
    assert (rows[:5] != 0).all()


def test_values_are_nan_until_they_are_drawn() -> None:
    with fake_context(Layout(tp=2)) as context:
        layer = ColumnParallelLinear(4, 6, context.tp)
        for parameter in layer.parameters():
            assert parameter.to_local().isnan().all()
        init_weights(layer, 0)
        assert not any(p.to_local().isnan().any() for p in layer.parameters())


def test_shape_is_global_and_placement_goes_with_it() -> None:
    with fake_context(Layout(tp=2), rank=1) as context:
        with torch.device("meta"):
            weight = ColumnParallelLinear(4, 6, context.tp).weight
        assert isinstance(weight, DTensor)
        assert (tuple(weight.shape), weight.placements, tuple(weight.to_local().shape)) == ((6, 4), (Shard(0),), (3, 4))
        assert weight.is_meta


def test_forgotten_memory_is_an_error() -> None:
    with fake_context() as context:
        with torch.device("meta"):
            forgotten = ColumnParallelLinear(4, 6, context.tp)
        model = nn.Sequential(RMSNorm(4, context.tp), forgotten)
        with pytest.raises(ValueError, match=r"1\.weight is on the meta device: call model\.to_empty"):
            init_weights(model, 0)


def test_an_unknown_first_value_is_an_error() -> None:
    """After to_empty a module that is left as it is would hold whatever was in memory."""
    with fake_context() as context:
        with torch.device("meta"):
            model = nn.Sequential(RMSNorm(4, context.tp), nn.Linear(4, 4))
        model.to_empty(device="cpu")
        with pytest.raises(ValueError, match=r"1\.weight has no initializer: set 1\.initializers = \{'weight': "):
            init_weights(model, 0)
        model[1].initializers = {"weight": Constant(2.0), "bias": Normal(0.5)}  # type: ignore[assignment]
        init_weights(model, 0)
        assert (model[1].weight == 2).all() and 0 < model[1].bias.abs().max() < 3


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_local_has_the_bits_of_to_local(dtype: torch.dtype | None) -> None:
    """Gradients of several micro-batches too, of which the second is strided, and one more of a gradient."""
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    with fake_context(Layout(tp=2)) as context:
        ours, torchs = (filled_parameter(x[:4], context) for _ in range(2))

        def by_torch(p: DTensor) -> torch.Tensor:
            part = p.to_local(grad_placements=p.placements)
            return part if dtype is None else part.to(dtype)

        for grad in (x[1:], x[:4].t().contiguous().t(), x[:4].exp()):
            for part in (local(ours, dtype), by_torch(torchs)):
                assert part.dtype == (dtype or torch.float32)
                part.backward(grad.to(part.dtype))
            got, want = ours.grad, torchs.grad
            assert isinstance(got, DTensor) and isinstance(want, DTensor)
            assert torch.equal(got.to_local(), want.to_local())
            assert (got.placements, got.shape, got.stride()) == (want.placements, want.shape, want.stride())
            assert got.to_local().stride() == want.to_local().stride()


def test_local_of_what_needs_no_gradient_is_the_memory_itself() -> None:
    with fake_context(Layout(tp=2)) as context:
        weight = filled_parameter(torch.ones(4, 4), context)
        with torch.no_grad():
            assert not local(weight).requires_grad
        assert local(weight).requires_grad
        weight.requires_grad_(False)
        assert local(weight, torch.bfloat16).dtype == torch.bfloat16
        assert local(weight).data_ptr() == weight.to_local().data_ptr()


def test_local_can_be_differentiated_twice() -> None:
    x = torch.arange(6.0).view(2, 3)
    with fake_context(Layout(tp=2)) as context:
        weight = filled_parameter(x, context)
        (first,) = torch.autograd.grad(local(weight).pow(3).sum(), weight, create_graph=True)
        assert isinstance(first, DTensor)
        first.to_local().sum().backward()
        assert isinstance(weight.grad, DTensor)
        assert torch.equal(weight.grad.to_local(), 6 * x)


def filled_parameter(rows: torch.Tensor, context: ParallelContext) -> DTensor:
    """Of which this rank of two has ``rows``."""
    parameter = tp_parameter((2 * len(rows), rows.shape[1]), Shard(0), context.tp)
    assert isinstance(parameter, DTensor)
    with torch.no_grad():
        parameter.to_local().copy_(rows)
    return parameter
