"""Losses of answers beside TRL's own trainers: the same tiny models, the same batch, one process and two.

Needs trl and datasets: ``pip install -e ".[test-trl]"``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from smp.config import Layout
from smp.convert.formats import open_checkpoint
from smp.convert.load import load_weights
from smp.data.tuning.encode import Encoder
from smp.data.tuning.tokenizer import open_tokenizer
from smp.layers.preference import Labelled, Preference
from smp.models.gpt import GPT
from smp.models.micro_batch import MicroBatch
from smp.parallel.context import ParallelContext, build_context
from tests.distributed import run_distributed
from tests.training.tiny_hf import write_model, write_tokenizer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

ROWS, BETA, WEIGHTS = 6, 0.3, (1.3, 0.8)
LIKED = [True, False, True, True, False, True]
LETTERS = np.array(list("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"))  # each is a token
TOKENIZER = {"pad_token": "<|bos|>"}  # not what ends a text


@dataclass(frozen=True)
class Batch:
    """What one of TRL's trainers was given and found.

    Attributes:
        kind: the loss.
        policy, reference: folders of the models.
        ids, mask: (rows, length), 1 at tokens of answers, for reward at the last token; chosen and rejected in turn.
        loss, gradient, norm: the loss; its gradient by the embedding (vocabulary, hidden) and the norm of all; None:
            TRL adds something else to it.
        others: (ids, mask) of prompts with answers of others, for kto; z0 of them.
    """

    kind: str
    policy: Path
    reference: Path
    ids: np.ndarray
    mask: np.ndarray
    loss: float
    gradient: np.ndarray | None = None
    norm: float = 0.0
    others: tuple[np.ndarray, np.ndarray] | None = None
    z0: float = field(default=0.0)


# TRL's side


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A policy, the reference that it has moved away from, and a reward model."""
    root = tmp_path_factory.mktemp("trl")
    policy, reference, reward = root / "policy", root / "reference", root / "reward"
    write_model(reference, layers=2)
    write_tokenizer(reference)
    model = transformers.AutoModelForCausalLM.from_pretrained(reference)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(policy)
    torch.manual_seed(0)
    scorer = transformers.AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, pad_token_id=0)
    scorer.save_pretrained(reward)
    return policy, reference, reward


def rows_of(seed: int, columns: dict[str, tuple[int, int]]) -> Any:
    """Texts of so many letters."""
    drawn = np.random.default_rng(seed)
    text = lambda least, most: "".join(drawn.choice(LETTERS, drawn.integers(least, most + 1)))  # noqa: E731
    return datasets.Dataset.from_list([{name: text(*size) for name, size in columns.items()} for _ in range(ROWS)])


def trainer_of(
    kind: Any, config: Any, model: Any, data: Any, folder: Path, options: dict[str, Any], **more: Any
) -> Any:
    """In fp32 on the CPU, with all rows as one batch."""
    arguments = config(
        output_dir=str(folder.parent / "out"),
        **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": []},
        per_device_train_batch_size=ROWS,
        disable_dropout=True,
        **options,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **TOKENIZER)
    return kind(model=model, args=arguments, train_dataset=data, processing_class=tokenizer, **more)


