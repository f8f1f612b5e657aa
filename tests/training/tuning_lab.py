"""Real runs on N ranks, and what their gradients were."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from smp.models.presets import PRESETS
from smp.parallel.dtensor_region import local_part
from smp.training.kind import RunKind
from smp.training.pretraining import Pretraining
from smp.training.process import Process
from smp.training.run import Run
from smp.training.runtime import StopSignal
from smp.training.settings import read_settings
from smp.training.trainer import Progress, StepResult
from smp.training.tuning.kinds import tuning_kind
from smp.training.tuning.settings import read_finetune_settings
from tests.parity.worker import fp64

QUIET = "--no-tensorboard --no-progress-bar --clip-grad 0 --lr-decay-style constant --weight-decay 0.1"


class Recording(Run):
    """A run that keeps its losses and the gradients of each step, whole, and which parameters a step has changed."""

    def record(self) -> Recording:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.moved: list[set[str]] = []
        self.tokens: list[int] = []
        self.more: list[dict[str, float]] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.trainer.optimizer.register_step_pre_hook(self._before_step)
        self.trainer.optimizer.register_step_post_hook(self._after_step)
        self.console.step = self.note  # type: ignore[method-assign]
        return self

    def _before_step(self, *_: Any) -> None:
        self.gradients.append(self.whole(gradients=True))
        self._before = self._local_parts()

    def _after_step(self, *_: Any) -> None:
        """A parameter has moved when this rank's part of what the *model* has is another one, whatever the optimizer
        updated."""
        now = self._local_parts()
        self.moved.append({name for name, part in self._before.items() if not torch.equal(part, now[name])})

    def _local_parts(self) -> dict[str, torch.Tensor]:
        trained = ((name, p) for name, p in self.trainer.model.named_parameters() if p.requires_grad)
        return {name: (p.to_local() if isinstance(p, DTensor) else p).detach().clone() for name, p in trained}

    def whole(self, *, gradients: bool = False) -> dict[str, torch.Tensor]:
        """What is trained, or its gradients, by name; of this rank's pipeline stage."""
        out = {}
        for name, p in self.trainer.model.named_parameters():
            tensor = p.grad if gradients else p
            if p.requires_grad and tensor is not None:
                full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                rows = self.config.model.vocab_size if name in ("embedding.weight", "head.weight") else full.shape[0]
                out[name] = full[:rows].detach().clone()
        return out

    def note(self, progress: Progress, result: StepResult) -> None:
        self.losses.append(result.loss)
        self.norms.append(result.grad_norm)
        self.tokens.append(result.num_tokens)
        if result.metrics:
            self.more.append(dict(result.metrics))


def tune(rank: int, world_size: int, flags: str, watch: type[Recording] = Recording) -> dict[str, Any]:
    """One fine-tuning run in an existing process group."""
    config, data = read_finetune_settings(shlex.split(f"{QUIET} {flags}"), world_size)
    assert data is not None
    return observe(tuning_kind(config, data), rank, world_size, watch)


def pretrain(rank: int, world_size: int, flags: str) -> dict[str, Any]:
    """One pretraining run in an existing process group."""
    return observe(Pretraining(read_settings(shlex.split(flags), PRESETS, world_size)), rank, world_size)


def pretrain_all(rank: int, world_size: int, flags: list[str]) -> list[dict[str, Any]]:
    """Several runs in one start."""
    return [pretrain(rank, world_size, each) for each in flags]


def observe(parts: RunKind, rank: int, world_size: int, watch: type[Recording] = Recording) -> dict[str, Any]:
    """What one run does, as far as this rank sees it."""
    process = Process(rank, world_size, rank)
    run = watch(parts, process, torch.device("cpu"), StopSignal()).record()
    try:
        initial = run.whole()
        run.run()
        final = run.whole()
    finally:
        run.close()
    optimizer = sum(
        t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes
        for state in run.trainer.optimizer.state.values()
        for t in state.values()
        if isinstance(t, torch.Tensor) and t.ndim
    )
    frozen = {str(p.dtype) for p in run.trainer.model.parameters() if not p.requires_grad}
    trained = {str(p.dtype) for p in run.trainer.model.parameters() if p.requires_grad}
    return {
        "losses": run.losses,
        "norms": run.norms,
        "moved": run.moved,
        "more": run.more,
        "gradients": run.gradients,
        "initial": initial,
        "final": final,
        "optimizer": optimizer,
        "dtypes": (trained, frozen),
        "validation": run.validation,
        "tokens": run.tokens,
        "held": sum(p.numel() for p in held_parameters(run)),
        "share": share_of(run.trainer.model),
        "batches": getattr(run, "seen", [])[: len(run.losses)],
    }


def share_of(model: Any) -> float:
    """Bytes of this rank's parameters, of those of all."""
    whole = list(model.parameters())
    return sum(local_part(p).nbytes for p in whole) / sum(p.nbytes for p in whole)


def held_parameters(run: Recording) -> list[torch.Tensor]:
    """Of the model, and of a frozen copy."""
    models = [run.trainer.model]
    reference = getattr(run.trainer.objective, "reference", None)
    if (copy := getattr(reference, "model", None)) not in (None, run.trainer.model):
        models.append(copy)
    return [p for model in models for p in model.parameters()]


def tune_all(rank: int, world_size: int, flags: list[str]) -> list[dict[str, Any]]:
    """Several runs in one start. Those in FP8 are fp64 but for their 8-bit products, see ``fp64``."""
    out = []
    for each in flags:
        with fp64() if "--fp8-format" in each else nullcontext():
            out.append(tune(rank, world_size, each))
    return out


def together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One result from those of all ranks, which must agree about the losses."""
    for name in ("losses", "norms"):
        assert all(r[name] == ranks[0][name] for r in ranks), "ranks disagree"
    out = dict(ranks[0])
    out["moved"] = [set().union(*parts) for parts in zip(*(r["moved"] for r in ranks), strict=True)]
    out["gradients"] = [merge(r["gradients"][i] for r in ranks) for i in range(len(ranks[0]["losses"]))]
    out["initial"], out["final"] = merge(r["initial"] for r in ranks), merge(r["final"] for r in ranks)
    return out


def merge(parts: Any) -> dict[str, torch.Tensor]:
    """Tensors of all stages; those that several ranks hold must be equal."""
    out: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(out.setdefault(name, tensor), tensor), f"{name} differs between ranks"
    return out
