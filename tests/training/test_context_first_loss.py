"""What of the first step has one process's bits when context parallelism cuts its sequences.

Everything but attention computes each token by itself, so all depends on two things: whether attention takes a token's
keys in one process's order, and whether a matrix product gives a row the same bits among fewer rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from smp.layers.heads.cross_entropy import linear_token_losses
from smp.layers.parameter import local
from smp.models.presets import PRESETS
from smp.training.pretraining import Pretraining
from smp.training.process import Process
from smp.training.run import Run
from smp.training.runtime import StopSignal
from smp.training.settings import read_settings
from tests.distributed import run_distributed
from tests.training.flag_runs import TINY

MODELS = {
    "small": "--seq-length 64",
    "larger": "--seq-length 256 --hidden-size 128 --ffn-hidden-size 384 --num-query-groups 4 --swiglu",
    "bf16": "--seq-length 256 --hidden-size 128 --ffn-hidden-size 384 --bf16",
}
Found = dict[str, Any]


def first_losses(rank: int, world: int, cases: list[tuple[str, str]]) -> list[Found]:
    return [first_loss(rank, world, *case) for case in cases]


def first_loss(rank: int, world: int, model: str, exchange: str) -> Found:
    """The first step's loss, and by token, its number in the batch, loss and final hidden state."""
    cut = f"--context-parallel-size {world} --cp-comm-type {exchange}" if world > 1 else ""
    words = f"{TINY} {MODELS[model]} --log-dir {model}-{world}-{exchange} {cut}".split()
    config = read_settings(words, PRESETS, world)
    run = Run(Pretraining(config), Process(rank, world, rank), torch.device("cpu"), StopSignal())
    batches: list[Any] = []
    seen: list[Any] = []
    run.trainer.model.register_forward_pre_hook(lambda module, args: batches.append(args[0]))
    head: Any = run.trainer.model.head

    def note(module: Any, args: Any) -> None:
        hidden, labels, _, tied = args[:4]
        weight = local(tied if head.weight is None else head.weight, hidden.dtype)
        losses, _ = linear_token_losses(hidden, weight, labels, head.shard, chunk_tokens=4096)
        seen.append((hidden.detach().clone(), losses))

    head.register_forward_pre_hook(note)
    step = run.trainer.train_step(next(run.batches))
    run.close()
    hidden, losses = zip(*seen, strict=True)
    return {
        "loss": step.loss,
        "tokens": torch.cat([batch.token_index.flatten() for batch in batches]),
        "hidden": torch.cat(hidden),
        "losses": torch.cat(losses),
    }


def compare(whole: Found, parts: list[Found]) -> tuple[bool, bool]:
    """Whether hidden states and losses of tokens have the same bits."""
    order = torch.cat([part["tokens"] for part in parts])
    place = {int(token): row for row, token in enumerate(whole["tokens"])}
    rows = torch.tensor([place[int(token)] for token in order])
    assert len(rows) == len(whole["tokens"]), "each token once"
    same = [torch.equal(torch.cat([part[what] for part in parts]), whole[what][rows]) for what in ("hidden", "losses")]
    return same[0], same[1]


def test_heads_exchanged_for_tokens_have_the_bits_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every token. Partial sums of the loss are added up over processes: that may round otherwise."""
    monkeypatch.chdir(tmp_path)
    wholes = run_distributed(first_losses, 1, [(model, "a2a") for model in MODELS])[0]
    cases = [*((model, "a2a") for model in MODELS), ("larger", "p2p")]
    found = run_distributed(first_losses, 2, cases)
    for number, (model, exchange) in enumerate(cases):
        whole, parts = wholes[list(MODELS).index(model)], [of[number] for of in found]
        same = compare(whole, parts)
        assert parts[0]["loss"] == pytest.approx(whole["loss"], rel=4e-7)
        assert same == (exchange == "a2a", exchange == "a2a"), "a ring merges partial results: other rounding"
