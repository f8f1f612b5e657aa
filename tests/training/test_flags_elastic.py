"""Settings of runs whose nodes come and go, and of copies in the memory of nodes."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from smp.checkpoint.peers import own_folder
from smp.config.rules.elastic import OWN_STORES
from smp.training.faults import copies
from smp.training.faults.members import LEFT
from tests.training.flag_runs import Run, Watched, proves, run_here

COPIES = "--peer-snapshot-interval 2 --peer-snapshot-dir {0} --hidden-dropout 0.1 --train-iters 6 "


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launcher of one process of one node sets, without a store."""
    values = {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "1", OWN_STORES: "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    # The launcher is who has started these tests.
    monkeypatch.setattr(copies, "remove_with_launcher", lambda folder: None)


def started(tmp_path: Path, flags: str) -> Run:
    return run_here(tmp_path / "run", flags.format(tmp_path / "memory"))


@proves("peer_snapshot_interval", "peer_snapshot_dir")
@pytest.mark.usefixtures("under_torchrun")
def test_a_run_goes_on_from_the_memory_of_its_node_bit_for_bit(tmp_path: Path) -> None:
    whole = started(tmp_path / "whole", COPIES)
    first = started(tmp_path, COPIES + "--save ck --exit-interval 3")
    assert first.code == 0 and first.status["status"] == "requeue"
    assert "copies in memory: at most 0.000 GB of a process" in first.out
    second = started(tmp_path, COPIES + "--save ck")
    assert "resumed from the memory of the nodes at iteration 3" in second.out
    assert second.losses == whole.losses and len(second.tokens) == 3 * len(whole.tokens) // 6
    assert all(torch.equal(second.final[name], whole.final[name]) for name in whole.final)
    # What is done leaves a note only: a node that joins in that moment makes torchrun start the workers once more.
    assert [path.name for path in own_folder(tmp_path / "memory").iterdir()] == ["done"]
    again = started(tmp_path, COPIES + "--save ck")
    assert again.code == 0 and "done: nothing left to train: this job has ended at iteration 6" in again.out
    assert second.losses == whole.losses and not again.tokens


@pytest.mark.usefixtures("under_torchrun")
def test_the_newer_of_memory_and_disk_counts(tmp_path: Path) -> None:
    saves = COPIES + "--save ck --load auto "
    started(tmp_path, saves + "--exit-interval 3")
    both = started(tmp_path, saves + "--train-iters 4")
    assert "resumed from the memory of the nodes at iteration 3" in both.out
    shutil.rmtree(tmp_path / "memory")
    last = started(tmp_path, saves)
    assert "resumed from ck/iter_0000004 at iteration 4" in last.out


@pytest.mark.usefixtures("under_torchrun")
def test_a_newer_checkpoint_is_gone_on_from_without_being_asked(tmp_path: Path) -> None:
    """The copy says that this is torchrun's next try of the job that wrote it."""

    def dies(run: Watched) -> None:
        if run.iteration == 3:
            raise RuntimeError("a loose cable")

    flags = COPIES.format(tmp_path / "memory") + "--save ck --save-interval 3"
    with pytest.raises(RuntimeError, match="a loose cable"):
        run_here(tmp_path / "run", flags, each_step=dies)
    second = run_here(tmp_path / "run", flags)
    assert "--save ck holds iter_0000003, newer than the copy in memory of iteration 2" in second.out
    assert second.code == 0 and "resumed from ck/iter_0000003 at iteration 3" in second.out


@pytest.mark.usefixtures("under_torchrun")
def test_copies_of_a_launcher_that_is_gone_are_removed(tmp_path: Path) -> None:
    own = own_folder(tmp_path / "memory")
    gone, elsewhere = own.parent / "1234567-99", tmp_path / "memory" / f"smp-copies-{os.getuid()}-1" / "1234567-99"
    for folder in (own, gone, elsewhere):
        folder.mkdir(parents=True, exist_ok=True)
    own_folder(tmp_path / "memory")
    assert own.exists() and not gone.exists() and elsewhere.exists()  # of another table of processes


@pytest.mark.usefixtures("under_torchrun")
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    """Anybody may have made it in a memory that all use."""
    root = own_folder(tmp_path / "memory").parent
    root.chmod(0o777)
    run = started(tmp_path, COPIES)
    assert run.code == 2 and "is another user's, or open to others: remove it" in run.errors[0]
    root.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o700)
    root.symlink_to(tmp_path / "elsewhere")
    run = started(tmp_path, COPIES)
    assert run.code == 2 and "is another user's" in run.errors[0]


