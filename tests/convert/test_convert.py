"""A conversion that is interrupted, continued, or run twice; and what the command says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from smp.checkpoint import CheckpointError, verify
from smp.checkpoint.folders.local import LocalFolder
from smp.checkpoint.format.manifest import read_manifest
from smp.convert.convert import DONE, JOURNAL, write
from smp.convert.formats import FORMATS, Format, make_target, open_checkpoint
from tests.convert.conversion import convert
from tests.convert.test_hf import assert_same_tensors
from tests.convert.tiny import save_theirs
from tools.convert_checkpoint import main

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_theirs("llama3", tmp_path_factory.mktemp("hf") / "source")


class StoppedError(Exception):
    """In the middle of a conversion."""


def attempt(source: Path, target: Path, kind: Format, stop_after: int | None, **options: Any) -> int:
    """Convert, and fail after so many bytes; files that were there before."""
    opened, done = open_checkpoint(source), 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        if stop_after is not None and done > stop_after:
            raise StoppedError

    with opened.weights as weights:
        made = make_target(kind, opened, shard_size=20_000)
        assert len(made.files) > 4
        return write(weights, made, target, options=options, workers=1, progress=progress)


@pytest.mark.parametrize("kind", FORMATS)
def test_an_interrupted_conversion_goes_on(kind: Format, source: Path, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        attempt(source, tmp_path / "target", kind, 60_000)
    partial = tmp_path / "target.partial"
    assert not (tmp_path / "target").exists() and (partial / JOURNAL).is_file()
    done = [str(path.relative_to(partial)).removesuffix(DONE) for path in partial.rglob(f"*{DONE}")]
    before = {name: (partial / name).stat().st_mtime_ns for name in done}
    assert len(done) >= 2
    half = partial / done[0]
    half.with_name("shard_99999.safetensors").write_bytes(b"half of a file that a killed process left")
    assert attempt(source, tmp_path / "target", kind, None) == len(done)
    target = tmp_path / "target"
    assert not partial.exists() and not (target / JOURNAL).exists() and not list(target.rglob(f"*{DONE}"))
    assert before == {name: (target / name).stat().st_mtime_ns for name in done}
    assert not list(target.rglob("shard_99999*"))
    assert_same_tensors(convert(target, tmp_path / "back", "hf"), source)
    if kind == "smp":
        assert verify(target) == []


@pytest.mark.parametrize("change", ["source", "options"])
def test_what_was_begun_with_something_else_is_not_continued(change: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        attempt(source, tmp_path / "target", "hf", 60_000)
    if change == "source":
        os.utime(source / "model.safetensors")
    assert attempt(source, tmp_path / "target", "hf", None, **({"a": 1} if change == "options" else {})) == 0
    assert_same_tensors(tmp_path / "target", source)


def test_a_file_of_another_size_is_written_again(source: Path, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        attempt(source, tmp_path / "target", "hf", 60_000)
    done = list((tmp_path / "target.partial").glob(f"*{DONE}"))
    os.truncate(str(done[0]).removesuffix(DONE), 10)
    assert attempt(source, tmp_path / "target", "hf", None) == len(done) - 1
    assert_same_tensors(tmp_path / "target", source)


def test_two_conversions_into_one_target(source: Path, tmp_path: Path) -> None:
    opened = open_checkpoint(source)
    other = open_checkpoint(source)

    def progress(count: int) -> None:
        with pytest.raises(CheckpointError, match="another conversion is writing there"):
            write(other.weights, make_target("hf", other), tmp_path / "target", options={}, workers=1)

    write(opened.weights, make_target("hf", opened), tmp_path / "target", options={}, workers=1, progress=progress)


def test_a_killed_process_leaves_nothing_under_the_name(source: Path, tmp_path: Path) -> None:
    """Killed at the first write after a file is complete."""
    program = (
        "import os, signal, sys\n"
        "from smp.convert import convert\n"
        "from tools.convert_checkpoint import main\n"
        "note, calls = convert._note, []\n"
        "def kill(path, record):\n"
        "    note(path, record)\n"
        "    calls.append(path)\n"
        "    len(calls) > 2 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "convert._note = kill\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    flags = ["--load", str(source), "--save", str(tmp_path / "target"), "--max-shard-size", "2e-5", "--workers", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program, *flags], cwd=ROOT, env=environment)
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["target.partial"]
    assert main(flags) == 0
    assert verify(tmp_path / "target") == []


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Formats are found out; --from and --to say them; --dtype converts; --workers and --max-shard-size."""

    def run(*words: str | Path) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return code, said.out, said.err

    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    code, out, _ = run("--load", source, "--save", a)
    assert code == 0 and "hf -> smp" in out and (a / "manifest.json").is_file()
    code, out, _ = run("--from", "smp", "--load", a, "--to", "megatron", "--save", b, "--workers", "3")
    assert code == 0 and "smp -> megatron" in out and (b / "release" / ".metadata").is_file()
    code, out, err = run("--load", b, "--to", "hf", "--save", c, "--dtype", "bf16", "--max-shard-size", "2e-5")
    assert code == 0 and "megatron -> hf" in out and "note: 29 rows" in err
    assert "has none: --reference FOLDER takes along that of a folder with tokenizer.json" in err
    assert json.loads((c / "config.json").read_text())["dtype"] == "bfloat16"
    files = sorted(c.glob("model-*.safetensors"))
    assert len(files) > 1
    wanted = load_file(source / "model.safetensors")
    for path in files:
        for name, tensor in load_file(path).items():
            assert torch.equal(tensor, wanted[name].bfloat16())
    code, _, err = run("--from", "hf", "--load", b, "--save", tmp_path / "d")
    assert code == 2 and "config.json cannot be read" in err
    code, _, err = run("--load", a, "--save", tmp_path / "d", "--workers", "0")
    assert code == 2 and "--workers" in err


