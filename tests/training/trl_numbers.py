"""Numbers of TRL's own trainers, for tests that run where it is not installed:

    pip install -e ".[test-trl]" && python -m tests.training.trl_numbers

writes ``trl_numbers.safetensors`` beside this file: of each loss and model the losses and gradient
norms of some steps of SGD, and the last gradient of the embedding.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.training.trl_cases import (
    BETA,
    CENTER,
    LOSSES,
    LR,
    MODELS,
    ROWS,
    STEPS,
    WEIGHTS,
    orders,
    rows_of,
    write_folders,
)

FILE = Path(__file__).with_suffix(".safetensors")
Numbers = dict[str, torch.Tensor]


def main() -> None:
    import transformers
    import trl

    with tempfile.TemporaryDirectory() as folder:
        write_folders(Path(folder))
        found = numbers_of_all(Path(folder))
    versions = {module.__name__: module.__version__ for module in (trl, transformers, torch)}
    save_file(found, FILE, metadata=versions)


def numbers_of_all(root: Path) -> Numbers:
    """Of each loss and model, by ``<model>.<loss>.<what>``."""
    return {
        f"{model}.{loss}.{what}": tensor
        for model in MODELS
        for loss in LOSSES
        for what, tensor in numbers(root, model, loss).items()
    }


def numbers(root: Path, model: str, loss: str) -> Numbers:
    """Steps of SGD by hand, each with all rows as one batch.

    Returns:
        losses, norms, kl: fp64 (steps,). rows, gradient: token ids that have a gradient, and it, after the last step.
        ids, mask: (rows, length) of the first step, 1 at tokens of answers; of pairs chosen and rejected in turn.
    """
    trainer = TRAINERS.get(loss, _dpo)(root, model, loss)
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    losses: list[float] = []
    norms: list[float] = []
    kl: list[float] = []
    first: Numbers = {}
    for step in range(STEPS):
        rows = [trainer.train_dataset[i] for i in range(ROWS * step, ROWS * (step + 1))]
        batch = trainer.data_collator(rows)
        first = first or _tokens(trainer, batch)
        trainer.model.zero_grad()
        trainer.model.train()
        value = _orpo_loss(trainer, batch) if loss == "orpo" else trainer.compute_loss(trainer.model, dict(batch))
        value.backward()
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms.append(torch.stack([g.double().norm() for g in gradients]).norm().item())
        losses.append(value.item())
        kl.append(trainer._metrics["train"]["kl"][-1] if loss == "kto" else 0.0)
        with torch.no_grad():
            for p in parameters:
                if p.grad is not None:
                    p -= LR * p.grad
    embedding = trainer.model.get_input_embeddings().weight.grad
    seen = embedding.any(1).nonzero()[:, 0]
    of_steps = {
        name: torch.tensor(each, dtype=torch.float64)
        for name, each in (("losses", losses), ("norms", norms), ("kl", kl))
    }
    return {**of_steps, "rows": seen, "gradient": embedding[seen].float(), **first}


def _trainer(kind: Any, config: Any, model: Any, folder: Path, rows: list[dict[str, Any]], **more: Any) -> Any:
    """In fp64 on the CPU."""
    import datasets
    import transformers

    of_trainer = {name: more.pop(name) for name in ("ref_model",) if name in more}
    arguments = config(
        output_dir=str(folder.parent / "out"),
        **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": []},
        per_device_train_batch_size=ROWS,
        disable_dropout=True,
        **more,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, pad_token="<|bos|>")  # not what ends a text
    tokenizer.bos_token = None  # the trainer of ORPO puts one before all, this project what the tokenizer's files say
    data = datasets.Dataset.from_list(rows)
    trainer = kind(model=model, args=arguments, train_dataset=data, processing_class=tokenizer, **of_trainer)
    for each in (trainer.model, *of_trainer.values()):
        each.double()
        if hasattr(each.config, "num_experts"):
            each.set_experts_implementation("eager")  # torch's grouped product knows no fp64
    return trainer


def _model(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def _dpo(root: Path, model: str, loss: str) -> Any:
    import trl

    folder, rows = root / model, rows_of(LOSSES[loss]) * STEPS
    options: Any = {"beta": BETA, "loss_type": [loss], "ref_model": _model(folder)}
    return _trainer(trl.DPOTrainer, trl.DPOConfig, _model(folder), folder, rows, **options)


def _kto(root: Path, model: str, loss: str) -> Any:
    """A prompt gets the answer of the row before it, where this project takes that of the row behind it."""
    import trl

    folder, rows = root / model, rows_of(LOSSES[loss])
    options: Any = {"beta": BETA, "desirable_weight": WEIGHTS[0], "undesirable_weight": WEIGHTS[1]}
    data = [rows[i] for order in orders() for i in reversed(order)]
    options |= {"train_sampling_strategy": "sequential", "ref_model": _model(folder)}
    return _trainer(trl.KTOTrainer, trl.KTOConfig, _model(folder), folder, data, **options)


def _orpo(root: Path, model: str, loss: str) -> Any:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from trl.experimental import orpo

    folder, options = root / model, {"beta": BETA, "max_length": 64}
    _without_prompts(_trainer(orpo.ORPOTrainer, orpo.ORPOConfig, _model(folder), folder, _of_one_length(), **options))
    rows = rows_of(LOSSES[loss]) * STEPS
    return _trainer(orpo.ORPOTrainer, orpo.ORPOConfig, _model(folder), folder, rows, **options)


def _of_one_length() -> list[dict[str, Any]]:
    """Without prompts, and all chosen answers of one length."""
    return [{"prompt": "", "chosen": f"ABC{i}", "rejected": "DEFGH"[i:]} for i in range(5)]


def _orpo_loss(trainer: Any, batch: Any) -> torch.Tensor:
    """What TRL measures, with a mean over pairs of the chosen answers' cross-entropies: TRL's is one over all tokens of
    a micro-batch, prompts included. The rest of its loss is the same."""
    found = trainer.concatenated_forward(trainer.model, batch)
    chosen, rejected, nll = found[0], found[1], found[4]
    ratio = trainer.odds_ratio_loss(chosen, rejected)[0].mean()
    theirs = trainer.compute_loss(trainer.model, dict(batch))
    assert abs((nll - ratio - theirs).item()) < 1e-6
    return -chosen.mean() - ratio


def _without_prompts(trainer: Any) -> None:
    """There ``_orpo_loss`` is TRL's own loss."""
    batch = trainer.data_collator(list(trainer.train_dataset))
    theirs = trainer.compute_loss(trainer.model, dict(batch))
    assert abs((_orpo_loss(trainer, batch) - theirs).item()) < 1e-6


