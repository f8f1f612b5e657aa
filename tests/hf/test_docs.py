"""Every block of docs/transform.md, and the README's about it, runs as it is written.

A block gets the names that it takes for granted (a folder, ids, a model), and what it has made is looked at. A block
that nothing here runs is an error.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import smp
from smp.config import ConfigError
from tests.distributed import run_distributed
from tests.hf.families import VOCAB, build, whole, worst

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
ROOT = Path(__file__).parents[2]
RANKS, ROWS = 4, 8


@dataclass(frozen=True)
class Block:
    """Attributes:
    place: the file, the section's title and which of its blocks it is.
    language: what stands after the backquotes.
    """

    place: tuple[str, str, int]
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    """Of one file, from above."""
    found: list[Block] = []
    section, fence = "", re.compile(r"^```(\w*)\n(.*?)^```$|^#+ ([^\n]*)$", re.MULTILINE | re.DOTALL)
    for language, text, title in fence.findall((ROOT / page).read_text(encoding="utf-8")):
        section = title or section
        if text:
            before = sum(block.place[1] == section for block in found)
            found.append(Block((page, section, before), language, text))
    return found


def all_blocks() -> dict[tuple[str, str, int], Block]:
    about = [block for block in blocks("README.md") if "smp.transform" in block.text or "hf_fsdp" in block.text]
    return {block.place: block for block in [*blocks("docs/transform.md"), *about]}


@dataclass(frozen=True)
class Run:
    """One block in a process.

    Attributes:
        folder: the working directory of all ranks.
    """

    block: Block
    rank: int
    folder: Path

    def __call__(self, **names: Any) -> dict[str, Any]:
        """Execute it where these names and the usual imports are there; returns what there is after it."""
        usual = {"smp": smp, "torch": torch, "fully_shard": fully_shard} | {
            name: getattr(transformers, name) for name in ("AutoModelForCausalLM", "Trainer", "TrainingArguments")
        }
        room = usual | names
        exec(compile(self.block.text, str(self.block.place), "exec"), room)
        return room

    def saved(self, family: str) -> tuple[Any, str]:
        """A model in one process, and its folder; a new one each time, as ranks may still read the last."""
        model = build(family)
        folder = self.folder / f"{family} {self.block.place[1][:12].strip()}"
        if self.rank == 0:
            model.save_pretrained(folder)
        torch.distributed.barrier()
        return model, str(folder)


def _ids(rows: int = ROWS, length: int = 16) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def _like_alone(model: Any, alone: Any, own: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Loss and every gradient of a training step."""
    ids = own(_ids())
    found, wanted = model(input_ids=ids, labels=ids).loss, alone(input_ids=_ids(), labels=_ids()).loss
    found.backward()
    wanted.backward()
    assert float(smp.state.mean_over_data(found.detach())) == pytest.approx(float(wanted.detach()), rel=1e-5)
    gradients = [{n: whole(p.grad) for n, p in m.named_parameters() if p.grad is not None} for m in (model, alone)]
    assert worst(*gradients)[0] <= 1e-5


def _rows_of_data_rank(ids: torch.Tensor) -> torch.Tensor:
    return ids.chunk(smp.state.dp_size)[smp.state.dp_rank]


