"""One folder, one process: round trips, damage, edits, crashes, replacement, `latest`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from smp import checkpoint
from smp.checkpoint import (
    CheckpointError,
    Shard,
    TensorEntry,
    commit_latest,
    find,
    load,
    read_manifest,
    save,
    verify,
)
from smp.checkpoint.folders.folder import open_folder
from smp.checkpoint.folders.latest import misnamed
from smp.checkpoint.format.entries import ELEMENT_SIZES, Manifest
from smp.checkpoint.format.manifest import write_manifest
from smp.checkpoint.format.tensor_bytes import DTYPES
from smp.checkpoint.format.validate_manifest import check_manifest
from tests.checkpoint.plain_reader import read_checkpoint

FILE = "shard_00000.safetensors"


def example() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randint(0, 2, (3, 4), generator=generator).to(dtype) for name, dtype in DTYPES.items()}
    return values | {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "view": torch.arange(6.0).view(2, 3).t()}


def zeros(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tmp_path / "iter_0000010"
    save(example(), target, extra={"iteration": 10})
    return target


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None], sign: bool = True) -> None:
    """Edit the manifest; with ``sign`` the editor also knows how to compute the checksum."""
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    if sign:
        content["checksum"] = "0" * 16
        digest = xxhash.xxh3_64_hexdigest(json.dumps(content).encode())
        content["checksum"] = digest
    (folder / "manifest.json").write_text(json.dumps(content))


def test_elements_have_the_sizes_of_torch() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ELEMENT_SIZES


def test_what_users_import_is_there_and_typed() -> None:
    imported = re.search(r"if TYPE_CHECKING:\n(.*?)\n\n", Path(checkpoint.__file__).read_text(), re.DOTALL)
    assert imported is not None and set(re.findall(r"\w+", imported[1])) >= set(checkpoint.__all__)
    assert all(getattr(checkpoint, name).__name__ == name for name in checkpoint.__all__)
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        checkpoint.laod  # noqa: B018


def test_round_trip_of_every_dtype(folder: Path) -> None:
    state = example()
    loaded = zeros(state)
    assert load(loaded, folder) == {"iteration": 10}
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name].float(), tensor.float()), name
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", FILE]


def test_stranger_reads_it(tmp_path: Path) -> None:
    state = {"a": torch.arange(12.0).view(3, 4), "b": torch.tensor([1, 2])}
    save(state, tmp_path / "x", extra={"note": "hi"})
    tensors, extra = read_checkpoint(tmp_path / "x")
    assert extra == {"note": "hi"}
    assert all(torch.equal(torch.from_numpy(tensors[name]), tensor) for name, tensor in state.items())
    repository = Path(__file__).parents[2]
    code = (repository / "tests/checkpoint/plain_reader.py").read_text().split("import json")[1]
    page = (repository / "docs/checkpoint-format.md").read_text()
    assert code.strip() in page
    example = page.split("```json\n")[1].split("\n```")[0].encode()
    digits = json.loads(example)["checksum"].encode()
    assert xxhash.xxh3_64_hexdigest(example.replace(digits, b"0" * 16)) == digits.decode()


def test_load_never_unpickles(folder: Path) -> None:
    """In a fresh process in which every way to unpickle raises."""
    code = f"""
