"""Output of a run: log lines, a progress bar, and records for the metric sinks. Only rank 0 prints."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from types import MappingProxyType

import torch
from tqdm import tqdm

from smp.config import Config, Layout
from smp.config.command_line.credentials import without_credentials
from smp.models.arithmetic import pair_training_flops, training_flops_per_token, visible_pairs_of_layers
from smp.training.reporting.device_peak import peak_flops
from smp.training.reporting.goodput import Goodput
from smp.training.reporting.run_record import start_record
from smp.training.reporting.sinks import earlier_records, open_sinks
from smp.training.trainer import Progress, StepResult


class Console:
    """Reports steps and evaluations; on ranks other than 0 it does nothing.

    Args:
        iteration: where the run starts; records after it are left-overs of a lost part and dropped.
        work: FLOPs of a step, relative to pretraining on as many tokens.
        epoch: samples of one; None: the data never repeat.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        rank: int,
        device: torch.device,
        iteration: int,
        work: float = 1.0,
        epoch: int | None = None,
    ) -> None:
        self.config, self.layout, self.device = config, layout, device
        self._speaks, self._epoch = rank == 0, epoch
        self.failed = False
        """Whether the run ended with an error, for :meth:`close`."""
        self.goodput: Goodput | None = None
        """The run's, which is told with each line."""
        self._window: list[StepResult] = []
        self._progress = Progress()
        if not self._speaks:
            return
        assert config.model.vocab_size is not None
        self._share = work / layout.world_size / 1e12  # TFLOP of each process, for one FLOP of the step
        self._pair_flops = pair_training_flops(config.model)
        alone = training_flops_per_token(config.model, 1, config.model.vocab_size)  # a token that sees itself
        # Attention grows with what a token sees, which is counted for each batch; the rest is the same for every token.
        self._token_flops = alone - visible_pairs_of_layers([1], config.model) * self._pair_flops
        for line in earlier_records(config, iteration):
            self.say(line)
        self._sinks = open_sinks(config.logging, iteration)
        record = start_record(config, layout, device, iteration)
        for sink in self._sinks:
            sink.start(record)
        self._bar = tqdm(
            total=config.training.train_iters,
            initial=iteration,
            disable=not config.logging.progress_bar,
            desc="training",
            unit="it",
            dynamic_ncols=True,
            mininterval=1.0,
        )

    def say(self, line: str) -> None:
        """Print one line above the progress bar."""
        if self._speaks:
            # Above the bar: a plain print would tear it.
            tqdm.write(without_credentials(line))

    def step(self, progress: Progress, result: StepResult) -> None:
        """Note a step; every --log-interval iterations, and for the last ones at the end, write a line and a record.

        A skipped step is said at once. ``progress`` may be a step ahead of ``result``.
        """
        if not self._speaks:
            return
        self._progress = progress
        self._bar.update(1)
        self._window.append(result)
        if not result.finite:
            self.say(
                f"iteration {result.iteration}: loss {result.loss} or grad norm {result.grad_norm} is not finite; "
                "step skipped"
            )
        if result.table:
            for sink in self._sinks:
                sink.table(result.iteration, result.table)
        if result.iteration % self.config.logging.log_interval == 0:
            self._report(progress)

    def _report(self, progress: Progress) -> None:
        last_step = self._window[-1]
        # Skipped steps are left out: a mean with a NaN would hide the others.
        finite = [r for r in self._window if not r.skipped]
        last = finite[-1] if finite else last_step
        # Means over the window: batches differ in their numbers of tokens.
        tokens = sum(r.num_tokens for r in self._window) / len(self._window)
        waited = sum(r.waited for r in self._window) / len(self._window)
        pairs = sum(r.visible_pairs for r in self._window) / len(self._window)
        tflop = self._share * (self._token_flops * tokens + self._pair_flops * pairs)
        seconds = waited + sum(r.seconds for r in self._window) / len(self._window)
        record = {
            "lm loss": sum(r.loss for r in finite) / len(finite) if finite else last.loss,
            "learning rate": last.learning_rate,
            "grad norm": last.grad_norm,
            "consumed samples": last_step.consumed_samples,
            "global batch size": last_step.num_samples,
            "skipped iterations": progress.skipped_iterations,
            "nan iterations": progress.nan_iterations,
            "seconds per iteration": seconds,
            "seconds waiting for data": waited,
            "tokens/s": tokens / seconds,
            "TFLOP/s per process": tflop / seconds,
            **self._device_record(tflop / seconds),
            **({} if self.goodput is None else {"goodput": self.goodput.share}),
            **last_step.metrics,
        }
        self._window.clear()
        self._log(last_step.iteration, record)
        if self.config.logging.log_format == "megatron":
            more = "".join(f" {name}: {value:.6f} |" for name, value in last_step.metrics.items())
            self.say(log_line(self.config, last_step.iteration, record) + more)
        else:
            epochs = None if self._epoch is None else last_step.consumed_samples / self._epoch
            self.say(short_line(self.config, last_step.iteration, record, epochs, last_step.metrics))

    def note(self, iteration: int, record: Mapping[str, float], line: str) -> None:
        """Report what is measured apart from steps: a record for the sinks and a line."""
        if self._speaks:
            self._log(iteration, record)
            self.say(line)

    def _log(self, iteration: int, record: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.log(iteration, record)

    def _device_record(self, rate: float) -> dict[str, float]:
        """Peak memory of the device, and MFU where the peak rate of the device is known."""
        if self.device.type != "cuda":
            return {"peak memory (GB)": _peak_resident_bytes() / 1e9}
        record = {"peak memory (GB)": torch.cuda.max_memory_allocated() / 1e9}
        peak = peak_flops(torch.cuda.get_device_name(), "bf16" if self.config.parallel.bf16 else "fp32")
        return record | ({"MFU": rate * 1e12 / peak} if peak else {})

    def evaluation(self, iteration: int, loss: float, part: str = "validation") -> None:
        """Report a loss in nats per token on a part of the data that is not trained on; of objectives that evaluate by
        rewards it is minus the mean reward."""
        if not self._speaks:
            return
        if self.config.objective_facts.evaluates == "reward":
            self._log(iteration, {f"{part} reward": -loss})
            self.say(f" {part} reward at iteration {iteration}: {-loss:.4f} |")
            return
        record, line = {f"{part} loss": loss}, f" {part} loss at iteration {iteration} | lm loss value: {loss:.6E} |"
        if self.config.objective_facts.entropy:
            # torch gives infinity where math.exp raises OverflowError.
            perplexity = float(torch.tensor(loss).exp())
            record[f"{part} perplexity"] = perplexity
            line += f" lm loss PPL: {perplexity:.6E} |"
        self._log(iteration, record)
        self.say(line)

    def rest(self) -> None:
        """Report the steps since the last line, if there are any."""
        if self._speaks and self._window:
            self._report(self._progress)

    def close(self) -> None:
        """As :meth:`rest`; flush and close the sinks."""
        self.rest()
        if self._speaks:
            self._bar.close()
            for sink in self._sinks:
                sink.close(self.failed)


def log_line(config: Config, iteration: int, record: Mapping[str, float]) -> str:
    """The line of an iteration: Megatron's up to the nan iterations, for scripts that parse it, then this project's.

    There is no fp16, so the loss scale is always 1.

    Args:
        iteration: the one the line is about.
        record: what was measured, by the names of ``metrics.jsonl``; "MFU", in [0, 1], only where the device's peak
            is known.
    """
    speed = record["TFLOP/s per process"]
    # Megatron's names and number formats: log parsers match them.
    parts = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {iteration:8d}/{config.training.train_iters:8d}",
        f"consumed samples: {record['consumed samples']:12d}",
        f"elapsed time per iteration (ms): {1000 * record['seconds per iteration']:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {speed:.{1 if speed >= 1 else 4}f}",
        f"learning rate: {record['learning rate']:.6E}",
        f"global batch size: {record['global batch size']:5d}",
        f"lm loss: {record['lm loss']:.6E}",
        f"loss scale: {1.0:.1f}",
        f"grad norm: {record['grad norm']:.3f}",
        f"number of skipped iterations: {record['skipped iterations']:3d}",
        f"number of nan iterations: {record['nan iterations']:3d}",
        f"tokens/s: {record['tokens/s']:.0f}",
        f"peak memory (GB): {record['peak memory (GB)']:.2f}",
    ]
    parts += [f"{name}: {record[name]:.3f}" for name in ("MFU", "goodput") if name in record]
    return " | ".join(parts) + " |"


