"""A dense model made a mixture of experts computes the same, here and in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from smp.convert.formats import open_checkpoint
from smp.convert.load import load_weights
from smp.convert.upcycle import Upcycled
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from tests.convert.tiny import VOCAB, save_theirs, their_model
from tests.fake_group import lone_context
from tools.convert_checkpoint import main

pytest.importorskip("transformers")


@torch.no_grad()
def test_it_computes_what_the_dense_model_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    source, made = save_theirs("llama3", tmp_path / "dense"), tmp_path / "experts"
    assert main(["--load", str(source), "--save", str(made), "--upcycle", "4", "--moe-router-topk", "3"]) == 0
    assert main(["--load", str(made), "--save", str(tmp_path / "hf")]) == 0
    inputs = torch.randint(0, VOCAB, (2, 30), generator=torch.Generator().manual_seed(0))
    mixture = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert type(mixture).__name__ == "MixtralForCausalLM" and mixture.config.num_experts_per_tok == 3
    want = their_model("llama3")(inputs).logits
    assert (mixture(inputs).logits - want).abs().max() <= 1e-4 and want.abs().max() > 1


@torch.no_grad()
def test_mlps_with_gelu_and_biases_become_experts(tmp_path: Path) -> None:
    source, made = save_theirs("gpt2", tmp_path / "dense"), tmp_path / "experts"
    assert main(["--load", str(source), "--save", str(made), "--upcycle", "4"]) == 0
    inputs = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    with lone_context() as context:
        opened = open_checkpoint(made)
        mixture = GPT(opened.weights.config, context, device="cpu").eval()
        load_weights(mixture, lambda: opened.weights)
        logits = mixture(MicroBatch(inputs)).logits
    want = their_model("gpt2")(inputs).logits
    assert mixture.config.num_experts == 4 and want.abs().max() > 1
    assert (logits - want).abs().max() <= 1e-4


def test_experts_are_copies_and_routers_are_drawn(tmp_path: Path) -> None:
    opened = open_checkpoint(save_theirs("llama3", tmp_path / "dense", torch.bfloat16))
    with Upcycled(opened.weights, 4, 2) as made:
        up = made.read("layers.1.mlp.experts.up.weight")
        assert up.shape == (4, 64, 32) and up.dtype == torch.bfloat16
        assert all(torch.equal(expert, opened.weights.read("layers.1.mlp.up.weight")) for expert in up)
        part = torch.empty(2, 10, 8, dtype=torch.bfloat16)
        made.read_into("layers.1.mlp.experts.down.weight", (1, 5, 16), part)
        assert torch.equal(part, made.read("layers.1.mlp.experts.down.weight")[1:3, 5:15, 16:24])
        routers = [made.read(f"layers.{i}.mlp.router.weight") for i in range(2)]
        assert not torch.equal(*routers) and all(0 < router.std() < 0.1 for router in routers)


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        ("mixtral", "--upcycle 8", "--upcycle 8: the model has 4 experts already"),
        ("llama3", "--upcycle 2 --moe-router-topk 3", "--moe-router-topk 3 is above --num-experts 2"),
        ("llama3", "--upcycle 2 --moe-router-topk 1", "the router gets no gradient"),
        ("llama3", "--upcycle 0", "--upcycle 0 must be above 0"),
        ("llama3", "--moe-router-topk 2", "--moe-router-topk 2 is for --upcycle"),
    ],
)
def test_what_cannot_be_one(
    kind: str, flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_theirs(kind, tmp_path / "source")
    capsys.readouterr()
    assert main(["--load", str(source), "--save", str(tmp_path / "made"), *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and not (tmp_path / "made").exists()
