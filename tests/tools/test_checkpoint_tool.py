"""tools/checkpoint.py, as a user calls it, on checkpoints of real runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import termios
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from smp.checkpoint import commit_latest, load, read_manifest, save
from smp.checkpoint import rewrite as rewrite_module
from smp.checkpoint.folders.folder import open_folder
from smp.checkpoint.folders.lock import RunLock
from smp.checkpoint.format.entries import Manifest, TensorEntry
from smp.checkpoint.rewrite import cut
from smp.checkpoint.tensor_slices import read_region_into
from tests.checkpoint.test_folder import rewrite as rewrite_manifest
from tests.distributed import run_distributed
from tests.training.flag_runs import run_here
from tools.checkpoint import main

ROOT = Path(__file__).parents[2]


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
    assert main(["ls", str(run / "iter_0000002")]) == 0 and "  64x32  " in capsys.readouterr().out
    assert main(["ls", str(run / "iter_0000002"), "--json"]) == 0
    rows = {row["tensor"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["model.layers.0.mlp.up.weight"] == {
        "tensor": "model.layers.0.mlp.up.weight",
        "dtype": "F32",
        "shape": [64, 32],
        "shards": 1,
        "bytes": 4 * 64 * 32,
    }


def test_ls_tells_what_is_not_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        save(tensors(), tmp_path / f"iter_000000{number}", extra={})
    (tmp_path / "iter_0000001" / "manifest.json").unlink()
    flip(tmp_path / "iter_0000002" / "manifest.json")
    (tmp_path / "damaged_iter_0000003").mkdir()
    assert main(["ls", str(tmp_path)]) == 1
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
    assert main(["verify", str(run / "iter_0000002"), "--all"]) == 2
    assert capsys.readouterr().err.endswith("iter_0000002 is one checkpoint: --all is for the folder of a run\n")


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


def test_diff_tells_settings_from_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other settings are no difference, whatever a tensor is called."""
    for name, value in (("a", 0), ("b", 1)):
        save({"extra w": torch.zeros(2)}, tmp_path / name, extra={"lr": value})
        save({"extra w": torch.full((2,), float(value))}, tmp_path / f"other {name}", extra={})
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == "extra lr: 0 and 1\nequal: 1 tensors\n"
    assert main(["diff", str(tmp_path / "other a"), str(tmp_path / "other b")]) == 1
    assert capsys.readouterr().out.startswith("extra w: largest difference 1")


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


def test_diff_of_damaged_data_is_none(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(small, whole)
    flip(small / "shard_00000.safetensors")
    for paths in ((small, whole), (whole, small)):
        assert main(["diff", *map(str, paths)]) == 1
        assert "do not match their checksum" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float64])
def test_diff_finds_a_nan_equal_to_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype
) -> None:
    save({"w": torch.full((3,), NAN).to(dtype)}, tmp_path / "x", extra={})
    assert main(["diff", str(tmp_path / "x"), str(tmp_path / "x")]) == 0
    assert capsys.readouterr().out == "equal: 1 tensors\n"


