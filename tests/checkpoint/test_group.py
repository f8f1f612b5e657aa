"""Some ranks save, by a process group of theirs; all can load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from smp.checkpoint import AsyncSaver, CheckpointError, async_save, load, save
from tests.distributed import run_distributed


def _content(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((4, 2), value), "b": torch.full((3,), value + 1)}


def _saved(rank: int, world_size: int, folder: str) -> list[Any]:
    group = dist.new_group([1, 2])
    if rank in (1, 2):
        save(_content(1.0), f"{folder}/now", extra={"rank": rank}, group=group)
        with AsyncSaver(group=group) as saver:
            async_save(_content(2.0), f"{folder}/later", saver=saver, extra={})
            assert saver.wait() is not None
            bad = {"a": torch.zeros(2 + rank)}  # another shape on each
            with pytest.raises(CheckpointError, match="cannot save"):
                async_save(bad, f"{folder}/bad", saver=saver, extra={})
    dist.barrier()
    found = [_content(0.0), _content(0.0)]
    extra = [load(content, f"{folder}/{name}") for content, name in zip(found, ("now", "later"), strict=True)]
    return [extra[0]["rank"], *(float(content[name].mean()) for content in found for name in ("a", "b"))]


def test_the_ranks_of_a_group_save(tmp_path: Path) -> None:
    assert run_distributed(_saved, 3, str(tmp_path)) == [[1, 1.0, 2.0, 2.0, 3.0]] * 3
    assert not (tmp_path / "bad" / "manifest.json").exists()
