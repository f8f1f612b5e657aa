"""State on a GPU: saved, saved in the background through page-locked memory, loaded whole and in other cuts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from smp.checkpoint import AsyncSaver, async_save, load, save, verify

pytestmark = pytest.mark.gpu


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {f"w{i}": torch.randn(300 + i, 1000, generator=generator) for i in range(4)}
    made |= {
        "half": torch.randn(77, 5, generator=generator).bfloat16(),
        "count": torch.tensor(7),
        "none": torch.ones(0),
    }
    return {name: tensor.cuda() for name, tensor in made.items()} | {"on the CPU": torch.arange(5)}


def check(folder: Path) -> None:
    expected = state()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load(loaded, folder)
    assert verify(folder) == []
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_save_and_load(tmp_path: Path) -> None:
    save(state(), tmp_path / "x", extra={})
    check(tmp_path / "x")


def test_the_background_copy_is_complete_when_it_returns(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        for n in range(3):
            live = state()
            async_save(live, tmp_path / str(n), saver=saver, extra={})
            for tensor in live.values():
                tensor.zero_()
        saver.wait()
    for n in range(3):
        check(tmp_path / str(n))


def test_transposed_memory(tmp_path: Path) -> None:
    """Neither written nor read in one piece."""
    save({"w": torch.arange(12.0).view(3, 4).cuda().t()}, tmp_path / "x", extra={})
    target = torch.zeros(3, 4).cuda().t()
    load({"w": target}, tmp_path / "x")
    assert torch.equal(target.cpu(), torch.arange(12.0).view(3, 4).t())


def test_what_the_caller_began_on_its_stream_comes_first(tmp_path: Path) -> None:
    """Threads copy on streams of their own."""
    save({"w": torch.ones(1000, 1000)}, tmp_path / "x", extra={})
    with torch.cuda.stream(torch.cuda.Stream()):
        target = torch.empty(1000, 1000, device="cuda")
        torch.cuda._sleep(500_000_000)  # clock cycles: tenths of a second
        target.zero_()
        load({"w": target}, tmp_path / "x")
    torch.cuda.synchronize()
    assert target.eq(1).all()