def test_the_padding_follows_the_flag_and_vocab_size_cuts_it(source: Path, tmp_path: Path) -> None:
    padded = convert(source, tmp_path / "padded", "megatron", megatron_tp=3)
    embedding = open_checkpoint(padded).weights.store.tensors["embedding.word_embeddings.weight"]  # type: ignore[attr-defined]
    assert embedding.shape[0] == 3 * 128
    smaller = open_checkpoint(padded, vocab_size=90).weights
    assert smaller.tensors["embedding.weight"].shape[0] == smaller.config.vocab_size == 90


def test_tokenizer_template_and_generation_settings_go_along(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    files = {"tokenizer.json": b"{}", "chat_template.jinja": b"{{ messages }}", "tokenizer_config.json": b'{"a": 1}'}
    files |= {"additional_chat_templates/rag.jinja": b"{{ x }}", "generation_config.json": b'{"eos_token_id": [2, 5]}'}
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((source / name).read_bytes())
    (folder / "README.md").write_text("not part of the model")
    megatron = convert(convert(folder, tmp_path / "smp", "smp"), tmp_path / "megatron", "megatron")
    back = convert(megatron, tmp_path / "back", "hf")
    found = {str(p.relative_to(back)): p.read_bytes() for p in back.rglob("*") if p.is_file()}
    assert {name: found[name] for name in files} == files
    assert set(found) == {*files, "config.json", "model.safetensors"}
    trained = convert(convert(source, tmp_path / "bare", "smp"), tmp_path / "tuned", "hf", reference=folder)
    assert (trained / "tokenizer.json").read_bytes() == files["tokenizer.json"]


def test_progress_counts_every_byte(source: Path, tmp_path: Path) -> None:
    opened, seen = open_checkpoint(source), []
    target = make_target("smp", opened)
    write(opened.weights, target, tmp_path / "t", options={}, workers=2, progress=seen.append)
    assert sum(seen) == sum(t.stored.nbytes for tensors in target.files.values() for t in tensors)


def test_values_that_a_dtype_cannot_hold_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_theirs("llama3", tmp_path / "hf", torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 1e30
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    flags = ["--load", str(folder), "--to", "hf", "--save", str(tmp_path / "target")]
    assert main([*flags, "--dtype", "fp16"]) == 2
    assert "model.layers.1.mlp.up_proj.weight has values that are too large for float16" in capsys.readouterr().err
    assert not (tmp_path / "target").exists()
    assert main([*flags, "--dtype", "fp32"]) == 0
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 3.4e38  # the nearest number of bf16 is infinite
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert main([*flags[:-1], str(tmp_path / "other"), "--dtype", "bf16"]) == 2
    assert "has values that are too large for bfloat16" in capsys.readouterr().err


def test_shards_of_our_checkpoints_are_as_small_as_those_of_a_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wants a row of a tensor reads its shard: docs/checkpoint-format.md says how large one is."""
    monkeypatch.setattr("smp.checkpoint.format.tensor_file.LARGEST_SHARD", 3000)  # 23 rows of 32 numbers in fp32
    ours = convert(source, tmp_path / "ours", "smp")
    shards = read_manifest(LocalFolder(ours)).tensors["model.embedding.weight"].shards
    assert [shard.sizes for shard in shards] == [(23, 32)] * 4 + [(7, 32)]
    assert verify(ours) == []
    assert_same_tensors(convert(ours, tmp_path / "back", "hf"), source)
    again = convert(ours, tmp_path / "again", "smp", dtype=torch.float64)
    assert_same_tensors(convert(again, tmp_path / "same", "hf", dtype=torch.float32), source)
