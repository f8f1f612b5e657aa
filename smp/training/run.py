"""A run from its parts to its last checkpoint. ``Run._train`` is the loop."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from collections import deque
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from smp.checkpoint import CheckpointError
from smp.config import ConfigError, Layout
from smp.config.batch import BatchSizes, uneven_in_words
from smp.config.command_line.credentials import without_credentials
from smp.config.resolve import with_rest
from smp.config.rules.checks import notes_on_effects
from smp.data.build import Datasets
from smp.data.loader import BatchLoader
from smp.data.sample import SampleDataset
from smp.kernels.copier import copier_of
from smp.models.description import describe_model
from smp.optim.optimizer import build_optimizer
from smp.parallel import backend
from smp.parallel.agree import on_all_or_none, on_rank_zero
from smp.parallel.context import ParallelContext, build_context
from smp.parallel.network.quantize import Quantization
from smp.parallel.network.select_collectives import choose_collectives, topology_of, with_secondary_shards
from smp.parallel.node_group import describe_exchange, within_nodes
from smp.pipeline.failure import naming
from smp.pipeline.stage_plan import describe_plan, plan_pipeline
from smp.sharding.offload import offload_of
from smp.training.build import RunSetup, batch_loader
from smp.training.checkpoints.saving import RunCheckpoints
from smp.training.cost.offload import describe_offload, offload_at_work
from smp.training.exchange import exchange_of
from smp.training.faults.copies import RunCopies
from smp.training.faults.guard import Guard
from smp.training.faults.members import describe_layouts
from smp.training.kind import BatchSource, RunKind
from smp.training.pipelined import Pipelined
from smp.training.process import Process, Status
from smp.training.reporting.console import Console
from smp.training.reporting.goodput import FILE, Goodput
from smp.training.reporting.goodput import describe as describe_goodput
from smp.training.reporting.profiler import PipelineTrace, Profiler
from smp.training.reporting.sinks import refuse_log_dir_in_use
from smp.training.reporting.slow_ranks import SlowRanks
from smp.training.runtime import StopSignal, Watchdog, library_settings, note_on_restarts
from smp.training.stopping import StopRules, due
from smp.training.trainer import Progress, Step, Trainer


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended; ``signalled``: because a signal asked for it."""

    status: Status
    reason: str
    iteration: int
    signalled: bool = False


