"""The fine-tuning kind of run: its data, the loaded model, and optionally adapters and preference pairs."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from smp.checkpoint import CheckpointError
from smp.config import Config, ConfigError, Layout
from smp.convert.peft.adapters import Adapters
from smp.data.build import Datasets
from smp.data.loader import ReadBatch
from smp.data.tuning.batches import PairBatch, TuningDataset
from smp.data.tuning.build import PromptData, TuningData
from smp.data.tuning.image_batches import ImageReader
from smp.data.tuning.sequences import Sequences, lay_out
from smp.kernels import Kernels
from smp.layers.adapters.lora import adapters_off
from smp.layers.fp8.apply import read_scales_of
from smp.models.arithmetic import count_parameters
from smp.models.protocol import Model
from smp.parallel.agree import gather, on_rank_zero
from smp.parallel.context import ParallelContext, build_context, with_experts_of
from smp.parallel.dtensor_region import local_part
from smp.sharding.parallelize import free_gathered
from smp.training.build import RunSetup, batch_loader, build_forward_backward, choose_backends, setup_for_second_model
from smp.training.distillation.elsewhere import TeacherElsewhere, TokenOwners
from smp.training.distillation.stored import read_stored
from smp.training.distillation.teacher import ModelTeacher, StoredTeacher, build_teacher
from smp.training.exchange import exchange_of
from smp.training.forward_backward import ForwardBackward
from smp.training.kind import RunKind, Say, Trainable
from smp.training.objectives import build_objective
from smp.training.objectives.contract import Reference, Teacher
from smp.training.objectives.reference import ModelReference, TableReference
from smp.training.tuning.adapter_files import note_on_ends, publish_adapter, read_start
from smp.training.tuning.model import build_finetune_model
from smp.training.tuning.settings import teacher_config


class Finetuning(RunKind):
    """Trains all weights or adapters of the model in --load, on samples or on pairs.

    Raises:
        ConfigError, CheckpointError: the adapter in --load-adapter cannot be read, or is not of this model.
    """

    evaluate_first = True

    def __init__(self, config: Config, data: TuningData | PromptData) -> None:
        # Before anything is built: the adapter's dropout becomes a setting.
        config, self._start = _read_adapters(config)
        super().__init__(config)
        self._data, self.work = data, _work(config)
        if isinstance(data, TuningData) and not config.objective_facts.has_scores:
            self.ends = data.ends
        self._models: Models | None = None

    @property
    def data(self) -> TuningData:
        """Samples that are trained on."""
        assert isinstance(self._data, TuningData), "prompts have a kind of run of their own"
        return self._data

    def datasets(self) -> Datasets:
        return _datasets(self.config, self.data)

    def kernels(self, context: ParallelContext, device: torch.device) -> tuple[Kernels, list[str]]:
        return _choose_backends(self.config, self.data, context, device)

    def trainable(self, setup: RunSetup, say: Say, progress: Callable[[], None]) -> Trainable:
        if line := note_on_ends(self.config, self._data.tokenizer, self.ends):
            say(line)
        built, self._models = _Build(self.config, self._data, self._start, setup, say, progress).trainable()
        return built

    def read(self, dataset: TuningDataset) -> ReadBatch:
        return dataset.batch

    def after(self, iteration: int) -> list[str]:
        return _publish(self.config, iteration)


def _read_adapters(config: Config) -> tuple[Config, Adapters | None]:
    """(the settings, with the dropout of --load-adapter unless --lora-dropout is given; the adapters to begin with)."""
    lora = config.lora
    assert lora is not None, "settings of a fine-tuning run"
    if lora.load_adapter is None:
        return config, None
    adapters, dropout = read_start(config)
    if adapters.score is not None:
        raise ConfigError(
            f"--load-adapter {lora.load_adapter} is of a reward model, with its head of scores: merge it into --load "
            "(tools/merge_lora.py)"
        )
    if lora.lora_dropout is None:
        config = dataclasses.replace(config, lora=dataclasses.replace(lora, lora_dropout=dropout))
    return config, adapters


def trims(config: Config) -> bool:
    """Whether padding at the end of micro-batches is cut off. Not in pipelines and compiled code, which need one shape
    for all, and not in FP8, where scales would depend on which samples share a micro-batch."""
    parallel = config.parallel
    return parallel.pipeline_model_parallel_size == 1 and not parallel.compile and parallel.fp8_format is None


def _dataset(
    config: Config, data: TuningData, sequences: Sequences, seed: int | None = None, notes: tuple[str, ...] = ()
) -> TuningDataset:
    return TuningDataset(
        # Without the texts of validation files: the order of training must not depend on them, as a
        # resume compares it.
        data.samples if sequences is not data.train else data.samples.first(data.texts),
        sequences,
        seed=seed,
        pairs=data.pairs,
        scores=config.objective_facts.has_scores,
        trim=trims(config),
        numbered=config.distillation is not None and config.distillation.logits_load_dir is not None,
        images=_images(config, data),
        notes=notes,
    )


def _images(config: Config, data: TuningData) -> ImageReader | None:
    if data.images is None:
        return None
    return ImageReader(
        data.samples, data.images.processor, data.images.begins, keep_end=config.data.truncation_side == "left"
    )


def _datasets(config: Config, data: TuningData) -> Datasets:
    here = data.samples.fingerprint()
    # Every rank reads the files itself. Other samples under the same numbers would train, and nobody would notice.
    if any(there != here for there in gather(here)):
        raise ConfigError(
            f"{data_flags(config)}: the processes do not read the same samples: the files differ between nodes, or the "
            "chat template writes the time"
        )
    train = _dataset(config, data, data.train, config.training.seed, data.lines)
    valid = _dataset(config, data, data.valid) if len(data.valid) else None
    return Datasets(train, valid, None)  # type: ignore[arg-type]


def data_flags(config: Config) -> str:
    """The flags that name the files of samples, for messages."""
    return "--data-path" if config.data.valid_data_path is None else "--data-path and --valid-data-path"


def _choose_backends(
    config: Config, data: TuningData, context: ParallelContext, device: torch.device
) -> tuple[Kernels, list[str]]:
    """Packed sequences hold documents; trimmed ones have any length."""
    # The shortest and the longest trimmed length: a kernel that takes both takes all between them.
    shorter = (1, max(data.train.length - 1, 1)) if trims(config) else ()
    documents = data.train.packed or data.valid.packed
    return choose_backends(config, context, device, documents=documents, other_lengths=shorter)


def _work(config: Config) -> float:
    """FLOPs of a step relative to pretraining on as many tokens: a third for the forward pass, a third for gradients of
    activations, a third for those of weights. A reference adds a forward pass. KTO's mismatched answers go through both
    models once."""
    assert config.objective is not None
    with_reference = config.objective.dpo_reference in ("adapters-off", "copy")
    # A teacher counts as a model of the same size: its size is not known here.
    with_reference |= config.distillation is not None and config.distillation.teacher is not None
    return (
        # Frozen weights have no gradients of weights.
        (2 / 3 if config.has_adapters else 1.0)
        + (1 / 3 if with_reference else 0.0)
        + 2 / 3 * config.objective_facts.mismatched
    )


def _publish(config: Config, iteration: int) -> list[str]:
    """Write the last adapters in peft's format as well; returns notes for the user."""
    if not config.has_adapters or config.checkpoint.save is None:
        return []
    return on_rank_zero(lambda: publish_adapter(config, iteration), CheckpointError)


