"""Parts of a fine-tuning run: its data, the loaded model, and optionally adapters and preference pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from smp.checkpoint import CheckpointError
from smp.config import Config, ConfigError
from smp.config.schema import ObjectiveConfig
from smp.convert.adapters import Adapters, family_for
from smp.convert.peft_read import read_adapters
from smp.data.build import Datasets
from smp.data.tuning.batches import PairBatch, TuningDataset
from smp.data.tuning.build import TuningData
from smp.data.tuning.sequences import Sequences, lay_out
from smp.kernels import Kernels
from smp.layers.fp8.apply import read_scales_of
from smp.layers.lora import adapters_off
from smp.models.arithmetic import count_parameters
from smp.models.gpt import GPT
from smp.parallel.agree import gather, on_rank_zero
from smp.parallel.boxes import local_part
from smp.parallel.context import ParallelContext
from smp.sharding.parallelize import free_gathered
from smp.training.adapter_files import leave_companions, publish_adapter, reference_config
from smp.training.build import RunSetup, batch_loader, build_forward_backward, choose_backends
from smp.training.finetune_model import build_finetune_model
from smp.training.forward_backward import ForwardBackward
from smp.training.objective import (
    LabelledAnswer,
    ModelReference,
    NextToken,
    NoReference,
    PreferredAnswer,
    Reference,
    ScoredAnswer,
    TableReference,
)
from smp.training.run import RunParts, Say, Trainable


def finetuning(config: Config, data: TuningData) -> RunParts:
    """Parts of a run that trains all weights or adapters of the model in --load, on samples or on pairs.

    Raises:
        ConfigError, CheckpointError: the adapter in --load-adapter cannot be read, or is not of this model.
    """
    config, start = _read_adapters(config)
    return RunParts(
        config=config,
        datasets=partial(_datasets, config, data),
        kernels=partial(_choose_backends, config, data),
        trainable=lambda setup, say, progress: _Build(config, data, start, setup, say, progress).trainable(),
        read=lambda dataset: dataset.batch,
        work=_work(config),
        evaluate_first=True,
        before=lambda: on_rank_zero(lambda: leave_companions(config), CheckpointError),
        after=partial(_publish, config),
    )


def _read_adapters(config: Config) -> tuple[Config, Adapters | None]:
    """Adapters to begin with; their dropout is taken over unless --lora-dropout is given."""
    lora = config.lora
    assert lora is not None, "settings of a fine-tuning run"
    if lora.load_adapter is None:
        return config, None
    adapters, dropout = read_adapters(
        lora.load_adapter, config.model, family_for(config.model, reference_config(config))
    )
    if adapters.score is not None:
        raise ConfigError(
            f"--load-adapter {lora.load_adapter} is of a reward model, with its head of scores: merge it into --load "
            "(tools/merge_lora.py)"
        )
    if lora.lora_dropout is None:
        config = dataclasses.replace(config, lora=dataclasses.replace(lora, lora_dropout=dropout))
    return config, adapters


def _trims(config: Config) -> bool:
    """Whether padding at the end of micro-batches is cut off: not where messages of a pipeline or compiled code want
    one shape for all of them, or scales in FP8 would depend on which samples share a micro-batch."""
    parallel = config.parallel
    return parallel.pipeline_model_parallel_size == 1 and not parallel.compile and parallel.fp8_format is None


def _dataset(
    config: Config, data: TuningData, sequences: Sequences, seed: int | None = None, notes: tuple[str, ...] = ()
) -> TuningDataset:
    return TuningDataset(
        data.samples,
        sequences,
        seed=seed,
        pairs=data.pairs,
        scores=config.has_scores,
        trim=_trims(config),
        notes=notes,
    )


def _datasets(config: Config, data: TuningData) -> Datasets:
    here = data.samples.fingerprint()
    # Every rank reads the files itself. Other samples under the same numbers would train, and nobody would notice.
    if any(there != here for there in gather(here)):
        raise ConfigError(
            "--data-path: the processes do not read the same samples: the files differ between nodes, or the chat "
            "template writes the time"
        )
    train = _dataset(config, data, data.train, config.training.seed, data.lines)
    valid = _dataset(config, data, data.valid) if len(data.valid) else None
    return Datasets(train, valid, None)  # type: ignore[arg-type]


def _choose_backends(
    config: Config, data: TuningData, context: ParallelContext, device: torch.device
) -> tuple[Kernels, list[str]]:
    """Packed sequences hold documents; trimmed ones have any length."""
    # The shortest and the longest but the full one: a kernel that takes both takes all between them.
    shorter = (1, max(data.train.length - 1, 1)) if _trims(config) else ()
    documents = data.train.packed or data.valid.packed
    return choose_backends(config, context, device, documents=documents, other_lengths=shorter)


def _work(config: Config) -> float:
    """FLOPs of a step relative to pretraining on as many tokens: a third for the forward pass, one for gradients of
    activations, one for those of weights; the reference adds a forward pass, the loss of pairs the head's. KTO's
    mismatched answers go through both models once."""
    assert config.objective is not None
    with_reference = config.objective.dpo_reference in ("adapters-off", "copy")
    return (2 / 3 if config.has_adapters else 1.0) + (1 / 3 if with_reference else 0.0) + 2 / 3 * config.has_labels


def _publish(config: Config, iteration: int) -> list[str]:
    """Leave the last state of adapters in peft's format as well."""
    if not config.has_adapters or config.checkpoint.save is None:
        return []
    folder = on_rank_zero(lambda: publish_adapter(config, iteration), CheckpointError)
    return [f"adapter in peft's format: {folder}"]