def computed(trainer: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Their batch; loss, gradient of the embedding, and norm of all gradients."""
    batch = dict(trainer.data_collator(list(trainer.train_dataset)))
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    norm = torch.stack([g.norm() for g in gradients]).norm().item()
    embedding = trainer.model.get_input_embeddings().weight.grad.numpy()
    return batch, {"loss": loss.item(), "gradient": embedding, "norm": norm}


def language_model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def in_turn(theirs: torch.Tensor) -> np.ndarray:
    """Theirs are all chosen answers, then all rejected ones."""
    return theirs.view(2, ROWS, -1).transpose(0, 1).reshape(2 * ROWS, -1).numpy()


PAIRS = {"prompt": (2, 8), "chosen": (1, 8), "rejected": (1, 8)}


def dpo(kind: str, folders: tuple[Path, Path, Path]) -> Batch:
    policy, reference, _ = folders
    options, models = {"beta": BETA, "loss_type": [kind]}, language_model(reference)
    data = rows_of(1, PAIRS)
    trainer = trainer_of(
        trl.DPOTrainer, trl.DPOConfig, language_model(policy), data, reference, options, ref_model=models
    )
    batch, found = computed(trainer)
    return Batch(kind, policy, reference, in_turn(batch["input_ids"]), in_turn(batch["completion_mask"]), **found)


def orpo(same_length: bool, folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> Batch:
    """TRL averages the chosen answers' cross-entropy over all tokens of a micro-batch, prompts included. That is ours
    where there are no prompts and all chosen answers have one length; elsewhere ours is made of what it measures."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    module = pytest.importorskip("trl.experimental.orpo")
    policy, reference, _ = folders
    data = rows_of(3, {"prompt": (0, 0), "chosen": (6, 6), "rejected": (1, 8)} if same_length else PAIRS)
    trainer = trainer_of(
        module.ORPOTrainer, module.ORPOConfig, language_model(policy), data, reference, {"beta": BETA, "max_length": 64}
    )
    batch, found = computed(trainer)
    whole = trainer.concatenated_inputs(batch, padding_value=0)
    ids, mask = whole["concatenated_input_ids"], (whole["concatenated_labels"] != -100).long()
    if not same_length:
        measured = {name: values[-1] for name, values in trainer._stored_metrics["train"].items()}
        assert abs(found["loss"] - (measured["nll_loss"] - BETA * measured["log_odds_ratio"])) < 1e-6
        found = {"loss": -measured["logps/chosen"] - BETA * measured["log_odds_ratio"]}
    return Batch("orpo", policy, reference, in_turn(ids), in_turn(mask), **found)


def kto(folders: tuple[Path, Path, Path]) -> Batch:
    """With the one of both models as policy that has moved towards answers of others, where z0 is above 0."""
    options = {"beta": BETA, "desirable_weight": WEIGHTS[0], "undesirable_weight": WEIGHTS[1]}
    data = rows_of(2, {"prompt": (2, 8), "completion": (1, 8)}).add_column("label", LIKED)
    for policy, reference in (folders[:2], folders[1::-1]):
        models = language_model(policy), language_model(reference)
        trainer = trainer_of(trl.KTOTrainer, trl.KTOConfig, models[0], data, folders[1], options, ref_model=models[1])
        batch, found = computed(trainer)
        z0 = trainer._metrics["train"]["kl"][-1]
        if z0 > 1e-3:
            break
    assert z0 > 1e-3 and batch["label"].tolist() == LIKED
    ids, mask, *others = (
        batch[name].numpy() for name in ("input_ids", "completion_mask", "KL_input_ids", "KL_completion_mask")
    )
    return Batch("kto", policy, reference, ids, mask, **found, others=(others[0], others[1]), z0=z0)


def reward(folders: tuple[Path, Path, Path]) -> Batch:
    _, reference, folder = folders
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    data = rows_of(4, {"chosen": (3, 12), "rejected": (3, 12)})
    options = {"center_rewards_coefficient": 0.1}
    batch, found = computed(trainer_of(trl.RewardTrainer, trl.RewardConfig, model, data, reference, options))
    ids, seen = in_turn(batch["input_ids"]), in_turn(batch["attention_mask"])
    last = np.zeros_like(ids)
    last[np.arange(len(ids)), seen.sum(1) - 1] = 1
    return Batch("reward", folder, folder, ids, last, **found)


@pytest.fixture(scope="module")
def batches(folders: tuple[Path, Path, Path]) -> dict[str, Batch]:
    with pytest.MonkeyPatch.context() as patch:
        return {
            **{kind: dpo(kind, folders) for kind in ("sigmoid", "hinge", "ipo")},
            "orpo": orpo(True, folders, patch),
            "orpo of any length": orpo(False, folders, patch),
            "kto": kto(folders),
            "reward": reward(folders),
        }


# ours


def micro_batch(batch: Batch, preference: Preference, ids: np.ndarray, mask: np.ndarray) -> MicroBatch:
    tokens, counted = torch.from_numpy(ids), torch.from_numpy(mask).float()
    if batch.kind == "reward":
        return MicroBatch(tokens, tokens, counted, preference=preference)
    labels, counted = tokens.roll(-1, 1), counted.roll(-1, 1)
    counted[:, -1] = 0
    return MicroBatch(tokens, labels, counted, preference=preference)


@torch.no_grad()
def log_probs(model: GPT, batch: Batch, ids: np.ndarray, mask: np.ndarray) -> torch.Tensor:
    found = model(micro_batch(batch, Preference(*ids.shape), ids, mask)).log_probs
    assert found is not None
    return found


def preference_of(batch: Batch, policy: GPT, reference: GPT) -> Preference:
    shape: tuple[int, int] = batch.ids.shape  # type: ignore[assignment]
    if batch.kind == "reward":
        return Preference(*shape, num_pairs=ROWS, center=0.1)
    if batch.kind == "orpo":
        return Preference(*shape, loss_type="orpo", beta=BETA, num_pairs=ROWS, reference=torch.zeros(2 * ROWS))
    known = log_probs(reference, batch, batch.ids, batch.mask)
    if batch.others is None:
        return Preference(*shape, loss_type=batch.kind, beta=BETA, num_pairs=ROWS, reference=known)  # type: ignore[arg-type]
    ratios = log_probs(policy, batch, *batch.others).double() - log_probs(reference, batch, *batch.others).double()
    z0 = ratios.mean().clamp(min=0)
    assert abs(z0.item() - batch.z0) <= 1e-5 * batch.z0
    labelled = Labelled(torch.tensor(LIKED), z0, WEIGHTS, (4 / 6, 2 / 6))
    return Preference(*shape, beta=BETA, num_pairs=ROWS, reference=known, labelled=labelled)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def model_of(folder: Path, context: ParallelContext) -> GPT:
    weights = open_checkpoint(folder).weights
    model = GPT(weights.config, context).to_empty(device="cpu")
    load_weights(model, lambda: open_checkpoint(folder).weights)
    return model.eval()


def measured(rank: int, world_size: int, batches: list[Batch]) -> list[tuple[float, np.ndarray, float]]:
    """Loss, gradient of the embedding and norm of all gradients of each batch; several ranks share every matrix."""
    context = build_context(Layout(tp=world_size), "cpu", sequence_parallel=world_size > 1)
    out = []
    for batch in batches:
        policy, reference = model_of(batch.policy, context), model_of(batch.reference, context)
        loss = policy(micro_batch(batch, preference_of(batch, policy, reference), batch.ids, batch.mask)).loss
        assert loss is not None
        loss.backward()
        gradients = {name: whole(p.grad) for name, p in policy.named_parameters() if p.grad is not None}
        norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
        out.append((loss.item(), gradients["embedding.weight"].numpy(), norm))
    return out


@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_and_gradients_are_trls(batches: dict[str, Batch], world_size: int) -> None:
    ranks = run_distributed(measured, world_size, list(batches.values()))
    for found in ranks:
        for (name, batch), (loss, gradient, norm) in zip(batches.items(), found, strict=True):
            assert abs(loss - batch.loss) <= 1e-6 * abs(batch.loss), (name, loss, batch.loss)
            if batch.gradient is None:
                continue
            error = np.linalg.norm(gradient[: len(batch.gradient)] - batch.gradient) / np.linalg.norm(batch.gradient)
            assert batch.norm > 1e-2 and abs(norm - batch.norm) <= 1e-5 * batch.norm, (name, norm, batch.norm)
            assert error <= 1e-5, (name, error)


def test_tokens_of_pairs_are_trls(batches: dict[str, Batch], folders: tuple[Path, Path, Path]) -> None:
    encoder = Encoder(open_tokenizer(folders[1]), None)
    ours = [answer for row in rows_of(1, PAIRS) for answer in encoder.pair(row)]
    batch = batches["sigmoid"]
    for (ids, trained), theirs, mask in zip(ours, batch.ids, batch.mask, strict=True):
        assert ids.tolist() == theirs[: len(ids)].tolist()
        assert np.flatnonzero(trained).tolist() == np.flatnonzero(mask).tolist()
