"""What hybrid FSDP holds, sends and rounds. (That its results are right is what the tests of parity show.)"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from smp import layers
from smp.config import Config, DataConfig, Layout, OptimizerConfig, ParallelConfig, TrainingConfig, resolve
from smp.config.resolve import resolve_model
from smp.data.loader import RankBatch
from smp.models.gpt import GPT
from smp.optim.optimizer import build_optimizer, clip_gradients
from smp.parallel.context import build_context
from smp.sharding.parallelize import parallelize, shard
from smp.training.build import compiles_experts
from smp.training.forward_backward import Accumulation
from smp.training.objectives.next_token import NextToken
from smp.training.trainer import Progress, Trainer
from tests.distributed import run_distributed
from tests.fake_group import fake_context
from tests.sharding.model import BATCH, LENGTH, MODEL, build, loss_of

MICRO_BATCHES = 3


def local_bytes(model: torch.nn.Module) -> int:
    return sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[operator]


# ---- hybrid shard degree ----


@pytest.mark.parametrize(
    ("tp", "degree", "shards"),
    [(1, 0, 8), (1, 1, 1), (1, 2, 2), (1, 4, 4), (1, 8, 8), (2, 0, 4), (2, 1, 1), (2, 2, 2), (2, 4, 4), (8, 0, 1)],
)
def test_degree_is_the_number_of_ranks_that_share_the_bytes(tp: int, degree: int, shards: int) -> None:
    """Of 8 ranks. 0: as many as tensor parallelism leaves; 1: none; n: n."""
    config = replace(MODEL, num_attention_heads=8, num_query_groups=8)
    parallel = ParallelConfig(tensor_model_parallel_size=tp, hybrid_shard_degree=degree)
    with fake_context(Layout.from_config(parallel, 8), rank=5) as context:
        whole = local_bytes(GPT(config, context.tp))
        model = build(context, config, parallel)
        assert local_bytes(model) * shards == whole
        assert {p.dtype for p in model.parameters()} == {torch.float32}


# ---- traffic, precision and residence, on four ranks ----

COLLECTIVES = {"allreduce_": "all-reduce", "_reduce_scatter_base_": "reduce-scatter", "_allgather_base_": "all-gather"}


class Traffic(TorchDispatchMode):
    """Collectives of FSDP as (kind, dtype), one list per forward pass. Single numbers (loss, norm) are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[list[tuple[str, str]]] = [[]]

    def begin(self, *_: Any) -> None:
        self.passes.append([])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind = func.overloadpacket.__name__
            tensor = args[0][0] if isinstance(args[0], list) else args[1]  # for gathers the input, else what is summed
            if tensor.numel() > 1:
                self.passes[-1].append((COLLECTIVES.get(kind, kind), str(tensor.dtype).removeprefix("torch.")))
        return func(*args, **(kwargs or {}))


def residence(model: GPT) -> list[tuple[str, int, int]]:
    """Numbers of elements at hand of both blocks' up projections: at rest, in block 0's forward, in block 1's."""
    ups = [model.layers[i].mlp.up for i in "01"]
    seen: list[tuple[str, int, int]] = []

    def look(where: str) -> None:
        sizes = [up.weight.to_local().numel() for up in ups]
        seen.append((where, sizes[0], sizes[1]))

    look("at rest")
    downs = enumerate(model.layers[i].mlp.down for i in "01")
    hooks = [down.register_forward_pre_hook(lambda m, x, i=i: look(f"in block {i}")) for i, down in downs]
    loss = loss_of(model)
    look("after forward")
    for hook in hooks:
        hook.remove()
    loss.backward()
    look("after backward")
    model.zero_grad()
    return seen


def dtypes(model: GPT) -> dict[str, set[torch.dtype]]:
    """Of parameters at rest and in use, of activations, of the loss and of gradients."""
    out: dict[str, set[torch.dtype]] = {"in use": set(), "activations": set()}
    block: Any = model.layers["1"]

    def look(module: Any, inputs: Any, output: torch.Tensor) -> None:
        out["in use"] |= {module.weight.dtype}
        out["activations"] |= {inputs[0].dtype, output.dtype}

    hooks = [m.register_forward_hook(look) for m in (block.attention_norm, block.attention.output, block.mlp.down)]
    loss = loss_of(model)
    loss.backward()
    for hook in hooks:
        hook.remove()
    out["loss"] = {loss.dtype}
    out["at rest"] = {p.dtype for p in model.parameters()}
    out["gradients"] = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    model.zero_grad()
    return out


