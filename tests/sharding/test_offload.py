"""Offloaded activations: the order of copies on devices that are simulated, what is on the device, and no growth."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from smp.config import ParallelConfig
from smp.kernels.copier import Copier, CudaCopier, HostCopier, HostPool
from smp.sharding import offload_activations
from smp.sharding.offload import Offload
from tests.fake_group import fake_context
from tests.sharding.copiers import ClockCopier, QueueCopier
from tests.sharding.model import MODEL, build, loss_of

WIDTH, ROWS, LAYERS = 16, 6, 6


class Block(nn.Module):
    """A residual block that also saves a view, the same tensor twice, and something that all blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, dim=1)
        return x + self.down(torch.sigmoid(gate) * value * value) * table


def blocks_of(layers: int = LAYERS, device: str = "cpu") -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(layers)).to(device)


def gradients(blocks: nn.ModuleList, passes: int = 2) -> list[torch.Tensor]:
    """Of some forward and backward passes, one after the other."""
    blocks.zero_grad()
    device = next(blocks.parameters()).device
    for number in range(passes):
        torch.manual_seed(number)
        x, table = torch.randn(ROWS, WIDTH).to(device), torch.randn(ROWS, WIDTH).to(device)
        for block in blocks:
            x = block(x, table)
        x.square().mean().backward()
        del x
    return [p.grad.clone() for p in blocks.parameters() if p.grad is not None]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


def offloaded(copier: Copier, horizon: int, recompute: bool, layers: int = LAYERS) -> tuple[nn.ModuleList, Offload]:
    blocks = blocks_of(layers)
    return blocks, offload_activations(blocks, horizon=horizon, recompute=recompute, min_tensor_size=1, copier=copier)


CASES = list(itertools.product((1, 2, 4), (False, True)))
ORDERS: list[Any] = list(itertools.product(("early", "late"), repeat=2))


@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize(("horizon", "recompute"), CASES)
def test_no_order_of_copies_that_events_allow_changes_a_bit(horizon: int, recompute: bool, orders: Any) -> None:
    wanted = gradients(blocks_of(), passes=3)
    copier = QueueCopier(*orders)
    blocks, offload = offloaded(copier, horizon, recompute)
    assert equal(gradients(blocks, passes=3), wanted)
    assert copier.bytes_out >= copier.bytes_back > 0
    assert offload.most_live == horizon


