"""The pretraining kind of run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from smp.config import Config, ConfigError
from smp.config.command_line.command import in_one_line
from smp.data.build import Datasets, build_datasets
from smp.kernels import Kernels
from smp.parallel.context import ParallelContext
from smp.training.build import RunSetup, build_forward_backward, build_model, choose_backends
from smp.training.kind import RunKind, Say, Trainable
from smp.training.objectives.next_token import NextToken


class Pretraining(RunKind):
    """Trains all weights from initialization on the next token of documents."""

    def datasets(self) -> Datasets:
        return _read(self.config)

    def kernels(self, context: ParallelContext, device: torch.device) -> tuple[Kernels, list[str]]:
        return choose_backends(self.config, context, device, documents=self.config.data.reset_attention_mask)

    def trainable(self, setup: RunSetup, say: Say, progress: Callable[[], None]) -> Trainable:
        model = build_model(self.config, setup)
        mtp = self.config.model.mtp_num_layers or 0
        objective = NextToken(setup.device, setup.context.cp_group, mtp=mtp)
        return Trainable(model, build_forward_backward(self.config, setup, model), objective)


def _read(config: Config) -> Datasets:
    data, length = config.data, config.data.seq_length
    assert config.model.vocab_size is not None
    try:
        datasets = build_datasets(data, config.model.vocab_size, config.training.seed)
    # Data that cannot be used are a matter of the settings that name them; its cause still decides the exit code.
    except (ValueError, OSError) as error:
        raise ConfigError(in_one_line(error)) from error
    if config.training.eval_interval is not None and datasets.valid is None:
        part = f"the validation part of --split {data.split}"
        source = "--valid-data-path" if data.valid_data_path else part
        raise ConfigError(f"--eval-interval: {source} holds less than one sample of {length} tokens")
    if data.test_data_path is not None and datasets.test is None:
        raise ConfigError(f"--test-data-path holds less than one sample of {length} tokens")
    _note_repeats(config, datasets)
    return datasets


def _note_repeats(config: Config, datasets: Datasets) -> None:
    """Note where an evaluation asks for more samples than there are, which are then read again."""
    batches, size = config.training.eval_iters, config.data.global_batch_size
    assert size is not None
    for part, blend in (("validation", datasets.valid), ("test", datasets.test)):
        if blend is not None:
            note = f"note: {part} reads --eval-iters {batches} x {size} samples"
            blend.notes += [f"{note}: {line}" for line in blend.read_again(batches * size)]
