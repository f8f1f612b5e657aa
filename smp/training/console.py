"""What a run tells its user: log lines, a progress bar, and records for the metric sinks. Rank 0 speaks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from tqdm import tqdm

from smp.config import Config, Layout
from smp.models.arithmetic import training_flops_per_token
from smp.training.device_peak import peak_flops
from smp.training.metrics import MetricsLog, log_line
from smp.training.trainer import Progress, StepResult


class Console:
    """Reports steps and evaluations; on ranks other than 0 it does nothing.

    Args:
        config: resolved settings.
        layout: degrees, for the number of processes that share the work.
        rank: of this process.
        device: whose memory and peak rate are reported.
        iteration: where the run starts; records after it are left-overs of a lost part and dropped.
        work: FLOPs of a step, relative to pretraining on as many tokens.
    """

    def __init__(
        self, config: Config, layout: Layout, rank: int, device: torch.device, iteration: int, work: float = 1.0
    ) -> None:
        self.config, self.layout, self.device = config, layout, device
        self._speaks = rank == 0
        self._window: list[StepResult] = []
        self._progress = Progress()
        if not self._speaks:
            return
        assert config.model.vocab_size is not None and config.data.seq_length is not None
        flops = training_flops_per_token(config.model, config.data.seq_length, config.model.vocab_size)
        self._tflop_per_token = work * flops / layout.world_size / 1e12  # of each process
        self._metrics = MetricsLog(Path(config.logging.log_dir), config.logging, iteration)
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
            tqdm.write(line)

    def step(self, progress: Progress, result: StepResult) -> None:
        """Note a step; every --log-interval iterations, and for the last ones at the end, write a line and a record.

        A skipped step is said at once. ``progress`` may be a step ahead of ``result``.
        """
        if not self._speaks:
            return
        self._progress = progress
        self._bar.update(1)
        self._window.append(result)
        if result.skipped:
            self.say(
                f"iteration {result.iteration}: loss {result.loss} or grad norm {result.grad_norm} is not finite; "
                "step skipped"
            )
        if result.iteration % self.config.logging.log_interval == 0:
            self._report(progress)

    def _report(self, progress: Progress) -> None:
        last_step = self._window[-1]
        finite = [r for r in self._window if not r.skipped]
        last = finite[-1] if finite else last_step
        tokens = sum(r.num_tokens for r in self._window) / len(self._window)
        waited = sum(r.waited for r in self._window) / len(self._window)
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
            "TFLOP/s per process": self._tflop_per_token * tokens / seconds,
            **self._device_record(self._tflop_per_token * tokens / seconds),
            **last_step.metrics,
        }
        self._window.clear()
        self._metrics.log(last_step.iteration, record)
        self.say(log_line(self.config, last_step.iteration, record) + _texts(last_step.metrics))

    def _device_record(self, rate: float) -> dict[str, float]:
        """Memory, and the fraction of the peak rate where that is known."""
        if self.device.type != "cuda":
            return {"peak memory (GB)": _peak_resident_bytes() / 1e9}
        record = {"peak memory (GB)": torch.cuda.max_memory_allocated() / 1e9}
        peak = peak_flops(torch.cuda.get_device_name(), "bf16" if self.config.parallel.bf16 else "fp32")
        return record | ({"MFU": rate * 1e12 / peak} if peak else {})

    def evaluation(self, iteration: int, loss: float, part: str = "validation") -> None:
        """Report a loss in nats per token on a part of the data that is not trained on."""
        if not self._speaks:
            return
        perplexity = float(torch.tensor(loss).exp())
        self._metrics.log(iteration, {f"{part} loss": loss, f"{part} perplexity": perplexity})
        self.say(f" {part} loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} |")

    def close(self) -> None:
        """Report the steps since the last line, flush and close the sinks."""
        if self._speaks:
            if self._window:
                self._report(self._progress)
            self._bar.close()
            self._metrics.close()


def _texts(metrics: Mapping[str, float]) -> str:
    return "".join(f" {name}: {value:.6f} |" for name, value in metrics.items())


def _peak_resident_bytes() -> int:
    """Largest resident size of this process so far (Linux counts it in KiB)."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
