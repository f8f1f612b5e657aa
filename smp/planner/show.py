"""Layouts for the user: a table, and a plot of where the time goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from smp.models.arithmetic import training_flops_per_token
from smp.pipeline.stage_plan import plan_pipeline
from smp.planner.devices import GIB, Device
from smp.planner.search import Candidate, shortened
from smp.planner.uncertainty import as_good_as_the_first, relative_error
from smp.training.cost.model_share import PRETRAINED
from smp.training.cost.offload import bytes_on_host

WORDS = {
    "products": "matrix products",
    "attention": "attention",
    "elementwise": "reading and writing memory",
    "tensor": "tensor-parallel collectives",
    "context": "context-parallel exchange",
    "experts": "rows on their way to experts",
    "data": "gathers of weights and reductions of gradients",
    "bubble": "waiting in the pipeline",
    "optimizer": "optimizer",
    "host": "issuing operations",
    "offload": "activations on their way to the host and back",
}
"""Names of a step's parts for the user."""


def mfu(found: Candidate, device: Device) -> float:
    """Model FLOPs utilization: the share of the device's peak that the model's FLOPs take. That peak is bf16's, with
    FP8, too, or TF32's where the run is in fp32."""
    model, length = found.config.model, found.config.data.seq_length
    assert model.vocab_size is not None and length is not None
    # Without recompute, as MFU is defined (PaLM, arXiv 2204.02311).
    flops = found.tokens_per_second() * training_flops_per_token(model, length, model.vocab_size)
    return flops / device.peak_of(bf16=found.config.parallel.bf16)


def what_binds(found: Candidate) -> str:
    """The two largest parts apart from matrix products."""
    assert found.time is not None
    parts = Counter(vars(found.time))
    del parts["products"]
    shares = ((WORDS[name], 100 * seconds / found.time.total) for name, seconds in parts.most_common(2))
    return ", ".join(f"{name} {share:.0f} %" for name, share in shares if share >= 1)


def table(best: Sequence[Candidate], device: Device) -> str:
    """A table, fastest first, with half of the interval around the step time."""
    lines = [f"{'step':>9}{'':8}{'tokens/s/GPU':>14}{'MFU':>8}{'memory':>11}  flags"]
    for found in best:
        assert found.time is not None
        lines.append(
            f"{found.time.total:7.3f} s ±{100 * relative_error(found.time, device.errors):3.0f} %"
            f"{found.tokens_per_second():15,.0f}{100 * mfu(found, device):6.1f} %"
            f"{found.memory.total / GIB:7.1f} GiB  {found.flags or '(as given)'}"
        )
        lines.append(f"{'':53}besides matrix products: {what_binds(found)}")
    return "\n".join(lines)


def draw(best: Sequence[Candidate], path: str) -> None:
    """A bar chart of where the time of each step goes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 0.5 * len(best) + 1.6), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(best)
    for name, words in WORDS.items():
        seconds = [getattr(found.time, name) for found in best]
        # Parts below 0.5 % everywhere would only fill the legend.
        if max(seconds) > 0.005 * max(found.time.total for found in best if found.time):
            axes.barh(range(len(best)), seconds, left=left, label=words)
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    axes.set_yticks(
        range(len(best)), [found.flags.replace(" --", "\n--", 1) or "(as given)" for found in best], fontsize=6
    )
    axes.invert_yaxis()
    axes.set_xlabel("predicted time of a step (seconds)")
    figure.legend(loc="outside upper center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=150)


def on_the_host(found: Candidate, device: Device) -> str:
    """A line about what waits in the host's memory; "": nothing does."""
    config, layout = found.config, found.layout
    plan = plan_pipeline(shortened(config, layout), layout) if layout.pp > 1 else None
    size = bytes_on_host(config, layout, plan, PRETRAINED, found.memory)
    if not size:
        return ""
    each = min(device.devices_per_node, layout.world_size)
    return (
        f"The first layout takes {size * each / GIB:.1f} GiB of each host's memory, {size / GIB:.1f} for each GPU; "
        "whether a host has that is not checked."
    )


def undecided(best: Sequence[Candidate], device: Device) -> str:
    """A line that says whether the first layout is really faster; "" for a single one."""
    alike = as_good_as_the_first(best, device.errors)
    if len(best) < 2:
        return ""
    if alike == 1:
        return "The first layout is faster than the others by more than the prediction's error."
    said = f"{alike} of these {len(best)}, the first counted, cannot be told apart"
    return f"{said}: they differ by less than the prediction's error."