def step_traffic(context: Any, model: GPT, parallel: ParallelConfig, data_parallel: int) -> list[list[tuple[str, str]]]:
    """Traffic of each micro-batch of one step of the trainer."""
    batch = BATCH * MICRO_BATCHES * data_parallel
    config = Config(
        model=MODEL,
        parallel=parallel,
        data=DataConfig(mock_data=True, seq_length=LENGTH, micro_batch_size=BATCH, global_batch_size=batch),
        optim=OptimizerConfig(lr_decay_style="constant"),
        training=TrainingConfig(train_iters=1),
    )
    config = resolve(config, data_parallel)
    trainer = Trainer(
        config,
        model,
        Accumulation(model),
        NextToken(torch.device("cpu")),
        build_optimizer(model, config.optim, context.fsdp),
        context,
        torch.device("cpu"),
        Progress(),
    )
    shape = (MICRO_BATCHES, BATCH, LENGTH)
    tokens = torch.arange(MICRO_BATCHES * BATCH * LENGTH).view(shape) % 64
    with Traffic() as traffic:
        hook = model.register_forward_pre_hook(traffic.begin)
        trainer.train_step(RankBatch(tokens, tokens, torch.arange(MICRO_BATCHES * BATCH).view(shape[:2])))
        hook.remove()
    return traffic.passes[1:]


