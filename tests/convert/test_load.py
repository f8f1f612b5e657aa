"""Weights of a Hugging Face folder in a sharded model: every rank has its parts, and reads little more than them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend

from smp.config import Config, ConfigError, Layout, ModelConfig, ParallelConfig, TrainingConfig, resolve
from smp.models.presets import PRESETS
from smp.training.settings import read_settings
from tests.convert.test_megatron import convert
from tests.convert.tiny import save_theirs
from tests.distributed import run_distributed
from tests.programs import run_program

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp 2, sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "shard 2": (2, {}),
    "replicate 2": (2, {"hybrid_shard_degree": 1}),
    "pp 2": (2, {"pipeline_model_parallel_size": 2}),
    "tp 2, shard 2": (4, {"tensor_model_parallel_size": 2}),
    "tp 4, shared key and value heads": (4, {"tensor_model_parallel_size": 4}),
}
FAST = ("tp 2, sp", "pp 2", "tp 2, shard 2")


def big_enough(folder: Path) -> Path:
    """A model whose rows are long enough to be read in parts: one of some megabytes."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 301, "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8}
    sizes |= {"intermediate_size": 1024, "max_position_embeddings": 64, "num_key_value_heads": 2}
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    return folder


def parts_read(rank: int, world: int, folder: str, parallel: dict[str, Any]) -> tuple[dict[str, Any], int, int]:
    """This rank's parts with their boxes, the bytes of them, and the bytes that it read for them."""
    from smp.checkpoint import local, training_state
    from smp.convert.describe import read_architecture
    from smp.convert.load import load_hf
    from smp.kernels import TORCH
    from smp.kernels.attention import AttentionChoice
    from smp.parallel.boxes import local_box
    from smp.parallel.mesh import build_mesh
    from smp.pipeline.plan import plan_pipeline
    from smp.training.build import Backends, build_model

    count, read = 0, local._LocalSource.read_into

    def counted(self: Any, offset: int, into: memoryview) -> None:
        nonlocal count
        count += len(into)
        read(self, offset, into)

    model = ModelConfig(**(read_architecture(folder) or {}))
    training = TrainingConfig(dry_run=True)
    config = resolve(Config(model=model, parallel=ParallelConfig(**parallel), training=training), world)
    layout = Layout.from_config(config.parallel, world)
    plan = plan_pipeline(config, layout) if layout.pp > 1 else None
    backends = Backends(TORCH, AttentionChoice("math", SDPBackend.MATH, "nothing is computed"), ())
    built = build_model(config, build_mesh(layout, "cpu"), torch.device("cpu"), backends, plan)
    local._LocalSource.read_into = counted  # type: ignore[method-assign]
    load_hf(built, folder)
    parts, size = {}, 0
    for name, parameter in training_state(built)[0].items():
        part = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        parts[name.removeprefix("model.")] = (local_box(parameter), part.detach().clone())
        size += part.nbytes
    return parts, size, count


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in LAYOUTS]
)
def test_every_rank_reads_its_own_parts(layout: str, tmp_path: Path) -> None:
    folder = big_enough(tmp_path / "hf")
    world, parallel = LAYOUTS[layout]
    found = run_distributed(parts_read, world, str(folder), parallel)
    whole = load_file(convert(folder, tmp_path / "smp", "smp") / "shard_00000.safetensors")
    covered = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in whole.items()}
    for parts, size, count in found:
        assert count <= 1.02 * size + 20_000  # headers, and what is left of a row
        assert layout == "replicate 2" or size < 0.75 * sum(tensor.nbytes for tensor in whole.values())
        for name, (box, part) in parts.items():
            tensor = whole[f"model.{name}"]
            rows = min(max(tensor.shape[0] - box.offsets[0], 0), box.sizes[0])
            place = (
                slice(box.offsets[0], box.offsets[0] + rows),
                *(slice(o, o + n) for o, n in zip(box.offsets[1:], box.sizes[1:], strict=True)),
            )
            assert torch.equal(part[:rows], tensor[place]), name
            assert (part[rows:] == 0).all()
            covered[f"model.{name}"][place] = True
    assert all(mask.all() for mask in covered.values())


