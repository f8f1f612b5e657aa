"""How many samples an optimizer step takes: a constant, or a number that grows with the samples consumed.

Both ways of Megatron's to say so become one table of (samples consumed, size from there on):

- ``--step-batch-size-schedule "0:16 2.4B:320"`` is that table, with tokens instead of samples.
- ``--rampup-batch-size`` start increment samples: with n = (final - start) / increment, the batch grows by the
  increment after every samples / n consumed samples.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from smp.config.schema import ConfigError, DataConfig

_FACTORS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_SHOWN = 6


@dataclass(frozen=True)
class BatchSizes:
    """Samples of a step as a function of the samples consumed before it.

    Attributes:
        parts: (consumed samples, size of the steps from there on), ascending, the first from 0 on.
    """

    parts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, data: DataConfig) -> BatchSizes:
        """The batch sizes of settings whose global batch is resolved.

        Raises:
            ConfigError: they do not say how the batch gets to --global-batch-size.
        """
        final, ramp, table = data.global_batch_size, data.rampup_batch_size, data.step_batch_size_schedule
        assert final is not None, "resolved before"
        if ramp is not None and table is not None:
            raise ConfigError("--rampup-batch-size and --step-batch-size-schedule are both given; give one")
        if table is None:
            # A batch without ramp or table is a schedule of one part.
            return cls(((0, final),) if ramp is None else _ramp(ramp, final))
        sizes = scheduled(data)
        # Learning rate and memory are planned for --global-batch-size: it must be the size that is
        # reached.
        if sizes.largest != final:
            raise ConfigError(
                f"--global-batch-size {final} with --step-batch-size-schedule {table}: its largest batch is "
                f"{sizes.largest}; leave --global-batch-size out"
            )
        return sizes

    def __call__(self, consumed: int) -> int:
        """Samples of the step that begins after ``consumed`` samples."""
        return self.parts[bisect_right(self.parts, consumed, key=lambda part: part[0]) - 1][1]

    @property
    def largest(self) -> int:
        """The largest size."""
        return max(size for _, size in self.parts)

    @property
    def constant(self) -> bool:
        """Whether all steps have the same size."""
        return len(self.parts) == 1

    def ahead(self, consumed: int = 0) -> list[int]:
        """The sizes of all steps that begin after ``consumed`` samples or later, without repetition."""
        parts = pairwise((*self.parts, (math.inf, 0)))
        return list(dict.fromkeys(size for (_, size), (end, _) in parts if consumed < end))

    def steps(self, samples: int, consumed: int = 0) -> int:
        """Number of steps after ``consumed`` samples until at least ``samples`` are consumed in all."""
        count = 0
        for (_, size), (end, _) in pairwise((*self.parts, (samples, 0))):
            # Rounded up: the step that crosses a border keeps the size it began with.
            steps = -(-max(0, min(samples, end) - consumed) // size)
            # It may also overshoot the border, and the next part begins later.
            consumed, count = consumed + steps * size, count + steps
        return count

    def ending(self, samples: int, consumed: int = 0) -> BatchSizes:
        """The same schedule with a last step that takes exactly what is left before ``samples``, counted after
        ``consumed``. Only where sizes change and what is left is a multiple of the greatest common divisor of all
        sizes: every layout that takes these takes it. Else the last step is whole."""
        count = self.steps(samples, consumed)
        start = consumed
        for _ in range(count - 1) if not self.constant else ():
            start += self(start)
        left = samples - start
        if self.constant or not 0 < left < self(start) or left % math.gcd(*(size for _, size in self.parts)):
            return self
        return BatchSizes((*(part for part in self.parts if part[0] < start), (start, left)))

    def samples(self, steps: int) -> int:
        """Samples that the first ``steps`` steps consume."""
        consumed = 0
        for (_, size), (end, _) in pairwise(self.parts):
            taken = min(steps, -(-max(0, end - consumed) // size))
            consumed, steps = consumed + taken * size, steps - taken
        return consumed + steps * self.parts[-1][1]

    def describe(self) -> list[str]:
        """Lines for the user: one, or none for a constant size."""
        if self.constant:
            return []
        texts = [f"{size} from sample {start:,} on" for start, size in self.parts]
        left_out = texts[_SHOWN - 1 : -1] if len(texts) > _SHOWN else []
        shown = texts if not left_out else [*texts[: _SHOWN - 1], f"({len(left_out)} more)", texts[-1]]
        return [f"global batch size: {', '.join(shown)}"]


def count_micro_batches(data: DataConfig, data_parallel: int, size: int | None = None) -> int:
    """Number of micro-batches that every data-parallel process computes in a step.

    Where the samples do not fill them all, the last ones are filled up, on as many processes as it takes: every process
    takes part in the same collectives, whatever its share is.

    Args:
        data: resolved.
        data_parallel: processes that see different samples.
        size: samples of the step; None: --global-batch-size.
    """
    size = data.global_batch_size if size is None else size
    assert size is not None, "resolved before"
    return -(-size // (data.micro_batch_size * data_parallel))


def uneven_in_words(data: DataConfig, data_parallel: int, sizes: Iterable[int]) -> list[str]:
    """Lines for the user where samples do not fill all micro-batches: one, or none."""
    rows = {
        size: count_micro_batches(data, data_parallel, size) * data.micro_batch_size * data_parallel for size in sizes
    }
    uneven = {size: padded for size, padded in rows.items() if padded > size}
    if not uneven:
        return []
    # The worst ratio of filler rows is reported.
    size, padded = max(uneven.items(), key=lambda item: (item[1] - item[0]) / item[1])
    return [
        f"uneven shares: {size} samples on {data_parallel} data-parallel processes in micro-batches of "
        f"{data.micro_batch_size} fill {size} of {padded} rows; the other rows are padding"
    ]


def scheduled(data: DataConfig) -> BatchSizes:
    """The schedule of --step-batch-size-schedule. As in Megatron, pairs may come in any order and be separated by
    commas.

    Raises:
        ConfigError: it is no such schedule.
    """
    text, length = data.step_batch_size_schedule, data.seq_length
    assert text is not None and length is not None, "asked for, and resolved before"
    said = f"--step-batch-size-schedule {text}"
    # Tokens to samples, rounded down.
    parts = sorted((_number(tokens, said) // length, _number(size, said)) for tokens, size in _pairs(text, said))
    starts = [start for start, _ in parts]
    if not starts or starts[0] != 0:
        raise ConfigError(f"{said}: the first pair must be 0:SIZE")
    if len(set(starts)) < len(starts):
        raise ConfigError(f"{said}: two pairs begin at one sample of --seq-length {length} tokens")
    if any(size < 1 for _, size in parts):
        raise ConfigError(f"{said}: a batch has at least one sample")
    return BatchSizes(tuple(parts))


def _pairs(text: str, said: str) -> list[tuple[str, str]]:
    entries = [entry.partition(":") for entry in text.replace(",", " ").split()]
    if not all(colon for _, colon, _ in entries):
        raise ConfigError(f"{said}: give pairs of tokens and samples, such as 0:16 2.4B:320")
    return [(tokens, size) for tokens, _, size in entries]


def _number(text: str, said: str) -> int:
    """``2.4B`` as 2,400,000,000, with Megatron's arithmetic (float times factor)."""
    digits, factor = (text[:-1], _FACTORS[text[-1:].upper()]) if text[-1:].upper() in _FACTORS else (text, 1)
    try:
        return int(float(digits) * factor)
    except (ValueError, OverflowError):
        raise ConfigError(f"{said}: {text!r} is no number, which may end with K, M, B or T") from None


def _ramp(text: str, final: int) -> tuple[tuple[int, int], ...]:
    words = text.split()
    if len(words) != 3 or not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"--rampup-batch-size {text}: give three numbers above 0: start, increment and samples")
    start, increment, samples = map(int, words)
    if start >= final or (final - start) % increment:
        raise ConfigError(
            f"--rampup-batch-size {text}: steps of {increment} do not lead from {start} up to "
            f"--global-batch-size {final}"
        )
    count = (final - start) // increment
    # A ramp of fewer samples than sizes passes some over: of those that begin at one sample the last one counts.
    # Part k begins where k / count of the ramp's samples are consumed, rounded up.
    table = {-(-part * samples // count): start + part * increment for part in range(count + 1)}
    return tuple(table.items())
