"""A fine-tuning run: a pretraining run with other data, a model that comes from somewhere, and perhaps adapters."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
import torch.distributed as dist

from smp.checkpoint.agree import gather, on_rank_zero
from smp.config import Config, ConfigError, as_flat_dict
from smp.config.batch import BatchSizes
from smp.config.finetune import FinetuneConfig, LoraConfig, ObjectiveConfig
from smp.config.finetune_checks import has_adapters
from smp.convert.adapters import Adapter, family_for
from smp.convert.peft_read import read_adapters
from smp.data.build import Datasets
from smp.data.loader import BatchLoader
from smp.data.sample import SampleDataset
from smp.data.tuning.batches import PairBatch, TuningDataset
from smp.data.tuning.build import TuningData
from smp.data.tuning.sequences import lay_out
from smp.layers.lora import adapters_off
from smp.models.arithmetic import count_parameters
from smp.models.gpt import GPT
from smp.pipeline.plan import Plan
from smp.training.adapter_files import leave_companions, publish_adapter, reference_config
from smp.training.build import Backends, build_passes, choose_backends
from smp.training.describe import describe
from smp.training.launch import launch
from smp.training.passes import Passes
from smp.training.persistence import TUNED
from smp.training.pipelined import Pipelined
from smp.training.preference import (
    ModelReference,
    PairInputs,
    PairLoss,
    PreferencePasses,
    Reference,
    TableReference,
)
from smp.training.pretrain import Outcome, Pretraining
from smp.training.process import Process
from smp.training.runtime import StopSignal
from smp.training.saving import RunCheckpoints
from smp.training.trainer import StepResult
from smp.training.tuned_model import build_tuned_model

NOTED = (
    *(field.name for group in (LoraConfig, ObjectiveConfig) for field in dataclasses.fields(group)),
    *("load", "ckpt_step", "tokenizer_model", "chat_template", "mask_prompt", "train_epochs"),
)
"""Settings of its own that a checkpoint notes, and that a resume compares with them."""


class Finetuning(Pretraining):
    """Everything of one run.

    Args:
        config: resolved settings that the run shares with pretraining.
        process, device, stop: as of ``Pretraining``.
        tuning: the whole settings.
        data: what to train on.
    """

    def __init__(
        self,
        config: Config,
        process: Process,
        device: torch.device,
        stop: StopSignal,
        *,
        tuning: FinetuneConfig,
        data: TuningData,
    ) -> None:
        self.tuning, self.data = tuning, data
        self.start: dict[str, Adapter] | None = None
        self.preferences: PreferencePasses | None = None
        if tuning.lora.load_adapter is not None:
            self.start = self._read_adapter(tuning.lora.load_adapter)
        super().__init__(config, process, device, stop)

    def _read_adapter(self, folder: str) -> dict[str, Adapter]:
        """Adapters to begin with; their dropout is taken over unless --lora-dropout is given."""
        model = self.tuning.model
        adapters, dropout = read_adapters(folder, model, family_for(model, reference_config(self.tuning)))
        lora = self.tuning.lora
        if lora.lora_dropout is None:
            lora = dataclasses.replace(lora, lora_dropout=dropout)
        self.tuning = dataclasses.replace(self.tuning, lora=lora)
        return adapters

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained and not the model."""
        return has_adapters(self.tuning.lora)

    @property
    def _trims(self) -> bool:
        """Not where messages of a pipeline or compiled code want one shape for all micro-batches."""
        return self.layout.pp == 1 and not self.config.parallel.compile

    def _datasets(self) -> Datasets:
        make = partial(TuningDataset, self.data.samples, pairs=self.data.pairs, trim=self._trims)
        seed, here = self.config.training.seed, self.data.samples.fingerprint()
        if any(there != here for there in gather(here)):
            raise ConfigError(
                "--data-path: the processes do not read the same samples: the files differ between nodes, or the chat "
                "template writes the time"
            )
        valid = make(self.data.valid, seed=None) if len(self.data.valid) else None
        return Datasets(make(self.data.train, seed=seed, notes=self.data.lines), valid, None)  # type: ignore[arg-type]

    def _loader(self, dataset: SampleDataset, start_sample: int, sizes: BatchSizes | None = None) -> BatchLoader:
        assert isinstance(dataset, TuningDataset)
        data, ranks = self.config.data, self.layout.data_parallel
        assert data.global_batch_size is not None
        return BatchLoader(
            dataset,
            micro_batch_size=data.micro_batch_size,
            num_microbatches=data.global_batch_size // (data.micro_batch_size * ranks),
            dp_rank=self.context.data_rank,
            dp_size=ranks,
            start_sample=start_sample,
            batch_size=sizes,
            pin_memory=self.device.type == "cuda",
            read=dataset.batch,
        )

    def _open_checkpoints(self) -> RunCheckpoints:
        settings = as_flat_dict(self.tuning)
        noted = {name: settings[name] for name in NOTED}
        return RunCheckpoints(self.config, self._announce, {TUNED: noted}, "--resume")

    def _choose_backends(self, device: torch.device) -> Backends:
        """Packed sequences hold documents; trimmed ones have any length."""
        documents, length = self.data.train.packed or self.data.valid.packed, self.data.train.length
        shorter = (1, max(length - 1, 1)) if self._trims else ()
        return choose_backends(self.config, device, documents=documents, other_lengths=shorter)

    def _model(self, device: torch.device, plan: Plan | None) -> tuple[GPT, Passes]:
        build = partial(
            build_tuned_model, self.config, self.tuning, self.context, device, self.backends, plan, self.start
        )
        model, notes = build()
        for line in [*notes, *self._sizes(model)]:
            self._announce(line)
        if self.tuning.objective.objective == "sft":
            return model, build_passes(self.config, self.context, device, model, plan)
        objective = self.tuning.objective
        loss = PairLoss(objective.dpo_beta, objective.dpo_label_smoothing)
        passes = build_passes(self.config, self.context, device, model, plan, loss, rows=2)
        reference: Reference
        if objective.dpo_reference == "adapters-off":
            reference = ModelReference(model, passes, device, partial(adapters_off, model))
        elif objective.dpo_reference == "precomputed":
            reference = TableReference(self._table(ModelReference(model, passes, device), device))
        else:
            copy, _ = build(trainable=False)
            copied = build_passes(self.config, self.context, device, copy, plan, PairInputs, rows=2)  # type: ignore[arg-type]
            reference = ModelReference(copy, copied, device)
        self.preferences = PreferencePasses(passes, loss, reference, self.context, device)
        return model, self.preferences

    def _table(self, reference: ModelReference, device: torch.device) -> torch.Tensor:
        """Log-probabilities of all answers by the model as it is now, fp32 (texts,), the same on all ranks."""
        samples = self.data.samples
        every = lay_out(samples, torch.arange(len(samples)).numpy(), self.data.train.length, "off")
        batches = self._loader(TuningDataset(samples, every, seed=None, pairs=True, trim=self._trims), 0)  # type: ignore[arg-type]
        table = torch.zeros(len(samples), device=device)
        try:
            for _ in range(-(-(len(samples) // 2) // (self.config.data.global_batch_size or 1))):
                batch = next(batches)
                assert isinstance(batch, PairBatch) and batch.texts is not None
                log_probs, real = reference.log_probs(batch), batch.texts >= 0
                table[batch.texts[real].to(device)] = log_probs[real.to(device)]
                self.watchdog.progress()
        finally:
            batches.close()
        self._announce(f"log-probabilities of the reference: {len(samples):,} answers")
        return self.context.sum_loss(table)

    def _sizes(self, model: GPT) -> list[str]:
        """How much is trained of how much, and where it lies."""
        assert self.config.model.vocab_size is not None
        parameters, total = list(model.parameters()), count_parameters(self.config.model, self.config.model.vocab_size)
        trained, base = torch.tensor(sum(p.numel() for p in parameters if p.requires_grad)), total.total
        if self.has_adapters:
            if self.context.pp_size > 1:  # its ranks have different layers
                dist.all_reduce(trained, group=self.context.pp.get_group())
            base += int(trained)
        else:
            trained = torch.tensor(base)
        here, frozen = (sum(_local(p).nbytes for p in parameters if p.requires_grad == w) for w in (True, False))
        return [
            f"trained parameters: {trained:,} of {base:,} ({100 * int(trained) / base:.3f} %)",
            f"weights of the first process: {here / 1e6:,.1f} MB trained, {frozen / 1e6:,.1f} MB frozen",
        ]

    def _pipeline(self) -> Pipelined | None:
        passes = self.trainer.passes if self.preferences is None else self.preferences.passes
        return passes if isinstance(passes, Pipelined) else None

    def _work(self) -> float:
        """FLOPs of a step relative to pretraining on as many tokens: a third for the forward pass, one for gradients of
        activations, one for those of weights; the reference adds a forward pass, the loss of pairs the head's."""
        work = 2 / 3 if self.has_adapters else 1.0
        with_reference = self.tuning.objective.dpo_reference in ("adapters-off", "copy")
        return work + (1 / 3 if with_reference else 0.0)

    def _tell(self, result: StepResult) -> None:
        more = {} if self.preferences is None else self.preferences.measured()
        self.console.step(self.trainer.progress, result, more)

    def _run(self) -> Outcome:
        """Train, and evaluate before the first step too; the last state of adapters is left in peft's format as
        well."""
        on_rank_zero(lambda: leave_companions(self.tuning))
        if self.config.training.eval_interval is not None and self.trainer.progress.iteration == 0:
            self.evaluate()
        outcome = super()._run()
        if self.has_adapters and self.config.checkpoint.save is not None and outcome.status == "done":
            folder = on_rank_zero(lambda: publish_adapter(self.config, self.tuning, self.trainer.progress.iteration))
            self._announce(f"adapter in peft's format: {folder}")
        return outcome


def launch_finetune(config: FinetuneConfig, data: TuningData | None, process: Process) -> int:
    """Run, report why it ended, and return the exit code, as ``smp.training.launch.launch``."""
    if config.training.dry_run:
        if process.rank == 0:
            notes = [f"# {line}" for line in (data.lines if data else ())]
            print("\n".join([describe(config.as_run(), process.world_size, config), *notes]))
        return 0
    assert data is not None, "checked with the settings"
    return launch(config.as_run(), process, partial(Finetuning, tuning=config, data=data))


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