def test_cat_shows_a_selection(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cat", str(small)]) == 0
    assert json.loads(capsys.readouterr().out) == {"lr": 0.1}
    assert main(["cat", str(small), "w[2:4,-1]"]) == 0
    lines = capsys.readouterr().out.splitlines()
    wanted = tensors()["w"][2:4, -1:]
    assert lines[0] == "w: F32 [37, 5], shown [2, 1]"
    assert f"max {wanted.max():.6g}" in lines[1] and lines[2] == "NaN 0  infinite 0"
    assert lines[3:] == str(wanted).splitlines()
    assert main(["cat", str(small), "w[-37,4]"]) == 0 and f"max {tensors()['w'][0, 4]:.6g}" in capsys.readouterr().out
    no_selections = ("w[x]", "w[]", "w[--1]", "w[1 2]", "w[,0]")
    for wrong in ("absent", *no_selections, "w[1,2,3]", "w[::2]", "w[37]", "w[-38]", "w[0,5]"):
        assert main(["cat", str(small), wrong]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and "int()" not in said
        assert ("has no tensor" in said) == (wrong in ("absent", *no_selections))


def test_prune_follows_the_rules_of_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, loss in enumerate([3.0, 1.0, 2.0, 4.0, 5.0], start=1):
        folder = tmp_path / f"iter_000000{number}"
        save(tensors(), folder, extra={"validation_loss": loss})
        commit_latest(tmp_path, folder)
    flags = ["prune", str(tmp_path), "--keep-last-k", "2", "--keep-best-k", "1"]
    names = lambda: sorted(path.name for path in tmp_path.glob("iter_*"))  # noqa: E731
    assert main([*flags, "--dry-run"]) == 0 and len(names()) == 5
    said = capsys.readouterr().out
    assert "would remove" in said and said.endswith("GB; iter_0000005, iter_0000004, iter_0000002 left\n")
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
    assert "not copied" not in capsys.readouterr().out
    assert main(["verify", str(target)]) == 0 and main(["diff", str(small), str(target)]) == 0
    capsys.readouterr()
    assert main(["reshard", str(small), str(target)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_reshard_gives_no_iteration_the_name_of_another(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No run goes on from a folder where it lies."""
    assert main(["reshard", str(run / "iter_0000002"), str(tmp_path / "iter_0000099")]) == 2
    said = (
        f"error: {tmp_path}/iter_0000099 would hold iteration 2: give the copy that one's name, or none of an iteration"
    )
    assert capsys.readouterr().err.strip() == said and not list(tmp_path.iterdir())
    assert main(["reshard", str(run / "iter_0000002"), str(tmp_path / "iter_0000002")]) == 0


def test_reshard_names_what_it_leaves(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (small / "hf").mkdir()
    (small / "shard_00000.safetensors.json").touch()  # a background save's own
    assert main(["reshard", str(small), str(tmp_path / "target")]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["not copied, because it is no part of the checkpoint: hf"]


def test_reshard_of_a_damaged_checkpoint_leaves_nothing(small: Path, tmp_path: Path) -> None:
    flip(small / "shard_00000.safetensors")
    assert main(["reshard", str(small), str(tmp_path / "target"), "--files", "2"]) == 1
    assert not (tmp_path / "target").exists()


def test_reshard_holds_one_piece_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 MB in 8 files: each, 3 MB, is read into the same memory, and little else is allocated by Python."""
    state = {f"w{i}": torch.randn(1000, 1000) for i in range(6)}
    save(state, tmp_path / "big", extra={})
    sizes: list[int] = []

    def watched(*args: Any) -> None:
        read_region_into(*args)
        sizes.append(args[-1].untyped_storage().nbytes())

    monkeypatch.setattr(rewrite_module, "read_region_into", watched)
    tracemalloc.start()
    assert main(["reshard", str(tmp_path / "big"), str(tmp_path / "small"), "--files", "8"]) == 0
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(sizes) > 8 and max(sizes) <= 3_000_000 and peak < 3_000_000


def test_cut_covers_every_row_once() -> None:
    shapes = {"a": (7, 3), "scalar": (), "none": (0, 2), "wide": (1, 50), "b": (40,)}
    manifest = Manifest({name: TensorEntry(shape, "F32", ()) for name, shape in shapes.items()}, {}, {})
    for files in range(1, 9):
        pieces = list(cut(manifest, files))
        assert len(pieces) <= files and all(pieces)
        for name, shape in shapes.items():
            ranges = [(item.first, item.count) for of_file in pieces for item in of_file if item.name == name]
            rows = [row for first, count in ranges for row in range(first, first + count)]
            assert rows == list(range(shape[0] if shape else 1)) and ranges


def both(tmp_path: Path, left: torch.Tensor, right: torch.Tensor) -> list[str]:
    """Two checkpoints of one tensor each, as arguments."""
    made = len(list(tmp_path.iterdir()))
    paths = [str(tmp_path / f"{made}{side}") for side in "ab"]
    for path, tensor in zip(paths, (left, right), strict=True):
        save({"w": tensor}, path, extra={})
    return ["diff", *paths]


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("dtype", "left", "right", "largest"),
    [
        (torch.int64, 2**60, 2**60 + 1, "1"),  # one number in double precision
        (torch.int64, -(2**63), 2**63 - 1, "1.84e+19"),
        (torch.uint8, 3, 255, "252"),
        (torch.bool, True, False, "1"),
        (torch.float32, 0.0, -0.0, "0"),
        (torch.float32, 1.0, 1.5, "0.5"),
        (torch.float64, NAN, 1.0, "inf"),
        (torch.float64, -INF, INF, "inf"),
        (torch.bfloat16, 1.0, INF, "inf"),
        (torch.float8_e4m3fn, 1.0, 1.125, "0.125"),
    ],
)
def test_diff_calls_nothing_equal_that_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype, left: float, right: float, largest: str
) -> None:
    common = torch.tensor([1, 0, 1]).to(dtype)
    sides = [torch.cat([common, torch.tensor([value]).to(dtype)]) for value in (left, right)]
    assert main(both(tmp_path, *sides)) == 1
    assert capsys.readouterr().out.startswith(f"w: largest difference {largest}, relative ")
    if not dtype.is_floating_point:
        assert main([*both(tmp_path, *sides), "--atol", "1e30", "--rtol", "1e30"]) == 1


def test_diff_leaves_out_what_has_equal_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = torch.tensor([-INF, NAN, INF, 3.0, 4.0])
    right = left.clone()
    right[4] += 0.5
    flags = both(tmp_path, left, right)
    assert main(flags) == 1
    assert capsys.readouterr().out == "w: largest difference 0.5, relative 0.1\n"
    assert main([*flags, "--atol", "0.5"]) == 0 and main([*flags, "--rtol", "0.11"]) == 0
    assert main(both(tmp_path, left, left)) == 0


@pytest.mark.parametrize("flag", ["--atol=nan", "--atol=-1", "--rtol=nan", "--rtol=-0.1", "--atol=x"])
def test_diff_refuses_tolerances_that_are_none(small: Path, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(small), str(small), flag]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {flag[:6]}: ") and error.count("\n") == 1


def lie(folder: Path) -> None:
    """A tensor of four million gigabytes, in a file of that size, says a manifest whose checksum is right."""

    def change(content: dict[str, Any]) -> None:
        content["files"]["shard_00000.safetensors"] = 2**60
        entry = content["tensors"]["b"]
        entry["shape"] = entry["shards"][0]["sizes"] = [2**50]

    rewrite_manifest(folder, change)


COMMANDS = {
    "verify": "verify {x}",
    "cat": "cat {x} b",
    "cat a slice": "cat {x} b[2:5]",
    "diff": "diff {x} {good}",
    "diff with": "diff {good} {x}",
    "reshard": "reshard {x} {new}",
}
DAMAGES = {
    "manifest": lambda folder: flip(folder / "manifest.json"),
    "data": lambda folder: corrupt(folder, "b"),
    "cut": lambda folder: shorten(folder / "shard_00000.safetensors"),
    "missing": lambda folder: (folder / "shard_00000.safetensors").unlink(),
    "sizes": lie,
}


def corrupt(folder: Path, name: str) -> None:
    """A bit of a tensor's data."""
    path = folder / "shard_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[content.index(tensors()[name].numpy().tobytes())] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("in_run", [False, True])
def test_damage_is_exit_code_1_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, damage: str, in_run: bool
) -> None:
    for name in ("run/iter_0000001", "good"):
        save(tensors(), tmp_path / name, extra={})
    DAMAGES[damage](tmp_path / "run/iter_0000001")
    paths = {"x": tmp_path / ("run" if in_run else "run/iter_0000001"), "good": tmp_path / "good"}
    assert main(COMMANDS[command].format(**paths, new=tmp_path / "new").split()) == 1
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if " GB/s" not in line]
    assert len(lines) == 1 and "iter_0000001/" in lines[0] and "Traceback" not in said.err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_in_the_command_is_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    save(tensors(), tmp_path / "good", extra={})
    paths = {"x": tmp_path / "absent", "good": tmp_path / "good", "new": tmp_path / "new"}
    assert main(COMMANDS[command].format(**paths).split()) == 2
    assert "error: no checkpoint folder" in capsys.readouterr().err


def test_verify_tells_a_checkpoint_under_another_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tensors(), tmp_path / "iter_0000010", extra={"progress": {"iteration": 10}})
    assert main(["verify", str(tmp_path)]) == 0
    (tmp_path / "iter_0000010").rename(tmp_path / "iter_0000020")
    capsys.readouterr()
    assert main(["verify", str(tmp_path)]) == 1
    assert "iter_0000020 holds iteration 10" in capsys.readouterr().out


