"""Damaged, incomplete and foreign input: one line that names file and tensor, and nothing under the target's name."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import pickle
import resource
import shutil
import signal
import zipfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from smp.checkpoint import CheckpointError
from smp.checkpoint.folders.local import LocalFolder
from smp.checkpoint.folders.local import _LocalSource as LocalSource
from smp.convert.formats import FORMATS
from smp.convert.megatron.read import INERT, _MetadataUnpickler
from smp.convert.megatron.torch_file import Inert, read_torch_file
from tests.convert.tiny import save_theirs
from tools import convert_checkpoint, merge_lora
from tools.convert_checkpoint import main

pytest.importorskip("transformers")
Change = Callable[[Path], None]
FIRST = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_theirs("llama3", tmp_path_factory.mktemp("hf") / "whole", shard="20KB")


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    code = main([str(word) for word in words])
    return code, capsys.readouterr().err


def refused(
    capsys: pytest.CaptureFixture[str], source: Path, *parts: str, flags: tuple[str, ...] = (), exit_code: int = 2
) -> str:
    """The error line of a conversion, which leaves nothing under the target's name. Damage is exit code 1."""
    target = source.with_name("target")
    code, error = run(capsys, "--load", source, "--save", target, *flags)
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert code == exit_code and len(lines) == 1 and not target.exists()
    for part in parts:
        assert part in lines[0], lines[0]
    return lines[0]


def file_of(folder: Path, tensor: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][tensor]


def edit_index(folder: Path, tensor: str, file: str | None) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    if file is None:
        del index["weight_map"][tensor]
    else:
        index["weight_map"][tensor] = file
    path.write_text(json.dumps(index))


