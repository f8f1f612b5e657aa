"""Every command of docs/converting.md, and the README's about converting, does what it says, with tiny models."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from smp.convert.huggingface.more_families import FAMILIES
from smp.data.indexed_dataset import IndexedDatasetWriter
from tests.convert.conversion import convert
from tests.convert.test_generate import tokenizer
from tests.convert.tiny import save_theirs

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/converting.md").read_text()


def commands(text: str) -> list[str]:
    """Of the shell blocks, with lines joined and comments cut off."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def readme() -> list[str]:
    return [line for line in commands((ROOT / "README.md").read_text()) if "Llama-3.2-1B" in line]


def words(command: str) -> list[str]:
    """With the programs of this machine and the files of this checkout."""
    out = shlex.split(command)
    if out[0] == "torchrun":
        out[:1] = ["python", "-m", "torch.distributed.run", "--standalone"]
    assert out[0] == "python"
    return [sys.executable, *(str(ROOT / word) if word.endswith(".py") else word for word in out[1:])]


@pytest.mark.slow
def test_the_commands_run(tmp_path: Path) -> None:
    source = save_theirs("llama3.2", tmp_path / "Llama-3.2-1B")
    tokenizer(source)
    convert(source, tmp_path / "run", "smp")
    with IndexedDatasetWriter(tmp_path / "corpus_text_document", np.uint16) as corpus:
        for _ in range(200):
            corpus.add_document(np.arange(3, 90))
    found = [*commands(PAGE), *readme()]
    assert len(found) == 8
    for command in found:
        line = words(command)
        save = line[line.index("--save") + 1] if "--save" in line else None
        if save == "run":
            save = line[line.index("--save") + 1] = "trained"
        if save is not None:
            shutil.rmtree(tmp_path / save, ignore_errors=True)
        if "--train-iters" in line:
            line[line.index("--train-iters") + 1] = "2"
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert save is None or any((tmp_path / save).iterdir()), command
    assert (tmp_path / "exported" / "tokenizer.json").is_file()


def test_every_family_and_every_link_is_there() -> None:
    names = (
        "Llama",
        "Mistral",
        "Qwen 2",
        "Qwen 3",
        "Mixtral",
        "Qwen 2 MoE",
        "Qwen 3 MoE",
        "OLMoE",
        "GLM-4.5",
        "DeepSeek-V2",
        "DeepSeek-V3",
        "DeepSeek-V3.2",
        "GLM-5",
        "GPT-2",
        "GPT-NeoX",
        "Qwen3-Next",
        "Qwen 3.5",
        "Qwen 3.5",
        "Gemma",
        "Gemma 2",
        "Gemma 3",
        "OLMo 2",
        "OLMo 3",
        "Phi-3",
        "Granite 3",
        "Cohere (",
        "Cohere 2",
        "SmolLM3",
        "StarCoder 2",
        "GLM-4 (",
        "GLM-4-0414",
        "Falcon",
        "OPT",
        "BLOOM",
        "GPT-OSS",
        "Llama 4",
        "Mamba-2",
        "Granite 4",
        "Nemotron-H",
        "Falcon-H1",
        "Kimi-Linear",
        "OLMo-hybrid",
    )
    for family, name in zip(FAMILIES, names, strict=True):
        rows = [line for line in PAGE.splitlines() if line.startswith(f"| {name}")]
        assert rows and all("(../tests/convert/test_logits.py)" in row and "/test_hf.py)" in row for row in rows), (
            family
        )
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
