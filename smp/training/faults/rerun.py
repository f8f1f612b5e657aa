"""--rerun-mode validate_results: a step whose result is doubted is computed again, from the same batch and weights.

Megatron's rerun state machine asks the same question: is an unexpected number what the program computes, or did a rank
compute wrongly? A computation is deterministic here (dropout is a function of the step and the token), so two passes
of a rank give the same bits, or its hardware is at fault. What is compared is every rank's own part of the loss and the
checksum of its gradients. If they differ, a third pass decides: what two of three give is taken, and the run continues.

Doubted are losses and norms that are not finite, spikes of --spike-policy, and without any sign of a fault one step in
each --check-replicas-interval: a flipped bit of a gradient before it is summed is the same on all replicas then.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from smp.config import Config, ConfigError
from smp.layers.heads.head import ModelOutput
from smp.parallel.agree import any_rank, gather
from smp.parallel.dtensor_region import local_part
from smp.training.errors import TrainingError
from smp.training.faults.replicas import checksum

SUM = "sum of "
"""Prefix of names of gradients that are summed over ranks."""


@dataclass(frozen=True, eq=False)
class Pass:
    """Forward and backward passes of a step, whose gradients are in the parameters.

    Attributes:
        loss, norm: of the global batch.
        digest: of this rank's own results, see :meth:`Rerun.digest`.
    """

    outputs: Sequence[ModelOutput]
    loss: torch.Tensor
    norm: torch.Tensor
    digest: dict[str, int] | None = None


class Rerun:
    """Decides when a step is computed again, and what to make of it.

    Args:
        interval: steps after which one is computed again without being doubted; None: never.
    """

    def __init__(self, interval: int | None) -> None:
        self.interval = interval
        self._own: dict[str, torch.Tensor] = {}  # checksums of gradients of the pass that is listened to
        self.said: list[str] = []
        """Lines for the user, the same on all ranks; their reader clears the list."""
        self.repeated = 0
        """Passes so far that were made only to compare."""
        self._seconds = 0.0

    @staticmethod
    def wanted(config: Config, on_cuda: bool) -> Rerun | None:
        """What the settings ask for.

        Raises:
            ConfigError: kernels that are not deterministic would be taken for faults.
        """
        training = config.training
        if training.rerun_mode == "disabled":
            return None
        # Atomic adds of CUDA kernels change the order of sums from pass to pass.
        if on_cuda and not training.deterministic_mode:
            raise ConfigError(
                f"--rerun-mode {training.rerun_mode} compares bits, and on CUDA some kernels do not add up in one "
                "order: give --deterministic-mode"
            )
        return Rerun(training.check_replicas_interval)

    @contextmanager
    def listening(self, model: nn.Module) -> Iterator[None]:
        """Context of a pass whose gradients are noted before they are summed over ranks: a sum does not tell whose part
        of it is wrong. Under FSDP a module's parameters are the gathered ones while it runs."""
        self._own = {}
        handles: list[Any] = []
        heard: set[int] = set()

        # Hooks go onto a parameter when its module runs: FSDP has put the gathered one in its place
        # only then.
        def before(prefix: str, module: nn.Module) -> None:
            for name, parameter in module.named_parameters(prefix, recurse=False):
                # A tied or reused parameter gets one hook.
                if parameter.requires_grad and id(parameter) not in heard:
                    heard.add(id(parameter))
                    handles.append(parameter.register_hook(partial(self._note, name)))

        for prefix, module in model.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                handles.append(module.register_forward_pre_hook(lambda m, _, prefix=prefix: before(prefix, m)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, name: str, gradient: torch.Tensor) -> None:
        """Note a gradient of one micro-batch."""
        found = checksum(local_part(gradient))
        self._own[name] = found if name not in self._own else self._own[name] + found

    def digest(self, loss: torch.Tensor, model: nn.Module) -> dict[str, int]:
        """Checksums of the pass that was listened to: of this rank's part of the loss and of its gradients, and of the
        sums of gradients (``SUM``). Waits for the device."""
        # As fp32: a word for the checksum.
        found = {"loss": checksum(loss.detach().float().view(1)), **self._own}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"{SUM}{name}"] = checksum(local_part(parameter.grad))
        # One transfer to the host for all.
        return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))

    def confirmed(self, iteration: int, first: Pass, again: Callable[[], Pass], doubted: Callable[[], bool]) -> Pass:
        """``first``, or what two of three passes give. Every rank calls it.

        Args:
            again: makes another pass, whose gradients replace those before.
            doubted: says whether ``first`` is unexpected; the same on all ranks.

        Raises:
            TrainingError: no two of three agree.
        """
        due = self.interval is not None and iteration % self.interval == 0
        if not (due or doubted()):
            # Not doubted on this rank is not doubted on any: ``doubted`` is the same everywhere.
            return first
        second = self._repeated(again)
        if not any_rank(first.digest != second.digest):
            # Its gradients are in the parameters now; they are equal to the first ones.
            return second
        third = self._repeated(again)
        as_first, as_second = (not any_rank(one.digest != third.digest) for one in (first, second))
        self.said.append(_in_words(iteration, [first, second, third]))
        if not (as_first or as_second):
            raise TrainingError(f"{self.said.pop()}: no two of three passes agree")
        # Of the three the third one's gradients are in the parameters, and it agrees with one of
        # the others.
        return third

    def _repeated(self, again: Callable[[], Pass]) -> Pass:
        """One more pass. Its digest waited for the device, so the host's clock is right."""
        started = time.perf_counter()
        passed = again()
        self.repeated += 1
        self._seconds += time.perf_counter() - started
        return passed

    def take_seconds(self) -> float:
        """Seconds that repeated passes took since they were last asked for."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _in_words(iteration: int, passes: Sequence[Pass]) -> str:
    """Which ranks computed something else, and what. Every rank calls it."""
    digests = [one.digest or {} for one in passes]
    names = [name for name in digests[0] if len({digest.get(name) for digest in digests}) > 1]
    told = gather((socket.gethostname(), names))
    # A rank whose own results differ is at fault: sums differ on all ranks that have a part in
    # them.
    guilty = {rank: one for rank, one in enumerate(told) if one[1] and not one[1][0].startswith(SUM)}
    guilty = guilty or {rank: one for rank, one in enumerate(told) if one[1]}
    who = ", ".join(f"rank {rank} on {host} ({found[0]})" for rank, (host, found) in guilty.items())
    return f"iteration {iteration}: silent corruption: from the same batch and weights another result on {who}"
