"""Weights of a Hugging Face folder in a sharded model: every rank has its parts, and reads little more than them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from smp.checkpoint import CheckpointError
from smp.config import Config, ConfigError, Layout, ModelConfig, ParallelConfig, TrainingConfig, resolve
from smp.convert.huggingface.config import resolved
from smp.models.presets import PRESETS
from smp.training.settings import read_settings
from tests.convert.conversion import convert
from tests.convert.tiny import save_theirs
from tests.distributed import run_distributed
from tests.programs import run_program
from tests.training.flag_runs import run_here

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
TOGETHER = [("tp 2, sp", "pp 2"), ("tp 2, shard 2",)]
TOGETHER_SLOW = [("shard 2", "replicate 2"), ("tp 4, shared key and value heads",)]
"""Layouts of as many ranks, tried in one start of them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows are long enough to be read in parts: one of some megabytes."""
    import transformers

    folder = tmp_path_factory.mktemp("theirs") / "hf"

    sizes: dict[str, Any] = {"vocab_size": 301, "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8}
    sizes |= {"intermediate_size": 1024, "max_position_embeddings": 64, "num_key_value_heads": 2}
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    return folder


Read = tuple[dict[str, Any], int, int]


def parts_read(rank: int, world: int, folder: str, layouts: tuple[str, ...]) -> list[Read]:
    """Of each layout this rank's parts with their regions, the bytes of them, and the bytes that it read for them."""
    return [parts_of(world, folder, LAYOUTS[layout][1]) for layout in layouts]


def parts_of(world: int, folder: str, parallel: dict[str, Any]) -> Read:
    from smp.checkpoint import training_state
    from smp.checkpoint.folders import local
    from smp.convert.describe import read_architecture
    from smp.convert.load import load_hf
    from smp.kernels import TORCH
    from smp.parallel.context import build_context
    from smp.parallel.dtensor_region import local_region
    from smp.pipeline.stage_plan import plan_pipeline
    from smp.training.build import RunSetup, build_model

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
    built = build_model(config, RunSetup(build_context(layout, "cpu"), torch.device("cpu"), TORCH, plan))
    local._LocalSource.read_into = counted  # type: ignore[method-assign]
    load_hf(built, folder)
    local._LocalSource.read_into = read  # type: ignore[method-assign]
    parts, size = {}, 0
    for name, parameter in training_state(built)[0].items():
        part = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        parts[name.removeprefix("model.")] = (local_region(parameter), part.detach().clone())
        size += part.nbytes
    return parts, size, count


@pytest.mark.parametrize(
    "layouts", [*TOGETHER, *(pytest.param(s, marks=pytest.mark.slow) for s in TOGETHER_SLOW)], ids=str
)
def test_every_rank_reads_its_own_parts(layouts: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    assert {name for together in (*TOGETHER, *TOGETHER_SLOW) for name in together} == set(LAYOUTS)
    found = run_distributed(parts_read, LAYOUTS[layouts[0]][0], str(folder), layouts)
    whole = load_file(convert(folder, tmp_path / "smp", "smp") / "shard_00000.safetensors")
    for layout, ranks in zip(layouts, zip(*found, strict=True), strict=True):
        check_parts(layout, ranks, whole)


def check_parts(layout: str, found: tuple[Read, ...], whole: dict[str, torch.Tensor]) -> None:
    """Each rank's parts are those of the whole, together they are all of it, and nobody read more."""
    covered = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in whole.items()}
    for parts, size, count in found:
        assert count <= 1.02 * size + 20_000  # headers, and what is left of a row
        assert layout == "replicate 2" or size < 0.75 * sum(tensor.nbytes for tensor in whole.values())
        for name, (region, part) in parts.items():
            tensor = whole[f"model.{name}"]
            rows = min(max(tensor.shape[0] - region.offsets[0], 0), region.sizes[0])
            place = (
                slice(region.offsets[0], region.offsets[0] + rows),
                *(slice(o, o + n) for o, n in zip(region.offsets[1:], region.sizes[1:], strict=True)),
            )
            assert torch.equal(part[:rows], tensor[place]), name
            assert (part[rows:] == 0).all()
            covered[f"model.{name}"][place] = True
    assert all(mask.all() for mask in covered.values())


RUN = "--mock-data --seq-length 32 --global-batch-size 4 --log-interval 1 --no-progress-bar --no-tensorboard"
RUN += " --log-dir logs"


def losses(output: str) -> list[float]:
    return [float(line.split("lm loss: ")[1].split(" ")[0]) for line in output.splitlines() if "lm loss: " in line]


