"""What runs of --objective distill do their own way: completions that the model writes, or the teacher's pass over all
samples in place of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from smp.config import ConfigError
from smp.data.loader import RankBatch
from smp.data.sample import IGNORE_INDEX
from smp.data.tuning.batches import NumberedBatch, TuningDataset
from smp.data.tuning.build import TuningData
from smp.data.tuning.sequences import lay_out
from smp.generation import Generator, Sampling, Stops
from smp.layers.heads.distillation import top_log_probs
from smp.layers.heads.head import DISTILLED, chunk_tokens
from smp.parallel.agree import gather, on_rank_zero
from smp.training.build import RunSetup, batch_loader, build_generator
from smp.training.distillation.meaning import Meaning
from smp.training.distillation.stored import LogitsWriter, new_folder, write_manifest
from smp.training.distillation.teacher import ModelTeacher
from smp.training.distillation.writing import Division, OwnCompletions
from smp.training.kind import BatchSource, Say, Trainable
from smp.training.objectives.distillation import Distillation
from smp.training.texts.text_model import end_ids, folder_of
from smp.training.tuning.finetuning import Finetuning, trims


class Distilling(Finetuning):
    """Trains the model in --load to follow a teacher, on samples and on what it writes itself.

    Raises:
        ConfigError: see :class:`Finetuning`.
    """

    _generator: Generator | None = None

    def trainable(self, setup: RunSetup, say: Say, progress: Callable[[], None]) -> Trainable:
        made = super().trainable(setup, say, progress)
        assert self.config.rollouts is not None and self.config.distillation is not None
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
            stops=Stops(frozenset({*end_ids(folder_of(config)), self.data.tokenizer.eos})),
            longest=rollouts.max_completion_length,
            share=config.distillation.lmbda,
            consumed=consumed,
        )


def _require_prompts(data: TuningData) -> None:
    """Raise ConfigError where a sample is all answer: --lmbda lets the model answer what comes before."""
    samples, begins = data.samples, len(data.tokenizer.before)
    firsts = [int(samples[n][1].argmax()) for n in range(len(samples))]
    without = sum(first <= begins for first in firsts)
    if without:
        raise ConfigError(f"--lmbda: {without} of {len(samples)} samples have no prompt for the model to answer")


class SavingLogits(Finetuning):
    """Writes what the model in --load says of all samples, and trains nothing.

    Raises:
        ConfigError: see :class:`Finetuning`; or --logits-save-dir holds something.
    """

    evaluate_first = False
    _setup: RunSetup | None = None
    _teacher: ModelTeacher | None = None

    def trainable(self, setup: RunSetup, say: Say, progress: Callable[[], None]) -> Trainable:
        assert self.config.distillation is not None and self.config.distillation.logits_save_dir is not None
        path = self.config.distillation.logits_save_dir
        on_rank_zero(lambda: new_folder(path), ConfigError)
        made = super().trainable(setup, say, progress)
        assert isinstance(made.objective, Distillation) and isinstance(made.objective.teacher, ModelTeacher)
        self._setup, self._teacher = setup, made.objective.teacher
        return made

    def instead(self, progress: Callable[[], None]) -> str:
        config, setup, distillation = self.config, self._setup, self.config.distillation
        assert setup is not None and distillation is not None and config.rollouts is not None
        path, samples = distillation.logits_save_dir, self.data.samples
        assert path is not None and config.model.vocab_size is not None
        meaning = Meaning(
            samples=samples.fingerprint(),
            vocab_size=config.model.vocab_size,
            temperature=config.rollouts.temperature,
            top_k=min(distillation.logits_top_k, config.model.vocab_size),
            dtype=distillation.logits_save_dtype,
        )
        writer = LogitsWriter(path, dist.get_rank() if dist.is_initialized() else 0, meaning)
        packing: Literal["best-fit", "off"] = "best-fit" if self.data.train.packed else "off"
        every = lay_out(samples, np.arange(len(samples)), self.data.train.length, packing)
        dataset = TuningDataset(samples, every, seed=None, trim=trims(config), numbered=True)
        batches = batch_loader(config, setup, dataset, dataset.batch)
        try:
            for _ in range(-(-len(every) // (config.data.global_batch_size or 1))):
                self._write(next(batches), writer, meaning)
                progress()
        finally:
            batches.close()
        writer.flush()
        parts = [part for rank in gather(writer.parts) for part in rank]
        on_rank_zero(lambda: write_manifest(path, meaning, parts), ConfigError)
        labels = sum(part["labels"] for part in parts)
        return f"log-probabilities of {meaning.top_k} tokens for each of {labels:,} labels are in {path}"

    def _write(self, batch: RankBatch, writer: LogitsWriter, meaning: Meaning) -> None:
        """What the teacher says of a rank's share of a step, by one rank of those that have the same tokens."""
        assert self._teacher is not None and self._setup is not None
        assert isinstance(batch, NumberedBatch) and batch.numbers is not None
        asked = self._teacher.micro_batches(batch)
        for i, states in enumerate(self._teacher.states(batch)):
            micro_batch, head = asked[i], self._teacher.head
            assert micro_batch.token_index is not None and micro_batch.labels is not None
            chunk = chunk_tokens(head.matrix, share=DISTILLED)
            top = top_log_probs(states, head, meaning.top_k, meaning.temperature, chunk_tokens=chunk)
            columns = micro_batch.token_index.cpu() - batch.sample_index[i][:, None] * batch.input_ids.shape[-1]
            labels = (micro_batch.labels != IGNORE_INDEX).flatten().cpu()
            if self._setup.context.tp.get_local_rank() == 0:
                numbers = batch.numbers[i].gather(1, columns).flatten()[labels]
                # What follows the rows is padding.
                writer.add(numbers, top[: len(labels)][labels.to(states.device)])
