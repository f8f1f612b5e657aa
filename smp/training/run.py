"""A run from its parts to its last checkpoint. ``Run._train`` is the loop."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from smp.config import Config, ConfigError, Layout
from smp.config.batch import BatchSizes, check_batch_sizes
from smp.config.checks import notes_on_effects
from smp.config.credentials import without_credentials
from smp.data.build import Datasets
from smp.data.loader import BatchLoader, ReadBatch
from smp.data.sample import SampleDataset
from smp.kernels import Kernels
from smp.kernels.copier import copier_of
from smp.models.gpt import GPT
from smp.models.in_words import in_words
from smp.optim.optimizer import build_optimizer
from smp.parallel import backend
from smp.parallel.agree import on_all_or_none, on_rank_zero
from smp.parallel.context import ParallelContext, build_context
from smp.parallel.network.choose import choose_collectives, spans_nodes, with_secondary_shards
from smp.parallel.network.quantize import Quantization
from smp.pipeline.failure import naming
from smp.pipeline.plan import describe_plan, plan_pipeline
from smp.sharding.offload import offload_of
from smp.training.build import RunSetup, batch_loader
from smp.training.console import Console
from smp.training.exchange import exchange_of
from smp.training.forward_backward import ForwardBackward
from smp.training.objective import Objective
from smp.training.offload import describe_offload, offload_at_work
from smp.training.pipelined import Pipelined
from smp.training.process import Process, Status
from smp.training.profiler import PipelineTrace, Profiler
from smp.training.runtime import StopSignal, Watchdog, library_settings
from smp.training.saving import RunCheckpoints
from smp.training.sinks import refuse_log_dir_in_use
from smp.training.stopping import StopRules, due
from smp.training.trainer import Progress, Step, Trainer

Say = Callable[[str], None]


class Trainable(NamedTuple):
    """A model as it is before a checkpoint is loaded, how micro-batches go through it, and what is minimised."""

    model: GPT
    forward_backward: ForwardBackward
    objective: Objective


@dataclasses.dataclass(frozen=True)
class RunParts:
    """What pretraining and fine-tuning do not share; see ``smp.training.pretraining`` and ``smp.training.finetuning``.

    Attributes:
        datasets: reads what to train and evaluate on, once the folder of checkpoints is this run's.
        read: (one of them) -> what makes a batch of numbered samples; None: the loader stacks them.
        kernels: (context, device) -> what computes, and what the user should hear of that choice.
        trainable: (setup, tell the user, say that there is progress) -> what is trained.
        work: FLOPs of a step, relative to pretraining on as many tokens.
        evaluate_first: also before the first step.
        before: called before the first step.
        after: (last iteration) -> what to tell the user; called when the run is done and saved.
    """

    config: Config
    datasets: Callable[[], Datasets]
    kernels: Callable[[ParallelContext, torch.device], tuple[Kernels, list[str]]]
    trainable: Callable[[RunSetup, Say, Callable[[], None]], Trainable]
    read: Callable[[Any], ReadBatch | None] = lambda dataset: None
    work: float = 1.0
    evaluate_first: bool = False
    before: Callable[[], None] = lambda: None
    after: Callable[[int], list[str]] = lambda iteration: []


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: Status
    reason: str
    iteration: int


class Run:
    """Everything of one run, built in the order in which the parts need each other; the process group exists."""

    def __init__(
        self,
        parts: RunParts,
        process: Process,
        device: torch.device,
        stop: StopSignal,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.parts, self.config, self.process, self.device = parts, parts.config, process, device
        self.stopping = StopRules(self.config.training, stop)
        self.layout = Layout.from_config(self.config.parallel, process.world_size)
        self.validation: tuple[int, float] | None = None  # iteration and loss of the last evaluation
        self._steps: deque[Step] = deque()  # issued, not yet accounted for
        # What is open is closed again, in reverse order, if a later part fails; else :meth:`close` does it.
        with contextlib.ExitStack() as opened:
            self.watchdog = watchdog or Watchdog(process, self.config.parallel.distributed_timeout_minutes)
            if watchdog is None:
                opened.callback(self.watchdog.close)
            with self.watchdog.ending():
                self.context = self._build_context()
            on_rank_zero(lambda: refuse_log_dir_in_use(self.config.logging), ConfigError)
            collectives = self.context.collectives
            # What the user has to know comes before what takes long.
            sizes = BatchSizes.of(self.config.data)
            effects = notes_on_effects(self.config, self.layout)
            notes = [*sizes.in_words(), *effects, *(collectives.lines if collectives else ())]
            for line in [in_words(self.config.model), *notes]:
                self.say(line)
            self.checkpoints = RunCheckpoints(self.config, self.say)  # before the data, whose indices may take minutes
            opened.callback(self.checkpoints.close)
            self.datasets = self._read_data()
            self.setup = self._make_setup()
            self.trainer = self._build_trainer()
            progress = self.trainer.progress
            check_batch_sizes(self.config.data, self.layout, sizes.ahead(progress.consumed_samples))
            self.batches = self._loader(self.datasets.train, progress.consumed_samples, sizes)
            opened.callback(self.batches.close)
            arguments = self.config, self.layout, process.rank, device, progress.iteration, parts.work
            epoch = self.datasets.train.samples_per_epoch
            log_dir = self.config.logging.log_dir
            self.console = on_all_or_none(lambda: Console(*arguments, epoch), ConfigError, f"--log-dir {log_dir}")
            opened.callback(self.console.close)
            self._evaluated_at = progress.iteration
            # All is built: from here on nothing closes by itself.
            self._opened = opened.pop_all()

    def say(self, line: str) -> None:
        """Tell the user one line, above the progress bar when there is one."""
        if self.process.rank == 0:
            tqdm.write(without_credentials(line))

    def _build_context(self) -> ParallelContext:
        parallel = self.config.parallel
        timeout = datetime.timedelta(minutes=parallel.distributed_timeout_minutes)
        setting, file = parallel.data_parallel_collectives, parallel.network_topology
        # The backend runs schedules of CPU tensors only, and one node needs none.
        knows_nodes = setting != "flat" and self.device.type == "cpu" and spans_nodes(file)
        self.watchdog.progress()
        context = build_context(
            self.layout,
            self.device.type,
            timeout,
            sequence_parallel=parallel.sequence_parallel,
            heads_group=exchange_of(self.config, self.device.type).heads_group,
            replica_backend=backend.NAME if knows_nodes else None,
            progress=self.watchdog.progress,
        )
        meshes = {"parameters": context.fsdp, "experts": context.expert_fsdp}
        coded = Quantization(parallel.zero_quantized_weights, parallel.zero_quantized_gradients)
        quantization = coded if coded.names else None
        collectives = choose_collectives(meshes, setting, timeout, file, quantization)
        self.watchdog.progress()
        if (size := parallel.zero_hpz_partition_size) > 1:
            collectives = with_secondary_shards(collectives, context.secondary_parts(size), timeout, file)
        # The context is frozen, and collectives need its groups first.
        return dataclasses.replace(context, collectives=collectives)

    def _read_data(self) -> Datasets:
        """What to train on, once the user has heard of all of it."""
        datasets = self.parts.datasets()
        evaluated = [datasets.valid] if self.config.training.eval_interval is not None else []
        for dataset in (datasets.train, *evaluated, datasets.test):
            for line in [] if dataset is None else dataset.notes:
                self.say(line)
        return datasets

    def _make_setup(self) -> RunSetup:
        config, device = self.config, self.device
        plan = plan_pipeline(config, self.layout) if self.layout.pp > 1 else None
        for line in [] if plan is None else describe_plan(plan, config):
            self.say(line)
        kernels, lines = self.parts.kernels(self.context, device)
        for line in lines:
            self.say(line)
        if device.type == "cuda":
            self.say(library_settings())
        if device.type == "cuda" and not config.parallel.bf16:
            self.say("fp32: matrix products as TF32, which rounds their inputs to 10 bits of mantissa")
        offload = offload_of(config.parallel, copier_of(device))
        for line in describe_offload(config, device.type):
            self.say(line)
        return RunSetup(self.context, device, kernels, plan, offload, self.watchdog.ending, self.watchdog.progress)

    def _build_trainer(self) -> Trainer:
        model, forward_backward, objective = self.parts.trainable(self.setup, self.say, self.watchdog.progress)
        optimizer = build_optimizer(
            model,
            self.config.optim,
            self.context.fsdp,
            self.context.expert_fsdp,
            seed=self.config.training.seed,
        )
        # After the optimizer, whose state comes with the weights.
        progress = self.checkpoints.load(model, optimizer)
        train = self.datasets.train
        # May refuse: other data than those of the checkpoint would be read from the wrong place.
        for line in train.resume(progress.data, progress.consumed_samples):
            self.say(line)
        progress.data = train.manifest
        return Trainer(self.config, model, forward_backward, objective, optimizer, self.context, self.device, progress)

    @property
    def pipeline(self) -> Pipelined | None:
        """What runs the micro-batches, if that is a pipeline."""
        runner = self.trainer.forward_backward
        return runner if isinstance(runner, Pipelined) else None

    def run(self) -> Outcome:
        """Train until the last iteration or a reason to stop; evaluate and save on the way.

        Raises:
            PipelineError: another rank of a pipeline is gone or late; the text says on which stages this one is.
        """
        named = contextlib.nullcontext() if self.pipeline is None else naming(self.pipeline.place)
        with named:
            self.parts.before()
            if self.parts.evaluate_first and self.config.training.eval_interval and not self.iteration:
                self.evaluate()
            outcome = self._train()
            # Before the last save, whose counters are those of all steps.
            self._finish_steps()
            if outcome.status == "done":
                self._evaluate_at_the_end()
            self.checkpoints.finish(*self._to_save())
            if outcome.status == "requeue" and self.config.checkpoint.save is None:
                return Outcome("failed", f"{outcome.reason}; nothing was saved: --save is not given", self.iteration)
            for line in self.parts.after(self.iteration) if outcome.status == "done" else []:
                self.say(line)
            return outcome

    @property
    def iteration(self) -> int:
        """Number of the last step that was issued."""
        return self.trainer.progress.iteration

    def _train(self) -> Outcome:
        training, last = self.config.training, self.config.training.train_iters
        assert last is not None, "resolved before"
        if self.iteration >= last:
            return Outcome("done", f"nothing left to train: at iteration {self.iteration} of {last}", self.iteration)
        trace = PipelineTrace(self.config, self.pipeline, self.say)
        profiler, first = Profiler(training, Path(self.config.logging.log_dir), self.process.rank), self.iteration + 1
        with contextlib.closing(profiler):
            while self.iteration < last:
                profiler.step(self.iteration + 1)
                asked = time.perf_counter()
                # An unreadable sample comes as a value and not as an error: all ranks have to hear of it together.
                batch = self.batches.next_or_reason()
                waited = time.perf_counter() - asked
                with trace.of(self.iteration + 1):
                    self._steps.append(self.trainer.start_step(batch, waited))
                # Looks at the step before while the device computes this one.
                self._finish_steps(keep=1)
                if self.iteration == first and self.setup.offload is not None:
                    for line in offload_at_work(self.setup.offload):
                        self.say(line)
                if due(self.iteration, training.eval_interval):
                    self.evaluate()
                self.checkpoints.poll()
                if self.checkpoints.due(self.iteration):
                    self._finish_steps()  # on all ranks alike
                    # In a row of skipped steps nothing is new, and older checkpoints are wanted if it ends the run.
                    if not self.trainer.skipped_in_a_row:
                        self.save()
                self.watchdog.progress()
                # Behind the save of this iteration, which may be due as well.
                if (reason := self.stopping.reason(self.iteration)) is not None and self.iteration < last:
                    return Outcome("requeue", reason, self.iteration)
        return Outcome("done", f"{last} iterations trained", last)

    def _finish_steps(self, keep: int = 0) -> None:
        """Account for steps: for all but the newest ``keep``, and for those that the device has finished.

        With one step kept the host issues the next one while the device computes, and reads, logs and checks meanwhile.
        """
        while len(self._steps) > keep or (self._steps and self._steps[0].measured.arrived()):
            result = self.trainer.finish(self._steps.popleft())
            self.console.step(self.trainer.progress, result)
            self.trainer.check_skipped(result)

    def evaluate(self) -> None:
        """Validation loss from the start of the validation data: the same samples every time. A signal ends it."""
        assert self.datasets.valid is not None, "checked with the data"
        self._evaluated_at = self.iteration
        loss = self._loss_on(self.datasets.valid)
        if loss is not None:
            self.validation = (self.iteration, loss)
            self.console.evaluation(self.iteration, loss)
            self.watchdog.progress()

    def _evaluate_at_the_end(self) -> None:
        if self.config.training.eval_interval is not None and self._evaluated_at != self.iteration:
            self.evaluate()
        if self.datasets.test is not None and (loss := self._loss_on(self.datasets.test)) is not None:
            self.console.evaluation(self.iteration, loss, "test")

    def _loss_on(self, dataset: SampleDataset) -> float | None:
        """None when a signal ended it."""
        self._finish_steps()
        batches = self._loader(dataset)
        try:
            loss = self.trainer.evaluate(batches, self.config.training.eval_iters, self.stopping.signalled)
        finally:
            # Also when a signal or an error ends it: the reader's threads would go on.
            batches.close()
        if loss is None:
            self.say(f"evaluation at iteration {self.iteration} was stopped by a signal")
        return loss

    def _loader(self, dataset: SampleDataset, start: int = 0, sizes: BatchSizes | None = None) -> BatchLoader:
        return batch_loader(self.config, self.setup, dataset, self.parts.read(dataset), start=start, sizes=sizes)

    def save(self) -> None:
        """Write a checkpoint, or begin to, if --save is given."""
        self._finish_steps()
        self.checkpoints.save(*self._to_save())
        self.watchdog.progress()

    def _to_save(self) -> tuple[nn.Module, torch.optim.Optimizer, Progress, float | None]:
        """Model, optimizer, counters, and the validation loss if it is that of these weights."""
        # A loss of older weights would make a checkpoint look better or worse than it is.
        iteration, loss = self.validation or (-1, None)
        trainer = self.trainer
        return trainer.model, trainer.optimizer, trainer.progress, loss if iteration == self.iteration else None

    def close(self, failed: bool = False) -> None:
        """Close the logs, which hear whether it failed, stop background threads and wait for a background save."""
        self.console.failed = failed
        self._opened.close()
