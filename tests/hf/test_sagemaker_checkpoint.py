"""SMP v2's functions for checkpoints, in one process. With several ranks: ``test_fsdp1.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

import smp
from smp.checkpoint import CheckpointError
from smp.config import ConfigError
from smp.hf.sagemaker.checkpoint import (
    SORT_BY_LAST_INT,
    DistributedFileSystemReader,
    DistributedFileSystemWriter,
    async_save,
    limit_num_subdirs,
    load,
    maybe_finalize_async_calls,
    save,
)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    smp.init({})
    yield
    smp.state.reset()
    torch.distributed.destroy_process_group()


def _content(value: float) -> dict[str, Any]:
    scheduler = {"rate": value, "steps": [1, 2], "last": {"epoch": int(value)}}
    return {"model": {"w": torch.full((3,), value)}, "scheduler": scheduler, "count": np.int64(value)}


def test_nested_state_comes_back(tmp_path: Path) -> None:
    save(_content(4.0), checkpoint_id=tmp_path / "run-3steps/tp2-1/ep4-0", planner=DefaultSavePlanner())
    assert (tmp_path / "run-3steps/manifest.json").exists() and not (tmp_path / "run-3steps/tp2-1").exists()
    found = _content(0.0)
    reader = DistributedFileSystemReader(tmp_path / "run-3steps/tp0_ep0_fsdp1")
    load(found, storage_reader=reader, planner=DefaultLoadPlanner(), process_group=None, coordinator_rank=0)
    assert torch.equal(found.pop("model")["w"], torch.full((3,), 4.0))
    assert found == {"scheduler": _content(4.0)["scheduler"], "count": 4}
    part = {"count": 0, "scheduler": {"last": {"epoch": 0}}}
    load(part, checkpoint_id=tmp_path / "run-3steps")
    assert part == {"count": 4, "scheduler": {"last": {"epoch": 4}}}


def test_what_a_folder_lacks(tmp_path: Path) -> None:
    save(_content(4.0), storage_writer=DistributedFileSystemWriter(tmp_path / "a"))
    with pytest.raises(CheckpointError, match="has no scheduler/other"):
        load({"scheduler": {"other": 1}}, checkpoint_id=tmp_path / "a")
    with pytest.raises(CheckpointError, match="model/v"):
        load({"model": {"v": torch.zeros(3)}}, checkpoint_id=tmp_path / "a")
    found = {"scheduler": {"other": 1, "rate": 0.0}, "model": {"v": torch.zeros(3)}}
    load(found, checkpoint_id=tmp_path / "a", check_keys_matched=False)
    assert found["scheduler"] == {"other": 1, "rate": 4.0}


def test_a_save_without_a_queue(tmp_path: Path) -> None:
    async_save(_content(1.0), checkpoint_id=tmp_path / "a", wait_error_handling=False, force_check_all_plans=False)
    assert maybe_finalize_async_calls(blocking=True) == [0]
    assert maybe_finalize_async_calls(blocking=False) == []
    smp.state.checkpoint_queue.saver.close()


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ({"a": object()}, {}, r"a \(object\) is neither a tensor nor JSON"),
        ({"a/b": 1, "a": {"b": 2}}, {}, "two values are named a/b"),
        ({"a": 1}, {"planner": object()}, "planner=object: smp.checkpoint plans itself"),
        ({"a": 1}, {"s3_region": "here"}, "s3_region: what a store needs comes from the environment"),
        ({"a": 1}, {"checkpoint_id": None}, "give checkpoint_id"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, content: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        save(content, **({"checkpoint_id": tmp_path} | options))
    assert "\n" not in str(caught.value)


def test_old_folders_are_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("m-2steps", "m-10steps", "m-9steps", "other"):
        (tmp_path / name).mkdir()
    assert SORT_BY_LAST_INT("llama3-12steps") == 12
    assert limit_num_subdirs(tmp_path, 2, regex=r"^.*\d+steps$", log=False) == []
    assert limit_num_subdirs(tmp_path, 2, sort_fn=SORT_BY_LAST_INT, regex=r"^.*\d+steps$") == ["m-2steps"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m-10steps", "m-9steps", "other"]
    assert "deleted" in capsys.readouterr().out
    assert limit_num_subdirs(tmp_path / "nowhere", 2) == []
    with pytest.raises(ConfigError, match="max_num_subdirs 0: at least 1"):
        limit_num_subdirs(tmp_path, 0)
