"""A fine-tuning run: a pretraining run with other data, a model that comes from somewhere, and perhaps adapters."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
import torch.distributed as dist

from smp.checkpoint import CheckpointError
from smp.config import Config, ConfigError
from smp.config.batch import BatchSizes
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
from smp.parallel.agree import gather, on_rank_zero
from smp.parallel.mesh import data_rank, sum_over_parts
from smp.pipeline.plan import Plan
from smp.training.adapter_files import leave_companions, publish_adapter, reference_config
from smp.training.build import Backends, build_passes, choose_backends
from smp.training.describe import describe
from smp.training.launch import launch
from smp.training.passes import Passes
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
from smp.training.trainer import StepResult
from smp.training.tuned_model import build_tuned_model


class Finetuning(Pretraining):
    """Everything of one run.

    Args:
        config: resolved settings.
        process, device, stop: as of ``Pretraining``.
        data: what to train on.
    """

    def __init__(
        self, config: Config, process: Process, device: torch.device, stop: StopSignal, *, data: TuningData
    ) -> None:
        self.data = data
        self.start: dict[str, Adapter] | None = None
        self.preferences: PreferencePasses | None = None
        assert config.lora is not None and config.objective is not None, "settings of a fine-tuning run"
        self.objective = config.objective
        if config.lora.load_adapter is not None:
            family = family_for(config.model, reference_config(config))
            self.start, dropout = read_adapters(config.lora.load_adapter, config.model, family)
            if config.lora.lora_dropout is None:  # that of the adapters is taken over
                config = dataclasses.replace(config, lora=dataclasses.replace(config.lora, lora_dropout=dropout))
        super().__init__(config, process, device, stop)

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
            dp_rank=data_rank(self.mesh),
            dp_size=ranks,
            start_sample=start_sample,
            batch_size=sizes,
            pin_memory=self.device.type == "cuda",
            read=dataset.batch,
        )

    def _choose_backends(self, device: torch.device) -> Backends:
        """Packed sequences hold documents; trimmed ones have any length."""
        documents, length = self.data.train.packed or self.data.valid.packed, self.data.train.length
        shorter = (1, max(length - 1, 1)) if self._trims else ()
        return choose_backends(self.config, device, documents=documents, other_lengths=shorter)

    def _model(self, device: torch.device, plan: Plan | None) -> tuple[GPT, Passes]:
        build = partial(build_tuned_model, self.config, self.mesh, device, self.backends, plan, self.start)
        model, notes = build()
        for line in [*notes, *self._sizes(model)]:
            self._announce(line)
        if self.objective.objective == "sft":
            return model, build_passes(self.config, self.mesh, device, model, plan)
        objective = self.objective
        loss = PairLoss(objective.dpo_beta, objective.dpo_label_smoothing)
        passes = build_passes(self.config, self.mesh, device, model, plan, loss, rows=2)
        reference: Reference
        if objective.dpo_reference == "adapters-off":
            reference = ModelReference(model, passes, device, partial(adapters_off, model))
        elif objective.dpo_reference == "precomputed":
            reference = TableReference(self._table(ModelReference(model, passes, device), device))
        else:
            copy, _ = build(trainable=False)
            copied = build_passes(self.config, self.mesh, device, copy, plan, PairInputs, rows=2)  # type: ignore[arg-type]
            reference = ModelReference(copy, copied, device)
        self.preferences = PreferencePasses(passes, loss, reference, self.mesh, device)
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
        return sum_over_parts(table, self.mesh)

    def _sizes(self, model: GPT) -> list[str]:
        """How much is trained of how much, and where it lies."""
        assert self.config.model.vocab_size is not None
        parameters, total = list(model.parameters()), count_parameters(self.config.model, self.config.model.vocab_size)
        trained, base = torch.tensor(sum(p.numel() for p in parameters if p.requires_grad)), total.total
        if self.config.has_adapters:
            if self.mesh["pp"].size() > 1:  # its ranks have different layers
                dist.all_reduce(trained, group=self.mesh.get_group("pp"))
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
        work = 2 / 3 if self.config.has_adapters else 1.0
        with_reference = self.objective.dpo_reference in ("adapters-off", "copy")
        return work + (1 / 3 if with_reference else 0.0)

    def _tell(self, result: StepResult) -> None:
        more = {} if self.preferences is None else self.preferences.measured()
        self.console.step(self.trainer.progress, result, more)

    def _run(self) -> Outcome:
        """Train, and evaluate before the first step too; the last state of adapters is left in peft's format as
        well."""
        on_rank_zero(lambda: leave_companions(self.config), CheckpointError)
        if self.config.training.eval_interval is not None and self.trainer.progress.iteration == 0:
            self.evaluate()
        outcome = super()._run()
        if self.config.has_adapters and self.config.checkpoint.save is not None and outcome.status == "done":
            folder = on_rank_zero(
                lambda: publish_adapter(self.config, self.trainer.progress.iteration), CheckpointError
            )
            self._announce(f"adapter in peft's format: {folder}")
        return outcome


def launch_finetune(config: Config, data: TuningData | None, process: Process) -> int:
    """Run, report why it ended, and return the exit code, as ``smp.training.launch.launch``."""
    if config.training.dry_run:
        if process.rank == 0:
            notes = [f"# {line}" for line in (data.lines if data else ())]
            print("\n".join([describe(config, process.world_size), *notes]))
        return 0
    assert data is not None, "checked with the settings"
    return launch(config, process, partial(Finetuning, data=data))


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