def test_copies_need_somebody_who_starts_workers_again(tmp_path: Path) -> None:
    run = started(tmp_path, COPIES)
    assert run.code == 2 and "--peer-snapshot-interval needs torchrun" in run.errors[0]


@proves("max_nodes", "min_nodes", "replica_increment_step")
@pytest.mark.usefixtures("under_torchrun")
def test_the_layouts_of_an_elastic_run_are_said(tmp_path: Path) -> None:
    """And when it is asked to stop, it ends so that its launcher starts it again."""
    run = started(tmp_path, "--max-nodes 5 --min-nodes 1 --replica-increment-step 2 --save ck --load auto")
    assert run.code == 0
    lines = [line for line in run.out.splitlines() if " nodes: dp_replicate" in line]
    assert [line.split(":")[0] for line in lines] == ["  1 nodes", "  3 nodes", "  5 nodes"]
    assert "1 nodes: dp_replicate 1 x dp_shard 1, micro-batches 2" in lines[0] and lines[0].endswith("(now)")
    assert "3 nodes: dp_replicate 1 x dp_shard 3, micro-batches 1" in lines[1]
    dry = started(tmp_path, "--max-nodes 5 --dry-run --save ck --load auto")
    assert dry.out.count(" nodes: dp_replicate") == 5
    few = started(tmp_path, "--max-nodes 5 --min-nodes 2 --save ck --load auto")
    assert few.code == 2 and "1 nodes of 1 processes are there, --min-nodes is 2" in few.errors[0]
    afresh = started(tmp_path, "--max-nodes 5 --save ck")
    assert afresh.code == 2 and "--max-nodes and --save need --load auto" in afresh.errors[0]


@pytest.mark.usefixtures("under_torchrun")
def test_who_is_asked_to_stop_ends_so_that_the_others_start_again(tmp_path: Path) -> None:
    flags = "--max-nodes 2 " + COPIES.format(tmp_path / "memory")
    run = run_here(tmp_path / "run", flags, each_step=lambda _: signal.raise_signal(signal.SIGTERM))
    assert run.code == LEFT and run.status["status"] == "requeue" and run.status["iteration"] == 1
    assert "resumed from the memory of the nodes at iteration 1" in run_here(tmp_path / "run", flags).out


@pytest.mark.usefixtures("under_torchrun")
def test_a_damaged_copy_is_not_gone_on_from(tmp_path: Path) -> None:
    """Nor is it the end: the newest checkpoint is."""

    def dies(run: Watched) -> None:
        if run.iteration == 5:
            raise RuntimeError("a loose cable")

    flags = COPIES.format(tmp_path / "memory") + "--save ck --save-interval 3"
    whole = started(tmp_path / "whole", COPIES)
    with pytest.raises(RuntimeError, match="a loose cable"):
        run_here(tmp_path / "run", flags, each_step=dies)
    (file,) = own_folder(tmp_path / "memory").glob("iter_0000004-*/shard_00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-7] ^= 4
    file.write_bytes(data)
    second = run_here(tmp_path / "run", flags)
    assert "WARNING: the copy in memory cannot be read: " in second.out
    assert "resumed from ck/iter_0000003 at iteration 3" in second.out
    assert second.code == 0 and second.losses[-3:] == whole.losses[-3:]
