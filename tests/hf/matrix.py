"""One architecture in every layout, beside itself in one process: what differs, or why ``transform`` refuses it."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import smp
from smp.config import ConfigError
from tests.hf.architectures import build
from tests.hf.families import VOCAB, batch, whole, worst

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 1": {"hybrid_shard_degree": 4},
    "TP 2": {"tensor_parallel_degree": 2},
    "TP 4": {"tensor_parallel_degree": 4},
    "SP": {"tensor_parallel_degree": 2, "sequence_parallel": True},
    "CP": {"tensor_parallel_degree": 2, "context_parallel_degree": 2},
    "EP": {"tensor_parallel_degree": 2, "expert_parallel_degree": 2},
}
"""Of four processes; FSDP2 shards over the data ranks."""
NOT_RUN = "not run: "
NEEDS_IDS = ("deepseek_v4", "gemma4", "gemma4_text", "gemma4_unified")
"""They look tables up by ``input_ids`` in their layers, and take no embeddings without."""
WHOLE = ("TP 2", "TP 4")
"""Layouts in which all is compared; the others show the loss and every gradient of their own training forward."""


def measure(
    rank: int, world_size: int, kinds: list[str], layouts: list[str], steps: int
) -> dict[str, dict[str, dict[str, float] | str]]:
    """By model type and layout: relative errors, or the line with which transform refuses; ``NOT_RUN`` and the reason
    for a model that fails before smp sees it."""
    found: dict[str, dict[str, dict[str, float] | str]] = {}
    for kind in kinds:
        smp.state.reset()
        fresh, sent = _reference(kind, steps, rank)
        dist.broadcast_object_list(sent)
        if isinstance(sent[0], str):
            found[kind] = dict.fromkeys(layouts, sent[0])
            continue
        found[kind] = {}
        for layout in layouts:
            smp.state.reset()
            smp.init(LAYOUTS[layout])
            try:
                found[kind][layout] = _in_layout(copy.deepcopy(fresh), layout, sent[0], steps)
            except ConfigError as refused:
                found[kind][layout] = str(refused)
    return found


def _reference(kind: str, steps: int, rank: int) -> tuple[Any, list[Any]]:
    """The model, and on rank 0 what it gives in one process, or why it gives nothing."""
    try:
        fresh = build(kind)
        return fresh, [_alone(copy.deepcopy(fresh), steps) if rank == 0 else None]
    except Exception as error:  # models raise what they like, and the other ranks wait
        return None, [f"{NOT_RUN}{type(error).__name__}: {_first_words(error)}"]


def _alone(model: Any, steps: int) -> dict[str, Any]:
    """In one process, without smp."""
    loss, gradients = _accumulate(model, lambda tensor: tensor)
    return {"loss": float(loss), "gradients": gradients} | _observe(model, steps, lambda tensor: tensor)


def _in_layout(model: Any, layout: str, wanted: dict[str, Any], steps: int) -> dict[str, float]:
    smp.transform(model, allow_whole_layers=True)  # its share is in the table
    if smp.state.ep_size > 1:
        for module in model.modules():
            if getattr(getattr(module, "smp_cut", None), "ep", None) is not None:
                fully_shard(module, mesh=smp.state.expert_mesh)
    fully_shard(model, mesh=smp.state.data_mesh)
    loss, gradients = _accumulate(model, _own)
    errors = {
        "loss": abs(float(smp.state.mean_over_data(loss)) - wanted["loss"]) / abs(wanted["loss"]),
        "gradients": worst(gradients, wanted["gradients"])[0],
    }
    if layout not in WHOLE:
        return errors
    found = _observe(model, steps, _own)
    errors |= {what: _error(found[what], wanted[what]) for what in found if what not in ("weights", "losses")}
    errors["losses"] = max(abs(a - b) for a, b in zip(found["losses"], wanted["losses"], strict=True))
    return errors | {"weights": worst(found["weights"], wanted["weights"])[0]}


def _own(rows: torch.Tensor) -> torch.Tensor:
    """What of whole sequences this rank reads."""
    return smp.cut_sequence(rows.chunk(smp.state.dp_size)[smp.state.dp_rank])


def _rows(seed: int) -> dict[str, torch.Tensor]:
    """Sequences of equally many labels, so that a mean over data ranks is the mean over tokens."""
    ids = torch.randint(3, VOCAB, (4, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(16) % 5 == 2, -100)}


def _accumulate(model: Any, own: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The last loss and all gradients, whole, of two micro-batches."""
    model.zero_grad()
    for seed in (0, 1):
        loss = model(**{name: own(rows) for name, rows in _rows(seed).items()}, use_cache=False).loss
        loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), gradients


def _inputs(model: Any) -> dict[str, dict[str, Any]]:
    """Ways to call a model, by what is special: padding, labels with -100 and none, positions, embeddings."""
    left = batch(50)
    right = {name: value.flip(-1) for name, value in left.items()}
    takes = inspect.signature(type(model).forward).parameters
    ways: dict[str, dict[str, Any]] = {"left": left, "right": right, "no labels": {"input_ids": left["input_ids"]}}
    if "position_ids" in takes:
        ways["position_ids"] = ways["no labels"] | {"position_ids": torch.arange(2, 12).expand(2, -1)}
    if "inputs_embeds" in takes and model.config.model_type not in NEEDS_IDS:
        table = model.get_input_embeddings()
        embeds = torch.randn(2, 8, table.embedding_dim, generator=torch.Generator().manual_seed(1))
        ways["inputs_embeds"] = {"inputs_embeds": embeds.to(table.weight.dtype)}
    return ways


def _observe(model: Any, steps: int, own: Any) -> dict[str, Any]:
    """What a user sees of a model, which is trained on the way."""
    seen: dict[str, Any] = {}
    # After a forward pass alone FSDP2's root keeps its parameters whole: an optimizer would get those.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for way, given in _inputs(model).items():
        out = model(**given, use_cache=False)
        seen[f"logits, {way}"] = out.logits.detach().clone()
        if "labels" in given:
            seen[f"loss, {way}"] = out.loss.detach().view(1)
    prompt = {name: batch(50)[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        text = model.eval().generate(**prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)
    seen["text"] = text.float()
    model.train()
    seen["losses"] = []
    for step in range(steps):
        loss = model(**{name: own(rows) for name, rows in _rows(100 + step).items()}, use_cache=False).loss
        loss.backward()
        if smp.is_initialized():
            smp.clip_grad_norm_(model, 1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen["losses"].append(float(smp.state.mean_over_data(loss) if smp.is_initialized() else loss))
    return seen | {"weights": {name: whole(p) for name, p in model.named_parameters()}}


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def _first_words(error: Exception) -> str:
    """Without the advice that transformers gives beside a missing library."""
    return " ".join(str(error).split()).partition(" but it was not found")[0]
