"""What recompute keeps and repeats, and what a compiled block's backward pass overlaps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from smp.config import Layout, ParallelConfig
from smp.layers import ColumnParallelLinear, RowParallelLinear
from smp.models.gpt import GPT
from tests.fake_group import fake_context
from tests.operations import order_of
from tests.sharding.model import BATCH, LENGTH, MODEL, build, loss_of

RECOMPUTE: tuple[Any, ...] = ("none", "selective", "full")


class Live(TorchDispatchMode):
    """Memory that operations have allocated and that still lives."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if type(tensor) is torch.Tensor:
                reference = StorageWeakRef(tensor.untyped_storage())
                self.storages[reference.cdata] = reference
        return out

    def forget(self, tensors: list[torch.Tensor]) -> None:
        """Leave out memory that was there before, of which operations give views."""
        for tensor in tensors:
            self.storages.pop(StorageWeakRef(tensor.untyped_storage()).cdata, None)

    def nbytes(self) -> int:
        """FSDP frees by resizing to 0, so sizes are asked for now."""
        alive = [torch.UntypedStorage._new_with_weak_ptr(cdata) for cdata in self.storages]
        return sum(storage.nbytes() for storage in alive if storage is not None)


def kept_bytes(granularity: Any, tp: int, sp: bool, layers: int) -> int:
    """Bytes that live between forward and backward, on one of ``tp`` ranks."""
    parallel = ParallelConfig(tp, sequence_parallel=sp, recompute_granularity=granularity)
    with fake_context(Layout(tp=tp)) as context:
        model = build(context, replace(MODEL, num_layers=layers), parallel)
        with Live() as live:
            loss = loss_of(model)
        live.forget([p.to_local() for p in model.parameters()])  # type: ignore[attr-defined]
        assert loss.requires_grad
        return live.nbytes()


def bytes_per_block(granularity: Any, tp: int, *, sp: bool = False) -> float:
    return (kept_bytes(granularity, tp, sp, 3) - kept_bytes(granularity, tp, sp, 1)) / 2


@pytest.mark.parametrize("tp", [1, 2])
def test_recompute_keeps_less(tp: int) -> None:
    per_block = {g: bytes_per_block(g, tp) for g in RECOMPUTE}
    assert per_block["full"] < per_block["selective"] < per_block["none"]


def test_full_recompute_keeps_the_input_of_a_block_alone() -> None:
    """This rank's tokens, fp32."""
    assert bytes_per_block("full", 1) == BATCH * LENGTH * MODEL.hidden_size * 4
    assert bytes_per_block("full", 2, sp=True) == BATCH * LENGTH / 2 * MODEL.hidden_size * 4


def backward_work(granularity: Any, *, sp: bool = True, deferred: bool = False) -> tuple[int, int]:
    """Products and collectives in the backward pass; when ``deferred`` without those of weight gradients."""
    parallel = ParallelConfig(2, sequence_parallel=sp, recompute_granularity=granularity)
    with fake_context(Layout(tp=2)) as context:
        model = build(context, MODEL, parallel)
        later: list[Any] = []
        for module in model.modules():
            if deferred and isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                module.sink = later.append
        loss = loss_of(model)
        events = order_of(loss.backward, 0)
    assert bool(later) == deferred
    products = events.count("dw")
    return products, len(events) - products - events.count("wait_tensor")


def test_full_recompute_repeats_products_and_selective_none() -> None:
    work = {g: backward_work(g) for g in RECOMPUTE}
    products, collectives = work["none"]
    assert products > 0 and collectives > 0
    assert work["selective"] == work["none"]
    repeated = work["full"][0] - products
    assert MODEL.num_layers * 6 <= repeated <= MODEL.num_layers * 7  # the last product's result is not needed
    assert work["full"][1] > collectives


@pytest.mark.parametrize("sp", [False, True])
def test_selective_recompute_repeats_nothing_when_weight_gradients_are_deferred(sp: bool) -> None:
    """As schedules with a split backward pass do."""
    work = {g: backward_work(g, sp=sp, deferred=True) for g in RECOMPUTE}
    assert min(work["none"]) > 0
    assert work["selective"] == work["none"]
    assert work["full"][1] > work["none"][1]