def test_prune_leaves_what_is_damaged_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(1, 5):
        save(tensors(), tmp_path / f"iter_000000{number}", extra={})
    flip(tmp_path / "iter_0000003/manifest.json")
    size = sum(path.stat().st_size for path in (tmp_path / "iter_0000001").iterdir())
    for flags in (["--dry-run"], []):
        assert main(["prune", str(tmp_path), "--keep-last-k", "2", *flags]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 3 and lines[0].startswith(f"WARNING: {tmp_path}/iter_0000003/manifest.json: ")
        assert lines[2] == f"1 checkpoints, {size / 1e9:.3f} GB; iter_0000004, iter_0000003, iter_0000002 left"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"iter_000000{number}" for number in (2, 3, 4)]


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_prune_refuses_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    save(tensors(), tmp_path / "iter_0000001", extra={})
    before = sorted(tmp_path.rglob("*"))
    for path in (tmp_path / "absent", tmp_path / "iter_0000001"):
        assert main(["prune", str(path), "--keep-last-k", "2", *flags]) == 2
        assert "is not the folder of a run" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_cat_shows_what_torch_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of tensors that torch prints in part, of which only the corners are kept."""
    torch.manual_seed(1)
    state = {
        "short": torch.randn(9, 7),
        "long": torch.randn(5000),
        "wide": torch.randn(2, 3000),
        "deep": torch.randn(8, 7, 6, 9).to(torch.bfloat16),
        "whole": torch.arange(10_000).view(100, 100),
        "flags": torch.rand(70, 70) > 0.5,
        "eight": torch.randn(50, 50).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "nan": torch.tensor([1.0, NAN, -INF]),
    }
    save(state, tmp_path / "x", extra={})
    for name, tensor in state.items():
        assert main(["cat", str(tmp_path / "x"), name]) == 0
        lines = capsys.readouterr().out.splitlines()
        torch.set_printoptions(precision=6, linewidth=120, threshold=1000)
        assert lines[3 if tensor.numel() else 1 :] == str(tensor).splitlines(), name
        numbers = tensor.double()
        if tensor.numel() and name != "nan":
            assert f"min {numbers.min():.6g}  max {numbers.max():.6g}" in lines[1]
            mean, norm = float(lines[1].split("mean ")[1].split()[0]), float(lines[1].split("norm ")[1])
            assert mean == pytest.approx(numbers.mean().item(), rel=1e-4, abs=1e-9)
            assert norm == pytest.approx(numbers.norm().item(), rel=1e-4)
    assert main(["cat", str(tmp_path / "x"), "wide[1:2,10:2000]"]) == 0
    assert capsys.readouterr().out.splitlines()[3:] == str(state["wide"][1:2, 10:2000]).splitlines()
    assert main(["cat", str(tmp_path / "x"), "nan"]) == 0
    assert "min nan  max nan" in capsys.readouterr().out
    torch.set_printoptions(profile="default")


MEMORY = """
import contextlib, io, shutil, sys
import smp.checkpoint.format.tensor_file
from tools.checkpoint import main
smp.checkpoint.format.tensor_file.LARGEST_SHARD = 48_000_000
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1e3
for words in ("verify {0}/a", "cat {0}/a w", "cat {0}/a w[:,5:7]", "diff {0}/a {0}/b", "reshard {0}/a {0}/c"):
    for timed in (False, True):
        shutil.rmtree(sys.argv[1] + "/c", ignore_errors=True)
        path = sys.argv[1] if timed else sys.argv[1] + "/small"
        open("/proc/self/clear_refs", "w").write("5")
        before = peak()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main(words.format(path).split())
    print(words.split()[0], peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="asks the system for the most memory used")
