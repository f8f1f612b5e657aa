"""Lines about offloading: a note at the start of a run, bytes and seconds in a dry run."""

from __future__ import annotations

from dataclasses import dataclass

from smp.config import Config, Layout
from smp.config.rules.mtp import mtp_layers
from smp.models.arithmetic import forward_flops
from smp.pipeline.stage_plan import Plan
from smp.pipeline.validate_schedule import peak_activations
from smp.sharding.offload import Offload
from smp.training.cost.memory import MemoryEstimate, kept_by_blocks
from smp.training.cost.model_share import Tuned

LINK = 55e9
"""Bytes per second between the host and a device, each way: PCIe 5 with 16 lanes, as it is measured."""
HOST_ADAM = 1.7e9
"""Parameters per second of torch's fused AdamW on one core of a CPU, in fp32."""
ADAM_ON_HOST = 16
"""Bytes of a parameter in the host's memory: weight, gradient and both moments."""


@dataclass(frozen=True)
class ActivationCopies:
    """Activation copies of one micro-batch on one process.

    Attributes:
        block: bytes of a block that go each way.
        layers: blocks of the process.
        away: those that wait on the host at most, in a pipeline of all micro-batches under way.
        forward: FLOPs of a block's forward pass.
    """

    block: int
    layers: float
    away: float
    forward: float

    @property
    def seconds(self) -> float:
        """That a block's copy takes."""
        return self.block / LINK

    def exposed(self, flops_per_second: float, *, recompute: bool) -> float:
        """Seconds of a micro-batch that computation waits: each copy has one block's pass to hide behind, of which the
        backward one takes twice as long, and with recompute three times."""
        ahead = self.forward / flops_per_second
        # Recompute runs the block's forward pass again before its backward pass.
        back = (3 if recompute else 2) * ahead
        # What takes longer than the pass it runs in is waited for.
        return self.layers * (max(0.0, self.seconds - ahead) + max(0.0, self.seconds - back))


def activation_copies(config: Config, layout: Layout, tuned: Tuned, under_way: float = 1.0) -> ActivationCopies:
    """Compute what --offload-activations copies.

    Args:
        under_way: most micro-batches at once that have all of the process's blocks behind them and go backward later.
    """
    data, parallel = config.data, config.parallel
    assert data.seq_length is not None, "resolved before"
    layers = (config.model.num_layers + len(mtp_layers(config.model))) / layout.pp
    tokens = tuned.rows * data.micro_batch_size * data.seq_length // layout.cp
    return ActivationCopies(
        block=max(kept_by_blocks(config, layout, tuned)),
        layers=layers,
        # Blocks within the horizon stay on the device.
        away=max(0.0, layers * under_way - parallel.activation_loading_horizon),
        forward=forward_flops(config.model, data.seq_length).layer * tokens / layout.tp,
    )


def trained_parameters(config: Config, layout: Layout, tuned: Tuned, memory: MemoryEstimate) -> int:
    """Number of parameters that a process updates: its share of the adapters or of all weights."""
    if tuned.adapters:
        return tuned.adapters // layout.pp // (layout.dp_shard * layout.cp)
    # Bytes per trained parameter: the fp32 weight, and frozen copies in compute precision.
    return memory.parameters // (4 + tuned.copies * (2 if config.parallel.bf16 else 4))


def micro_batches_under_way(plan: Plan | None) -> float:
    """Most micro-batches at once that have all of a process's blocks behind them and go backward later."""
    if plan is None:
        return 1.0
    # Peaks count chunks; a process has ``stages / ranks`` of them for each micro-batch.
    return max(peak_activations(plan.training)) * plan.training.ranks / plan.training.stages


def bytes_on_host(config: Config, layout: Layout, plan: Plan | None, tuned: Tuned, memory: MemoryEstimate) -> int:
    """Bytes that a process keeps in the host's memory."""
    size = 0.0
    if config.parallel.offload_activations:
        copies = activation_copies(config, layout, tuned, micro_batches_under_way(plan))
        size += copies.away * copies.block
    if config.optim.optimizer_cpu_offload:
        size += ADAM_ON_HOST * trained_parameters(config, layout, tuned, memory)
    return int(size)


def host_step_seconds(parameters: int) -> float:
    """Seconds of --optimizer-cpu-offload after the backward pass: weights go while the host computes, on one core."""
    # Copies and the fused CPU step overlap; the longer one is what a step waits for.
    return max(4 * parameters / LINK, parameters / HOST_ADAM)


def describe_offload(config: Config, device_type: str) -> list[str]:
    """Lines for the start of a run."""
    parallel, lines = config.parallel, []
    if parallel.offload_activations:
        what = "inputs of blocks" if parallel.recompute_granularity == "full" else "activations of blocks"
        lines.append(
            f"offload: {what} wait for their backward pass in the host's memory, but for those of "
            f"{parallel.activation_loading_horizon} at a time"
            + (
                ""
                if parallel.recompute_granularity == "full"
                else f"; tensors of less than {parallel.min_offloaded_tensor_size:,} elements "
                "(--min-offloaded-tensor-size) stay"
            )
        )
    if config.optim.optimizer_cpu_offload:
        lines.append("offload: Adam's moments are in the host's memory, and its steps are computed there")
    if lines and device_type == "cpu":
        lines.append("offload: on a CPU the device's memory is the host's: copies are made, but save nothing")
    return lines


def offload_at_work(offload: Offload) -> list[str]:
    """Lines after the first step."""
    if offload.copier.bytes_out:
        return []
    nothing = "WARNING: --offload-activations has copied nothing:"
    if offload.most_live < offload.horizon:  # of a pipeline's process, whose blocks under way its schedule decides
        held = f"at most {offload.most_live} blocks have activations at once"
        return [f"{nothing} {held}, and --activation-loading-horizon {offload.horizon} keeps them all; give less"]
    return [f"{nothing} no block keeps a tensor of --min-offloaded-tensor-size elements; give a smaller one"]


def describe_savings(config: Config, layout: Layout, tuned: Tuned, trained: int, under_way: float = 1.0) -> list[str]:
    """Lines for a dry run: what is saved, in bytes, and what it costs, in time.

    Args:
        trained: parameters that the process updates.
        under_way: see :func:`activation_copies`.
    """
    lines = []
    if config.parallel.offload_activations:
        copies = activation_copies(config, layout, tuned, under_way)
        lines.append(
            f"offload of activations: {copies.away:.4g} blocks x {copies.block / 2**20:,.1f} MiB = "
            f"{copies.away * copies.block / 2**30:.3f} GiB wait on the host, not on the device; a block's copy takes "
            f"{1e3 * copies.seconds:.2f} ms each way at {LINK / 1e9:.0f} GB/s, hidden behind its forward pass up to "
            f"{copies.forward / copies.seconds / 1e12:,.0f} TFLOP/s of the device"
            + ("" if config.parallel.recompute_granularity == "full" else "; small tensors, which stay, are counted")
        )
    if config.optim.optimizer_cpu_offload:
        lines.append(
            f"offload of the optimizer: 8 bytes x {trained:,} parameters = {8 * trained / 2**30:.3f} GiB less on the "
            f"device, {ADAM_ON_HOST * trained / 2**30:.3f} GiB on the host; gradients are copied during the last "
            f"backward pass, then one core computes for {1e3 * trained / HOST_ADAM:.1f} ms and new weights come back, "
            f"4 bytes each, {4e3 * trained / LINK:.1f} ms at {LINK / 1e9:.0f} GB/s during it; that is not hidden"
        )
    return lines
