"""Every training command of the documentation, as it is written there: its settings are read, resolved and checked.

Nothing is trained and a model is its config.json, so that of Llama 3.1 70B costs no more than one for a laptop. What a
command needs beside (corpora, tokenizers, samples, files that a page shows) lies where it runs.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from smp.config import Layout, ModelConfig, resolve_model
from smp.convert.huggingface.config import to_hf
from smp.data.indexed_dataset import IndexedDatasetWriter
from smp.data.tuning.build import TuningData
from smp.models.presets import PRESETS
from smp.training.distillation.meaning import VERSION, Meaning
from smp.training.settings import read_settings
from smp.training.tuning.settings import read_finetune_settings
from tests.training.flag_runs import run_here
from tests.training.tiny_hf import write_model, write_pieces, write_samples, write_tokenizer
from tests.training.tiny_vision import MAKERS, save_processor

pytest.importorskip("tokenizers")
ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
ENTRIES = ("pretrain_gpt.py", "finetune.py")
SKELETONS = {
    (
        "collectives.md",
        "... ... --data-parallel-collectives hierarchical --zero-quantized-weights",
    ),
    ("differences-from-megatron.md", "--nproc-per-node 8 --from-megatron <the flags of a Megatron script>"),
}
"""Lines that leave something out for the reader to fill in: page, and how they begin but for the programs' names."""
MODELS = {
    "Llama-3.2-1B": "llama3.2-1b",
    "HF_FOLDER": "llama3.2-1b",
    "TEACHER_FOLDER": "qwen2.5-7b",
    "Llama-3.1-70B": "llama3.1-70b",
    "Qwen2.5-7B": "qwen2.5-7b",
    "Qwen3-Next-80B-A3B-Instruct": "qwen3-next-80b-a3b",
    "Nemotron-H-8B-Instruct": "qwen3-next-80b-a3b",
}
"""Folders that commands name, and the named size that is in them."""

CORPORA = ("corpus_text_document", "corpus/books_text_document", "corpus/code_text_document")
"""Data files that they name."""


