"""Fine-tuning's part of a step on fake tensors: adapters, frozen weights, pairs and their reference model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

from smp.config import Config
from smp.config.rules.finetune import targets_of
from smp.layers.adapters.lora import adapters_off, choose
from smp.layers.heads.answers import AnswerLoss
from smp.models.micro_batch import MicroBatch
from smp.models.protocol import Model
from smp.sharding.parallelize import free_gathered
from smp.training.forward_backward import ForwardBackward
from smp.training.micro_batches import MicroBatches
from smp.training.objectives import implementation_of
from smp.training.tuning.adapter_files import read_start
from smp.training.tuning.model import AdapterPlan, tune

Build = Callable[[bool], tuple[Model, ForwardBackward]]
"""(whether it is trained) -> a sharded model and how micro-batches go through it."""


def can_be_tried(config: Config) -> bool:
    """Whether the objective's step can run on fake tensors."""
    return implementation_of(config).fake is not None


def tuned(model: Model, config: Config, *, trained: bool) -> None:
    """Add adapters and freeze weights, as a run does before sharding; does nothing in pretraining."""
    if config.objective is not None:
        tune(model, config, _adapters(model, config) if config.has_adapters else None, trainable=trained)


def _adapters(model: Model, config: Config) -> AdapterPlan:
    """The adapters of this rank's layers. A pattern that matches no layer is reported by the run itself."""
    lora = config.lora
    assert lora is not None, "settings of a fine-tuning run"
    if lora.load_adapter is not None:
        return AdapterPlan.of_files(read_start(config)[0], lora)
    return AdapterPlan.asked((name for names in choose(model, targets_of(config)).values() for name in names), lora)


def judged(config: Config, micro_batch: MicroBatch, *, by_reference: bool = False) -> MicroBatch:
    """``micro_batch`` with the loss of the run's objective; ``by_reference``: log-probabilities only."""
    fake = implementation_of(config).fake
    assert fake is not None, "can_be_tried was asked before"
    answers = AnswerLoss() if by_reference else fake(config, len(micro_batch.input_ids))
    return replace(micro_batch, answers=answers)


class FakeReference:
    """The reference model's pass over a step of pairs: of a frozen copy, or of the model with its adapters off; none
    where log-probabilities come from a table, or the loss has no reference.

    Attributes:
        copy: None, if there is none.
    """

    def __init__(self, config: Config, policy: Model, passes: ForwardBackward, build: Build) -> None:
        kind = None if config.objective is None else config.objective.dpo_reference
        self.copy: Model | None = None
        self._around: Callable[[], AbstractContextManager[None]] = nullcontext
        self._passes: ForwardBackward | None = None
        if not config.has_reference:
            return
        if kind == "copy":
            self.copy, self._passes = build(False)
        elif kind == "adapters-off":
            self._passes, self._around = passes, partial(adapters_off, policy)

    @property
    def is_computed(self) -> bool:
        """Whether a step runs anything for it."""
        return self._passes is not None

    def run(self, micro_batches: MicroBatches) -> None:
        """A forward pass of the reference, as :class:`smp.training.objectives.reference.ModelReference` runs it."""
        assert self._passes is not None, "is_computed was asked before"
        with self._around():
            self._passes.forward(micro_batches)
        if self.copy is not None:
            # No backward pass follows, which would free the gathered weights.
            free_gathered(self.copy)
