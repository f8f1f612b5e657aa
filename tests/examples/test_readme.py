"""Some commands of the README and the module of docs/layers.md, as they are written there."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_gpt
from tests.distributed import run_distributed
from tests.training.tiny_hf import write_adapter, write_model, write_tokenizer
from tools.generate import main as generate

ROOT = Path(__file__).parents[2]
README, LAYERS = ROOT / "README.md", ROOT / "docs" / "layers.md"


def tag(rank: int, world: int) -> dict[int, torch.Tensor]:
    """Outputs by TP size."""
    blocks = re.findall(r"^```python\n(.*?)^```", LAYERS.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    [code] = [block for block in blocks if "def build(" in block]
    room: dict[str, Any] = {}
    exec(code, room)
    out = {}
    for tp in (1, world):
        tagger = room["build"](world, tp)
        with torch.no_grad():
            out[tp] = tagger(torch.tensor([3, 7, 49_999]))
    return out


def test_the_tagger_gives_the_same_on_one_rank_and_on_two() -> None:
    for out in run_distributed(tag, 2):
        assert out[1].shape == (3, 17) and out[1].std() > 0
        assert (out[2] - out[1]).norm() < 1e-6 * out[1].norm()


def command(part: str) -> list[str]:
    """The words of the one command of the README with ``part`` in it."""
    lines = README.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    [line] = [line for line in lines if line.startswith(("python ", "WORLD_SIZE=")) and part in line]
    return shlex.split(line, comments=True)


@pytest.mark.slow
def test_the_layout_of_a_70b_model_is_shown_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world, _, script, *flags = command("llama3-70b --tensor")
    assert (world, script) == ("WORLD_SIZE=64", "pretrain_gpt.py")
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert pretrain_gpt.main(flags) == 0
    out = capsys.readouterr().out
    assert "# mesh: " in out and "parameters: 70,553,706,496" in out and "memory" in out


def test_chat_with_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    write_tokenizer(tmp_path / "HF_FOLDER")
    write_model(tmp_path / "HF_FOLDER", layers=2)
    write_adapter(tmp_path / "HF_FOLDER", tmp_path / "runs/chat/adapter", target_modules="all-linear", r=4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("what is\none\n"))
    words = command("--adapter runs/chat/adapter --chat")
    assert words[:2] == ["python", "tools/generate.py"]
    assert generate([*words[2:], "--max-new-tokens", "5"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2