@dataclasses.dataclass(frozen=True)
class _Build:
    """Makes what is trained.

    Attributes:
        start: adapters to begin with, if any.
        progress: called when something that takes long has come further.
    """

    config: Config
    data: TuningData
    start: Adapters | None
    setup: RunSetup
    say: Say
    progress: Callable[[], None]

    def trainable(self) -> Trainable:
        config, setup = self.config, self.setup
        model, notes = build_finetune_model(config, setup, self.start)
        for line in [*notes, *_sizes(config, setup.context, model)]:
            self.say(line)
        forward_backward = build_forward_backward(config, setup, model)
        objective = config.objective
        cp = setup.context.cp_group
        if objective is None or not config.judges_answers:
            return Trainable(model, forward_backward, NextToken(setup.device, cp))
        if config.has_scores:
            scored = ScoredAnswer(setup.device, objective.reward_center_coefficient, cp)
            return Trainable(model, forward_backward, scored)
        if config.has_labels:
            labelled = LabelledAnswer(
                device=setup.device,
                reference=self._reference(objective, model, forward_backward),
                policy=ModelReference(model, forward_backward, setup.device, cp=cp),
                context=setup.context,
                beta=objective.kto_beta,
                weights=(objective.kto_desirable_weight, objective.kto_undesirable_weight),
            )
            return Trainable(model, forward_backward, labelled)
        preferred = PreferredAnswer(
            device=setup.device,
            reference=self._reference(objective, model, forward_backward),
            loss_type="orpo" if objective.objective == "orpo" else objective.dpo_loss_type,
            beta=objective.orpo_beta if objective.objective == "orpo" else objective.dpo_beta,
            label_smoothing=objective.dpo_label_smoothing,
            cp=cp,
        )
        return Trainable(model, forward_backward, preferred)

    def _reference(self, objective: ObjectiveConfig, model: GPT, forward_backward: ForwardBackward) -> Reference:
        device, cp = self.setup.device, self.setup.context.cp_group
        if objective.objective == "orpo":
            return NoReference()
        if objective.dpo_reference == "adapters-off":
            return ModelReference(model, forward_backward, device, around=partial(adapters_off, model), cp=cp)
        if objective.dpo_reference == "precomputed":
            # All at once, before training: the model is still the reference.
            table = self._table(ModelReference(model, forward_backward, device, cp=cp))
            free_gathered(model)
            return TableReference(table)
        copy, _ = build_finetune_model(self.config, self.setup, self.start, trainable=False)
        read_scales_of(copy, model)
        return ModelReference(copy, build_forward_backward(self.config, self.setup, copy), device, cp=cp)

    def _table(self, reference: ModelReference) -> torch.Tensor:
        """Log-probabilities of all answers by the model as it is now, fp32 (texts,), the same on all ranks."""
        config, samples, device = self.config, self.data.samples, self.setup.device
        every = lay_out(samples, np.arange(len(samples)), self.data.train.length, "off")
        dataset = _dataset(config, self.data, every)
        batches = batch_loader(config, self.setup, dataset, dataset.batch)
        table = torch.zeros(len(samples), device=device)
        try:
            # Pairs, in batches of the run's size: as many collectives on every rank.
            for _ in range(-(-(len(samples) // 2) // (config.data.global_batch_size or 1))):
                batch = next(batches)
                assert isinstance(batch, PairBatch) and batch.texts is not None
                log_probs, real = reference.log_probs(batch), batch.texts >= 0
                if self.setup.context.cp_rank == 0:  # the others have the same ones, and the sum is over all ranks
                    table[batch.texts[real].to(device)] = log_probs[real.to(device)]
                self.progress()
        finally:
            batches.close()
        self.say(f"log-probabilities of the reference: {len(samples):,} answers")
        return self.setup.context.sum_loss(table)


def _sizes(config: Config, context: ParallelContext, model: GPT) -> list[str]:
    """How much is trained of how much, and where it lies."""
    assert config.model.vocab_size is not None
    parameters, base = list(model.parameters()), count_parameters(config.model, config.model.vocab_size).total
    trained = base
    if config.has_adapters:
        # On the CPU: a group with gloo sums it without the GPU.
        adapters = torch.tensor(sum(p.numel() for p in parameters if p.requires_grad))
        if context.pp is not None and context.pp_size > 1:  # its ranks have different layers
            dist.all_reduce(adapters, group=context.pp.get_group())
        trained = int(adapters)
        base += trained - (config.model.hidden_size if config.has_scores else 0)  # the head is counted already
    here, frozen = (sum(local_part(p).nbytes for p in parameters if p.requires_grad == w) for w in (True, False))
    return [
        f"trained parameters: {trained:,} of {base:,} ({100 * trained / base:.3f} %)",
        f"weights of the first process: {here / 1e6:,.1f} MB trained, {frozen / 1e6:,.1f} MB frozen",
    ]