@dataclasses.dataclass(frozen=True)
class _Build:
    """Builds the trained model and its objective.

    Attributes:
        start: adapters to begin with, if any.
        progress: called when something that takes long has come further.
    """

    config: Config
    data: TuningData | PromptData
    start: Adapters | None
    setup: RunSetup
    say: Say
    progress: Callable[[], None]

    def trainable(self) -> tuple[Trainable, Models]:
        config, setup = self.config, self.setup
        model, notes = build_finetune_model(config, setup, self.start)
        for line in [*notes, *_sizes(config, setup.context, model)]:
            self.say(line)
        forward_backward = build_forward_backward(config, setup, model)
        models = Models(self, model, forward_backward)
        return Trainable(model, forward_backward, build_objective(config, models)), models


@dataclasses.dataclass(frozen=True)
class Models:
    """The models of a run for its objective: the trained one, and those it is compared with."""

    run: _Build
    model: Model
    forward_backward: ForwardBackward

    @property
    def context(self) -> ParallelContext:
        return self.run.setup.context

    @property
    def device(self) -> torch.device:
        return self.run.setup.device

    def policy(self) -> ModelReference:
        return self._asked(self.model, self.forward_backward)

    def reference(self) -> Reference:
        config, setup, model = self.run.config, self.run.setup, self.model
        assert config.objective is not None, "settings of a fine-tuning run"
        match config.objective.dpo_reference:
            case "adapters-off":
                # The base model is the reference; it needs no memory of its own.
                return self._asked(model, self.forward_backward, around=partial(adapters_off, model))
            case "precomputed":
                # All at once, before training: the model is still the reference.
                table = self._table(self.policy())
                free_gathered(model)
                return TableReference(table)
        # A copy with the adapters of --load-adapter: what the policy starts as.
        copy, _ = build_finetune_model(config, setup, self.run.start, trainable=False)
        read_scales_of(copy, model)
        return self._asked(copy, build_forward_backward(config, setup, copy))

    def teacher(self) -> Teacher:
        config, setup, data = self.run.config, self.run.setup, self.run.data
        assert config.distillation is not None and isinstance(data, TuningData), "settings of a distillation run"
        # None where another pipeline rank has the output matrix.
        student = self.model.output_shard()
        if config.distillation.logits_load_dir is not None:
            stored = read_stored(config.distillation.logits_load_dir, data.samples)
            return StoredTeacher(stored, self.device, student is not None)
        if config.distillation.logits_save_dir is not None:
            # What it says is written: the model is its own teacher.
            return ModelTeacher(self.model, self.forward_backward, student, self.device, self.context.cp_group)
        of = teacher_config(config, self.context.world_size)
        documents, setup = data.train.packed or data.valid.packed, self._in_layout_of(of)
        elsewhere = _mesh(of, setup.context) != _mesh(config, setup.context)
        teacher_setup = setup_for_second_model(of, setup, documents=documents, trim=trims(of))
        made, lines = build_teacher(of, teacher_setup, None if elsewhere else student)
        if config.parallel.compile and not of.parallel.compile:
            lines.append("note: the teacher is not compiled, since it has a layout of its own")
        for line in lines:
            self.run.say(line)
        if not elsewhere:
            return made
        there = TokenOwners.of(setup.context, has_head=made.model.output_shard() is not None)
        here = TokenOwners.of(self.context, has_head=student is not None)
        return TeacherElsewhere(made, student, there, here, trims(of))

    def _in_layout_of(self, other: Config) -> RunSetup:
        """The set-up for a model with another layout than the run's, or with other expert parallelism; all ranks make
        its groups together."""
        setup, parallel, config = self.run.setup, other.parallel, self.run.config
        layout = Layout.from_config(parallel, self.context.world_size)
        own = Layout.from_config(config.parallel, self.context.world_size)
        if layout == own:
            return setup
        timeout = datetime.timedelta(minutes=parallel.distributed_timeout_minutes)
        kind, progress = setup.device.type, setup.progress
        with setup.making_groups():
            if _mesh(other, self.context) == _mesh(config, self.context):
                context = with_experts_of(self.context, layout, kind, timeout, progress=progress)
            else:
                context = build_context(
                    layout,
                    kind,
                    timeout,
                    sequence_parallel=parallel.sequence_parallel,
                    heads_group=exchange_of(other, kind).heads_group,
                    progress=progress,
                )
        return dataclasses.replace(setup, context=context)

    def _asked(self, model: Model, forward_backward: ForwardBackward, **around: Any) -> ModelReference:
        return ModelReference(model, forward_backward, self.device, cp=self.context.cp_group, **around)

    def _table(self, reference: ModelReference) -> torch.Tensor:
        """Log-probabilities of all answers by the model as it is now, fp32 (texts,), the same on all ranks.
        Collective."""
        run, data = self.run, self.run.data
        assert isinstance(data, TuningData), "prompts have no answers yet"
        samples = data.samples
        every = lay_out(samples, np.arange(len(samples)), data.train.length, "off")
        dataset = _dataset(run.config, data, every)
        batches = batch_loader(run.config, run.setup, dataset, dataset.batch)
        table = torch.zeros(len(samples), device=self.device)
        try:
            # Pairs, in batches of the run's size: as many collectives on every rank.
            # Rounded up, two texts to a pair.
            for _ in range(-(-(len(samples) // 2) // (run.config.data.global_batch_size or 1))):
                batch = next(batches)
                assert isinstance(batch, PairBatch) and batch.texts is not None
                log_probs, real = reference.log_probs(batch), batch.texts >= 0
                if self.context.cp_rank == 0:  # the others have the same ones, and the sum is over all ranks
                    table[batch.texts[real].to(self.device)] = log_probs[real.to(self.device)]
                run.progress()
        finally:
            batches.close()
        run.say(f"log-probabilities of the reference: {len(samples):,} answers")
        return self.context.sum_loss(table)


def _mesh(config: Config, context: ParallelContext) -> tuple[int, ...]:
    """Degrees of the mesh without those of experts."""
    layout = Layout.from_config(config.parallel, context.world_size)
    return layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp


def _sizes(config: Config, context: ParallelContext, model: Model) -> list[str]:
    """Lines on how many parameters are trained, and on their bytes."""
    assert config.model.vocab_size is not None
    parameters, base = list(model.parameters()), count_parameters(config.model, config.model.vocab_size).total
    # Parts that --freeze-vision-model and its kin leave as they are; DTensors count whole.
    trained = base - (0 if config.has_adapters else sum(p.numel() for p in parameters if not p.requires_grad))
    if config.has_adapters:
        # On the CPU: a group with gloo sums it without the GPU.
        # Global sizes: DTensors count whole.
        adapters = torch.tensor(sum(p.numel() for p in parameters if p.requires_grad))
        if context.pp is not None and context.pp_size > 1:  # its ranks have different layers
            dist.all_reduce(adapters, group=context.pp.get_group())
        trained = int(adapters)
        base += trained - (
            config.model.hidden_size if config.objective_facts.has_scores else 0
        )  # the head is counted already
    here, frozen = (sum(local_part(p).nbytes for p in parameters if p.requires_grad == w) for w in (True, False))
    return [
        f"trained parameters: {trained:,} of {base:,} ({100 * trained / base:.3f} %)",
        f"weights of the first process: {here / 1e6:,.1f} MB trained, {frozen / 1e6:,.1f} MB frozen",
    ]