def pretrain(*words: str | Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    return run_program(ROOT / "pretrain_gpt.py", words, ROOT, ranks)


RUN = ("--mock-data", "--seq-length", "32", "--global-batch-size", "4", "--log-interval", "1", "--no-progress-bar")


def losses(output: str) -> list[float]:
    return [float(line.split("lm loss: ")[1].split(" ")[0]) for line in output.splitlines() if "lm loss: " in line]


def test_pretraining_starts_from_a_hugging_face_folder(tmp_path: Path) -> None:
    folder = save_theirs("qwen3", tmp_path / "hf", torch.bfloat16)
    flags = ("--load", folder, "--finetune", *RUN, "--train-iters", "2", "--lr", "1e-3")
    one = pretrain(*flags, "--log-dir", tmp_path / "one", "--save", tmp_path / "run")
    two = pretrain(*flags, "--log-dir", tmp_path / "two", "--tensor-model-parallel-size", "2", ranks=2)
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    for done in (one, two):
        assert f"weights from the Hugging Face folder {folder}; optimizer and counters start afresh" in done.stdout
        assert "note: weights are bfloat16 in the files and float32 here" in done.stdout
    assert losses(one.stdout) == pytest.approx(losses(two.stdout), rel=1e-5) and len(losses(one.stdout)) == 2
    saved = json.loads((tmp_path / "run" / "iter_0000002" / "manifest.json").read_text())["extra"]["config"]
    assert (saved["num_layers"], saved["kv_channels"], saved["qk_layernorm"]) == (2, 16, True)
    again = pretrain("--load", tmp_path / "run", *RUN, "--train-iters", "3", "--log-dir", tmp_path / "again")
    assert again.returncode == 0 and "at iteration 2" in again.stdout  # and knows what model it is
    exported = convert(tmp_path / "run", tmp_path / "exported", "hf", reference=folder)
    assert (exported / "generation_config.json").is_file()
    other = pretrain("--model", "debug", "--vocab-size", "99", *RUN, "--train-iters", "1", "--log-dir", tmp_path / "o")
    assert losses(other.stdout)[0] != pytest.approx(losses(one.stdout)[0], rel=1e-2)


def test_a_converted_checkpoint_is_where_a_run_starts(tmp_path: Path) -> None:
    folder = save_theirs("llama3", tmp_path / "hf", torch.bfloat16)
    ours = convert(folder, tmp_path / "ours", "smp")
    common = (*RUN, "--train-iters", "1", "--log-dir", tmp_path / "log")
    refused = pretrain("--load", ours, *common)
    assert refused.returncode == 2 and "holds weights only, nothing to resume: give --finetune" in refused.stderr
    a = pretrain("--load", ours, "--finetune", *common)
    b = pretrain("--load", folder, *common)
    assert a.returncode == b.returncode == 0, a.stderr + b.stderr
    assert losses(a.stdout) == losses(b.stdout) and len(losses(a.stdout)) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--num-layers", "3"), "is a model with --num-layers 2, this run has 3"),
        (("--model", "llama3-8b"), "is a model with --num-layers 2, this run has 32"),
    ],
)
def test_other_settings_than_the_folders_are_refused(flags: tuple[str, ...], message: str, tmp_path: Path) -> None:
    folder = save_theirs("llama3", tmp_path / "hf")
    with pytest.raises(ConfigError, match=message):
        read_settings(["--load", str(folder), *RUN, "--train-iters", "1", *flags], PRESETS, 1)


def test_a_folder_has_no_iterations(tmp_path: Path) -> None:
    folder = save_theirs("llama3", tmp_path / "hf")
    done = pretrain("--load", folder, "--ckpt-step", "3", *RUN, "--train-iters", "1", "--log-dir", tmp_path / "log")
    assert done.returncode == 2 and "is a Hugging Face folder" in done.stderr


def test_a_damaged_folder_ends_all_ranks_in_one_line(tmp_path: Path) -> None:
    folder = save_theirs("llama3", tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    done = pretrain("--load", folder, *RUN, "--train-iters", "1", "--log-dir", tmp_path / "log", ranks=2)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode != 0 and len(errors) == 1
    assert "model.safetensors" in errors[0] or str(folder) in errors[0]
    assert "tensor model.norm.weight is missing" in errors[0]