def _three_lines(run: Run) -> None:
    alone, folder = run.saved("Llama")
    own = _ids().chunk(2)[run.rank // 2]  # of data rank; tensor-parallel ranks are neighbours
    room = run(folder=folder, ids=own)
    assert room["optimizer"].param_groups[0]["params"] == list(room["model"].parameters())
    wanted = alone(input_ids=_ids(), labels=_ids()).loss
    wanted.backward()
    torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    assert float(smp.state.mean_over_data(room["loss"].detach())) == pytest.approx(float(wanted.detach()), rel=1e-5)
    found = {name: whole(p.grad) for name, p in room["model"].named_parameters()}
    assert worst(found, {name: p.grad for name, p in alone.named_parameters()})[0] <= 1e-5


def _report(run: Run) -> None:
    """What the page shows is what transform says."""
    smp.init({"tensor_parallel_degree": 2})
    model = smp.transform(build("Qwen3"))
    first, *shown, dots = run.block.text.splitlines()
    assert (first, dots) == ("smp.transform: Qwen3ForCausalLM over 2 tensor-parallel ranks", "  ...")
    assert len(shown) == 3 and {line.rstrip() for line in shown} <= {str(done) for done in model.smp_report}


def _sequence_parallel(run: Run) -> None:
    run()
    assert smp.state.settings.sequence_parallel
    alone = build("Llama")
    model = fully_shard(smp.transform(copy.deepcopy(alone)), mesh=smp.state.data_mesh)
    _like_alone(model, alone, _rows_of_data_rank)


def _context_parallel(run: Run) -> None:
    alone = build("Llama")
    own = _ids().chunk(2)[run.rank // 2]
    room = run(model=copy.deepcopy(alone), ids=own, labels=own)
    assert smp.state.cp_size == 2 and smp.state.dp_size == 2 and room["ids"].shape == (ROWS // 2, 8)
    wanted = alone(input_ids=_ids(), labels=_ids()).loss
    assert float(smp.state.mean_over_data(room["loss"].detach())) == pytest.approx(float(wanted.detach()), rel=1e-5)


def _expert_parallel(run: Run) -> None:
    alone = build("Mixtral")
    room = run(model=copy.deepcopy(alone))
    assert smp.state.ep_size == 4
    _like_alone(room["model"], alone, _rows_of_data_rank)


def _trainer(run: Run) -> None:
    from accelerate.state import AcceleratorState

    alone, folder = run.saved("Llama")
    data = [{"input_ids": ids, "labels": ids} for ids in _ids(16)]
    names = {"folder": folder, "data": data}
    with pytest.raises(ConfigError, match=r"smp.init, and accelerate knows of 1: .*use_cpu=True"):
        run(**names)
    AcceleratorState._reset_state(reset_partial_state=True)
    smp.state.reset()
    room = run(**names, TrainingArguments=partial(transformers.TrainingArguments, use_cpu=True))
    trained = {name: whole(p) for name, p in room["model"].named_parameters()}
    assert worst(trained, dict(alone.named_parameters()))[0] > 1e-4
    torch.distributed.barrier()
    saved = transformers.AutoModelForCausalLM.from_pretrained("final")
    assert all(torch.equal(trained[name], p) for name, p in saved.named_parameters())


def _adapters(run: Run) -> None:
    peft = pytest.importorskip("peft")
    smp.init({"tensor_parallel_degree": 4})
    torch.manual_seed(1)
    alone, state = build("Llama"), torch.get_rng_state()
    room = run(model=copy.deepcopy(alone), get_peft_model=peft.get_peft_model, LoraConfig=peft.LoraConfig)
    torch.set_rng_state(state)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    _like_alone(room["model"], peft.get_peft_model(alone, config), lambda ids: ids)


def _experts_left_whole(run: Run) -> None:
    smp.init({"tensor_parallel_degree": 4})
    alone = build("Mixtral")
    model = run(model=copy.deepcopy(alone))["model"]
    assert model.model.layers[0].mlp.experts.gate_up_proj.to_local().shape[0] == 4
    _like_alone(model, alone, lambda ids: ids)


class _Attention(nn.Module):
    """Bidirectional, over (batch, tokens, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.query, self.key, self.value, self.output = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = (part(x).unflatten(-1, (self.num_heads, -1)) for part in (self.query, self.key, self.value))
        seen = torch.nn.functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in columns))
        return self.output(seen.transpose(1, 2).flatten(-2))


class _Encoder(nn.Module):
    """A model of nobody's, by the names that the page has."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 16)
        layers = [nn.ModuleDict({"attention": _Attention()}) for _ in range(2)]
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.table(input_ids)
        for layer in self.encoder["layers"]:
            x = x + layer["attention"](x)
        return {"hidden": x}


def _rows_of_ones_own(run: Run) -> None:
    smp.init({"tensor_parallel_degree": 4})
    torch.manual_seed(1)
    alone = _Encoder()
    model = run(model=copy.deepcopy(alone))["model"]
    assert model.encoder["layers"][1]["attention"].num_heads == 1
    found, wanted = (m(_ids())["hidden"] for m in (model, alone))
    assert float((found - wanted).norm() / wanted.norm()) <= 1e-5


def _meta_device(run: Run) -> None:
    smp.init({"tensor_parallel_degree": 2})
    alone, folder = run.saved("Llama")
    model = run(config=alone.config, folder=folder)["model"]
    assert all(torch.equal(whole(p), alone.get_parameter(name)) for name, p in model.named_parameters())
    found, wanted = (m.eval()(input_ids=_ids()).logits for m in (model, alone))
    assert float((found - wanted).norm() / wanted.norm()) <= 1e-5


def _readme(run: Run) -> None:
    alone, folder = run.saved("Llama")
    _like_alone(fully_shard(run(folder=folder)["model"], mesh=smp.state.data_mesh), alone, _rows_of_data_rank)


TITLE = "A Hugging Face model in your own loop: `smp.init`, `smp.transform`"
ON_RANKS: dict[tuple[str, str, int], Callable[[Run], None]] = {
    ("docs/transform.md", TITLE, 0): _three_lines,
    ("docs/transform.md", "`smp.transform`", 0): _report,
    ("docs/transform.md", "Sequence parallelism", 0): _sequence_parallel,
    ("docs/transform.md", "Context parallelism: sequences cut over ranks", 0): _context_parallel,
    ("docs/transform.md", "Expert parallelism", 0): _expert_parallel,
    ("docs/transform.md", "transformers' Trainer", 0): _trainer,
    ("docs/transform.md", "Adapters of peft", 0): _adapters,
    ("docs/transform.md", "Rows: how each module is split", 0): _experts_left_whole,
    ("docs/transform.md", "Rows: how each module is split", 1): _rows_of_ones_own,
    ("docs/transform.md", "Weights of models on the meta device", 0): _meta_device,
    ("README.md", "A Hugging Face model in your own loop", 0): _readme,
}


def _on_ranks(rank: int, world_size: int, folder: str) -> list[tuple[str, str, int]]:
    """The blocks that ran."""
    os.chdir(folder)
    found = all_blocks()
    for place, run in ON_RANKS.items():
        smp.state.reset()
        run(Run(found[place], rank, Path(folder)))
    return list(ON_RANKS)


def test_blocks_in_python_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": str(RANKS)}.items():
        monkeypatch.setenv(name, value)  # as torchrun does, and accelerate wants; the group exists already
    for ran in run_distributed(_on_ranks, RANKS, str(tmp_path)):
        assert ran == list(ON_RANKS)


# The script that the page's recipe for AWS's own starts: it reads what the launcher gives, and the flags.
TRAIN = """
import sys
import smp
smp.compat.install()
import torch.sagemaker as tsm
tsm.init()
assert (tsm.state.tp_size, tsm.state.hybrid_shard_degree, tsm.state.device_type) == (2, 2, "cpu")
if tsm.state.rank == 0:
    print(*sys.argv[1:])
"""
PIP = f"#!{sys.executable}\nimport sys\nprint('pip', *sys.argv[1:])\n"


def _shell(text: str, folder: Path) -> str:
    """What the commands print. Nothing is installed: ``pip`` says only what it was asked for."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, content in {"bin/pip": PIP, "train.py": TRAIN}.items():
        (folder / name).write_text(content)
    (programs / "pip").chmod(0o755)
    for name in ("python", "torchrun"):
        module = " -m torch.distributed.run" if name == "torchrun" else ""
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable}{module} "$@"\n')
        (programs / name).chmod(0o755)
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euc", text], cwd=folder, capture_output=True, text=True, env=environment, timeout=200
    )
    assert done.returncode == 0, f"{text}\n{done.stderr}"
    return done.stdout


def _losses(out: str) -> list[float]:
    return [float(number) for number in re.findall(r"step \d+ loss ([\d.]+) ", out)]


def _example(folder: Path, text: str) -> None:
    """Twenty steps, and twenty more from the folder that they left."""
    out = _shell(text, folder)
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    asked = re.findall(r"^pip install -e \.\[(\w+)\]$", out, re.MULTILINE)
    assert len(asked) == text.count("pip") and all(f'"{extra}": ' in setup for extra in asked)
    losses = _losses(out)
    assert len(losses) == 40 and losses[20] < losses[19] < losses[0]


def _aws(folder: Path, text: str) -> None:
    out = _shell(text, folder).splitlines()[-1]
    assert out.startswith("--distributed_backend gloo --use_smp_implementation 1") and out.endswith("...")


IN_A_SHELL: dict[tuple[str, str, int], Callable[[Path, str], None]] = {
    ("docs/transform.md", TITLE, 1): _example,
    ("docs/transform.md", "AWS's own training script", 0): _aws,
}


@pytest.mark.slow
@pytest.mark.parametrize("place", IN_A_SHELL, ids=lambda place: place[1][:20])
def test_blocks_of_commands_run(tmp_path: Path, place: tuple[str, str, int]) -> None:
    IN_A_SHELL[place](tmp_path, all_blocks()[place].text)


@pytest.mark.slow
def test_the_commands_that_the_example_names_run(tmp_path: Path) -> None:
    text = (ROOT / "examples/hf_fsdp.py").read_text(encoding="utf-8")
    lines = re.findall(r"^    (torchrun .*)$", text, re.MULTILINE)
    assert len(lines) == 2
    _example(tmp_path, "\n".join(lines))


def test_every_block_is_run() -> None:
    found = all_blocks()
    assert found.keys() == ON_RANKS.keys() | IN_A_SHELL.keys()
    assert all(found[place].language in ("python", "py", "") for place in ON_RANKS)
    assert all(found[place].language == "sh" for place in IN_A_SHELL)
