"""Find where a number that is not finite comes from: the module, the micro-batch, the samples.

The step was skipped, so its weights are still there: its micro-batches go through the model once more, without
gradients, and the outputs of modules are looked at. The first one with a NaN or an infinity whose inputs have none is
where it comes from. If all outputs are finite, the backward pass is made again, too, and gradients are looked at.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from smp.data.loader import RankBatch
from smp.optim.host import HostAdamW
from smp.parallel.agree import any_rank, gather
from smp.parallel.dtensor_region import local_part
from smp.training.micro_batches import MicroBatches
from smp.training.trainer import Trainer

LINES = 4
"""Ranks that are told; the others found the same."""


@dataclass
class _Seen:
    """What the hooks of one pass found.

    Attributes:
        micro_batch: the one that is under way.
        origin: (module, micro-batch, rows of it that are not finite; None: they cannot be told apart).
    """

    micro_batch: int = -1
    origin: tuple[str, int, list[int] | None] | None = None
    names: dict[nn.Module, str] = field(default_factory=dict)

    def look(self, module: nn.Module, args: Any, output: Any, rows: int) -> None:
        """After a module's forward pass on ``rows`` sequences."""
        # Only the first module whose inputs are finite is the origin; all after it inherit the NaN.
        if self.origin is not None or _all_finite(output) or not _all_finite(args):
            return
        wrong = next(x for x in tree_iter(output) if isinstance(x, torch.Tensor) and not _all_finite(x))
        self.origin = self.names[module], self.micro_batch, _wrong_rows(wrong, rows)


def _all_finite(values: Any) -> bool:
    tensors = (x for x in tree_iter(values) if isinstance(x, torch.Tensor) and x.is_floating_point())
    # Of DTensors the local shard: the check must not communicate, as ranks are in different
    # modules.
    return all(bool(local_part(x.detach()).isfinite().all()) for x in tensors)


def _wrong_rows(output: torch.Tensor, rows: int) -> list[int] | None:
    """Sequences of a micro-batch whose tokens are not finite; dimension 0 is tokens, sequence after sequence."""
    found = ~local_part(output.detach()).isfinite()
    # Not one row per token: a loss, or statistics of experts.
    if found.ndim < 1 or found.shape[0] % rows:
        return None
    # (tokens, ...) -> (rows, tokens of a row x ...)
    return found.reshape(rows, -1).any(1).nonzero().flatten().tolist()


@contextmanager
def _watched(model: nn.Module, seen: _Seen, rows: int) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        # The root has no name: the origin is one of its modules.
        if name:
            seen.names[module] = name
            handles.append(module.register_forward_hook(lambda m, args, out: seen.look(m, args, out, rows)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def find_origin(trainer: Trainer, batch: RankBatch, num_valid: int) -> list[str]:
    # Weights first: with a NaN in them every output has one.
    """Lines that say where a skipped step's NaN or infinity comes from, the same on all ranks. Every rank calls it."""
    wrong = [name for name, p in trainer.model.named_parameters() if not bool(local_part(p.detach()).isfinite().all())]
    told = _told([f"the weights of {wrong[0]} ({len(wrong)} tensors)"] if wrong else [])
    if told:
        return told
    seen, rows = _Seen(), batch.input_ids.shape[1]
    given = trainer.objective.micro_batches(batch, num_valid)

    # The hooks have to know which micro-batch runs.
    def make(i: int) -> Any:
        seen.micro_batch = i
        return given[i]

    with _watched(trainer.model, seen, rows):
        trainer.forward_backward.forward(MicroBatches(len(given), make))
    told = _told([] if seen.origin is None else [_in_words(*seen.origin, batch)])
    # An optimizer on the host takes gradients, and makes its step, while the backward pass runs.
    return told or ([] if isinstance(trainer.optimizer, HostAdamW) else _of_gradients(trainer, given))


def _of_gradients(trainer: Trainer, micro_batches: MicroBatches) -> list[str]:
    trainer.forward_backward.train(micro_batches)
    grads = {n: local_part(p.grad) for n, p in trainer.model.named_parameters() if p.grad is not None}
    wrong = [f"the gradient of {name}" for name, gradient in grads.items() if not bool(gradient.isfinite().all())]
    trainer.optimizer.zero_grad()
    nothing = torch.zeros((), dtype=torch.bool, device=trainer.device)
    # ``end_step`` closes the step's counters (router biases) as if it had been skipped.
    trainer.model.end_step(nothing)
    if (history := trainer.history) is not None:
        # An infinite number that was rounded to 8 bits is the largest one, and gradients computed from it are finite.
        maxima = {name: torch.stack(one).isfinite().all() for name, one in zip(history.names, history.now, strict=True)}
        wrong += [f"the gradient of the output of {name}" for name, finite in maxima.items() if not finite]
        history.advance(nothing)  # or the next step would have this one's maxima, and be skipped as well
    return _told([f"{wrong[0]} ({len(wrong)} tensors), all outputs are finite"] if wrong else [])


def _in_words(module: str, micro_batch: int, rows: list[int] | None, batch: RankBatch) -> str:
    index = batch.sample_index[micro_batch]
    samples = (index if not rows or len(rows) > len(index) else index[rows]).tolist()
    return f"the output of {module} in micro-batch {micro_batch}, samples {', '.join(map(str, samples))}"


def _told(own: list[str]) -> list[str]:
    """A line for each rank that found something. Collective."""
    # The strings are gathered only if there are some.
    if not any_rank(bool(own)):
        return []
    found = [(rank, *one) for rank, one in enumerate(gather((socket.gethostname(), own))) if one[1]]
    lines = [f"not finite on rank {rank} on {host}: {lines[0]}" for rank, host, lines in found[:LINES]]
    return lines + ([f"and on {len(found) - LINES} other ranks"] if len(found) > LINES else [])