def test_recompute_changes_no_bit_of_a_gradient_with_dropout_either() -> None:
    config = replace(MODEL, hidden_dropout=0.2, attention_dropout=0.2)
    grads = {}
    for granularity in RECOMPUTE:
        with fake_context() as context:
            model = build(context, config, ParallelConfig(recompute_granularity=granularity))
            loss_of(model).backward()
            grads[granularity] = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    for granularity in ("selective", "full"):
        differing = [name for name, g in grads["none"].items() if not torch.equal(g, grads[granularity][name])]
        assert differing == []


def test_selective_recompute_keeps_less_under_sequence_parallelism_too() -> None:
    """What is gathered and what is not yet reduced has the size of all ranks' tokens: neither is kept."""
    for tp in (2, 4):
        assert bytes_per_block("selective", tp, sp=True) < bytes_per_block("none", tp, sp=True)


@pytest.mark.parametrize(
    ("sp", "reduction", "compiled"),
    [
        (False, "all_reduce", False),
        (True, "reduce_scatter_tensor", False),
        pytest.param(False, "all_reduce", True, marks=pytest.mark.slow),
        (True, "reduce_scatter_tensor", True),
    ],
)
def test_input_gradients_are_reduced_under_products(sp: bool, reduction: str, compiled: bool) -> None:
    """A whole block's backward pass as it runs: between the start of a reduction and its wait come the products."""
    parallel = ParallelConfig(2, sequence_parallel=sp, compile=compiled)
    with fake_context(Layout(tp=2)) as context:
        model = build(context, replace(MODEL, num_layers=1), parallel)
        loss_of(model).backward()  # compiles
        events = order_of(loss_of(model).backward, 0)
    torch._dynamo.reset()
    after = [events[i + 1 : i + 4] for i, event in enumerate(events) if event == reduction]
    assert ["dw", "dw", "wait_tensor"] in after  # of gate and up
    assert ["dw", "dw", "dw"] in after  # of query, key and value


def test_a_compiled_block_gathers_its_input_again() -> None:
    """Kept for the backward pass, the gathered input would cost what sequence parallelism saves."""
    gathers = {}
    for compiled in (False, True):
        parallel = ParallelConfig(2, sequence_parallel=True, compile=compiled)
        with fake_context(Layout(tp=2)) as context:
            model = build(context, MODEL, parallel)
            loss_of(model).backward()  # compiles
            gathers[compiled] = order_of(loss_of(model).backward, 0).count("all_gather_into_tensor")
        torch._dynamo.reset()
    assert gathers[True] == gathers[False] > 0


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_selective_recompute_keeps_less_when_compiled(tp: int) -> None:
    saved = {}
    for granularity in ("none", "selective"):
        parallel = ParallelConfig(tp, sequence_parallel=tp > 1, recompute_granularity=granularity, compile=True)  # type: ignore[arg-type]
        with fake_context(Layout(tp=tp)) as context:
            model = build(context, MODEL, parallel)
            loss_of(model).backward()  # compiles
            saved[granularity] = saved_bytes(model)
        torch._dynamo.reset()
    assert saved["selective"] < 0.9 * saved["none"]


def saved_bytes(model: GPT) -> int:
    """Bytes that compiled blocks keep for their backward pass, weights apart."""
    weights = {parameter.to_local().untyped_storage().data_ptr() for parameter in model.parameters()}  # type: ignore[attr-defined]
    sizes: dict[int, int] = {}
    nodes, seen = [loss_of(model).grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        if "CompiledFunction" in node.name():
            kept = [x for x in node.saved_tensors if isinstance(x, torch.Tensor)]  # type: ignore[attr-defined]
            storages = [x.untyped_storage() for x in kept]
            sizes |= {storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr() not in weights}
    return sum(sizes.values())