def edit_tensors(folder: Path, tensor: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = file_of(folder, tensor)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def truncate(folder: Path) -> None:
    path = file_of(folder, FIRST)
    os.truncate(path, path.stat().st_size - 100)


def garble_header(folder: Path) -> None:
    path = file_of(folder, FIRST)
    data = bytearray(path.read_bytes())
    data[8:40] = b"x" * 32
    path.write_bytes(data)


def overlap(folder: Path) -> None:
    path = file_of(folder, "model.layers.0.mlp.up_proj.weight")
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    spans = sorted((e["data_offsets"], n) for n, e in header.items() if n != "__metadata__" and len(e["shape"]) == 2)
    (start, end), name = spans[1]
    header[name]["data_offsets"] = [start - 64, end - 64]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (size - len(text))
    path.write_bytes(data[:8] + text + data[8 + size :])


def wrong_shape(folder: Path) -> None:
    edit_tensors(folder, FIRST, lambda tensors: tensors.update({FIRST: tensors[FIRST][:50].clone()}))


def extra_tensor(folder: Path) -> None:
    edit_tensors(folder, FIRST, lambda tensors: tensors.update({"model.extra.weight": torch.ones(2)}))
    edit_index(folder, "model.extra.weight", file_of(folder, FIRST).name)


def unlisted_tensor(folder: Path) -> None:
    edit_tensors(folder, FIRST, lambda tensors: tensors.update({"model.extra.weight": torch.ones(2)}))


def missing_tensor(folder: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    edit_tensors(folder, name, lambda tensors: tensors.__delitem__(name))
    edit_index(folder, name, None)


def twice(folder: Path) -> None:
    other = "model.layers.1.mlp.down_proj.weight"
    first = load_file(file_of(folder, FIRST))[FIRST]
    edit_tensors(folder, other, lambda tensors: tensors.update({FIRST: first}))


HF: dict[str, tuple[Change, tuple[str, ...]]] = {
    "cut off": (truncate, ("model-00001-of", "is damaged or cut off", "tensor 'model.")),
    "garbled header": (garble_header, ("model-00001-of", "damaged")),
    "overlapping tensors": (overlap, ("overlaps another", ".safetensors")),
    "missing file": (lambda f: file_of(f, FIRST).unlink(), ("model-00001-of", "is missing")),
    "wrong shape": (wrong_shape, ("model-00001-of", FIRST, "[50, 32]", "[99, 32]")),
    "extra tensor": (extra_tensor, ("model-00001-of", "model.extra.weight", "belongs to nothing")),
    "tensor not in the index": (unlisted_tensor, ("model-00001-of", "model.extra.weight", "is not in model.safetens")),
    "missing tensor": (missing_tensor, ("model.layers.1.self_attn.k_proj.weight is missing",)),
    "tensor twice": (twice, (FIRST, "is also in")),
    "index without the tensor's file": (
        lambda f: edit_index(f, FIRST, file_of(f, "model.layers.1.mlp.down_proj.weight").name),
        (FIRST, "is not in it"),
    ),
    "index out of the folder": (lambda f: edit_index(f, FIRST, "../evil.safetensors"), (FIRST, "../evil.safetensors")),
    "index to an absolute path": (lambda f: edit_index(f, FIRST, "/etc/passwd"), (FIRST, "/etc/passwd")),
    "one file beside an index of others": (
        lambda f: shutil.copy(file_of(f, FIRST), f / "model.safetensors") and None,
        ("model.safetensors: model.safetensors.index.json does not name it",),
    ),
    "index cut off": (
        lambda f: os.truncate(f / "model.safetensors.index.json", 99),
        ("model.safetensors.index.json is damaged or cut off",),
    ),
    "no index": (lambda f: (f / "model.safetensors.index.json").write_text("{}") and None, ("is not an index",)),
    "config cut off": (lambda f: os.truncate(f / "config.json", 99), ("config.json is damaged or cut off",)),
    "config no JSON": (lambda f: (f / "config.json").write_text("[1]") and None, ("config.json is not a JSON object",)),
}


@pytest.mark.parametrize("kind", HF)
def test_hugging_face_folders(kind: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(whole, folder)
    change, parts = HF[kind]
    change(folder)
    damaged = kind in ("cut off", "garbled header", "overlapping tensors", "index cut off", "config cut off")
    refused(capsys, folder, *parts, exit_code=1 if damaged else 2)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]  # found before anything was written


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek": (
        {"architectures": ["DeepseekVLForCausalLM"], "model_type": "deepseek_vl"},
        "DeepseekVLForCausalLM is not supported (it has attention or layers of its own, not converted here); ",
    ),
    "phi moe": ({"architectures": ["PhimoeForCausalLM"], "model_type": "phimoe"}, "it has a router or layers besides"),
    "rope": (
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        "RoPE of type longrope without a list short_factor",
    ),
    "bias": ({"attention_bias": "yes"}, "attention_bias 'yes' is not true or false"),
    "activation": ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported, only silu"),
    "heads": ({"num_key_value_heads": 3}, "not divisible by --num-query-groups 3"),
    "text for a number": ({"hidden_size": "32"}, "hidden_size '32' is not an integer"),
    "no size": ({"hidden_size": None}, "config.json"),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_architectures(kind: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(whole, folder)
    changes, message = SETTINGS[kind]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    refused(capsys, folder, "config.json: ", message)


def bins(whole: Path, folder: Path, value: Any = None) -> Path:
    """The same model as pytorch_model.bin; ``value`` replaces the last tensor."""
    folder.mkdir()
    shutil.copy(whole / "config.json", folder)
    tensors = {n: t for path in sorted(whole.glob("*.safetensors")) for n, t in load_file(path).items()}
    if value is not None:
        tensors["lm_head.weight"] = value
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


def test_bin_files_are_read_only_when_allowed(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.convert.test_hf import assert_same_tensors

    folder = bins(whole, tmp_path / "folder")
    refused(capsys, folder, "pytorch_model.bin is a pickle file", "--allow-pickle")
    code, error = run(capsys, "--load", folder, "--to", "hf", "--save", tmp_path / "back", "--allow-pickle")
    assert code == 0, error
    assert_same_tensors(whole, tmp_path / "back")


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_code_in_pickles_is_never_run(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = bins(whole, tmp_path / "folder", Evil(tmp_path / "pwned"))
    refused(capsys, folder, "pytorch_model.bin asks for posix.mkdir", "refused", flags=("--allow-pickle",))
    dist = tmp_path / "dist"
    dist.mkdir()
    (dist / ".metadata").write_bytes(pickle.dumps({"a": Evil(tmp_path / "pwned")}))
    refused(capsys, dist, ".metadata asks for posix.mkdir", "refused")
    megatron = tmp_path / "megatron"
    assert run(capsys, "--load", whole, "--to", "megatron", "--save", megatron)[0] == 0
    torch.save({"args": Evil(tmp_path / "pwned")}, megatron / "release" / "common.pt")
    refused(capsys, megatron, "common.pt asks for posix.mkdir")
    assert not (tmp_path / "pwned").exists()


def test_megatrons_older_format_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run" / "iter_0000005" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save({"args": Evil(tmp_path / "pwned"), "model": {}}, folder / "model_optim_rng.pt")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    refused(capsys, tmp_path / "run", "iter_0000005 is in Megatron's older format", "--ckpt-convert-format torch_dist")
    assert not (tmp_path / "pwned").exists()


def bend(path: Path, old: bytes, new: bytes) -> None:
    """Change the pickle, or what is beside the tensors' data, in a file of torch.save."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    assert any(old in data for name, data in entries.items() if "/data/" not in name)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data if "/data/" in name else data.replace(old, new))


def test_bin_files_that_lie(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--allow-pickle",)
    cut = bins(whole, tmp_path / "cut")
    os.truncate(cut / "pytorch_model.bin", 3000)
    refused(capsys, cut, "pytorch_model.bin is damaged or cut off", flags=flags, exit_code=1)
    refused(capsys, bins(whole, tmp_path / "view", torch.ones(32, 99).t()), "does not lie row by row", flags=flags)
    refused(
        capsys, bins(whole, tmp_path / "text", "no tensor"), "lm_head.weight is not a tensor but a str", flags=flags
    )
    sizes = bins(whole, tmp_path / "sizes")
    bend(sizes / "pytorch_model.bin", b"K\x63K \x86", b"K\xffK \x86")  # 99 x 32 becomes 255 x 32
    refused(capsys, sizes, "in a storage of 3168 elements", flags=flags)
    packed = bins(whole, tmp_path / "packed")
    bend(packed / "pytorch_model.bin", b"little", b"little")
    refused(capsys, packed, "pytorch_model.bin was packed again by another program", flags=flags)
    other = bins(whole, tmp_path / "endian")
    bend(other / "pytorch_model.bin", b"little", b"big")
    refused(capsys, other, "pytorch_model.bin was written on a big-endian machine", flags=flags)


def test_megatron_files(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = tmp_path / "good"
    assert run(capsys, "--load", whole, "--to", "megatron", "--save", good, "--max-shard-size", "3e-5")[0] == 0

    def broken(name: str, change: Callable[[Path], Any], *parts: str) -> None:
        folder = tmp_path / name / "megatron"
        shutil.copytree(good, folder)
        change(folder / "release")
        refused(capsys, folder, *parts, exit_code=1 if name in ("cut", "metadata", "common") else 2)

    broken("missing", lambda f: (f / "__1_0.distcp").unlink(), "__1_0.distcp is missing")
    broken("cut", lambda f: os.truncate(f / "__0_0.distcp", 3000), "__0_0.distcp is cut off: tensor ")
    broken("metadata", lambda f: os.truncate(f / ".metadata", 300), ".metadata is damaged or cut off")
    broken("common", lambda f: os.truncate(f / "common.pt", 300), "common.pt is damaged or cut off")
    broken("data", lambda f: _garble(f / "__0_0.distcp"), "__0_0.distcp is not a zip archive", "tensor ")
    broken("tracker", lambda f: f.rename(f.with_name("iter_5")), "latest_checkpointed_iteration.txt names 'release'")
    broken("link", lambda f: _point_out(f / ".metadata"), "'../../../secret': that is no file", ".metadata: tensor")
    wanted = {"num_experts": 8, "moe_expert_capacity_factor": 1.5}
    message = "a model with moe_expert_capacity_factor 1.5"
    broken("arguments", lambda f: _arguments(f / "common.pt", **wanted), message)
    broken("experts", lambda f: _arguments(f / "common.pt", num_experts=8), "mlp.router.weight is missing")
    broken("layers", lambda f: _arguments(f / "common.pt", num_layers=3), "linear_qkv", "has shape [2, ")


def _garble(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[:64] = bytes(64)
    path.write_bytes(data)


def _point_out(path: Path) -> None:
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../../../secret"
    path.write_bytes(pickle.dumps(metadata))


def _arguments(path: Path, **changes: Any) -> None:
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(io.BytesIO(path.read_bytes()))
    vars(content["args"]).update(changes)
    torch.save(content, path)


READ = {
    "config": (Path, "read_text", "config.json"),
    "index": (Path, "read_text", "model.safetensors.index.json"),
    "opened": (LocalFolder, "reader", "model-00001-of"),
    "header": (LocalSource, "read_into", "model-00001-of"),
}


@pytest.mark.parametrize(("number", "exit_code"), [(errno.EIO, 1), (errno.EACCES, 2)])
@pytest.mark.parametrize("kind", READ)
def test_a_file_that_the_system_does_not_give(
    kind: str, number: int, exit_code: int, whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """An error of a disk is no mistake of the user, and is not said to be damage; rights are what another command, as
    another user, has."""
    owner, method, name = READ[kind]
    real = getattr(owner, method)

    def refuse(self: Any, *args: Any, **options: Any) -> Any:
        if kind == "header" or name in f"{self} {args}":
            raise OSError(number, os.strerror(number))
        return real(self, *args, **options)

    monkeypatch.setattr(owner, method, refuse)
    line = refused(capsys, whole, name, "cannot be read: ", os.strerror(number), exit_code=exit_code)
    assert "damaged" not in line


def test_a_read_that_fails_in_the_middle(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = bins(whole, tmp_path / "bin"), tmp_path / "megatron"
    assert run(capsys, "--load", whole, "--to", "megatron", "--save", failed[1])[0] == 0
    real = LocalSource.read_into

    def fail(self: LocalSource, offset: int, into: memoryview) -> None:
        if offset > 1000:  # behind what tells the format
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(self, offset, into)

    monkeypatch.setattr(LocalSource, "read_into", fail)
    for folder, name, flags in (
        (whole, ".safetensors", ()),
        (failed[0], "pytorch_model.bin", ("--allow-pickle",)),
        (failed[1], ".distcp", ()),
    ):
        line = refused(capsys, folder, name, "cannot be read: Input/output error", flags=flags, exit_code=1)
        assert "damaged" not in line
        shutil.rmtree(folder.with_name("target.partial"), ignore_errors=True)


def test_a_fault_of_the_program_is_not_said_to_be_the_users(whole: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def fault(*args: Any) -> None:
        raise ValueError("zip() argument 2 is shorter than argument 1")

    for tool, name in ((convert_checkpoint, "make_target"), (merge_lora, "open_checkpoint")):
        monkeypatch.setattr(tool, name, lambda *args, **options: fault())
        words = ["--load", str(whole), "--save", str(tmp_path / "new")]
        with pytest.raises(ValueError, match="zip"):
            tool.main([*words, *(["--adapter", str(whole)] if tool is merge_lora else [])])


def test_our_checkpoints(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = tmp_path / "ours"
    assert run(capsys, "--load", whole, "--save", ours)[0] == 0
    path = ours / "shard_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    refused(capsys, ours, "shard_00000.safetensors: ", "do not match their checksum", "tensor model.", exit_code=1)


def test_a_disk_that_is_full(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit of the size of files stands for it: a write fails in the middle."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for kind in FORMATS:
        target = tmp_path / kind
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
        try:
            code, error = run(capsys, "--load", whole, "--to", kind, "--save", target)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert code == 1 and f"error: {target}.partial cannot be written: " in error and not target.exists()
        assert run(capsys, "--load", whole, "--to", kind, "--save", target)[0] == 0  # there is room again
    signal.signal(signal.SIGXFSZ, handler)


def test_dtypes_that_differ_within_a_fused_matrix(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they are they cannot lie in one matrix; in a dtype that is asked for they can."""
    folder, name = tmp_path / "folder", "model.layers.1.self_attn.k_proj.weight"
    shutil.copytree(whole, folder)
    edit_tensors(folder, name, lambda tensors: tensors.update({name: tensors[name].bfloat16()}))
    line = refused(capsys, folder, "layers.1.attention.key.weight", flags=("--to", "megatron"))
    assert "have different dtypes" in line and "--dtype" in line
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]  # found before anything was written
    flags = ("--to", "megatron", "--dtype", "fp32")
    assert run(capsys, "--load", folder, "--save", tmp_path / "megatron", *flags)[0] == 0
    assert run(capsys, "--load", tmp_path / "megatron", "--save", tmp_path / "back", "--to", "hf")[0] == 0
    wanted = {n: t.float() for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)
    norm = "model.layers.1.input_layernorm.weight"  # a matrix of its own, but one of a stack of all layers
    edit_tensors(folder, name, lambda tensors: tensors.update({name: tensors[name].float()}))
    edit_tensors(folder, norm, lambda tensors: tensors.update({norm: tensors[norm].bfloat16()}))
    refused(capsys, folder, "decoder.layers.1.", "has another dtype than in other layers", flags=("--to", "megatron"))


def test_a_folder_of_somebody_else_is_not_emptied(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "file").write_text("mine")
    code, error = run(capsys, "--load", whole, "--save", tmp_path / "new")
    assert code == 2 and "new.partial exists already and is no interrupted conversion" in error
    assert (tmp_path / "new.partial" / "file").read_text() == "mine" and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--megatron-tp", "2"), "--megatron-tp is for --to megatron, not smp"),
        (("--vocab-size", "90"), "--vocab-size is for --from megatron, not hf"),
        (("--from", "smp", "--allow-pickle"), "--allow-pickle is for --from hf, not smp"),
        (("--max-shard-size", "nan"), "--max-shard-size nan must be above 0"),
        (("--max-shard-size", "inf"), "--max-shard-size inf must be above 0"),
        (("--vocab-size", "0"), "--vocab-size 0 must be above 0"),
        (("--megatron-tp", "0"), "--megatron-tp 0 must be above 0"),
        (("--reference", "nowhere"), "--reference nowhere: there is no such folder"),
    ],
)
def test_flags_that_would_do_nothing(
    flags: tuple[str, ...],
    message: str,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, error = run(capsys, "--load", whole, "--save", tmp_path / "new", *flags)
    assert (found, error) == (2, f"error: {message}\n")
    assert list(tmp_path.iterdir()) == []


def test_targets_are_never_overwritten(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    code, error = run(capsys, "--load", whole, "--save", tmp_path / "there")
    assert code == 2 and "exists already" in error
    assert (tmp_path / "there" / "file").read_text() == "mine"
    code, error = run(capsys, "--load", tmp_path / "there", "--save", tmp_path / "new")
    assert code == 2 and "is no checkpoint" in error
    code, error = run(capsys, "--load", tmp_path / "nowhere", "--save", tmp_path / "new")
    assert code == 2 and error == f"error: {tmp_path / 'nowhere'}: there is no such folder\n"
    code, error = run(capsys, "--load", "meta-llama/Llama-3.2-1B", "--save", tmp_path / "new")
    assert code == 2 and error.endswith("no such folder; of a model on the hub: --load hub:meta-llama/Llama-3.2-1B\n")


class Member:
    """A member of an enumeration as Python 3.11.0 to 3.11.3 write it; of anything else, an attribute."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)


def test_attributes_are_never_looked_up(tmp_path: Path) -> None:
    """Of a member of an enumeration there is a stand-in; other classes are refused by their names."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    def read_metadata(what: object) -> Any:
        return _MetadataUnpickler(io.BytesIO(pickle.dumps(what))).load()

    def read_file(what: object) -> Any:
        torch.save(what, tmp_path / "file.pt")
        with LocalFolder(tmp_path).reader("file.pt") as source:
            return read_torch_file(source, tmp_path / "file.pt", inert=INERT)

    for read in (read_metadata, read_file):
        assert isinstance(read(Member(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")), Inert)
        assert isinstance(read(Member("text", "__doc__")), Inert)
        with pytest.raises(CheckpointError, match="asks for fractions.Fraction"):
            read(Member(Fraction, "__doc__"))
