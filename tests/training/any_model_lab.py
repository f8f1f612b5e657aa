"""Tiny models of transformers' types, a plain loop that trains one, and what a run of ``finetune.py`` does with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from smp.models.micro_batch import MicroBatch
from tests.hf import architectures
from tests.training.tiny_hf import write_samples, write_tokenizer
from tests.training.tuning_lab import Recording, tune

VOCAB = 300
LR = 0.02


def write_type(folder: Path, kind: str, **changes: Any) -> Path:
    """A folder with a tiny model of a ``model_type``, with a tokenizer of 300 ids and samples; returns it."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = architectures.tiny(CONFIG_MAPPING[kind])
    for name, value in {"vocab_size": VOCAB, **changes}.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # large enough that every part shows in the loss
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    write_samples(folder)
    return folder


class Watched(Recording):
    """A run that also keeps the micro-batches of each step."""

    def record(self) -> Watched:
        super().record()
        self.seen: list[list[MicroBatch]] = [[]]
        self.trainer.model.register_forward_pre_hook(lambda _, args: self.seen[-1].append(args[0]))
        self.trainer.optimizer.register_step_post_hook(lambda *_: self.seen.append([]))
        return self


def documents(batch: MicroBatch) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(ids, labels, weights) of each document of a micro-batch by itself, without padding behind it."""
    assert batch.labels is not None and batch.loss_weights is not None
    out = []
    for row in range(batch.input_ids.shape[0]):
        numbers = torch.zeros_like(batch.input_ids[row])
        if batch.document_ids is not None:
            numbers = batch.document_ids[row]
        for number in numbers.unique():
            of = numbers == number
            weights = batch.loss_weights[row][of]
            if weights.any():
                last = int(weights.nonzero().max()) + 1
                out.append((batch.input_ids[row][of][:last], batch.labels[row][of][:last], weights[:last]))
    return out


def plain_loop(folder: Path, steps: list[list[MicroBatch]], lr: float = LR) -> dict[str, Any]:
    """The same steps by transformers alone: every document by itself, logits in fp32, plain SGD."""
    return train_plainly(load(folder).train(), steps, lr)


def load(folder: Path) -> Any:
    """The model of a folder, by transformers, in fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def train_plainly(model: Any, steps: list[list[MicroBatch]], lr: float) -> dict[str, Any]:
    """The same steps on what ``model`` trains."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=lr)
    losses, norms = [], []
    for step in steps:
        total = torch.zeros(())
        for ids, labels, weights in (document for batch in step for document in documents(batch)):
            logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
            loss = (F.cross_entropy(logits, labels, reduction="none", ignore_index=-100) * weights).sum()
            loss.backward()
            total += loss.detach()
        losses.append(total.item())
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in trained.values() if p.grad is not None]).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "final": {n: p.detach() for n, p in trained.items()}}


def tune_types(rank: int, world_size: int, runs: list[str]) -> list[dict[str, Any]]:
    """Several runs in one start; of one that is refused the reason."""
    out = []
    for flags in runs:
        try:
            out.append(tune(rank, world_size, flags, Watched))
        except Exception as refused:  # of one type, which must not end those of the others
            name = "" if isinstance(refused, ValueError) else f"{type(refused).__name__}: "
            out.append({"refused": f"{name}{refused}"})
    return out


def largest_error(got: dict[str, Any], want: dict[str, Any]) -> dict[str, float]:
    """Relative errors of losses, gradient norms and final weights, the largest of each."""
    weights = {
        name: ((got["final"][name] - tensor).norm() / tensor.norm().clamp(min=1e-3)).item()
        for name, tensor in want["final"].items()
    }
    pairs = {key: zip(got[key], want[key], strict=True) for key in ("losses", "norms")}
    out = {key: max(abs(a - b) / abs(b) for a, b in both) for key, both in pairs.items()}
    return out | {"weights": max(weights.values())}