def test_pretraining_starts_from_a_hugging_face_folder(tmp_path: Path) -> None:
    folder = save_theirs("qwen3", tmp_path / "hf", torch.bfloat16)
    flags = f"{RUN} --load {folder} --finetune --train-iters 2 --lr 1e-3"
    one = run_here(tmp_path / "one", f"--save {tmp_path / 'run'}", base=flags)
    two = run_program(ROOT / "pretrain_gpt.py", [*flags.split(), "--tensor-model-parallel-size", "2"], tmp_path, 2)
    assert one.code == two.returncode == 0, one.err + two.stderr
    for said in (one.out, two.stdout):
        assert f"weights from the Hugging Face folder {folder}; optimizer and counters start afresh" in said
        assert "note: weights are bfloat16 in the files and float32 here" in said
    assert losses(one.out) == pytest.approx(losses(two.stdout), rel=1e-5) and len(losses(one.out)) == 2
    saved = json.loads((tmp_path / "run" / "iter_0000002" / "manifest.json").read_text())["extra"]["config"]
    assert (saved["num_layers"], saved["kv_channels"], saved["qk_layernorm"]) == (2, 16, True)
    again = run_here(tmp_path / "again", f"--load {tmp_path / 'run'} --train-iters 3", base=RUN)
    assert again.code == 0 and "at iteration 2" in again.out  # and knows what model it is
    exported = convert(tmp_path / "run", tmp_path / "exported", "hf", reference=folder)
    assert (exported / "generation_config.json").is_file()
    other = run_here(tmp_path / "other", "--model debug --vocab-size 99 --train-iters 1", base=RUN)
    assert losses(other.out)[0] != pytest.approx(losses(one.out)[0], rel=1e-2)


def test_a_converted_checkpoint_is_where_a_run_starts(tmp_path: Path) -> None:
    folder = save_theirs("llama3", tmp_path / "hf", torch.bfloat16)
    ours = convert(folder, tmp_path / "ours", "smp")
    refused = run_here(tmp_path / "refused", f"--load {ours} --train-iters 1", base=RUN)
    assert refused.code == 2 and "holds weights only, nothing to resume: give --finetune" in refused.err
    a = run_here(tmp_path / "a", f"--load {ours} --finetune --train-iters 1", base=RUN)
    b = run_here(tmp_path / "b", f"--load {folder} --train-iters 1", base=RUN)
    assert a.code == b.code == 0, a.err + b.err
    assert losses(a.out) == losses(b.out) and len(losses(a.out)) == 1
    assert f"weights from {ours}; optimizer and counters start afresh" in a.out and "resumed" not in a.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-layers 3", "is a model with --num-layers 2, this run has 3"),
        ("--model llama3-8b", "is a model with --num-layers 2, this run has 32"),
        ("--tensor-model-parallel-size 3", "--tensor-model-parallel-size"),
    ],
)
def test_other_settings_than_the_folders_are_refused(flags: str, message: str, tmp_path: Path) -> None:
    folder = save_theirs("llama3", tmp_path / "hf")
    with pytest.raises(ConfigError, match=message):
        read_settings([*f"--load {folder} {RUN} --train-iters 1 {flags}".split()], PRESETS, 3 if "size" in flags else 1)


def test_a_folder_has_no_iterations(tmp_path: Path) -> None:
    folder = save_theirs("llama3", tmp_path / "hf")
    done = run_here(tmp_path / "run", f"--load {folder} --ckpt-step 3 --train-iters 1", base=RUN)
    assert done.code == 2 and "is a Hugging Face folder" in done.err


def refusals(rank: int, world: int, folder: str) -> str:
    """What loading a folder ends with."""
    from smp.convert.describe import read_architecture
    from smp.convert.load import load_hf
    from smp.models.gpt import GPT
    from smp.parallel.context import build_context

    mesh = build_context(Layout(tp=world), "cpu").tp
    model = GPT(resolved(**(read_architecture(folder) or {})), mesh, device="cpu")
    with pytest.raises(CheckpointError) as error:
        load_hf(model, folder)
    return str(error.value)


def test_a_damaged_folder_ends_all_ranks_in_one_line(tmp_path: Path) -> None:
    folder = save_theirs("llama3", tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    done = run_here(tmp_path / "run", f"--load {folder} --train-iters 1", base=RUN)
    line = f"{folder}: tensor model.norm.weight is missing"
    assert done.code != 0 and len(done.errors) == 1 and line in done.errors[0]
    assert run_distributed(refusals, 2, str(folder)) == [line, line]
