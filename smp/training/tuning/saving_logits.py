"""A run of --objective distill with --logits-save-dir: the teacher's pass over all samples, instead of training."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch.distributed as dist

from smp.checkpoint.folders.latest import ITERATION, find, iteration_of
from smp.config import Config, ConfigError
from smp.config.schema import CheckpointConfig
from smp.convert.huggingface.config import is_hf_folder
from smp.data.loader import RankBatch
from smp.data.sample import IGNORE_INDEX
from smp.data.tuning.batches import NumberedBatch, TuningDataset
from smp.data.tuning.sequences import Sequences, lay_out
from smp.layers.heads.distillation import top_log_probs
from smp.layers.heads.head import DISTILLED, chunk_tokens
from smp.parallel.agree import any_rank, gather, on_rank_zero
from smp.training.build import RunSetup, batch_loader
from smp.training.distillation.meaning import Meaning
from smp.training.distillation.stored import LogitsWriter, write_manifest
from smp.training.distillation.teacher import ModelTeacher
from smp.training.distillation.unfinished import Come, Work, begin_folder, forget, note
from smp.training.kind import Instead, Say, Trainable
from smp.training.objectives.distillation import Distillation
from smp.training.tuning.finetuning import Finetuning, trims

SECONDS = 300.0
"""Seconds of work that are lost at most when a process is killed."""


class SavingLogits(Finetuning):
    """Writes the log-probabilities of the model in --load for all samples, and trains nothing.

    Raises:
        ConfigError: see :class:`Finetuning`; or --logits-save-dir holds something else.
    """

    evaluate_first = False
    _setup: RunSetup | None = None
    _teacher: ModelTeacher | None = None
    _begun: Work | None = None
    _come = Come()

    def trainable(self, setup: RunSetup, say: Say, progress: Callable[[], None]) -> Trainable:
        path, work = self._path, self._work()
        self._begun = work  # once: a run that continues saving may have a newer checkpoint at the end
        self._come = on_rank_zero(lambda: begin_folder(path, work), ConfigError)
        if self._come.sequences:
            say(f"--logits-save-dir {path}: {self._come.sequences} sequences are done; continuing after them")
        made = super().trainable(setup, say, progress)
        assert isinstance(made.objective, Distillation) and isinstance(made.objective.teacher, ModelTeacher)
        self._setup, self._teacher = setup, made.objective.teacher
        return made

    @property
    def _path(self) -> str:
        assert self.config.distillation is not None and self.config.distillation.logits_save_dir is not None
        return self.config.distillation.logits_save_dir

    def _work(self) -> Work:
        config, distillation, vocab_size = self.config, self.config.distillation, self.config.model.vocab_size
        assert distillation is not None and config.rollouts is not None and vocab_size is not None, "resolved before"
        meaning = Meaning(
            samples=self.data.samples.fingerprint(),
            vocab_size=vocab_size,
            temperature=config.rollouts.temperature,
            top_k=min(distillation.logits_top_k, vocab_size),
            dtype=distillation.logits_save_dtype,
        )
        return Work(
            meaning,
            teacher=str(config.checkpoint.load),
            iteration=_iteration(config.checkpoint),
            dtype=_dtype(config),
            adapter=None if config.lora is None else config.lora.load_adapter,
            seq_length=self.data.train.length,
            packed=self.data.train.packed,
        )

    def _sequences(self) -> Sequences:
        """All samples as sequences, in the order in which they are written."""
        packing: Literal["best-fit", "off"] = "best-fit" if self.data.train.packed else "off"
        samples = self.data.samples
        return lay_out(samples, np.arange(len(samples)), self.data.train.length, packing)

    def instead(self, progress: Callable[[], None], reason: Callable[[int], str | None]) -> Instead:
        config, setup, work, path = self.config, self._setup, self._begun, self._path
        assert setup is not None and work is not None, "trainable() is called first"
        assert config.data.global_batch_size is not None, "resolved before"
        every, begun, size = self._sequences(), self._come.sequences, config.data.global_batch_size
        rank = dist.get_rank() if dist.is_initialized() else 0
        writer = LogitsWriter(path, rank, work.meaning, number=len(self._come.parts))
        dataset = TuningDataset(self.data.samples, every, seed=None, trim=trims(config), numbered=True)
        batches = batch_loader(config, setup, dataset, dataset.batch, start=begun)
        noted = time.monotonic()
        try:
            # Steps begin at multiples of the batch, after the sequences of an interrupted run.
            for step, first in enumerate(range(begun, len(every), size), 1):
                self._write(next(batches), writer, work.meaning)
                progress()
                done, why = min(first + size, len(every)), reason(step)
                # A rank's memory or the time is up: all write, so that the note counts the same
                # sequences for all.
                if done < len(every) and (why or any_rank(writer.full or time.monotonic() - noted > SECONDS)):
                    on_rank_zero(partial(note, path, work, Come(done, self._parts(writer))), ConfigError)
                    noted = time.monotonic()
                if why and done < len(every):
                    said = f"{why}; {done} of {len(every)} sequences are in {path}: the same command continues"
                    return Instead(said, interrupted=True)
        finally:
            batches.close()
        # The rest; then the manifest makes the folder complete, and only after it the note of
        # unfinished work goes.
        parts = self._parts(writer)
        on_rank_zero(lambda: write_manifest(path, work.meaning, parts), ConfigError)
        on_rank_zero(lambda: forget(path), ConfigError)
        labels = sum(part["labels"] for part in parts)
        return Instead(f"log-probabilities of {work.meaning.top_k} tokens for each of {labels:,} labels are in {path}")

    def _parts(self, writer: LogitsWriter) -> list[dict[str, Any]]:
        """All files that are complete, of all ranks and of the interrupted run."""
        writer.flush()
        return [*self._come.parts, *(part for rank in gather(writer.parts) for part in rank)]

    def _write(self, batch: RankBatch, writer: LogitsWriter, meaning: Meaning) -> None:
        """Write the teacher's log-probabilities for a rank's share of a step, by one rank of those that have the same
        tokens."""
        assert self._teacher is not None and self._setup is not None
        assert isinstance(batch, NumberedBatch) and batch.numbers is not None
        asked = self._teacher.micro_batches(batch)
        for i, states in enumerate(self._teacher.states(batch)):
            micro_batch, head = asked[i], self._teacher.head
            assert micro_batch.token_index is not None and micro_batch.labels is not None
            chunk = chunk_tokens(head.matrix, share=DISTILLED)
            # Some tokens at a time: logits of all of them would not fit.
            top = top_log_probs(states, head, meaning.top_k, meaning.temperature, chunk_tokens=chunk)
            columns = micro_batch.token_index.cpu() - batch.sample_index[i][:, None] * batch.input_ids.shape[-1]
            labels = (micro_batch.labels != IGNORE_INDEX).flatten().cpu()
            # After the sums over the vocabulary's shards all tensor-parallel ranks have the same
            # numbers.
            if self._setup.context.tp.get_local_rank() == 0:
                numbers = batch.numbers[i].gather(1, columns).flatten()[labels]
                # What follows the rows is padding.
                writer.add(numbers, top[: len(labels)][labels.to(states.device)])


def _dtype(config: Config) -> str:
    parallel = config.parallel
    kinds = ["bf16" if parallel.bf16 else "fp32"]
    kinds += [] if parallel.fp8_format is None else [f"fp8 {parallel.fp8_format}"]
    kinds += ["weights in 4 bits"] if config.lora is not None and config.lora.load_in_4bit else []
    return ", ".join(kinds)


def _iteration(settings: CheckpointConfig) -> int | None:
    """The iteration of the checkpoint that --load and --ckpt-step name; None: a Hugging Face folder, or a checkpoint of
    no run."""
    if settings.ckpt_step is not None or settings.load is None or is_hf_folder(settings.load):
        return settings.ckpt_step
    name = find(settings.load).name
    return iteration_of(name) if ITERATION.fullmatch(name) else None
