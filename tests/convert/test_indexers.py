"""A model with latent attention that is given indexers computes the same while all keys are seen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from smp.convert.formats import open_checkpoint
from smp.convert.indexers import Indexed
from smp.convert.load import load_weights
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from tests.convert.tiny import VOCAB, save_theirs, their_model
from tests.fake_group import lone_context
from tools.convert_checkpoint import main

pytest.importorskip("transformers")


@torch.no_grad()
def test_it_computes_what_the_dense_model_does_until_tokens_are_left_out(tmp_path: Path) -> None:
    source, made = save_theirs("deepseek-v3", tmp_path / "dense"), tmp_path / "sparse"
    assert main(["--load", str(source), "--save", str(made), "--add-indexers", "20"]) == 0
    inputs = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    with lone_context() as context:
        opened = open_checkpoint(made)
        sparse = GPT(opened.weights.config, context, device="cpu").eval()
        load_weights(sparse, lambda: opened.weights)
        short, long = sparse(MicroBatch(inputs[:, :20])).logits, sparse(MicroBatch(inputs)).logits
    want = their_model("deepseek-v3")(inputs).logits
    assert (short - want[:, :20]).abs().max() <= 1e-4 and want.abs().max() > 1
    assert (long[:, :20] - want[:, :20]).abs().max() <= 1e-4 and (long - want).abs().max() > 1e-3
    assert main(["--load", str(made), "--save", str(tmp_path / "hf")]) == 0  # transformers' DeepseekV32


def test_indexers_are_drawn_and_the_rest_is_kept(tmp_path: Path) -> None:
    opened = open_checkpoint(save_theirs("deepseek-v3", tmp_path / "dense", torch.bfloat16))
    with Indexed(opened.weights, 6) as made:
        first, second = (made.read(f"layers.{i}.attention.indexer.queries.weight") for i in range(2))
        assert first.shape == (64 * 128, 14) and first.dtype == torch.bfloat16 and not torch.equal(first, second)
        part = torch.empty(30, 5, dtype=torch.bfloat16)
        made.read_into("layers.0.attention.indexer.queries.weight", (100, 3), part)
        assert torch.equal(part, first[100:130, 3:8])
        assert made.read("layers.1.attention.indexer.key_norm.weight").eq(1).all()
        name = "layers.1.attention.key_value_up.weight"
        assert torch.equal(made.read(name), opened.weights.read(name))


@pytest.mark.parametrize(
    ("kind", "number", "why"),
    [
        ("llama3", "4", "--add-indexers 4: the model has no latent attention"),
        ("deepseek-v3.2", "4", "--add-indexers 4: the model has indexers already"),
        ("deepseek-v2-lite", "4", "give --q-lora-rank"),
        ("deepseek-v3", "0", "--add-indexers 0 must be above 0"),
    ],
)
def test_what_cannot_be_is_one_line(
    kind: str, number: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_theirs(kind, tmp_path / "dense")
    assert main(["--load", str(source), "--save", str(tmp_path / "out"), "--add-indexers", number]) == 2
    assert why in capsys.readouterr().err