def lines() -> list[tuple[str, str]]:
    """Page and command: of blocks of code, with lines joined and comments cut off."""
    found = []
    for page in PAGES:
        blocks = re.findall(r"^```(?:sh|bash|)\n(.*?)^```", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        joined = "\n".join(blocks).replace("\\\n", " ").splitlines()
        started = re.compile(r"(\w+=\S+ )*(python|torchrun) .*(pretrain_gpt|finetune)\.py")
        found += [(page.name, " ".join(line.split())) for line in joined if started.match(line)]
    return found


def is_skeleton(page: str, line: str) -> bool:
    text = re.sub(r"(torchrun|python|\S+\.py) ", "", line)
    return any(page == where and text.startswith(begins) for where, begins in SKELETONS)


COMMANDS = [(page, line) for page, line in lines() if not is_skeleton(page, line)]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the commands take for granted."""
    folder = tmp_path_factory.mktemp("room")
    for name in CORPORA:
        (folder / name).parent.mkdir(exist_ok=True)
        with IndexedDatasetWriter(folder / name, np.uint16) as corpus:
            for _ in range(300):
                corpus.add_document(np.arange(3, 200))
    write_pieces(folder / "tokenizer.model")
    write_pieces(folder / "corpus/tokenizer.model")
    for name, size in MODELS.items():
        write_tokenizer(folder / name)
        config = to_hf(resolve_model(ModelConfig(**PRESETS[size])), "bfloat16")
        (folder / name / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder / "Bamba-9B")  # whose sizes are the defaults of its class
    (folder / "Bamba-9B/config.json").write_text('{"model_type": "bamba"}')
    write_tokenizer(folder / "flan-t5-xl")
    (folder / "flan-t5-xl/config.json").write_text('{"model_type": "t5", "decoder_start_token_id": 0}')
    (folder / "config.json").write_text('{"model_type": "bamba"}')
    seeing, processor = MAKERS["qwen2_5_vl"]()
    seeing.text_config.max_position_embeddings = 8192
    seeing.save_pretrained(folder / "Qwen2.5-VL-7B-Instruct")
    save_processor(processor, folder / "Qwen2.5-VL-7B-Instruct")
    write_samples(folder)
    (folder / "sft.jsonl").rename(folder / "chats.jsonl")
    (folder / "held-out.jsonl").write_text((folder / "chats.jsonl").read_text())
    (folder / "prompts.jsonl").write_text('{"prompt": "what is it?", "answer": "it"}\n' * 20)
    (folder / "checks.py").write_text("def is_right(completions, **columns):\n    return [0.0] * len(completions)\n")
    pair = {"prompt": "what is the answer", "chosen": "forty two", "rejected": "one two three"}
    (folder / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 20)
    (folder / "qa.jsonl").write_text('{"prompt": "what is it?", "completion": "it"}\n' * 20)
    (folder / "topology.json").write_text('{"nodes": [[0, 1], [2, 3]]}')
    page = (ROOT / "docs/configuration.md").read_text("utf-8")
    [recipe] = re.findall(r"^```yaml\n(# my_run.yaml.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (folder / "my_run.yaml").write_text(recipe)
    (folder / "kept").mkdir()
    (folder / "kept" / "manifest.json").write_text(json.dumps(kept(folder)))
    return folder


def kept(folder: Path) -> dict[str, Any]:
    """What a teacher's folder says of the samples."""
    flags = f"--load {folder}/HF_FOLDER --data-path {folder}/chats.jsonl --train-iters 1"
    data = read_finetune_settings(flags.split(), 1)[1]
    assert isinstance(data, TuningData)
    meaning = Meaning(data.samples.fingerprint(), 128256, 1.0, 128, "fp16")
    return {"version": VERSION, **asdict(meaning), "parts": []}


def read(line: str) -> tuple[int, str, list[str]]:
    """Number of processes, entry point and flags of a command."""
    words = shlex.split(line, comments=True)
    at = next(i for i, word in enumerate(words) if word.endswith(ENTRIES))
    before = words[:at]
    world = [word.removeprefix("WORLD_SIZE=") for word in before if word.startswith("WORLD_SIZE=")]
    if "--nproc-per-node" in before:
        world = [before[before.index("--nproc-per-node") + 1]]
    return int(world[0]) if world else 1, Path(words[at]).stem, words[at + 1 :]


def test_there_are_commands_on_many_pages_and_few_are_left_out() -> None:
    assert len(COMMANDS) > 25 and len({page for page, _ in COMMANDS}) > 12
    assert len(lines()) - len(COMMANDS) == len(SKELETONS)


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{p}-{i}" for i, (p, _) in enumerate(COMMANDS)])
def test_the_settings_of_a_command_of_the_docs_are_good(
    page: str, line: str, room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, script, flags = read(line)
    monkeypatch.chdir(room)
    config = read_finetune_settings(flags, world)[0] if script == "finetune" else read_settings(flags, PRESETS, world)
    assert Layout.from_config(config.parallel, world).world_size == world


def longer_contexts() -> list[str]:
    """Flags of the command of docs/context-parallelism.md that extends a context, for a model of 64 tokens."""
    [line] = [line for page, line in COMMANDS if page == "context-parallelism.md" and "--use-rope-scaling" in line]
    _, _, flags = read(line)
    shorter = {"131072": "128", "32768": "64", "100": "2"}
    assert shorter.keys() <= set(flags)
    return [shorter.get(word, word) for word in flags]


def test_the_command_that_extends_a_context_trains(room: Path, tmp_path: Path) -> None:
    """On one process; how many share a sequence changes nothing (tests/parity)."""
    pytest.importorskip("transformers")
    write_model(tmp_path / "Qwen2.5-7B", "qwen2", layers=2)
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus_text_document{suffix}").write_bytes((room / f"corpus_text_document{suffix}").read_bytes())
    flags = longer_contexts()
    flags[flags.index("--context-parallel-size") + 1] = "1"
    alone = run_here(tmp_path, shlex.join(flags), base="--no-progress-bar --no-tensorboard --log-interval 1")
    assert alone.code == 0, alone.err
    assert len(alone.losses) == 2 and torch.tensor(alone.losses).isfinite().all()
    assert alone.tokens[0].shape[-1] == 128
    assert "--max-position-embeddings 64 -> 128, --use-rope-scaling false -> true" in alone.out
