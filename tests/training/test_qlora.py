"""Adapters on weights in 4 bits: alike under every layout, like bitsandbytes' form of the weights under peft."""

from __future__ import annotations

import contextlib
import io
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from smp.config import ConfigError
from smp.kernels.precision import nf4
from smp.layers.adapters.quantized import quantized_layers
from smp.models.micro_batch import MicroBatch
from smp.parallel.dtensor_region import local_part
from smp.training.cost.predict import predicted_memory
from smp.training.process import Process
from smp.training.runtime import StopSignal
from smp.training.tuning.finetuning import Finetuning
from smp.training.tuning.settings import read_finetune_settings
from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE, tensor_errors
from tests.training.tiny_hf import write_adapter, write_model, write_samples, write_tokenizer
from tests.training.tuning_lab import QUIET, Recording, together, tune_all
from tools.merge_lora import main as merge_lora

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

METHODS = {
    "sft": "--data-path {0}/sft.jsonl --load-in-4bit --lora-rank 4 --lora-dropout 0.25",
    "few layers": "--data-path {0}/sft.jsonl --load-in-4bit --lora-rank 4 --lora-target-modules value,up "
    "--no-bnb-4bit-use-double-quant",
    "dpo": "--data-path {0}/dpo.jsonl --objective dpo --load-in-4bit --lora-rank 4",
    "dora": "--data-path {0}/sft.jsonl --load-in-4bit --lora-rank 4 --use-dora",
    "reward": "--data-path {0}/dpo.jsonl --objective reward --load-in-4bit --lora-rank 4",
}
LAYOUTS = {
    "tp 2 + sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel", ("sft", "few layers", "dora")),
    "pp 2": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1", ("few layers", "reward")),
    "shard 2": (2, "--recompute-granularity selective", ("sft", "dpo")),
    "cp 2": (2, "--context-parallel-size 2 --cp-comm-type p2p --recompute-granularity full", ("sft",)),
    "shard 2 x tp 4": (
        8,
        "--tensor-model-parallel-size 4 --recompute-granularity selective",
        ("sft", "few layers", "dpo", "dora"),
    ),
}
"""With 2 key/value heads, which 4 ranks do not cut."""
STEPS = "--train-iters 2 --seq-length 48 --micro-batch-size 2 --global-batch-size 8 --lr 0.02 --optimizer sgd"
Results = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    write_tokenizer(path)
    write_model(path, layers=2, hidden=256)
    write_samples(path)
    write_tokenizer(path / "small")
    write_model(path / "small", layers=1)
    write_adapter(path, path / "theirs", r=4, lora_alpha=10, target_modules=["q_proj", "down_proj"])
    return path


def flags_of(folder: Path, method: str, layout: str = "") -> str:
    return f"--load {folder} --log-dir {folder}/logs {STEPS} {METHODS[method].format(folder)} {layout}"


def results_of(folder: Path, worlds: tuple[int, ...]) -> Results:
    out = {}
    layouts = {"alone": (1, "", tuple(METHODS))} | LAYOUTS
    for world in worlds:
        cases = [(name, method) for name, (n, _, methods) in layouts.items() if n == world for method in methods]
        flags = [flags_of(folder, method, layouts[layout][1]) for layout, method in cases]
        ranks = run_distributed(tune_all, world, flags)
        out.update({case: together([r[i] for r in ranks]) for i, case in enumerate(cases)})
    return out


@pytest.fixture(scope="module")
def alone(folder: Path) -> Results:
    return results_of(folder, (1,))


def check(got: Results, alone: Results) -> None:
    for (layout, method), result in got.items():
        want = alone["alone", method]
        assert len(set(want["losses"])) == 2
        for loss, other in zip(result["losses"], want["losses"], strict=True):
            assert abs(loss - other) <= TOLERANCE * abs(other), (layout, method)
        for here, there in zip(result["gradients"], want["gradients"], strict=True):
            assert any(g.any() for g in there.values())
            assert max(tensor_errors(here, there, there).values()) <= TOLERANCE, (layout, method)