@pytest.mark.parametrize("forget", ["use", "free", "reuse"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_wait_that_is_left_out_shows(forget: str, recompute: bool) -> None:
    """On the order of copies that it lets happen: what is used comes late, what is freed is read late, and memory of
    the host is written early while it is still to be read."""
    wanted = gradients(blocks_of(), passes=3)
    orders: Any = {"use": ("early", "late"), "free": ("late", "late"), "reuse": ("early", "late")}[forget]
    blocks, _ = offloaded(QueueCopier(*orders, forget=forget), 2, recompute)
    if forget == "reuse":  # what is waited for where it is used has been read before its place is free again
        pool_reuse_shows()
    else:
        assert not equal(gradients(blocks, passes=3), wanted)


def pool_reuse_shows() -> None:
    """A buffer that is given back while the copy from it has yet to run."""
    for forget, right in (("", True), ("reuse", False)):
        copier = QueueCopier("early", "late", forget)
        pool = HostPool(copier)
        buffer, after = pool.take(16)
        written = copier.out(torch.arange(4.0), buffer.view(torch.float32), after)
        target = torch.empty(4)
        came = copier.back(buffer.view(torch.float32), target, written)
        pool.give(buffer, came)
        again, after = pool.take(16)
        assert again is buffer
        copier.out(torch.full((4,), 7.0), again.view(torch.float32), after)
        copier.wait(came)
        assert torch.equal(target, torch.arange(4.0)) is right


class Stage(nn.Module):
    """Takes its time on a clock, forward and backward."""

    def __init__(self, copier: ClockCopier, seconds: float) -> None:
        super().__init__()
        self.weight, self.copier, self.seconds = nn.Parameter(torch.ones(4)), copier, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Timed.apply(x, self.weight, self.copier, self.seconds)


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, copier: ClockCopier, seconds: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.copier, ctx.seconds = copier, seconds
        copier.compute(seconds)
        return x * 2 + weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.saved_tensors  # noqa: B018 (waits for what it takes)
        ctx.copier.compute(2 * ctx.seconds)
        return 2 * gradient, gradient.sum(0), None, None


def waited(copy: float, horizon: int, layers: int = 8) -> float:
    """Seconds that computation waits when a block takes 1 s forward and 2 s backward, and a copy so many."""
    rows = 64
    copier = ClockCopier(rows * 4 * 4 / copy)
    blocks = nn.ModuleList(Stage(copier, 1.0) for _ in range(layers))
    offload_activations(blocks, horizon=horizon, min_tensor_size=1, copier=copier)
    x = torch.ones(rows, 4, requires_grad=True)
    for block in blocks:
        x = block(x)
    x.sum().backward()
    assert copier.now == pytest.approx(3.0 * layers + copier.waited)
    return copier.waited


def test_copies_hide_behind_computation() -> None:
    """One that takes as long as a block's forward pass costs nothing, one that takes longer only what it is longer."""
    assert waited(0.99, horizon=2) == 0.0
    assert waited(0.99, horizon=3) == 0.0
    slow = waited(1.5, horizon=2)  # 6 of 8 leave; the first of them while the second block computes, and so on
    assert slow == pytest.approx(0.5 * 6, abs=0.5)
    assert waited(0.99, horizon=1) == pytest.approx(2 * 0.99 * 7)  # nothing is beside a copy; the last one stays


def test_a_prefetch_that_is_late_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Offload, "_following", lambda self, block: iter(()))
    assert waited(0.99, horizon=2) > 5.0


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_block_inputs_on_the_device_are_counted(recompute: Any) -> None:
    """By the life of their memory, in a model of ours: at most as many as the horizon at any moment."""
    config = replace(MODEL, num_layers=6)
    for horizon in (1, 2, 4):
        parallel = ParallelConfig(
            offload_activations=True,
            activation_loading_horizon=horizon,
            recompute_granularity=recompute,
            min_offloaded_tensor_size=1,
        )
        with fake_context() as context:
            offload = LiveInputs(HostCopier(), horizon=horizon, min_tensor_size=0 if recompute == "full" else 1)
            model = build(context, config, parallel, offload)
            loss_of(model).backward()
        assert offload.most_inputs == horizon


class LiveInputs(Offload):
    """Counts the inputs of blocks whose memory is alive whenever one comes."""

    most_inputs = 0

    def around(self, block: nn.Module, run: Any) -> Any:
        inner, alive = super().around(block, run), self.__dict__.setdefault("alive", dict[int, Any]())

        def counted(x: torch.Tensor, *rest: Any) -> Any:
            self.note(x.untyped_storage())
            return inner(x, *rest)

        self.alive = alive
        return counted

    def note(self, storage: torch.UntypedStorage) -> None:
        self.alive[storage._cdata] = weakref.ref(storage)
        living = {key: reference for key, reference in self.alive.items() if reference() is not None}
        self.alive = living
        # the one that comes now takes its place when the block begins
        self.most_inputs = max(self.most_inputs, len(living) - (len(living) > self.horizon))

    def _fetch(self, block: Any) -> None:
        super()._fetch(block)
        first = next(iter(block.storages.values()))
        self.note(first.flat.untyped_storage())


def test_memory_of_the_host_does_not_grow_over_200_steps() -> None:
    blocks, offload = offloaded(HostCopier(), 2, recompute=True)
    gradients(blocks)
    held = offload.pool.nbytes
    gc.collect()
    objects = len(gc.get_objects())
    for _ in range(200):
        gradients(blocks, passes=1)
    assert offload.pool.nbytes == held > 0
    assert len(gc.get_objects()) < objects + 500
    assert len(offload.pool._free) * 2 * ROWS * WIDTH * 4 >= held


def test_a_pool_takes_no_more_buffers_than_were_used_at_once() -> None:
    """Whatever their sizes."""
    pool = HostPool(HostCopier())
    torch.manual_seed(0)
    for _ in range(200):
        sizes = torch.randint(1, 100_000, (4,)).tolist()
        taken = [pool.take(size)[0] for size in sizes]
        assert all(buffer.nbytes >= size for buffer, size in zip(taken, sizes, strict=True))
        for buffer in taken:
            pool.give(buffer, None)
    assert len(pool._free) == 4
    assert pool.nbytes <= 4 * 120_000


def test_what_is_no_activation_stays() -> None:
    """Weights, what blocks share, and what is smaller than the limit."""
    copier = HostCopier()
    blocks = blocks_of()
    offload_activations(blocks, min_tensor_size=ROWS * WIDTH + 1, copier=copier)
    gradients(blocks, passes=1)
    whole = 4 * ROWS * WIDTH * 4  # what is cut into gate and value
    # of a block: that, and sigmoid, sigmoid times value, their product; of all but the last two
    assert copier.bytes_back == (LAYERS - 2) * (whole + 3 * whole // 2)
    assert copier.bytes_out == (LAYERS - 1) * (whole + 3 * whole // 2)


def test_a_block_that_somebody_else_recomputes_is_refused() -> None:
    blocks = blocks_of(3)
    offload_activations(blocks, horizon=1, copier=HostCopier())
    x, table = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    with pytest.raises(RuntimeError, match="wrap what recomputes it"):
        torch.utils.checkpoint.checkpoint(blocks[0], x, table, use_reentrant=False)


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        z = y * y  # saves y
        y.add_(1.0)
        return z


def test_what_is_overwritten_after_it_was_saved_is_an_error() -> None:
    """As without offload."""
    blocks = nn.ModuleList(Overwriting() for _ in range(4))
    offload_activations(blocks, horizon=1, min_tensor_size=1, copier=HostCopier())
    x = torch.randn(ROWS, WIDTH)
    with pytest.raises(RuntimeError, match="written to in place"):
        for block in blocks:
            x = block(x)
        x.sum().backward()


def test_a_pass_without_backward_pass_gives_its_memory_back() -> None:
    blocks, offload = offloaded(HostCopier(), 1, recompute=True)
    x, table = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    for _ in range(3):
        y = x
        for block in blocks:
            y = block(y, table)
        del y
    assert not offload._live and not offload._passes
    assert len(offload.pool._free) == LAYERS
    with torch.no_grad():
        gradients_free = offload.copier.bytes_out
        for block in blocks:
            x = block(x, table)
    assert offload.copier.bytes_out == gradients_free


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="horizon 0"):
        offload_activations(blocks_of(1), horizon=0)
    with pytest.raises(ValueError, match="give device"):
        offload_activations([nn.Identity()])


@pytest.mark.gpu
@pytest.mark.parametrize(("horizon", "recompute"), CASES)
def test_streams_of_a_gpu_change_no_bit(horizon: int, recompute: bool) -> None:
    wanted = gradients(blocks_of(device="cuda"), passes=3)
    blocks = blocks_of(device="cuda")
    copier = CudaCopier(torch.device("cuda", 0))
    offload = offload_activations(blocks, horizon=horizon, recompute=recompute, min_tensor_size=1, copier=copier)
    assert equal(gradients(blocks, passes=3), wanted)
    held = offload.pool.nbytes
    for _ in range(200):
        gradients(blocks, passes=1)
    assert offload.pool.nbytes == held
    assert copier.bytes_out >= copier.bytes_back > 0
