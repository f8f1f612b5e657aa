"""tools/checkpoint.py, as a user calls it, on checkpoints of real runs."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from smp.checkpoint import commit_latest, load, read_manifest, save
from smp.checkpoint import rewrite as rewrite_module
from smp.checkpoint.box import read_box
from smp.checkpoint.entries import Manifest, TensorEntry
from smp.checkpoint.local import open_folder
from smp.checkpoint.lock import RunLock
from smp.checkpoint.rewrite import cut
from tests.distributed import run_distributed
from tests.training.flag_runs import run_here
from tools.checkpoint import main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four checkpoints of a run of one process."""
    made = run_here(
        tmp_path_factory.mktemp("tool"), "--train-iters 4 --save ck --save-interval 1 --eval-interval 1 --eval-iters 1"
    )
    assert made.code == 0, made.err
    return made.folder / "ck"


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"w": torch.randn(37, 5), "b": torch.randn(11), "n": torch.tensor(3.0), "empty": torch.empty(0, 4)}


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    save(tensors(), tmp_path / "small", extra={"lr": 0.1})
    return tmp_path / "small"


def test_ls_shows_checkpoints_and_tensors(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[0].startswith("checkpoint") and "latest" in lines[4] and "complete" in lines[1]
    assert main(["ls", str(run / "iter_0000002"), "--json"]) == 0
    rows = {row["tensor"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["model.layers.0.mlp.up.weight"] == {
        "tensor": "model.layers.0.mlp.up.weight",
        "dtype": "F32",
        "shape": "64x32",
        "shards": 1,
        "bytes": 4 * 64 * 32,
    }


def test_ls_tells_what_is_not_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        save(tensors(), tmp_path / f"iter_000000{number}", extra={})
    (tmp_path / "iter_0000001" / "manifest.json").unlink()
    flip(tmp_path / "iter_0000002" / "manifest.json")
    (tmp_path / "damaged_iter_0000003").mkdir()
    assert main(["ls", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "iter_0000001          incomplete" in out and "damaged: " in out
    assert "damaged_iter_0000003  set aside" in out
    assert main(["ls", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("workers", ["1", "3"])
def test_verify_names_the_tensor_that_is_damaged(small: Path, capsys: pytest.CaptureFixture[str], workers: str) -> None:
    assert main(["verify", str(small), "--workers", workers]) == 0
    assert capsys.readouterr().out == f"{small}: whole\n"
    flip(small / "shard_00000.safetensors")
    assert main(["verify", str(small), "--workers", workers]) == 1
    assert "shard_00000.safetensors: the data of tensor " in capsys.readouterr().out
    shorten(small / "shard_00000.safetensors")
    assert main(["verify", str(small)]) == 1


def test_verify_all_goes_through_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run), "--all"]) == 0
    assert capsys.readouterr().out.count(": whole") == 4


def save_in_layout(rank: int, world: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    save({name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in tensors().items() if t.ndim}, folder, extra={})


def test_diff_compares_across_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("two", "three")]
    for world, path in zip((2, 3), paths, strict=True):
        run_distributed(save_in_layout, world, path)
    assert [len(read_manifest(path).tensors["w"].shards) for path in paths] == [2, 3]
    assert main(["diff", *paths]) == 0
    assert capsys.readouterr().out == "equal: 3 tensors\n"


def test_diff_tells_tensors_and_settings(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tensors()
    other["w"][36, 4] += 0.5
    other["b"] = torch.randn(12)
    other["new"] = other.pop("n")
    save(other, tmp_path / "other", extra={"lr": 0.2})
    assert main(["diff", str(small), str(tmp_path / "other")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"only in {small}: n" in lines and f"only in {tmp_path / 'other'}: new" in lines
    assert "b: F32 [11] and F32 [12]" in lines and "extra lr: 0.1 and 0.2" in lines
    assert any(line.startswith("w: largest difference 0.5, relative ") for line in lines)
    assert main(["diff", str(small), str(small)]) == 0
    assert capsys.readouterr().out == "equal: 4 tensors\n"


def test_diff_passes_what_is_close_enough(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    near = {name: tensor + 1e-4 for name, tensor in tensors().items()}
    save(near, tmp_path / "near", extra={"lr": 0.1})
    paths = [str(small), str(tmp_path / "near")]
    assert main(["diff", *paths]) == 1 and main(["diff", *paths, "--atol", "1e-5"]) == 1
    assert main(["diff", *paths, "--atol", "1.1e-4"]) == 0 and main(["diff", *paths, "--rtol", "1e-3"]) == 0
    nan = tensors()
    nan["w"][0, 0] = float("nan")
    save(nan, tmp_path / "nan", extra={"lr": 0.1})
    assert main(["diff", str(small), str(tmp_path / "nan"), "--atol", "1e9", "--rtol", "1e9"]) == 1
    assert main(["diff", str(tmp_path / "nan"), str(tmp_path / "nan")]) == 0


def test_cat_shows_a_selection(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cat", str(small)]) == 0
    assert json.loads(capsys.readouterr().out) == {"lr": 0.1}
    assert main(["cat", str(small), "w[2:4,-1]"]) == 0
    lines = capsys.readouterr().out.splitlines()
    wanted = tensors()["w"][2:4, -1:]
    assert lines[0] == "w: F32 [37, 5], shown [2, 1]"
    assert f"max {wanted.max():.6g}" in lines[1] and lines[2] == "NaN 0  infinite 0"
    assert lines[3:] == str(wanted).splitlines()
    for wrong in ("absent", "w[1,2,3]", "w[::2]", "w[x]"):
        assert main(["cat", str(small), wrong]) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_prune_follows_the_rules_of_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, loss in enumerate([3.0, 1.0, 2.0, 4.0, 5.0], start=1):
        folder = tmp_path / f"iter_000000{number}"
        save(tensors(), folder, extra={"validation_loss": loss})
        commit_latest(tmp_path, folder)
    flags = ["prune", str(tmp_path), "--keep-last-k", "2", "--keep-best-k", "1"]
    names = lambda: sorted(path.name for path in tmp_path.glob("iter_*"))  # noqa: E731
    assert main([*flags, "--dry-run"]) == 0 and len(names()) == 5
    assert "would remove" in capsys.readouterr().out
    lock = RunLock(open_folder(str(tmp_path)), print)
    assert main(flags) == 2 and len(names()) == 5
    assert "is in use by process" in capsys.readouterr().err
    lock.release()
    assert main(flags) == 0
    assert names() == ["iter_0000002", "iter_0000004", "iter_0000005"]
    assert not (tmp_path / "lock").exists()
    assert main(["prune", str(tmp_path), "--keep-last-k", "1"]) == 2


@pytest.mark.parametrize("files", [1, 3, 100])
def test_reshard_keeps_every_bit(small: Path, tmp_path: Path, files: int, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "target"
    assert main(["reshard", str(small), str(target), "--files", str(files)]) == 0
    manifest = read_manifest(target)
    assert len(manifest.files) <= files and (files == 1 or len(manifest.files) > 1)
    assert manifest.extra == {"lr": 0.1}
    into = {name: torch.full_like(tensor, 9.0) for name, tensor in tensors().items()}
    load(into, target)
    assert all(torch.equal(into[name], tensor) for name, tensor in tensors().items())
    assert main(["verify", str(target)]) == 0 and main(["diff", str(small), str(target)]) == 0
    capsys.readouterr()
    assert main(["reshard", str(small), str(target)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_reshard_of_a_damaged_checkpoint_leaves_nothing(small: Path, tmp_path: Path) -> None:
    flip(small / "shard_00000.safetensors")
    assert main(["reshard", str(small), str(tmp_path / "target"), "--files", "2"]) == 2
    assert not (tmp_path / "target").exists()


def test_reshard_holds_one_piece_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 MB in 8 files: no more than a piece, 3 MB, is asked for at once, and little else is allocated by Python."""
    state = {f"w{i}": torch.randn(1000, 1000) for i in range(6)}
    save(state, tmp_path / "big", extra={})
    sizes: list[int] = []

    def watched(*args: object) -> torch.Tensor:
        tensor = read_box(*args)  # type: ignore[arg-type]
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(rewrite_module, "read_box", watched)
    tracemalloc.start()
    assert main(["reshard", str(tmp_path / "big"), str(tmp_path / "small"), "--files", "8"]) == 0
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(sizes) == 24_000_000 and max(sizes) <= 3_000_000 and peak < 3_000_000


def test_cut_covers_every_row_once() -> None:
    shapes = {"a": (7, 3), "scalar": (), "none": (0, 2), "wide": (1, 50), "b": (40,)}
    manifest = Manifest({name: TensorEntry(shape, "F32", ()) for name, shape in shapes.items()}, {}, {})
    for files in range(1, 9):
        pieces = list(cut(manifest, files))
        assert len(pieces) <= files and all(pieces)
        for name, shape in shapes.items():
            ranges = [(first, count) for of_file in pieces for n, first, count in of_file if n == name]
            rows = [row for first, count in ranges for row in range(first, first + count)]
            assert rows == list(range(shape[0] if shape else 1)) and ranges