import io, pickle, torch
from smp.checkpoint import load
def refuse(*args, **kwargs): raise SystemExit("unpickled")
pickle.load = pickle.loads = pickle.Unpickler = pickle._Unpickler = torch.load = refuse
state = {{"F32": torch.zeros(3, 4)}}
load(state, {str(folder)!r}, allow_unread=True)
assert state["F32"].any()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_padding_is_neither_written_nor_touched(tmp_path: Path) -> None:
    save({"w": torch.arange(10.0).view(5, 2)}, tmp_path / "x", extra={}, logical_rows={"w": 3})
    assert read_manifest(tmp_path / "x").tensors["w"].shape == (3, 2)
    wider = torch.full((8, 2), -1.0)
    load({"w": wider}, tmp_path / "x", logical_rows={"w": 3})
    assert torch.equal(wider, torch.cat([torch.arange(6.0).view(3, 2), torch.full((5, 2), -1.0)]))
    with pytest.raises(CheckpointError, match="cannot have 9 logical rows"):
        load({"w": wider}, tmp_path / "x", logical_rows={"w": 9})
    with pytest.raises(CheckpointError, match="not in the state: v"):
        load({"w": wider}, tmp_path / "x", logical_rows={"v": 3})


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("flip") / "x"
    state = {"a": torch.arange(12.0).view(3, 4), "b": torch.tensor([1, 2])}
    save(state, folder, extra={"lr": 0.5})
    path = folder / data.draw(st.sampled_from(["manifest.json", FILE]))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=path.name):
        load(zeros(state), folder)


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:20], lambda b: b"", lambda b: b + b"\0"])
def test_wrong_length_is_found(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    (folder / FILE).write_bytes(damage((folder / FILE).read_bytes()))
    with pytest.raises(CheckpointError, match=rf"{FILE}: has \d+ bytes instead of"):
        load(zeros(example()), folder)
    assert len(verify(folder)) == 1


def test_missing_data_file_is_found(folder: Path) -> None:
    (folder / FILE).unlink()
    with pytest.raises(CheckpointError, match=FILE):
        load(zeros(example()), folder)


def test_exchanged_data_file_is_found(folder: Path) -> None:
    """Same size, valid safetensors, other tensor under the key."""
    tensors = load_file(folder / FILE)
    tensors["F32"], tensors["I32"] = tensors["I32"], tensors["F32"]
    save_file(tensors, folder / FILE)
    rewrite(folder, lambda content: content["files"].update({FILE: (folder / FILE).stat().st_size}))
    with pytest.raises(CheckpointError, match=r"tensor F32 is I32"):
        load(zeros(example()), folder)


def test_edit_without_checksum_is_found(folder: Path) -> None:
    rewrite(folder, lambda content: content["extra"].update(iteration=11), sign=False)
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        load(zeros(example()), folder)
    rewrite(folder, lambda content: None)
    assert read_manifest(folder).extra == {"iteration": 11}


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "newer": (lambda c: c.update(version=2), "version 2"),
    "foreign": (lambda c: c.update(format="other"), "format is not"),
    "no tensors": (lambda c: c.pop("tensors"), "KeyError"),
    "tensors is a list": (lambda c: c.update(tensors=[]), "not a readable manifest"),
    "extra is a list": (lambda c: c.update(extra=[]), "extra is not"),
    "unlisted file": (lambda c: c["tensors"]["F32"]["shards"][0].update(file="b.safetensors"), "not listed"),
    "parent": (lambda c: c["files"].update({"../x.safetensors": 1}), "not a plain"),
    "absolute": (lambda c: c["files"].update({"/etc/x.safetensors": 1}), "not a plain"),
    "other suffix": (lambda c: c["files"].update({"x.pkl": 1}), "not a plain"),
    "negative size": (lambda c: c["files"].update({FILE: -1}), "size -1"),
    "key": (lambda c: c["tensors"]["F32"]["shards"][0].update(key=7), "without a key"),
    "dtype": (lambda c: c["tensors"]["F32"].update(dtype="OBJECT"), "unknown dtype"),
    "negative": (lambda c: c["tensors"]["F32"]["shards"][0].update(offsets=[-1, 0]), "impossible"),
    "outside": (lambda c: c["tensors"]["F32"]["shards"][0].update(offsets=[1, 0]), "impossible"),
    "rank": (lambda c: c["tensors"]["F32"]["shards"][0].update(offsets=[0]), "impossible"),
    "float": (lambda c: c["tensors"]["F32"].update(shape=[3.0, 4]), "impossible"),
    "hole": (lambda c: c["tensors"]["F32"]["shards"][0].update(sizes=[2, 4]), "exactly once"),
    "grown": (lambda c: c["tensors"]["F32"].update(shape=[4, 4]), "exactly once"),
    "no shard": (lambda c: c["tensors"]["F32"].update(shards=[]), "exactly once"),
    "twice": (lambda c: c["tensors"]["F32"]["shards"].append(c["tensors"]["F32"]["shards"][0]), "exactly once"),
    "unknown field": (lambda c: c["tensors"]["F32"]["shards"][0].update(loader="os.system"), "TypeError"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_signed_edit_is_refused(folder: Path, edit: str) -> None:
    change, message = EDITS[edit]
    rewrite(folder, lambda content: (change(content), None)[1])
    with pytest.raises(CheckpointError, match=message):
        load(zeros(example()), folder)


def test_signed_edit_of_a_key_cannot_be_read(folder: Path) -> None:
    rewrite(folder, lambda content: content["tensors"]["F32"]["shards"][0].update(key="I32"))
    with pytest.raises(CheckpointError, match="two shards are tensor 'I32' of 'shard_00000.safetensors'"):
        load(zeros(example()), folder)
    rewrite(folder, lambda content: content["tensors"]["F32"]["shards"][0].update(key="absent"))
    with pytest.raises(CheckpointError, match=f"{FILE}: has no tensor 'absent'"):
        load(zeros(example()), folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\xff"])
def test_what_is_not_a_manifest_is_refused(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_manifest(folder)


def test_link_out_of_the_folder_is_refused(folder: Path) -> None:
    (folder / FILE).rename(folder.parent / "elsewhere")
    (folder / FILE).symlink_to(folder.parent / "elsewhere")
    with pytest.raises(CheckpointError, match="leads out of the checkpoint folder"):
        load(zeros(example()), folder)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    columns=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    spoil=st.integers(0, 3),
    data=st.data(),
)
def test_coverage(rows: list[int], columns: list[int], spoil: int, data: st.DataObject) -> None:
    """Any tiling passes; one with a tile missing, doubled or shortened does not."""
    tiles = [
        Shard(FILE, f"w{i} {j}", (sum(rows[:i]), sum(columns[:j])), (r, c), "0" * 16)
        for i, r in enumerate(rows)
        for j, c in enumerate(columns)
    ]
    victim = data.draw(st.integers(0, len(tiles) - 1))
    tile = tiles[victim]
    short = Shard(tile.file, tile.key, tile.offsets, (tile.sizes[0] - 1, tile.sizes[1]), tile.xxh3_64)
    replacement = [[tile], [], [tile, tile], [short]][spoil]
    tiles[victim : victim + 1] = replacement
    manifest = Manifest({"w": TensorEntry((sum(rows), sum(columns)), "F32", tuple(tiles))}, {FILE: 10**6}, {})
    if spoil:
        with pytest.raises(CheckpointError, match="exactly once"):
            check_manifest(manifest, Path("anywhere"))
    else:
        check_manifest(manifest, Path("anywhere"))


def test_state_that_does_not_fit(folder: Path) -> None:
    state = zeros(example())
    state["F32"] = torch.zeros(4, 3)
    state["F64"] = torch.zeros(3, 4)
    state["new"] = torch.zeros(1)
    del state["I64"]
    with pytest.raises(CheckpointError) as caught:
        load(state, folder)
    message = str(caught.value)
    assert "F32 (shape (3, 4) in the checkpoint, (4, 3) here)" in message
    assert "F64 (dtype torch.float64 in the checkpoint, torch.float32 here)" in message
    assert "new (missing in the checkpoint)" in message and "I64 (in the checkpoint but not expected)" in message
    assert "\n" not in message and not any(tensor.any() for tensor in state.values())


def test_one_memory_takes_no_two_values(tmp_path: Path) -> None:
    """Tied here, not tied there: the name that is read last would have its way."""
    w = torch.randn(6, 4)
    save({"w": w, "same": w.clone(), "other": w + 1, "empty": w[:0], "none": w[:0]}, tmp_path / "x", extra={})
    shared, nothing = torch.zeros(6, 4), torch.zeros(0, 4)
    rest = {"empty": nothing, "none": nothing}
    load({"w": shared, "same": shared, "other": torch.zeros(6, 4), **rest}, tmp_path / "x")
    assert torch.equal(shared, w)
    message = "cannot load .*: w .another value in the checkpoint than other, whose memory it shares here.$"
    with pytest.raises(CheckpointError, match=message):
        load({"w": shared, "other": shared, "same": torch.zeros(6, 4), **rest}, tmp_path / "x")


def test_overlapping_memory_is_refused(tmp_path: Path) -> None:
    """Neither of two threads that fill it would have the last word; columns that interleave are two memories."""
    whole = {"a": torch.zeros(2, 3), "b": torch.ones(2, 3), "c": torch.arange(6.0)}
    save(whole, tmp_path / "x", extra={})
    wide, flat = torch.zeros(2, 6), torch.zeros(6)
    for a, b in ((wide[:, :3], wide[:, 3:]), (wide[:, ::2], wide[:, 1::2])):
        load({"a": a, "b": b, "c": flat}, tmp_path / "x")
        assert torch.equal(a, whole["a"]) and torch.equal(b, whole["b"]) and torch.equal(flat, whole["c"])
    once = torch.zeros(1).expand(6)
    for wrong, name in (
        ({"a": wide[:, :3], "b": wide[:, 2:5], "c": flat}, "b .memory that is another part or shape of a here"),
        ({"a": flat.view(2, 3), "b": wide[:, :3], "c": flat}, "c .memory that is another part or shape of a here"),
        ({"a": wide[:, :3], "b": wide[:, 3:], "c": once}, "c .elements that share memory here"),
    ):
        with pytest.raises(CheckpointError, match=f"cannot load .*: {name}.$"):
            load(wrong, tmp_path / "x")


def test_a_url_of_the_file_system_is_refused(tmp_path: Path) -> None:
    """fsspec would take it for an object store, and make no folders."""
    with pytest.raises(CheckpointError, match="^file:///a: give the path alone, without file://$"):
        open_folder("file:///a")
    assert repr(open_folder(tmp_path)) == f"LocalFolder('{tmp_path}')"


def test_views_that_are_refused_or_the_same(tmp_path: Path) -> None:
    save({"a": torch.arange(12.0).view(4, 3)}, tmp_path / "a", extra={})
    with pytest.raises(CheckpointError, match="a .elements that share memory here.$"):
        load({"a": torch.zeros(6).unfold(0, 3, 1)}, tmp_path / "a")
    row = torch.arange(6.0).view(1, 6)
    save({"a": row, "b": row}, tmp_path / "b", extra={})
    into = torch.zeros(6)
    load({"a": into.as_strided((1, 6), (6, 1)), "b": into.as_strided((1, 6), (1, 1))}, tmp_path / "b")
    assert torch.equal(into, row[0])


def test_long_lists_of_misfits_are_cut(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="and 92 more"):
        load({f"new{i}": torch.zeros(1) for i in range(100)}, folder, allow_unread=True)


@pytest.mark.parametrize("extra", [{"a": (1, 2)}, {1: "a"}, {"a": float("nan")}, {"a": {1, 2}}, {"a": torch.ones(1)}])
def test_extra_that_json_would_change_is_refused(tmp_path: Path, extra: dict[Any, Any]) -> None:
    with pytest.raises(TypeError, match="extra"):
        save({"w": torch.zeros(2)}, tmp_path / "x", extra=extra)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "value", [3, 1.5, "text", None, {"nested": torch.zeros(1)}, torch.zeros(2, dtype=torch.complex64)]
)
def test_only_tensors_go_into_state(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match="value"):
        save({"value": value}, tmp_path / "x", extra={})
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["__w", "__metadata", "a b/ü[0:1]\n", "w\0"])
def test_any_text_is_a_name(tmp_path: Path, name: str) -> None:
    save({name: torch.ones(3)}, tmp_path / "x", extra={})
    into = {name: torch.zeros(3)}
    load(into, tmp_path / "x")
    assert into[name].sum() == 3 and verify(tmp_path / "x") == [] and list(load_file(tmp_path / "x" / FILE)) == [name]


@pytest.mark.parametrize("name", ["", "__metadata__", "\ud800"])
def test_what_no_reader_gives_back_is_no_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="no tensor of a safetensors file can be called"):
        save({name: torch.ones(3)}, tmp_path / "x", extra={})
    assert not (tmp_path / "x").exists()