class Order(TorchDispatchMode):
    """When weights are gathered and when blocks compute, in the order of the host."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.seen: list[str] = []
        for i in "01":
            norm: Any = model.layers[i].attention_norm
            norm.register_forward_pre_hook(lambda module, args, i=i: self.seen.append(f"block {i}"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and COLLECTIVES.get(func.overloadpacket.__name__) == "all-gather":
            self.seen.append("gather")
        return func(*args, **(kwargs or {}))


def order_of_forward(model: GPT) -> list[str]:
    with Order(model) as order, torch.no_grad():
        loss_of(model)
    return order.seen


def measure(rank: int, world: int) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for degree, bf16 in ((0, False), (1, False), (2, False), (2, True)):
        parallel = ParallelConfig(hybrid_shard_degree=degree, bf16=bf16)
        context = build_context(Layout.from_config(parallel, world), "cpu")
        model = build(context, MODEL, parallel)
        out[f"degree {degree}{', bf16' if bf16 else ''}"] = {
            "residence": residence(model),
            "dtypes": dtypes(model),
            "traffic": step_traffic(context, model, parallel, world),
            "order": order_of_forward(model),
        }
    return out


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, Any]]:
    ranks = run_distributed(measure, 4)
    assert ranks[1:] == ranks[:1] * 3
    return ranks[0]


UNITS = 2 + MODEL.num_layers  # embedding, blocks, final norm with head


def test_the_next_blocks_weights_are_under_way_while_a_block_computes(measured: dict[str, dict[str, Any]]) -> None:
    """Embedding, block 0 and block 1 are gathered before block 0 computes."""
    order = measured["degree 0"]["order"]
    assert order == ["gather"] * 3 + ["block 0", "block 1", "gather"]
    assert measured["degree 1"]["order"] == ["block 0", "block 1"]


def counts(passes: list[list[tuple[str, str]]], kind: str) -> list[int]:
    return [sum(k == kind for k, _ in collectives) for collectives in passes]


def test_replicas_reduce_only_in_the_last_micro_batch(measured: dict[str, dict[str, Any]]) -> None:
    for degree in ("degree 1", "degree 2", "degree 2, bf16"):
        traffic = measured[degree]["traffic"]
        assert counts(traffic, "all-reduce") == [0, 0, UNITS], degree
    assert counts(measured["degree 0"]["traffic"], "all-reduce") == [0, 0, 0]
    for degree in ("degree 0", "degree 2", "degree 2, bf16"):
        assert counts(measured[degree]["traffic"], "reduce-scatter") == [UNITS] * 3, degree


def test_blocks_are_gathered_for_each_pass_and_freed_in_between(measured: dict[str, dict[str, Any]]) -> None:
    whole = MODEL.hidden_size * 32
    for degree, shards in (("degree 0", 4), ("degree 2", 2), ("degree 2, bf16", 2)):
        part = whole // shards
        states = {name: (first, second) for name, first, second in measured[degree]["residence"]}
        assert states == {
            "at rest": (part, part),
            "in block 0": (whole, part),
            "in block 1": (part, whole),
            "after forward": (part, part),
            "after backward": (part, part),
        }
        assert min(counts(measured[degree]["traffic"], "all-gather")) >= UNITS + MODEL.num_layers


def test_without_shards_weights_stay_whole(measured: dict[str, dict[str, Any]]) -> None:
    whole = MODEL.hidden_size * 32
    assert {state[1:] for state in measured["degree 1"]["residence"]} == {(whole, whole)}


def test_bf16_computes_in_bf16_and_reduces_and_rests_in_fp32(measured: dict[str, dict[str, Any]]) -> None:
    single, half = {torch.float32}, {torch.bfloat16}
    rest = {"at rest": single, "gradients": single, "loss": single}
    assert measured["degree 2, bf16"]["dtypes"] == {"in use": half, "activations": half} | rest
    assert measured["degree 2"]["dtypes"] == {"in use": single, "activations": single} | rest
    traffic = {pair for collectives in measured["degree 2, bf16"]["traffic"] for pair in collectives}
    assert traffic == {("all-gather", "bfloat16"), ("reduce-scatter", "float32"), ("all-reduce", "float32")}


# ---- parameters that are not ours ----


class Scale(nn.Module):
    """An own layer with a parameter that every TP rank holds and uses alike."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.weight = layers.tp_parameter((8,), Replicate(), mesh)
        self.initializers = {"weight": layers.Constant(1.5)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * layers.local(self.weight)


def mixed(context: Any, middle: nn.Module) -> nn.Sequential:
    wide: dict[str, Any] = {"activation": "gelu", "bias": True, "init_std": 1.0, "output_std": 1.0}
    return nn.Sequential(layers.LayerNorm(8, context.tp), middle, layers.MLP(8, 16, context.tp, **wide))


@pytest.mark.parametrize("meta", [False, True])
def test_an_ordinary_parameter_beside_shared_ones_is_refused(meta: bool) -> None:
    """Its copies would each count in the gradient norm."""
    with fake_context(Layout(dp_shard=2, tp=2)) as context, torch.device("meta" if meta else "cpu"):
        with pytest.raises(ValueError, match=r"1\.weight is an ordinary parameter among .* mesh of 2 ranks"):
            shard(mixed(context, nn.Linear(8, 8)), [], context.fsdp)
        shard(mixed(context, Scale(context.tp)), [], context.fsdp)
    with fake_context(Layout(dp_shard=2)) as context:
        shard(mixed(context, nn.Linear(8, 8)), [], context.fsdp)


def norms_by_layout(rank: int, world: int) -> dict[int, float]:
    """Gradient norm of one batch, by TP size."""
    out, batch = {}, torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    for tp in (1, 2):
        context = build_context(Layout(dp_shard=world // tp, tp=tp), "cpu")
        model = mixed(context, Scale(context.tp))
        shard(model, [], context.fsdp)
        layers.init_weights(model, 0)
        model(batch[context.data_rank :: world // tp]).square().sum().backward()
        out[tp] = clip_gradients(model.parameters(), 0.0).item()
    return out


def test_own_parameters_count_once() -> None:
    norms = run_distributed(norms_by_layout, 2)[0]
    assert norms[2] == pytest.approx(norms[1], rel=1e-6)


def test_blocks_with_experts_can_be_left_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where their gradients were wrong, on CUDA and with torch 2.11: the others are compiled."""
    sizes: dict[str, Any] = {"num_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True}
    config = resolve_model(replace(MODEL, **sizes, moe_layer_freq="[0,1]"))
    with fake_context() as context:
        for experts in (True, False):
            model = GPT(config, context, device="meta")
            parallelize(model, context, ParallelConfig(compile=True), compile_experts=experts)
            eager = [block.run == block._run for block in model.layers.values()]  # type: ignore[union-attr]
            assert eager == [False, not experts]
    assert not compiles_experts(torch.device("cuda"))
    for version, compiled in (("2.13.0+cpu", True), ("2.11.0", False)):
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        assert compiles_experts(torch.device("cpu")) == compiled