def test_two_ranks_equal_one(folder: Path, alone: Results) -> None:
    check(results_of(folder, (2,)), alone)


@pytest.mark.slow
def test_eight_ranks_equal_one(folder: Path, alone: Results) -> None:
    check(results_of(folder, (8,)), alone)


def test_rounding_shows_and_is_small(folder: Path, alone: Results) -> None:
    """The control: the loss is not that of the weights as they were, and near it."""
    plain = run_distributed(tune_all, 1, [flags_of(folder, "sft").replace("--load-in-4bit", "")])[0][0]
    own, other = alone["alone", "sft"]["losses"][0], plain["losses"][0]
    assert 1e-4 < abs(own - other) / other < 0.1


def logits_of(rank: int, world: int, flags: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(widened weights by Hugging Face's names, logits) of a run's model after its last step."""
    config, data = read_finetune_settings(shlex.split(f"{QUIET} {flags}"), world)
    assert data is not None
    double = config.lora is not None and config.lora.bnb_4bit_use_double_quant
    run = Recording(Finetuning(config, data), Process(rank, world, rank), torch.device("cpu"), StopSignal()).record()
    try:
        run.run()
        model = run.trainer.model.eval()
        layers = quantized_layers(model)
        wide = {n: nf4.widen(m.weight.to_local(), torch.float32, double=double) for n, m in layers.items()}
        with torch.no_grad():
            logits = model(MicroBatch(torch.arange(40).view(2, 20))).logits
    finally:
        run.close()
    return wide, logits


@pytest.mark.parametrize("more", ["", "--no-bnb-4bit-use-double-quant", "--use-dora --lora-dropout 0"])
def test_peft_computes_the_same_on_the_widened_weights(folder: Path, more: str) -> None:
    flags = f"{flags_of(folder, 'sft')} --save {folder}/run{len(more)} {more}"
    [(wide, logits)] = run_distributed(logits_of, 1, flags)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    names |= {name: f"{name}_proj" for name in ("gate", "up", "down")}
    for name, weight in wide.items():
        front, last = name.rsplit(".", 1)
        module = model.get_submodule(f"model.{front.replace('attention', 'self_attn')}.{names[last]}")
        assert not torch.equal(module.weight, weight)
        module.weight = nn.Parameter(weight)
    assert len(wide) == 2 * len(names)
    tuned = peft.PeftModel.from_pretrained(model, folder / f"run{len(more)}" / "adapter").eval()
    with torch.no_grad():
        theirs = tuned(input_ids=torch.arange(40).view(2, 20)).logits
    assert (logits - theirs).norm() / theirs.norm() < 1e-5
    with torch.no_grad(), tuned.disable_adapter():
        assert (logits - tuned(input_ids=torch.arange(40).view(2, 20)).logits).norm() / theirs.norm() > 1e-3


def test_an_adapter_of_peft_s_goes_on(folder: Path) -> None:
    flags = f"--load {folder} --log-dir {folder}/logs {STEPS} --data-path {folder}/sft.jsonl"
    run = run_distributed(tune_all, 1, [f"{flags} --load-in-4bit --load-adapter {folder}/theirs"])[0][0]
    assert {name.split(".")[-3] for name in run["gradients"][0]} == {"query", "down"}


def trained(rank: int, world: int, lines: list[str]) -> list[dict[str, Any]]:
    """Of each command line: its losses, what it said, which layers are in 4 bits, and a weight that is not trained."""
    found = []
    for flags in lines:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            config, data = read_finetune_settings(shlex.split(f"{QUIET} {flags}"), world)
            assert data is not None
            run = Recording(Finetuning(config, data), Process(rank, world, rank), torch.device("cpu"), StopSignal())
            run.record().run()
            model = run.trainer.model
            up = local_part(model.get_parameter("layers.0.mlp.up.weight")).clone()
            found.append(
                {"losses": run.losses, "said": said.getvalue(), "4 bits": set(quantized_layers(model)), "up": up}
            )
            run.close()
    return found


def test_a_run_goes_on_in_4_bits_or_says_that_it_does_not(folder: Path, tmp_path: Path) -> None:
    """The same bits with --load-in-4bit; without it the adapters go on with the weights of the files, in a line. And
    tools/merge_lora.py adds them to these."""
    flags = flags_of(folder, "sft")
    first = f"{flags} --train-iters 1 --save {tmp_path}"
    plain = flags.replace("--load-in-4bit", "--no-load-in-4bit")
    lines = [flags, f"{first}/same", f"{first}/plain"]
    lines += [f"{flags} --save {tmp_path}/same --resume", f"{plain} --save {tmp_path}/plain --resume"]
    whole, _, _, same, other = run_distributed(trained, 1, lines)[0]
    assert same["losses"] == whole["losses"][1:] and same["4 bits"] and "load_in_4bit was" not in same["said"]
    assert "note: load_in_4bit was True in the checkpoint and is False now" in other["said"]
    assert not other["4 bits"] and 1e-5 < abs(other["losses"][0] / whole["losses"][1] - 1) < 0.1
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert torch.equal(other["up"], base.model.layers[0].mlp.up_proj.weight)
    run, merged = tmp_path / "same", tmp_path / "merged"
    assert merge_lora(["--load", str(folder), "--adapter", str(run / "adapter"), "--save", str(merged)]) == 0
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        alone = base(input_ids=ids).logits
        wanted = peft.PeftModel.from_pretrained(base, run / "adapter").eval()(input_ids=ids).logits
        model = transformers.AutoModelForCausalLM.from_pretrained(merged, attn_implementation="eager").eval()
        found = model(input_ids=ids).logits
    assert (found - wanted).norm() / wanted.norm() < 1e-5 < (found - alone).norm() / alone.norm()


def bytes_of(rank: int, world: int, flags: list[str]) -> list[tuple[int, int]]:
    """(bytes of a model's parameters, those of the dry run) of each command line."""
    found = []
    for each in flags:
        config, data = read_finetune_settings(shlex.split(f"{QUIET} {each}"), world)
        assert data is not None
        run = Recording(Finetuning(config, data), Process(rank, world, rank), torch.device("cpu"), StopSignal())
        held = sum(local_part(p).nbytes for p in run.trainer.model.parameters())
        found.append((held, predicted_memory(config, world).parameters))
        run.close()
    return found


def test_the_dry_run_knows_the_bytes(folder: Path) -> None:
    plain = flags_of(folder, "sft").replace("--load-in-4bit", "--bf16")
    flags = [plain, f"{plain} --load-in-4bit", f"{plain} --load-in-4bit --no-bnb-4bit-use-double-quant"]
    wide, *narrow = run_distributed(bytes_of, 1, flags)[0]
    for held, predicted in (wide, *narrow):
        assert held == predicted
    linear = 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512)  # two layers
    for (held, _), size in zip(narrow, (0.56, 36 / 64), strict=True):  # short rows: 8 + 4 x 2 bytes each
        assert wide[0] - held == pytest.approx((2 - size) * linear, rel=0.02)


REFUSED = {
    "--use-dora": "--use-dora: there are no adapters",
    "--lora-rank 2 --decoupled-lr 0.1": "--decoupled-lr: the embedding and the output matrix are frozen",
    "--lora-rank 2 --use-dora --lora-dropout 0.1": "--use-dora and --lora-dropout 0.1 exclude each other",
    "--load-in-4bit": "--load-in-4bit: there are no adapters",
    "--lora-rank 2 --no-bnb-4bit-use-double-quant": "--no-bnb-4bit-use-double-quant",
    "--lora-rank 2 --load-in-4bit --compile": "--compile",
    "--lora-rank 2 --load-in-4bit --load {0}/small": "blocks of 64",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_work_is_refused(folder: Path, flags: str) -> None:
    line = f"--data-path {folder}/sft.jsonl --train-iters 1 {flags.format(folder)}"
    with pytest.raises(ConfigError, match=REFUSED[flags]):
        read_finetune_settings(shlex.split(line if "--load " in line else f"--load {folder} {line}"), 1)
