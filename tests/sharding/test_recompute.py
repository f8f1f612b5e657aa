"""What recompute keeps and repeats, and what a compiled block's backward pass overlaps."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from smp.config import Layout, ParallelConfig
from tests.fake_group import fake_mesh
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

    def nbytes(self) -> int:
        """FSDP frees by resizing to 0, so sizes are asked for now."""
        alive = [torch.UntypedStorage._new_with_weak_ptr(cdata) for cdata in self.storages]
        return sum(storage.nbytes() for storage in alive if storage is not None)


def kept_bytes(granularity: Any, tp: int, sp: bool, layers: int) -> int:
    """Bytes that live between forward and backward, on one of ``tp`` ranks."""
    parallel = ParallelConfig(tp, sequence_parallel=sp, recompute_granularity=granularity)
    with fake_mesh(Layout(tp=tp)) as mesh:
        model = build(mesh, replace(MODEL, num_layers=layers), parallel)
        with Live() as live:
            loss = loss_of(model)
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


class Work(TorchDispatchMode):
    """Counts matrix products and collectives of tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.collectives = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        self.collectives += func.namespace == "_c10d_functional" and "wait" not in func.name()
        return func(*args, **(kwargs or {}))


def backward_work(granularity: Any) -> tuple[int, int]:
    """Products and collectives in the backward pass."""
    parallel = ParallelConfig(2, sequence_parallel=True, recompute_granularity=granularity)
    with fake_mesh(Layout(tp=2)) as mesh:
        loss = loss_of(build(mesh, MODEL, parallel))
        with Work() as work:
            loss.backward()
    return work.products, work.collectives


def test_full_recompute_repeats_products_and_selective_none() -> None:
    work = {g: backward_work(g) for g in RECOMPUTE}
    products, collectives = work["none"]
    assert products > 0 and collectives > 0
    assert work["selective"] == work["none"]
    repeated = work["full"][0] - products
    assert MODEL.num_layers * 6 <= repeated <= MODEL.num_layers * 7  # the last product's result is not needed
    assert work["full"][1] > collectives


def test_recompute_changes_no_bit_of_a_gradient_with_dropout_either() -> None:
    config = replace(MODEL, hidden_dropout=0.2, attention_dropout=0.2)
    grads = {}
    for granularity in RECOMPUTE:
        with fake_mesh() as mesh:
            model = build(mesh, config, ParallelConfig(recompute_granularity=granularity))
            loss_of(model).backward()
            grads[granularity] = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    for granularity in ("selective", "full"):
        differing = [name for name, g in grads["none"].items() if not torch.equal(g, grads[granularity][name])]
        assert differing == []


def compiled_backward(sp: bool) -> list[str]:
    """Collectives, waits and matrix products of a compiled block's backward pass, as Inductor orders them."""
    from torch._inductor.utils import run_and_get_code

    with fake_mesh(Layout(tp=2)) as mesh:
        model = build(mesh, replace(MODEL, num_layers=1), ParallelConfig(2, sequence_parallel=sp, compile=True))
        _, codes = run_and_get_code(lambda: loss_of(model).backward())
    torch._dynamo.reset()
    calls = re.findall(r"extern_kernels\.(?:add)?mm\(|_c10d_functional\.(\w+)\.default\((\w*)", codes[-1])
    # gradients of norms are summed too, as views; no product waits for these
    return [name or "product" for name, argument in calls if argument != "reinterpret_tensor"]


@pytest.mark.parametrize(
    ("sp", "reduction"),
    [
        pytest.param(
            False,
            "all_reduce_",
            marks=pytest.mark.xfail(strict=True, raises=AssertionError, reason="Inductor waits before the products"),
        ),
        (True, "reduce_scatter_tensor"),
    ],
)
def test_compiled_input_gradients_are_reduced_under_products(sp: bool, reduction: str) -> None:
    calls = compiled_backward(sp)
    after = [calls[i + 1 : i + 3] for i, call in enumerate(calls) if call == reduction]
    assert after == [["product", "product"]] * 2  # of gate and up; of query, key and value
