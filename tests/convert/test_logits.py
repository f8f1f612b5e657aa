"""Our decoder against transformers' models of every family: the same weights, through our reader of their folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.convert.tiny import EXPERTS, TINY, VOCAB, save_theirs, their_model
from tests.distributed import run_distributed

pytest.importorskip("transformers")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels."""
    drawn = torch.randint(0, VOCAB, (2, 41), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:]


@pytest.fixture(scope="module")
@torch.no_grad()
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their models in both dtypes, and what they compute, once for all ranks: logits in fp32, and of the weights that
    were rounded to bf16 in bf16 and in fp32."""
    root = tmp_path_factory.mktemp("theirs")
    inputs, _ = tokens()
    for kind in TINY:
        for name, dtype in DTYPES.items():
            save_theirs(kind, root / kind / name, dtype, shard="20KB")
        logits = [_their_logits(root / kind / "bf16", dtype, inputs) for dtype in (torch.bfloat16, torch.float32)]
        torch.save([their_model(kind)(inputs).logits, *logits], root / kind / "logits.pt")
    return root


def _their_logits(folder: Path, dtype: torch.dtype, inputs: torch.Tensor) -> torch.Tensor:
    """Loaded as users do: tables of RoPE stay in fp32 then."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()(inputs).logits.float()


def distance(kind: str, got: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative. Where a token's logits are nearly equal, rounding sends it to another expert, in theirs and in ours:
    with experts it is the median over the tokens."""
    off = (got - exact).norm(dim=-1) / exact.norm(dim=-1)
    return off.median().item() if kind in EXPERTS else ((got - exact).norm() / exact.norm()).item()


@torch.no_grad()
def differences(rank: int, world: int, root: str) -> dict[str, tuple[float, float, float, float, float]]:
    """By family: largest difference of the logits and largest logit in fp32, relative difference of the loss; distances
    of our bf16 logits and of theirs from the fp32 ones of the same rounded weights."""
    from smp.config import Layout
    from smp.convert.describe import read_architecture
    from smp.convert.huggingface.config import resolved
    from smp.convert.load import load_hf
    from smp.models.gpt import GPT
    from smp.models.micro_batch import MicroBatch
    from smp.parallel.context import build_context

    context, out = build_context(Layout(tp=world), "cpu", sequence_parallel=world > 1), {}
    inputs, labels = tokens()
    for kind in TINY:
        logits = {}
        for name, dtype in DTYPES.items():
            folder = f"{root}/{kind}/{name}"
            config = resolved(**(read_architecture(folder) or {}))
            ours = GPT(config, context, device="cpu").to(dtype).eval()
            load_hf(ours, folder)
            logits[name] = ours(MicroBatch(inputs)).logits
            if name == "fp32":
                loss = ours(MicroBatch(inputs, labels, torch.full(labels.shape, 1.0 / labels.numel()))).loss
        want, bf16, exact = torch.load(f"{root}/{kind}/logits.pt")
        reference = torch.nn.functional.cross_entropy(want.flatten(0, 1), labels.flatten())
        out[kind] = (
            (logits["fp32"] - want).abs().max().item(),
            want.abs().max().item(),
            abs(loss.item() / reference.item() - 1),
            distance(kind, logits["bf16"].float(), exact),
            distance(kind, bf16, exact),
        )
    return out


@pytest.fixture(scope="module", params=[1, 2], ids=["tp 1", "tp 2"])
def measured(request: pytest.FixtureRequest, folders: Path) -> list[dict[str, tuple[float, ...]]]:
    return run_distributed(differences, request.param, str(folders))


@pytest.mark.parametrize("kind", TINY)
def test_logits_and_loss_are_theirs(measured: list[dict[str, tuple[float, ...]]], kind: str) -> None:
    for rank in measured:
        difference, largest, loss, *_ = rank[kind]
        assert largest > 1
        assert difference <= 1e-4
        assert loss <= 1e-5


@pytest.mark.parametrize("kind", TINY)
def test_bf16_logits_are_as_near_to_exact_ones_as_theirs(
    measured: list[dict[str, tuple[float, ...]]], kind: str
) -> None:
    for rank in measured:
        ours, theirs = rank[kind][3:]
        assert 0 < ours <= 1.5 * theirs


@torch.no_grad()
def spread(rank: int, world: int, root: str) -> dict[str, float]:
    """By family with experts: largest difference of the logits when its experts lie on ``world`` processes."""
    from smp.config import Layout
    from smp.convert.describe import read_architecture
    from smp.convert.huggingface.config import resolved
    from smp.convert.load import load_hf
    from smp.models.gpt import GPT
    from smp.models.micro_batch import MicroBatch
    from smp.parallel.context import build_context

    context, out = build_context(Layout(dp_shard=world, ep=world), "cpu"), {}
    for kind in EXPERTS:
        folder = f"{root}/{kind}/fp32"
        ours = GPT(resolved(**(read_architecture(folder) or {})), context, device="cpu").eval()
        load_hf(ours, folder)
        want = torch.load(f"{root}/{kind}/logits.pt")[0]
        out[kind] = (ours(MicroBatch(tokens()[0])).logits - want).abs().max().item()
    return out


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_spread_experts_give_their_logits(folders: Path, world: int) -> None:
    for rank in run_distributed(spread, world, str(folders)):
        assert rank.keys() == set(EXPERTS) and max(rank.values()) <= 1e-4