class Run:
    """Everything of one run, built in the order in which the parts need each other; the process group exists."""

    def __init__(
        self,
        kind: RunKind,
        process: Process,
        device: torch.device,
        stop: StopSignal,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.kind, self.config, self.process, self.device = kind, kind.config, process, device
        self.stopping = StopRules(self.config.training, stop)
        self.layout = Layout.from_config(self.config.parallel, process.world_size)
        self.validation: tuple[int, float] | None = None  # iteration and loss of the last evaluation
        self._steps: deque[Step] = deque()  # issued, not yet accounted for
        # Parts that are open are closed in reverse order if a later one fails; otherwise
        # :meth:`close` closes them.
        with contextlib.ExitStack() as opened:
            self.watchdog = watchdog or Watchdog(process, self.config.parallel.distributed_timeout_minutes)
            opened.callback(kind.close)
            if watchdog is None:
                opened.callback(self.watchdog.close)
            with self.watchdog.ending():
                self.context = self._build_context()
            # Rank 0 alone writes logs.
            on_rank_zero(lambda: refuse_log_dir_in_use(self.config.logging), ConfigError)
            collectives = self.context.collectives
            exchange = describe_exchange(self.context.meshes()) if device.type == "cpu" else []
            account = Path(self.config.logging.log_dir) / FILE if process.rank == 0 else None
            again = process.restarts > 0
            self.goodput = Goodput(account, process.started, self.config.checkpoint.save, self.say, again=again)
            # Notes are printed before what takes long.
            sizes = BatchSizes.of(self.config.data)
            effects = notes_on_effects(self.config, self.layout)
            notes = [
                *sizes.describe(),
                *effects,
                *describe_layouts(self.config, process.world_size),
                *exchange,
                *(collectives.lines if collectives else ()),
            ]
            for line in [describe_model(self.config.model), *notes]:
                self.say(line)
            self.copies = RunCopies(self.config, process, self.say)
            opened.callback(self.copies.close)
            # Before the data, whose indices may take minutes.
            self.checkpoints = RunCheckpoints(self.config, self.say, self.copies.found, self.copies.find_again)
            opened.callback(self.checkpoints.close)
            self.datasets = self._read_data()
            self.setup = self._make_setup()
            # Settings and data are good: from here on a start that dies is part of the job.
            self.goodput.alive()
            opened.push(self._died_loading)
            self.trainer = self._build_trainer()
            self.goodput.alive()
            progress = self.trainer.progress
            # A ramp-up makes the number of samples of a step a function of the samples so far.
            sizes = self._ending(sizes)
            ahead = sizes.ahead(progress.consumed_samples)
            for line in uneven_in_words(self.config.data, self.layout.data_parallel, ahead):
                self.say(line)
            self.batches: BatchSource = self._batches(progress.consumed_samples, sizes)
            opened.callback(self.batches.close)
            arguments = self.config, self.layout, process.rank, device, progress.iteration, kind.work
            epoch = self.datasets.train.samples_per_epoch
            log_dir = self.config.logging.log_dir
            # All ranks fail if rank 0 cannot open its log files.
            self.console = on_all_or_none(lambda: Console(*arguments, epoch), ConfigError, f"--log-dir {log_dir}")
            opened.callback(self.console.close)
            self.console.goodput = self.goodput
            self.goodput.waits_for = "data" if isinstance(self.batches, BatchLoader) else "rollout"
            self.goodput.begin(progress.iteration)
            self.guard = Guard(self.trainer, self.console, self.goodput)
            self._evaluated_at = progress.iteration
            if self.checkpoints.from_memory:
                self.copies.make(*self._to_copy())  # of nodes that were lost there is one copy left
            # All is built: from here on nothing closes by itself.
            self._opened = opened.pop_all()

    def _ending(self, sizes: BatchSizes) -> BatchSizes:
        """Batch sizes with a last step that ends where --train-samples does, if that is possible."""
        samples, data = self.config.training.train_samples, self.config.data
        if samples is None:
            return sizes
        ending = sizes.ending(samples, self.trainer.progress.consumed_samples)
        if ending is not sizes and self.pipeline is not None:
            # A step of another size has another number of micro-batches, and needs a schedule.
            last = dataclasses.replace(data, global_batch_size=ending.parts[-1][1])
            plan = plan_pipeline(dataclasses.replace(self.config, data=last), self.layout)
            self.pipeline.add_plan(plan)
        return ending

    def _died_loading(self, kind: type[BaseException] | None, *_: object) -> None:
        # A refused start leaves no trace; any other death counts as a start of the job.
        if kind is not None and issubclass(kind, (ConfigError, CheckpointError)):
            self.goodput.refused()
        elif kind is not None:
            self.goodput.alive()

    def say(self, line: str) -> None:
        """Tell the user one line, above the progress bar when there is one."""
        if self.process.rank == 0:
            tqdm.write(without_credentials(line))

    def _build_context(self) -> ParallelContext:
        parallel = self.config.parallel
        timeout = datetime.timedelta(minutes=parallel.distributed_timeout_minutes)
        setting, file = parallel.data_parallel_collectives, parallel.network_topology
        on_cpu = self.device.type == "cpu" and self.process.world_size > 1
        topology = topology_of(file) if on_cpu else None
        # The backend runs schedules of CPU tensors only, and one node needs none.
        knows_nodes = setting != "flat" and topology is not None and len(topology.nodes) > 1
        shares = topology is not None and parallel.cpu_collectives == "auto"
        self.watchdog.progress()
        context = build_context(
            self.layout,
            self.device.type,
            timeout,
            sequence_parallel=parallel.sequence_parallel,
            heads_group=exchange_of(self.config, self.device.type).heads_group,
            replica_backend=backend.NAME if knows_nodes else None,
            backend=within_nodes(topology) if shares and topology is not None else lambda ranks: None,
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
        """Read the data, and print their notes."""
        datasets = self.kind.datasets()
        evaluated = [datasets.valid] if self.config.training.eval_interval is not None else []
        # The test data are read also where there is no --eval-interval.
        for dataset in (datasets.train, *evaluated, datasets.test):
            for line in [] if dataset is None else dataset.notes:
                self.say(line)
        return datasets

    def _make_setup(self) -> RunSetup:
        config, device = self.config, self.device
        plan = plan_pipeline(config, self.layout) if self.layout.pp > 1 else None
        for line in [] if plan is None else describe_plan(plan, config):
            self.say(line)
        kernels, lines = self.kind.kernels(self.context, device)
        for line in lines:
            self.say(line)
        if line := note_on_restarts():
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
        model, forward_backward, objective = self.kind.trainable(self.setup, self.say, self.watchdog.progress)
        optimizer = build_optimizer(
            model,
            self.config.optim,
            self.context.fsdp,
            self.context.expert_fsdp,
            seed=self.config.training.seed,
        )
        # After the optimizer, whose state comes with the weights.
        progress = self.checkpoints.load(model, optimizer, self.kind.kept())
        # Epochs or samples that are left are known once the checkpoint says what was done.
        self.config = with_rest(self.config, progress.iteration, progress.consumed_samples)
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
            self.kind.before()
            # Such as --logits-save-dir: a pass over the data, without a step.
            if (done := self.kind.instead(self.watchdog.progress, self.stopping.reason)) is not None:
                status: Status = "requeue" if done.interrupted else "done"
                return Outcome(status, done.said, self.iteration, self.stopping.heard)
            if self.kind.evaluate_first and self.config.training.eval_interval and not self.iteration:
                self.evaluate()
            # Time inside of a step loop is productive unless a part says otherwise.
            with self.goodput.during("productive"):
                outcome = self._train()
                # Before the last save, whose counters are those of all steps.
                self._finish_steps()
                self.guard.look(self.iteration)
            # Before what follows the last step: its line would come behind the checkpoint's and the summary.
            self.console.rest()
            self.goodput.turn_to("idle")
            if outcome.status == "done":
                self._evaluate_at_the_end()
            with self.goodput.during("save"):
                if self.config.checkpoint.save is not None or self.copies.interval is not None:
                    self.guard.before_save(self.iteration)
                if outcome.status == "requeue":
                    self.copies.finish(*self._to_copy())
                self.checkpoints.finish(*self._to_save())
            self.goodput.saved(self.iteration)
            self.goodput.end(outcome.status)
            self.copies.done = self.iteration if outcome.status == "done" else None
            # A launcher that requeues would start from nothing.
            if outcome.status == "requeue" and self.config.checkpoint.save is None and not self.copies.kept:
                return Outcome("failed", f"{outcome.reason}; nothing was saved: --save is not given", self.iteration)
            for line in self.kind.after(self.iteration) if outcome.status == "done" else []:
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
        slow = SlowRanks(self.config, self.context, self.device, self.pipeline, self.console)
        profiler, first = Profiler(training, Path(self.config.logging.log_dir), self.process.rank), self.iteration + 1
        # A callback gets the weights of its step, so the next step may not have been issued.
        waits = self.guard.waits or bool(self.kind.callbacks)
        with contextlib.closing(profiler), contextlib.closing(slow):
            while self.iteration < last:
                profiler.step(self.iteration + 1)
                asked = time.perf_counter()
                # An unreadable sample comes as a value and not as an error: all ranks have to hear of it together.
                batch = self.batches.next_or_reason()
                waited = time.perf_counter() - asked
                with trace.of(self.iteration + 1), slow.measured(self.iteration + 1):
                    self._steps.append(self.trainer.start_step(batch, waited))
                slow.step(self.iteration, waited if isinstance(self.batches, BatchLoader) else 0.0)
                # Looks at the step before while the device computes this one.
                self._finish_steps(keep=0 if waits else 1)
                # On CUDA ranks hear of the newest step at different times.
                late = self.device.type == "cuda" and not waits
                self.guard.look(self.iteration - late)
                self.guard.after(self.iteration)
                if self.iteration == first and self.setup.offload is not None:
                    for line in offload_at_work(self.setup.offload):
                        self.say(line)
                if due(self.iteration, training.eval_interval):
                    self.evaluate()
                self._copy()
                self.checkpoints.poll()
                if self.checkpoints.due(self.iteration):
                    self._finish_steps()  # on all ranks alike
                    self.guard.look(self.iteration)
                    # In a row of skipped steps nothing is new, and older checkpoints are wanted if it ends the run.
                    if not self.trainer.skipped_in_a_row:
                        self.save()
                self.watchdog.progress()
                # Behind the save of this iteration, which may be due as well.
                if (reason := self.stopping.reason(self.iteration)) is not None and self.iteration < last:
                    return Outcome("requeue", reason, self.iteration, self.stopping.heard)
        return Outcome("done", f"{last} iterations trained", last)

    def _finish_steps(self, keep: int = 0) -> None:
        """Account for steps: all except the newest ``keep``, and those that the device has already finished.

        With one step kept the host issues the next one while the device computes, and reads, logs and checks meanwhile.
        """
        # Order matters: counters and the log go forward.
        while len(self._steps) > keep or (self._steps and self._steps[0].measured.arrived()):
            step = self._steps.popleft()
            result = self.trainer.finish(step)
            self.guard.finished(step, result)
            rerun = self.trainer.rerun
            repeated = 0.0 if rerun is None else rerun.take_seconds()
            self.goodput.step(result.iteration, result.seconds, result.waited, result.skipped, repeated)
            self.console.step(self.trainer.progress, result)
            for callback in self.kind.callbacks:
                callback(result, self.trainer.model)

    def evaluate(self) -> None:
        """Measure the validation loss, from the start of the validation data: the same samples every time. A signal
        ends it."""
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
        """Mean loss on ``dataset``; None when a signal ended the evaluation."""
        self._finish_steps()
        with self.goodput.during("evaluation"):
            loss = self.kind.evaluate(self.trainer, dataset, self._loader, self.stopping.signalled)
        if loss is None:
            self.say(f"evaluation at iteration {self.iteration} was stopped by a signal")
        return loss

    def _batches(self, consumed: int, sizes: BatchSizes) -> BatchSource:
        dataset = self.datasets.train
        own = self.kind.batches(self.setup, dataset, consumed, self.checkpoints.carried, self.say)
        return own or self._loader(dataset, consumed, sizes)

    def _loader(self, dataset: SampleDataset, start: int = 0, sizes: BatchSizes | None = None) -> BatchLoader:
        return batch_loader(self.config, self.setup, dataset, self.kind.read(dataset), start=start, sizes=sizes)

    def _copy(self) -> None:
        """Copy the state to the nodes' memory, if it is time."""
        self.copies.poll()
        if self.copies.due(self.iteration):
            self._finish_steps()  # on all ranks alike
            self.guard.look(self.iteration)
            if not self.trainer.skipped_in_a_row:
                with self.goodput.during("save"):
                    self.guard.before_save(self.iteration)
                    self.copies.make(*self._to_copy())
                self.goodput.saved(self.iteration)

    def _to_copy(self) -> tuple[nn.Module, torch.optim.Optimizer, Progress, BatchSource]:
        return self.trainer.model, self.trainer.optimizer, self.trainer.progress, self.batches

    def save(self) -> None:
        """Write a checkpoint, or begin to, if --save is given."""
        self._finish_steps()
        with self.goodput.during("save"):
            if self.config.checkpoint.save is not None:
                self.guard.before_save(self.iteration)
            self.checkpoints.save(*self._to_save())
        self.goodput.saved(self.iteration)
        self.watchdog.progress()

    def _to_save(self) -> tuple[nn.Module, torch.optim.Optimizer, Progress, float | None, dict[str, torch.Tensor]]:
        """Arguments of a save: model, optimizer, counters, the validation loss if it is that of these weights, and the
        state of the source of batches."""
        # A loss of older weights would make a checkpoint look better or worse than it is.
        iteration, loss = self.validation or (-1, None)
        trainer = self.trainer
        # May wait for what is still being made: only where it is written.
        state = {} if self.config.checkpoint.save is None else self.batches.state()
        return trainer.model, trainer.optimizer, trainer.progress, loss if iteration == self.iteration else None, state

    def close(self, failed: bool = False) -> None:
        """Close the logs, which are told whether the run failed, stop background threads and wait for a background
        save."""
        self.console.failed = failed
        if failed:
            self.goodput.end("failed")
        self.say(describe_goodput(self.goodput.account))
        self._opened.close()
