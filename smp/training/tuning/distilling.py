"""Runs of --objective distill: completions that the model writes itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from smp.config import ConfigError
from smp.convert.huggingface.folder import end_ids
from smp.data.tuning.batches import TuningDataset
from smp.data.tuning.build import TuningData
from smp.generation import Generator, Sampling, Stops
from smp.training.build import RunSetup, build_generator
from smp.training.distillation.writing import Division, OwnCompletions
from smp.training.kind import BatchSource, Say, Trainable
from smp.training.texts.text_model import folder_of
from smp.training.tuning.finetuning import Finetuning


class Distilling(Finetuning):
    """Trains the model in --load to follow a teacher, on samples and on what it writes itself.

    Raises:
        ConfigError: see :class:`Finetuning`.
    """

    _generator: Generator | None = None

    def trainable(self, setup: RunSetup, say: Say, progress: Callable[[], None]) -> Trainable:
        made = super().trainable(setup, say, progress)
        assert self.config.rollouts is not None and self.config.distillation is not None
        # lmbda 0: never on its own completions, and no generator is built.
        if self.config.distillation.lmbda:
            size = self.config.rollouts.generation_batch_size
            self._generator = build_generator(self.config, setup, made.model, batch_size=size)
        return made

    def batches(
        self, setup: RunSetup, dataset: TuningDataset, consumed: int, carried: Mapping[str, torch.Tensor], say: Say
    ) -> BatchSource | None:
        if self._generator is None:
            return None
        config, context, rollouts, data = self.config, setup.context, self.config.rollouts, self.config.data
        assert rollouts is not None and config.distillation is not None and data.global_batch_size is not None
        _require_prompts(self.data)
        return OwnCompletions(
            dataset,
            self._generator,
            context,
            Division(data.global_batch_size, data.micro_batch_size, context.data_rank, context.data_size),
            sampling=Sampling(rollouts.temperature, rollouts.top_k, rollouts.top_p, config.training.seed),
            stops=Stops(frozenset({*end_ids(folder_of(config)), self.data.tokenizer.eos, *self.data.ends})),
            longest=rollouts.max_completion_length,
            share=config.distillation.lmbda,
            consumed=consumed,
        )


def _require_prompts(data: TuningData) -> None:
    """Raise ConfigError where a sample has no prompt: --lmbda lets the model answer prompts."""
    samples, begins = data.samples, len(data.tokenizer.before)
    # argmax: index of the first trained token.
    firsts = [int(samples[n][1].argmax()) for n in range(len(samples))]
    without = sum(first <= begins for first in firsts)
    if without:
        raise ConfigError(f"--lmbda: {without} of {len(samples)} samples have no prompt for the model to answer")
