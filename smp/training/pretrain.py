"""A pretraining run from resolved settings to its last checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import sdpa_kernel
from tqdm import tqdm

from smp.config import Config, ConfigError, Layout
from smp.config.batch import BatchSizes
from smp.config.command import in_one_line
from smp.data.blend import BlendedDataset
from smp.data.build import Datasets, build_datasets
from smp.data.loader import BatchLoader
from smp.data.sample import SampleDataset
from smp.models.gpt import GPT
from smp.optim.optimizer import build_optimizer
from smp.parallel.agree import on_all_or_none
from smp.parallel.mesh import build_mesh, data_rank
from smp.pipeline.failure import naming
from smp.pipeline.plan import Plan, describe_plan, plan_pipeline
from smp.pipeline.timeline import to_trace
from smp.training.build import Backends, build_model, build_passes, choose_backends
from smp.training.console import Console
from smp.training.passes import Passes
from smp.training.pipelined import Pipelined
from smp.training.process import Process, Status
from smp.training.profiler import Profiler
from smp.training.runtime import StopSignal, Watchdog
from smp.training.saving import RunCheckpoints
from smp.training.trainer import Progress, Step, StepResult, Trainer


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: Status
    reason: str
    iteration: int


class Pretraining:
    """Everything of one run, built in the order in which the parts need each other.

    Args:
        config: resolved settings.
        process: this process's place; the process group exists.
        device: what to train on.
        stop: told of signals that ask for an end.
    """

    def __init__(self, config: Config, process: Process, device: torch.device, stop: StopSignal) -> None:
        self.config, self.process, self.device, self.stop = config, process, device, stop
        self.started = time.monotonic()
        self.watchdog = Watchdog(process, config.parallel.distributed_timeout_minutes)
        try:
            self._prepare()
        except BaseException:
            self.watchdog.close()
            raise

    def _prepare(self) -> None:
        config, process, device = self.config, self.process, self.device
        self.layout = Layout.from_config(config.parallel, process.world_size)
        timeout = datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes)
        self.mesh = build_mesh(self.layout, device.type, timeout)
        self.sizes = BatchSizes.of(config.data)
        self.validation: tuple[int, float] | None = None  # iteration and loss of the last evaluation
        self.traced = False
        self._steps: deque[Step] = deque()  # issued, not yet accounted for
        self.checkpoints = self._open_checkpoints()  # before the data, whose indices may take minutes
        try:
            self._build(device, self._announced_data())
        except BaseException:
            self.checkpoints.close()
            raise

    def _announced_data(self) -> BlendedDataset:
        """What to train on, once the user has heard of all parts."""
        train, self.valid, self.test = self._datasets()
        evaluated = [self.valid] if self.config.training.eval_interval is not None else []
        for line in [line for blend in (train, *evaluated, self.test) if blend is not None for line in blend.notes]:
            self._announce(line)
        return train

    def _open_checkpoints(self) -> RunCheckpoints:
        return RunCheckpoints(self.config, self._announce)

    def _announce(self, line: str) -> None:
        """Before there is a console; what is said then is seen even if the start fails."""
        if self.process.rank == 0:
            tqdm.write(line)

    def _build(self, device: torch.device, train: BlendedDataset) -> None:
        config = self.config
        plan = plan_pipeline(config, self.layout) if self.layout.pp > 1 else None
        for line in [] if plan is None else describe_plan(plan, config):
            self._announce(line)
        self.backends = self._choose_backends(device)
        for line in self.backends.lines:
            self._announce(line)
        if device.type == "cuda" and not config.parallel.bf16:
            self._announce("fp32: matrix products as TF32, which rounds their inputs to 10 bits of mantissa")
        with self._only_its_attention():  # a reference's answers may be computed here
            model, passes = self._model(device, plan)
        optimizer = build_optimizer(model, config.optim)
        progress = self.checkpoints.load(model, optimizer)
        for line in train.resume(progress.data, progress.consumed_samples):
            self._announce(line)
        progress.data = train.manifest
        self.trainer = Trainer(config, model, passes, optimizer, self.mesh, device, progress)
        self.batches = self._loader(train, progress.consumed_samples, self.sizes)
        place = config, self.layout, self.process.rank, device, progress.iteration, self._work()
        self.console = on_all_or_none(lambda: Console(*place), ConfigError, f"--log-dir {config.logging.log_dir}")

    def _choose_backends(self, device: torch.device) -> Backends:
        return choose_backends(self.config, device, documents=self.config.data.reset_attention_mask)

    def _only_its_attention(self) -> contextlib.AbstractContextManager[None]:
        """PyTorch must not fall back to another backend without a word."""
        return sdpa_kernel([self.backends.attention.backend])

    def _model(self, device: torch.device, plan: Plan | None) -> tuple[GPT, Passes]:
        """The model as it is before a checkpoint is loaded, and how micro-batches go through it."""
        model = build_model(self.config, self.mesh, device, self.backends, plan)
        return model, build_passes(self.config, self.mesh, device, model, plan)

    def _datasets(self) -> Datasets:
        config = self.config
        assert config.model.vocab_size is not None
        try:
            datasets = build_datasets(config.data, config.model.vocab_size, config.training.seed)
        except (ValueError, OSError) as error:
            raise ConfigError(in_one_line(error)) from error
        if config.training.eval_interval is not None and datasets.valid is None:
            part = f"the validation part of --split {config.data.split}"
            raise ConfigError(
                f"--eval-interval: {'--valid-data-path' if config.data.valid_data_path else part} holds less than one "
                f"sample of {config.data.seq_length} tokens"
            )
        if config.data.test_data_path is not None and datasets.test is None:
            raise ConfigError(f"--test-data-path holds less than one sample of {config.data.seq_length} tokens")
        self._note_repeats(datasets)
        return datasets

    def _note_repeats(self, datasets: Datasets) -> None:
        """Say so when an evaluation asks for more samples than there are."""
        batches, size = self.config.training.eval_iters, self.config.data.global_batch_size
        assert size is not None
        for part, blend in (("validation", datasets.valid), ("test", datasets.test)):
            if blend is not None:
                told = f"note: {part} reads --eval-iters {batches} x {size} samples"
                blend.notes += [f"{told}: {line}" for line in blend.read_again(batches * size)]

    def _loader(self, dataset: SampleDataset, start_sample: int, sizes: BatchSizes | None = None) -> BatchLoader:
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
            num_workers=data.num_workers,
            with_documents=data.reset_attention_mask,
            with_positions=data.reset_position_ids,
            pin_memory=self.device.type == "cuda",
        )

    def run(self) -> Outcome:
        """Train until the last iteration or a reason to stop; evaluate and save on the way.

        Raises:
            PipelineError: another rank of a pipeline is gone or late; the text says on which stages this one is.
        """
        pipeline = self._pipeline()
        named = contextlib.nullcontext() if pipeline is None else naming(pipeline.place)
        with named, self._only_its_attention():
            return self._run()

    def _run(self) -> Outcome:
        """Train until the last iteration or a reason to stop; evaluate and save on the way."""
        training, progress = self.config.training, self.trainer.progress
        last = training.train_iters
        assert last is not None
        outcome = Outcome("done", f"{last} iterations trained", last)
        if progress.iteration >= last:
            nothing = f"nothing left to train: at iteration {progress.iteration} of {last}"
            outcome = Outcome("done", nothing, progress.iteration)
        evaluated_at = progress.iteration
        with Profiler(training, Path(self.config.logging.log_dir), self.process.rank) as profiler:
            while progress.iteration < last:
                profiler.step(progress.iteration + 1)
                asked = time.perf_counter()
                batch = self.batches.next_or_reason()
                waited = time.perf_counter() - asked
                with self._traced(progress.iteration + 1):
                    self._steps.append(self.trainer.start_step(batch, waited))
                self._settle(keep=1)
                if _due(progress.iteration, training.eval_interval):
                    self.evaluate()
                    evaluated_at = progress.iteration
                self.checkpoints.poll()
                if self.checkpoints.due(progress.iteration):
                    self._settle()  # on all ranks alike
                    # In a row of skipped steps nothing is new, and older checkpoints are wanted if it ends the run.
                    if not self.trainer.skipped_in_a_row:
                        self.save()
                self.watchdog.progress()
                if (reason := self._reason_to_stop()) is not None and progress.iteration < last:
                    outcome = Outcome("requeue", reason, progress.iteration)
                    break
        self._settle()
        if outcome.status == "done" and training.eval_interval is not None and evaluated_at != progress.iteration:
            self.evaluate()
        if outcome.status == "done" and self.test is not None:
            self._evaluate_test(self.test)
        self.checkpoints.finish(*self._to_save())
        if outcome.status == "requeue" and self.config.checkpoint.save is None:
            return Outcome("failed", f"{outcome.reason}; nothing was saved: --save is not given", progress.iteration)
        return outcome

    def _pipeline(self) -> Pipelined | None:
        """What runs the training's micro-batches, if that is a pipeline."""
        passes = self.trainer.passes
        return passes if isinstance(passes, Pipelined) else None

    def _work(self) -> float:
        """FLOPs of a step, relative to pretraining on as many tokens."""
        return 1.0

    def _tell(self, result: StepResult) -> None:
        """Report a step."""
        self.console.step(self.trainer.progress, result)

    def _settle(self, keep: int = 0) -> None:
        """Account for steps: for all but the newest ``keep``, and for those that the device has finished.

        With one step kept the host issues the next one while the device computes, and reads, logs and checks meanwhile.
        """
        while len(self._steps) > keep or (self._steps and self._steps[0].finished()):
            result = self.trainer.settle(self._steps.popleft())
            self._tell(result)
            self.trainer.check_skipped(result)

    @contextlib.contextmanager
    def _traced(self, iteration: int) -> Iterator[None]:
        """--trace-pipeline: the timeline of one iteration, the first of this run from --profile-step-start on."""
        training = self.config.training
        if not training.trace_pipeline or self.traced or iteration < training.profile_step_start:
            yield
            return
        pipeline, self.traced = self._pipeline(), True
        assert pipeline is not None, "checked with the settings"
        pipeline.record()
        yield
        timeline = pipeline.recorded()
        if timeline is not None and self.process.rank == 0:
            path = Path(self.config.logging.log_dir) / "pipeline_trace.json"
            title = f"{self.config.parallel.pipeline_schedule}, iteration {iteration}"
            path.write_text(json.dumps(to_trace(timeline, title)))
            self.console.say(f"wrote {path}: bubble {100 * timeline.bubble_fraction:.1f} % of the step")

    def evaluate(self) -> None:
        """Validation loss from the start of the validation data: the same samples every time. A signal ends it."""
        assert self.valid is not None, "checked with the data"
        loss = self._loss_on(self.valid)
        if loss is None:
            return
        self.validation = (self.trainer.progress.iteration, loss)
        self.console.evaluation(self.trainer.progress.iteration, loss)
        self.watchdog.progress()

    def _evaluate_test(self, test: SampleDataset) -> None:
        loss = self._loss_on(test)
        if loss is not None:
            self.console.evaluation(self.trainer.progress.iteration, loss, "test")

    def _loss_on(self, dataset: SampleDataset) -> float | None:
        """None when a signal ended it."""
        self._settle()
        batches = self._loader(dataset, 0)
        try:
            loss = self.trainer.evaluate(batches, self.config.training.eval_iters, lambda: self.stop.name is not None)
        finally:
            batches.close()
        if loss is None:
            self.console.say(f"evaluation at iteration {self.trainer.progress.iteration} was stopped by a signal")
        return loss

    def save(self) -> None:
        """Write a checkpoint, or begin to, if --save is given."""
        self._settle()
        self.checkpoints.save(*self._to_save())
        self.watchdog.progress()

    def _to_save(self) -> tuple[nn.Module, torch.optim.Optimizer, Progress, float | None]:
        """Model, optimizer, counters, and the validation loss if it is that of these weights."""
        trainer, (iteration, loss) = self.trainer, self.validation or (-1, 0.0)
        progress = trainer.progress
        return trainer.model, trainer.optimizer, progress, loss if iteration == progress.iteration else None

    def _reason_to_stop(self) -> str | None:
        """Why to end early, agreed upon by all ranks: a signal or a clock may reach one before the others."""
        training = self.config.training
        minutes, limit = (time.monotonic() - self.started) / 60, training.exit_duration_in_mins
        flags = torch.tensor([self.stop.name is not None, limit is not None and minutes >= limit], dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        signalled, timed_out = flags.tolist()
        if signalled:
            return f"stopped by {self.stop.name or 'a signal to another rank'}"
        if timed_out:
            return f"--exit-duration-in-mins {limit} reached"
        if _due(self.trainer.progress.iteration, training.exit_interval):
            return f"--exit-interval {training.exit_interval} reached"
        return None

    def close(self) -> None:
        """Wait for a background save, stop background threads and close the logs."""
        self.checkpoints.close()
        self.batches.close()
        self.console.close()
        self.watchdog.close()


def _due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0
