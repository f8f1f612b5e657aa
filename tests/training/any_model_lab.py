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
SCALES = dict.fromkeys(("t5", "mt5", "umt5", "longt5", "switch_transformers"), 0.5)
"""What first weights are multiplied by, where it is not 3: T5's attention does not divide its scores."""


def write_type(folder: Path, kind: str, **changes: Any) -> Path:
    """A folder with a tiny model of a ``model_type``, with a tokenizer of 300 ids and samples; returns it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = architectures.tiny(CONFIG_MAPPING[kind])
    for name, value in {"vocab_size": VOCAB, **changes}.items():
        for part in (config, getattr(config, "encoder", None), getattr(config, "decoder", None)):
            if hasattr(part, name):  # T5Gemma's two parts have configurations of their own
                setattr(part, name, value)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # T5's files have it, its class has not
    torch.manual_seed(0)
    model = class_of(config).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # large enough that every part shows in the loss
                parameter.mul_(SCALES.get(kind, 3.0))
        if (bias := model._buffers.get("final_logits_bias")) is not None:  # of BART's kind, 0 at first
            bias.normal_()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    write_samples(folder)
    return folder


def class_of(config: Any) -> Any:
    """transformers' class that makes the language model of a configuration."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


class Watched(Recording):
    """A run that also keeps the micro-batches of each step."""

    def record(self) -> Watched:
        super().record()
        self.seen: list[list[MicroBatch]] = [[]]
        self.trainer.model.register_forward_pre_hook(lambda _, args: self.seen[-1].append(args[0]))
        self.trainer.optimizer.register_step_post_hook(lambda *_: self.seen.append([]))
        return self


def lora_loop(folder: Path, run: dict[str, Any], scale: float, lr: float = LR) -> dict[str, Any]:
    """The steps of a run with adapters by transformers and a hook on each of its linear layers, from the run's first
    values; ``scale`` is alpha / rank."""
    model = load(folder).train().requires_grad_(False)
    for layer in dict.fromkeys(name.rpartition(".lora.")[0] for name in run["initial"]):
        module = model.get_submodule(layer)
        factors = {part: run["initial"][f"{layer}.lora.{part}"].clone() for part in "ab"}
        module.lora = torch.nn.ParameterDict(factors)

        def add(module: Any, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
            return out + F.linear(F.linear(args[0], module.lora["a"]), module.lora["b"]) * scale

        module.register_forward_hook(add)
    return train_plainly(model, run["batches"], lr)


def logits_error(folder: Path, saved: Path, run: dict[str, Any]) -> float:
    """How far the logits of an exported folder are from those of the weights that a run ended with: relative, of a
    sequence of its last batch."""
    wanted, got = load(folder).eval(), load(saved).eval()
    wanted.load_state_dict(run["final"], strict=False)
    ids, labels, weights = documents(run["batches"][-1][0])[0]
    with torch.no_grad():
        (a, *_), (b, *_) = (read(model, ids, labels, weights) for model in (wanted, got))
    return ((a - b).norm() / a.norm()).item()


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
    from transformers import AutoConfig

    return class_of(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32)


def train_plainly(model: Any, steps: list[list[MicroBatch]], lr: float) -> dict[str, Any]:
    """The same steps on what ``model`` trains."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=lr)
    losses, norms = [], []
    for step in steps:
        total = torch.zeros(())
        for ids, labels, weights in (document for batch in step for document in documents(batch)):
            logits, labels, weights = read(model, ids, labels, weights)
            loss = (F.cross_entropy(logits, labels, reduction="none", ignore_index=-100) * weights).sum()
            loss.backward()
            total += loss.detach()
        losses.append(total.item())
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in trained.values() if p.grad is not None]).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "final": {n: p.detach() for n, p in trained.items()}}


def read(
    model: Any, ids: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits in fp32, labels, weights) of a document: of an encoder with a decoder those of the answer, from the first
    label that counts on; what is in front of it is the prompt."""
    if not model.config.is_encoder_decoder:
        return model(input_ids=ids[None], use_cache=False).logits[0].float(), labels, weights
    first = int(weights.nonzero().min())
    answer = labels[first:]
    out = model(input_ids=ids[None, : first + 1], labels=answer[None], use_cache=False)
    return out.logits[0].float(), answer, weights[first:]


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
