"""--dry-run --suggest: flags that make a run fit into a device's memory, the cheapest first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from smp.config import Config, ConfigError, Layout, resolve
from smp.config.batch import count_micro_batches
from smp.config.command_line.commands import tool
from smp.models.arithmetic import forward_flops
from smp.training.cost.memory import MemoryEstimate
from smp.training.cost.model_share import Tuned
from smp.training.cost.offload import activation_copies, host_step_seconds, trained_parameters

RATE = 450e12
"""FLOP/s of a device in bf16 products, such as an H100 reaches; half of it in fp32."""
BANDWIDTH = 2.7e12
"""Bytes per second of its memory that kernels reach."""
FAR = 0.1
"""Share of the device's memory: where the formula is nearer than that to the limit, a step is tried."""
TOO_HIGH = 0.25
"""As :data:`FAR`, for rows cheaper than all that fit, of which the first would be chosen. The formula is up to a fifth
too high, for zb-v of a few layers."""
_RECOMPUTE: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")

Estimate = Callable[[Config], MemoryEstimate]
Measure = Callable[[Config], int | None]
"""Bytes on the device in a step that is tried; None: it takes too long."""


@dataclass(frozen=True)
class Suggestion:
    """Memory-saving flags, and the memory and time of a run with them.

    Attributes:
        flags: in addition to the others of the run.
        device: bytes on the device.
        is_tried: they are those of a step on tensors without data, not of the formula.
        seconds: of a step, more than without any of them.
    """

    flags: str
    device: int
    seconds: float
    is_tried: bool = False

    @property
    def order(self) -> tuple[float, bool, int]:
        """The cheapest first; of those that cost the same, what was tried."""
        return self.seconds, not self.is_tried, self.device


def suggestions(
    config: Config,
    world_size: int,
    tuned: Tuned,
    estimate: Estimate,
    measure: Measure = lambda config: None,
    limit: float | None = None,
) -> list[Suggestion]:
    """Every combination of recompute and offload that the run can have, the cheapest first.

    A step that is tried takes seconds, the formula none. With a limit only those are tried of which the formula does
    not say clearly whether they fit, and the cheapest that fits.

    Args:
        config: resolved. What it says of these flags is left out.
        estimate: of the rank that needs most memory, by formula.
        measure: the same, tried.
        limit: bytes of the device; None: all are tried.
    """
    estimated = []
    for tried in _combinations(config, world_size):
        memory = estimate(tried)
        seconds = _seconds(tried, Layout.from_config(tried.parallel, world_size), tuned, memory)
        estimated.append((tried, Suggestion(_flags(tried), memory.total, seconds)))
    found: list[Suggestion] = []
    # Cheapest first: an expensive step is tried only where no cheaper row is known to fit.
    for tried, row in sorted(estimated, key=lambda pair: pair[1].order):
        if limit is None or _is_open(row.device / limit, any(one.device <= limit for one in found)):
            device = measure(tried)
            row = row if device is None else replace(row, device=device, is_tried=True)
        found.append(row)
    return sorted(found, key=lambda row: row.order)


def _is_open(share: float, one_fits: bool) -> bool:
    """Whether the formula's ``share`` of the device leaves the question open. Until a row fits, all that may fit are
    tried."""
    return 1 - FAR < share < 1 + FAR if one_fits else share < 1 + TOO_HIGH


def _combinations(config: Config, world_size: int) -> Iterator[Config]:
    # At most 12 combinations.
    for recompute, activations, host in itertools.product(_RECOMPUTE, (False, True), (False, True)):
        parallel = replace(
            config.parallel,
            recompute_granularity=recompute,
            offload_activations=activations,
            activation_loading_horizon=2,
            min_offloaded_tensor_size=type(config.parallel).min_offloaded_tensor_size,
        )
        optim = replace(config.optim, optimizer_cpu_offload=host)
        try:
            yield resolve(replace(config, parallel=parallel, optim=optim), world_size)
        except ConfigError:
            continue  # not together with what else the run has


def _flags(config: Config) -> str:
    parallel, words = config.parallel, []
    if parallel.recompute_granularity != "none":
        words.append(f"--recompute-granularity {parallel.recompute_granularity}")
    if parallel.offload_activations:
        words.append("--offload-activations")
    if config.optim.optimizer_cpu_offload:
        words.append("--optimizer-cpu-offload")
    return " ".join(words) or "none of them"


def _rate(config: Config) -> float:
    return RATE if config.parallel.bf16 else RATE / 2


def _seconds(config: Config, layout: Layout, tuned: Tuned, memory: MemoryEstimate) -> float:
    """Seconds of a step for what is computed again, for copies that are waited for, and for the optimizer's steps on
    the host."""
    data, parallel, model = config.data, config.parallel, config.model
    copies = activation_copies(config, layout, tuned)
    again = {"none": 0.0, "full": copies.forward / _rate(config)}
    if parallel.recompute_granularity == "selective":
        split = layout.tp if parallel.sequence_parallel else 1
        width = 10 * model.hidden_size // split + 3 * (model.ffn_hidden_size or 0) // layout.tp
        tokens = tuned.rows * data.micro_batch_size * (data.seq_length or 0) // layout.cp
        # Cheap operations wait for memory: bytes, not FLOPs, say how long they take.
        again["selective"] = tokens * width * (2 if parallel.bf16 else 4) / BANDWIDTH  # norms, activation, residuals
    seconds = copies.layers * again[parallel.recompute_granularity]
    if parallel.offload_activations:
        seconds += copies.exposed(_rate(config), recompute=parallel.recompute_granularity == "full")
    micro_batches = count_micro_batches(data, layout.data_parallel)
    host = (
        host_step_seconds(trained_parameters(config, layout, tuned, memory))
        if config.optim.optimizer_cpu_offload
        else 0.0
    )
    return seconds * micro_batches + host


def describe_suggestions(
    config: Config, world_size: int, tuned: Tuned, estimate: Estimate, measure: Measure
) -> list[str]:
    """The table as lines; those that fit into --suggest GiB first."""
    limit = config.training.suggest
    assert limit is not None, "asked for"
    layout = Layout.from_config(config.parallel, world_size)
    flops = forward_flops(config.model, config.data.seq_length or 1)
    tokens = tuned.rows * (config.data.global_batch_size or 1) * (config.data.seq_length or 1)
    # Forward and backward: 3 times the forward FLOPs.
    step = 3 * (sum(flops.layers) + flops.head) * tokens / layout.world_size / _rate(config)
    rows = suggestions(config, world_size, tuned, estimate, measure, limit * 2**30)
    some, untried = any(row.is_tried for row in rows), sum(not row.is_tried for row in rows)
    by = "memory in steps on tensors without data, time" if some else "both"
    fitting = [row for row in rows if row.device <= limit * 2**30]
    lines = [
        f"flags that save memory, the cheapest first of those that fit into {limit:g} GiB (time next to a step's "
        f"{step:.3f} s of products at {_rate(config) / 1e12:.0f} TFLOP/s; {by} by formula):",
        *(
            f"  {'~' if some and not row.is_tried else ' '}{row.device / 2**30:8.2f} GiB  "
            f"{100 * row.seconds / step:+7.1f} %  {'fits' if row in fitting else 'too much'}  {row.flags}"
            for row in [*fitting, *(row for row in rows if row not in fitting)]
        ),
    ]
    if some and untried:
        lines.append(f"~: by formula, and not tried: more than {FAR:.0%} of the device away from what fits")
    if not fitting:
        lines.append(f"none of them fits: {tool('plan')} looks for a layout that shares the model among more processes")
    return lines
