"""Every flipped bit and every cut is found; lies in manifests and headers cost an error and nothing else."""

from __future__ import annotations

import json
import os
import random
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smp.checkpoint import CheckpointError, DamagedError, load, read_manifest, save, verify
from tests.checkpoint.test_folder import FILE, example, rewrite, zeros

FILES = ("manifest.json", FILE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(example(), tmp_path / "x", extra={"iteration": 10, "text": "ä\n"})
    return tmp_path / "x"


def problems(folder: Path) -> list[str]:
    try:
        return verify(folder)
    except DamagedError as error:
        return [str(error)]


def test_a_whole_one_has_no_problems(folder: Path) -> None:
    counts: list[int] = []
    assert verify(folder, progress=counts.append) == []
    assert sum(counts) == sum(tensor.nbytes for tensor in example().values())


@pytest.mark.parametrize("trials", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_flipped_bits_and_cuts(folder: Path, trials: int) -> None:
    chance = random.Random(trials)
    for trial in range(trials):
        path = folder / FILES[trial % 2]
        whole = path.read_bytes()
        if trial % 5:
            spoiled, bit = bytearray(whole), chance.randrange(8 * len(whole))
            spoiled[bit // 8] ^= 1 << bit % 8
        else:
            spoiled = bytearray(whole[: chance.randrange(len(whole))])
        path.write_bytes(spoiled)
        found = problems(folder)
        assert found and path.name in found[0] and "\n" not in found[0], (trial, found)
        path.write_bytes(whole)
    assert problems(folder) == []


@pytest.mark.parametrize("stride", [19, pytest.param(3, marks=pytest.mark.slow)])
def test_bits_all_over_the_header(folder: Path, stride: int) -> None:
    whole = (folder / FILE).read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    for bit in range(0, 8 * (8 + length), stride):  # odd: every place in a byte comes by
        spoiled = bytearray(whole)
        spoiled[bit // 8] ^= 1 << bit % 8
        (folder / FILE).write_bytes(spoiled)
        assert problems(folder), bit


def with_header(folder: Path, text: bytes, length: int | None = None) -> None:
    """Replace the header and let the manifest know the size."""
    whole = (folder / FILE).read_bytes()
    (old,) = struct.unpack("<Q", whole[:8])
    spoiled = struct.pack("<Q", len(text) if length is None else length) + text + whole[8 + old :]
    (folder / FILE).write_bytes(spoiled)
    rewrite(folder, lambda content: content["files"].update({FILE: len(spoiled)}))


def header(folder: Path) -> dict[str, Any]:
    whole = (folder / FILE).read_bytes()
    return json.loads(whole[8 : 8 + struct.unpack("<Q", whole[:8])[0]])


HEADERS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "not JSON": lambda h: b"{" * 100,
    "not UTF-8": lambda h: b"\xff" * 100,
    "a list": lambda h: b"[]",
    "deep": lambda h: b"[" * 200_000,
    "empty": lambda h: b"",
    "beyond the end": lambda h: json.dumps(h | {"F32": h["F32"] | {"data_offsets": [0, 2**40]}}).encode(),
    "negative": lambda h: json.dumps(h | {"F32": h["F32"] | {"data_offsets": [-48, 0]}}).encode(),
    "backwards": lambda h: json.dumps(h | {"F32": h["F32"] | {"data_offsets": [48, 0]}}).encode(),
    "floats": lambda h: json.dumps(h | {"F32": h["F32"] | {"data_offsets": [0.0, 48.0]}}).encode(),
    "one offset": lambda h: json.dumps(h | {"F32": h["F32"] | {"data_offsets": [0]}}).encode(),
    "huge numbers": lambda h: json.dumps(h | {"F32": h["F32"] | {"shape": [10**4000]}}).encode(),
    "huge shape": lambda h: json.dumps(h | {"F32": h["F32"] | {"shape": [2**62, 4, 0]}}).encode(),
    "too small": lambda h: json.dumps(h | {"F32": h["F32"] | {"data_offsets": [0, 4]}}).encode(),
    "other dtype": lambda h: json.dumps(h | {"F32": h["F32"] | {"dtype": "I32"}}).encode(),
    "unknown dtype": lambda h: json.dumps(h | {"F32": h["F32"] | {"dtype": "OBJECT"}}).encode(),
    "no tensor": lambda h: json.dumps({k: v for k, v in h.items() if k != "F32"}).encode(),
    "a tensor is a number": lambda h: json.dumps(h | {"F32": 7}).encode(),
    "two tensors in one place": lambda h: json.dumps(
        h | {"F32": h["F32"] | {"data_offsets": [n + 4 for n in h["F32"]["data_offsets"]]}}
    ).encode(),
    "twice": lambda h: (json.dumps(h)[:-1] + ', "F32": ' + json.dumps(h["F32"]) + "}").encode(),
    "NaN": lambda h: (json.dumps(h)[:-1] + ', "x": NaN}').encode(),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_that_lies(folder: Path, kind: str) -> None:
    with_header(folder, HEADERS[kind](header(folder)))
    with pytest.raises(DamagedError, match=FILE) as caught:
        load(zeros(example()), folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000
    assert problems(folder)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 10**8 + 1, 10**6])
def test_a_gigantic_header_costs_no_memory(folder: Path, length: int) -> None:
    with_header(folder, b"{}", length)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedError, match=f"a header of {length} bytes cannot be"):
        load(zeros(example()), folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB


def shard(content: dict[str, Any], name: str = "F32") -> dict[str, Any]:
    return content["tensors"][name]["shards"][0]


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "more cells than memory": lambda c: c["tensors"].update(
        {"F32": {"shape": [4] * 20, "dtype": "U8", "shards": [diagonal(i) for i in range(4)]}}
    ),
    "a tensor larger than its file": lambda c: (
        c["tensors"]["F32"].update(shape=[2**40]),
        shard(c).update(offsets=[0], sizes=[2**40]),
    ),
    "numbers beyond 64 bits": lambda c: (
        c["tensors"]["F32"].update(shape=[2**70]),
        shard(c).update(offsets=[0], sizes=[2**70]),
    ),
    "a product beyond 64 bits": lambda c: c["tensors"]["F32"].update(shape=[2**40, 2**40]),
    "sixty-five dimensions": lambda c: (
        c["tensors"]["F32"].update(shape=[1] * 65),
        shard(c).update(offsets=[0] * 65, sizes=[1] * 65),
    ),
    "a file larger than it is": lambda c: c["files"].update({FILE: 2**50}),
    "booleans for numbers": lambda c: shard(c).update(offsets=[False, False]),
    "a checksum that is a number": lambda c: shard(c).update(xxh3_64=5),
    "another checksum": lambda c: shard(c).update(xxh3_64="0" * 16),
    "a file in a folder": lambda c: c["files"].update({"a/b.safetensors": 1}),
    "dots": lambda c: c["files"].update({"..safetensors": 1}),
    "a line break": lambda c: c["files"].update({"a.safetensors\n": 1}),
    "a null byte": lambda c: c["files"].update({"a\0.safetensors": 1}),
    "a file that is not there": lambda c: (
        c["files"].update({"b.safetensors": 10**4}),
        shard(c).update(file="b.safetensors"),
    ),
}


def diagonal(i: int) -> dict[str, Any]:
    return {"file": FILE, "key": "F32", "offsets": [i] * 20, "sizes": [1] * 20, "xxh3_64": "0" * 16}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_signed_manifest_that_lies(folder: Path, kind: str) -> None:
    rewrite(folder, lambda content: (MANIFESTS[kind](content), None)[1])
    started = time.monotonic()
    with pytest.raises(DamagedError):
        load(zeros(example()), folder)
    assert problems(folder) and time.monotonic() - started < 30


def test_a_key_twice_in_the_manifest(folder: Path) -> None:
    """The second would win in Python and may not in another reader."""
    path = folder / "manifest.json"
    text = path.read_text()
    path.write_text(text[:-1] + ', "extra": {}}')
    with pytest.raises(DamagedError, match="a key appears twice"):
        read_manifest(folder)


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    for name in (*FILES,):
        (folder / name).rename(secret)
        (folder / name).symlink_to(secret)
        with pytest.raises(CheckpointError):
            load(zeros(example()), folder)
        (folder / name).unlink()
        secret.rename(folder / name)
    assert problems(folder) == []


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    for name in FILES:
        (folder / name).rename(folder / "kept")
        os.mkfifo(folder / name)
        with pytest.raises(CheckpointError):
            load(zeros(example()), folder)
        (folder / name).unlink()
        (folder / "kept").rename(folder / name)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_anywhere_in_a_signed_manifest(folder: Path, data: st.DataObject) -> None:
    """Loads the right data, or is an error of ours."""
    whole = (folder / "manifest.json").read_bytes()

    def change(content: dict[str, Any]) -> None:
        where: Any = content
        while True:
            keys = list(where) if isinstance(where, dict) else list(range(len(where)))
            key = data.draw(st.sampled_from(keys))
            if not isinstance(where[key], dict | list) or not where[key] or data.draw(st.integers(0, 3)) == 0:
                where[key] = data.draw(json_values)
                return
            where = where[key]

    rewrite(folder, change)
    state = zeros(example())
    try:
        load(state, folder)
        assert all(torch.equal(t.float(), example()[name].float()) for name, t in state.items())
    except CheckpointError as error:
        assert "\n" not in str(error)
    finally:
        (folder / "manifest.json").write_bytes(whole)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.binary(max_size=200), length=st.none() | st.integers(0, 2**64 - 1))
def test_any_bytes_as_a_header(folder: Path, text: bytes, length: int | None) -> None:
    kept = {name: (folder / name).read_bytes() for name in FILES}
    with_header(folder, text, length)
    assert problems(folder)
    for name, content in kept.items():
        (folder / name).write_bytes(content)