def test_meta_tensor_is_refused(folder: Path, tmp_path: Path) -> None:
    meta = {"F32": torch.zeros(3, 4, device="meta")}
    with pytest.raises(CheckpointError, match="F32 is on the meta device"):
        save(meta, tmp_path / "x", extra={})
    with pytest.raises(CheckpointError, match="F32 is on the meta device"):
        load(meta, folder, allow_unread=True)


def test_crash_before_the_commit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that dies between data and manifest leaves what was there: nothing, or the old checkpoint."""

    def die(*_: object) -> None:
        raise OSError("power cut")

    new = folder.parent / "iter_0000020"
    with monkeypatch.context() as patch:
        patch.setattr("smp.checkpoint.commit.write_manifest", die)
        patch.setattr("smp.checkpoint.api.discard_unfinished", lambda folder: None)  # whoever died cleans nothing
        for target in (new, folder):
            with pytest.raises(CheckpointError, match="OSError: power cut"):
                save({"w": torch.ones(2)}, target, extra={})
    assert (new / FILE).exists() and (folder / "shard_00000.1.safetensors").exists()
    with pytest.raises(
        CheckpointError, match=r"has no manifest\.json: it is not a checkpoint, or one whose save did not"
    ):
        load({"w": torch.zeros(2)}, new)
    with pytest.raises(CheckpointError, match="never names an incomplete"):
        commit_latest(folder.parent, new)
    assert load(zeros(example()), folder) == {"iteration": 10}

    save({"w": torch.ones(2)}, new, extra={})
    save({"w": torch.ones(2)}, folder, extra={"iteration": 11})
    assert sorted(path.name for path in new.iterdir()) == ["manifest.json", "shard_00000.1.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "shard_00000.2.safetensors"]
    assert load({"w": torch.zeros(2)}, folder) == {"iteration": 11}


def test_a_save_that_fails_cleans_up_after_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    new = folder.parent / "iter_0000020"
    with monkeypatch.context() as patch:
        patch.setattr("smp.checkpoint.commit.write_manifest", lambda *_: Path("/nowhere/x").read_bytes())
        for target in (new, folder):
            with pytest.raises(CheckpointError, match="FileNotFoundError"):
                save({"w": torch.ones(2)}, target, extra={})
    assert not new.exists() and {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_no_manifest_is_committed_that_load_would_refuse(tmp_path: Path) -> None:
    hole = Manifest({"w": TensorEntry((2,), "F32", ())}, {}, {})
    with pytest.raises(CheckpointError, match="exactly once"):
        write_manifest(tmp_path, hole)
    assert not list(tmp_path.iterdir())


def test_latest_names_a_complete_checkpoint_in_one_line(folder: Path) -> None:
    commit_latest(folder.parent, folder)
    assert (folder.parent / "latest").read_text() == "iter_0000010\n"
    with pytest.raises(CheckpointError, match="not directly inside"):
        commit_latest(folder.parent / "other", folder)


def test_a_path_means_a_checkpoint_or_the_newest_one_of_a_run(folder: Path) -> None:
    root = folder.parent
    assert str(find(folder)) == str(find(root)) == str(folder)
    save({"w": torch.ones(2)}, root / "iter_0000020", extra={})
    (root / "iter_0000030").mkdir()
    commit_latest(root, folder)
    assert str(find(root)) == str(root / "iter_0000020")
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        read_manifest(find(root / "absent"))


@pytest.mark.parametrize("style", [{"separators": (",", ":")}, {"indent": 2}])
def test_another_writers_spaces_are_its_own_business(folder: Path, style: dict[str, Any]) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text()) | {"checksum": "0" * 16}
    text = json.dumps(content, **style)
    signed = text.replace("0" * 16, xxhash.xxh3_64_hexdigest(text.encode()), 1)
    path.write_text(signed)
    assert load(zeros(example()), folder) == {"iteration": 10}
    path.write_text(signed + " ")
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        read_manifest(folder)


def test_a_name_of_another_iteration_is_told(folder: Path) -> None:
    extra = {"progress": {"iteration": 10}}
    assert misnamed(open_folder(folder), extra) is None
    assert misnamed(open_folder(folder.parent / "best"), extra) is None and misnamed(open_folder(folder), {}) is None
    told = misnamed(open_folder(folder.parent / "iter_0000020"), extra)
    assert told is not None and "iter_0000020 holds iteration 10" in told


def test_a_stranger_writes_it(tmp_path: Path) -> None:
    """By docs/checkpoint-format.md, with json, xxhash and the safetensors package."""
    state = {"any name/at all": torch.arange(12.0).view(4, 3), "n": torch.tensor(7)}
    parts = {"upper": state["any name/at all"][:3], "lower": state["any name/at all"][3:], "n": state["n"]}
    save_file({key: part.contiguous() for key, part in parts.items()}, tmp_path / "0.mine-x.safetensors", {"by": "me"})

    def shard(key: str, offsets: list[int]) -> dict[str, Any]:
        part = parts[key].contiguous()
        digest = xxhash.xxh3_64_hexdigest(part.numpy().tobytes())
        place = {"file": "0.mine-x.safetensors", "key": key, "offsets": offsets, "sizes": list(part.shape)}
        return place | {"xxh3_64": digest}

    rows = {"shape": [4, 3], "dtype": "F32", "shards": [shard("lower", [3, 0]), shard("upper", [0, 0])]}
    tensors = {"any name/at all": rows, "n": {"shape": [], "dtype": "I64", "shards": [shard("n", [])]}}
    files = {"0.mine-x.safetensors": (tmp_path / "0.mine-x.safetensors").stat().st_size}
    content = {"format": "smp-checkpoint", "version": 1, "extra": {"by": "me"}, "files": files, "tensors": tensors}
    text = json.dumps({"checksum": "0" * 16, **content}, separators=(",", ":"))
    (tmp_path / "manifest.json").write_text(text.replace("0" * 16, xxhash.xxh3_64_hexdigest(text.encode()), 1))
    into = zeros(state)
    assert load(into, tmp_path) == {"by": "me"} and verify(tmp_path) == []
    assert all(torch.equal(into[name], tensor) for name, tensor in state.items())