LONGEST = 200
"""Characters of a short line."""


def short_line(
    config: Config,
    iteration: int,
    record: Mapping[str, float],
    epochs: float | None = None,
    metrics: Mapping[str, float] = MappingProxyType({}),
) -> str:
    """The line of an iteration for people: what matters most first, and no more than fits.

    Args:
        iteration, record: as of :func:`log_line`.
        epochs: passes over the data so far; None: they never repeat.
        metrics: what the objective measures besides.
    """
    last = config.training.train_iters or iteration
    changing = config.data.rampup_batch_size is not None or config.data.step_batch_size_schedule is not None
    left = timedelta(seconds=round((last - iteration) * record["seconds per iteration"]))
    parts = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {iteration}/{last}",
        *([] if epochs is None else [f"epoch {epochs:.2f}"]),
        f"lm loss: {record['lm loss']:.6E}",
        f"grad norm: {record['grad norm']:.3f}",
        f"learning rate: {record['learning rate']:.3E}",
        *([f"global batch size: {record['global batch size']:.0f}"] if changing else []),
        *([f"skipped: {record['skipped iterations']:.0f}"] if record["skipped iterations"] else []),
        f"left: {left}",
        f"tokens/s: {record['tokens/s']:.0f}",
        *(f"{name}: {value:.4f}" for name, value in metrics.items()),
        f"peak memory (GB): {record['peak memory (GB)']:.2f}",
        *(f"{name}: {record[name]:.3f}" for name in ("MFU", "goodput") if name in record),
    ]
    line = parts[0]
    for part in parts[1:]:
        # " |" ends the line, and has to fit as well.
        if len(line) + len(" | ") + len(part) + len(" |") > LONGEST:
            break
        line = f"{line} | {part}"
    return line + " |"


def _peak_resident_bytes() -> int:
    """Largest resident size of this process so far (Linux counts it in KiB)."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
