"""How many samples an optimizer step takes: one number, or one that grows with the samples consumed.

The ramp-up is Megatron's: with n = (final - start) / increment, the batch grows by the increment after every
samples / n consumed samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from smp.config.schema import ConfigError, DataConfig


@dataclass(frozen=True)
class BatchSizes:
    """Samples of a step as a function of the samples consumed before it.

    Attributes:
        final: samples of a step in the end.
        start: of the first one.
        increment: what the batch grows by.
        samples: consumed samples from which on the batch is ``final``.
    """

    final: int
    start: int
    increment: int = 1
    samples: int = 0

    @classmethod
    def of(cls, data: DataConfig) -> BatchSizes:
        """From settings whose global batch is resolved.

        Raises:
            ConfigError: --rampup-batch-size is not three numbers that lead to --global-batch-size.
        """
        final, text = data.global_batch_size, data.rampup_batch_size
        assert final is not None, "resolved before"
        if text is None:
            return cls(final, final)
        words = text.split()
        if len(words) != 3 or not all(word.isdecimal() and int(word) for word in words):
            raise ConfigError(f"--rampup-batch-size {text}: give three numbers above 0: start, increment and samples")
        start, increment, samples = map(int, words)
        if start >= final or (final - start) % increment:
            raise ConfigError(
                f"--rampup-batch-size {text}: steps of {increment} do not lead from {start} up to "
                f"--global-batch-size {final}"
            )
        return cls(final, start, increment, samples)

    def __call__(self, consumed: int) -> int:
        """Samples of the step before which ``consumed`` were."""
        if consumed >= self.samples:
            return self.final
        steps = consumed * ((self.final - self.start) // self.increment) // self.samples
        return self.start + steps * self.increment

    @property
    def sizes(self) -> range:
        """Every size, in order."""
        return range(self.start, self.final + 1, self.increment)

    def steps(self, samples: int) -> int:
        """Steps, from the first on, that consume at least so many samples."""
        consumed = count = 0
        parts = (self.final - self.start) // self.increment
        for part, size in enumerate(self.sizes[:-1]):
            end = min(samples, -(-(part + 1) * self.samples // parts))  # from here on the batch is larger
            steps = -(-max(0, end - consumed) // size)
            consumed, count = consumed + steps * size, count + steps
        return count + -(-max(0, samples - consumed) // self.final)