def test_memory_is_bounded_by_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of 48 MB in bf16, which are 192 MB each in double precision; what one call costs at all, a small checkpoint
    shows."""
    monkeypatch.setattr("smp.checkpoint.format.tensor_file.LARGEST_SHARD", 48_000_000)
    for folder, rows in ((tmp_path, 48_000), (tmp_path / "small", 10)):
        w = torch.randn(rows, 1000).bfloat16()
        save({"w": w}, folder / "a", extra={})
        w[3] += 1
        save({"w": w}, folder / "b", extra={})
    result = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    used = [(line.split()[0], float(line.split()[1])) for line in result.stdout.splitlines()]
    assert [command for command, _ in used] == ["verify", "cat", "cat", "diff", "reshard"]
    for command, megabytes in used:
        assert megabytes < (30 if command in ("verify", "cat") else 48 + 30), used


def test_progress_and_speed_are_shown(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run)]) == 0
    assert re.search(r"^iter_0000004: 0\.\d{3} GB in \d+\.\d\d s, \d+\.\d\d GB/s$", capsys.readouterr().err, re.M)
    assert main(["diff", str(run), str(run)]) == 0 and "comparing: " in capsys.readouterr().err
    assert main(["reshard", str(run), str(tmp_path / "x")]) == 0 and "rewriting: " in capsys.readouterr().err


def test_a_terminal_gets_a_bar(small: Path) -> None:
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    command = [sys.executable, "-m", "tools.checkpoint", "verify", str(small)]
    result = subprocess.run(command, stderr=theirs, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(theirs)
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert result.stdout == f"{small}: whole\n" and "small: 100%|" in shown and "GB/s" in shown