def _reward(root: Path, model: str, loss: str) -> Any:
    import transformers
    import trl

    folder = root / f"{model}-reward"
    scorer = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    options = {"center_rewards_coefficient": CENTER}
    rows = rows_of(LOSSES[loss]) * STEPS
    return _trainer(trl.RewardTrainer, trl.RewardConfig, scorer, root / model, rows, **options)


TRAINERS = {"kto": _kto, "orpo": _orpo, "reward": _reward}


def _tokens(trainer: Any, batch: Any) -> Numbers:
    """Token ids and which of them are of an answer, as this project orders them."""
    if "label" in batch:
        return {"ids": batch["input_ids"].clone(), "mask": batch["completion_mask"].long()}
    if "chosen_input_ids" in batch:
        whole = trainer.concatenated_inputs(batch, padding_value=0)
        ids, mask = whole["concatenated_input_ids"], (whole["concatenated_labels"] != -100).long()
    else:
        ids = batch["input_ids"]
        mask = batch.get("completion_mask", batch["attention_mask"])
    in_turn = [
        np.ascontiguousarray(t.view(2, ROWS, -1).transpose(0, 1).reshape(2 * ROWS, -1).numpy()) for t in (ids, mask)
    ]
    return {"ids": torch.from_numpy(in_turn[0]), "mask": torch.from_numpy(in_turn[1])}


if __name__ == "__main__":
    main()
