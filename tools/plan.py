"""Find a layout to train a model on some GPUs: command-line flags, ranked by predicted step time.

    python tools/plan.py --model llama3-70b --gpus 64 --gpu h100 --seq-length 8192 --global-batch-size 256
    python tools/plan.py --model llama3-8b --gpus 8 --gpu a100 --tensor-model-parallel-size 2 --top 5 --output plan.png
    python tools/plan.py --model debug --vocab-size 512 --gpus 2 --gpu cpu --global-batch-size 8
    python tools/plan.py --model llama3-8b --gpus 8 --gpu h100 --mtbf-hours 60 --save-seconds 2 --recovery-seconds 300

Flags of pretrain_gpt.py are kept as given; the rest (tensor, pipeline and context parallelism, schedule,
sharding, recompute, micro-batch size) is tried. Memory is --dry-run's estimate, time a roofline with stated shares of
what data sheets promise: docs/planning.md has both, and how far off predictions of published runs are. --output draws
where the time goes. Nothing is run, and no GPU is needed. --gpu cpu is this machine with --gpus processes: the
operators and collectives of a step are timed first, about half a minute. --mtbf-hours, --save-seconds and
--recovery-seconds also give the best --save-interval and the goodput that failures leave (docs/watching.md).
"""

from __future__ import annotations

import math
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from smp.checkpoint.folders.retention import best_interval
from smp.config import Config, ConfigError, load_config
from smp.config.command_line.cli import read_values
from smp.config.command_line.command import CommandParser, run_tool
from smp.config.command_line.entry_points import PRETRAIN
from smp.models.arithmetic import training_flops_per_token
from smp.models.presets import PRESETS
from smp.planner.devices import DEVICES, GB, GIB, Device
from smp.planner.goodput import predicted_shares
from smp.planner.search import FREE, Candidate, candidates, ranked

CPU = "cpu"
"""The kind of GPU that is none: this machine's processor."""

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
"""Parts of a step as a user reads them."""


def read_arguments(argv: Sequence[str] | None) -> tuple[Any, list[str]]:
    """This tool's options, and the flags of training."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--gpus", type=int, required=True, help="number of GPUs (with --gpu cpu: of processes)")
    parser.add_argument("--gpu", choices=[CPU, *sorted(DEVICES)], required=True, help="kind of GPU")
    parser.add_argument("--gpus-per-node", type=int, help="GPUs per node (default: 8)")
    parser.add_argument("--node-bandwidth", type=float, help="GB/s that each GPU can send to other nodes")
    parser.add_argument("--mtbf-hours", type=float, help="mean time between failures of the whole job, in hours")
    parser.add_argument("--save-seconds", type=float, help="how long a save stops the training")
    parser.add_argument("--recovery-seconds", type=float, help="from a failure to the first step of the next start")
    parser.add_argument("--top", type=int, default=10, help="number of layouts to show")
    parser.add_argument("--output", help="file for a picture of where the time goes (png, svg, pdf)")
    return parser.parse_known_args(argv)


def device_of(given: Any) -> Device:
    """The kind of GPU, with what the user knows better."""
    device = DEVICES[given.gpu]
    if given.gpus_per_node is not None:
        device = replace(device, devices_per_node=given.gpus_per_node)
    if given.node_bandwidth is not None:
        device = replace(device, node_link=given.node_bandwidth * GB)
    return device


def asked_for(flags: Sequence[str], gpus: int) -> Config:
    """Settings that were decided, and without a batch size four samples on each GPU."""
    config = load_config([*flags, "--dry-run"], PRESETS)
    data = config.data
    if config.model.vocab_size is None:
        raise ConfigError("the size of the vocabulary is missing: give --vocab-size")
    if data.global_batch_size is None and data.step_batch_size_schedule is None:
        config = replace(config, data=replace(config.data, global_batch_size=4 * gpus))
    if not (data.mock_data or data.data_path or data.data_args_path or data.train_data_path):
        config = replace(config, data=replace(config.data, mock_data=True))
    return config


def mfu(found: Candidate, device: Device) -> float:
    """Share of the device's peak that model FLOPs take."""
    model, length = found.config.model, found.config.data.seq_length
    assert model.vocab_size is not None and length is not None
    return found.tokens_per_second() * training_flops_per_token(model, length, model.vocab_size) / device.peak


def what_binds(found: Candidate) -> str:
    """The two largest parts beside matrix products."""
    assert found.time is not None
    parts = Counter(vars(found.time))
    del parts["products"]
    shares = ((WORDS[name], 100 * seconds / found.time.total) for name, seconds in parts.most_common(2))
    return ", ".join(f"{name} {share:.0f} %" for name, share in shares if share >= 1)


def table(best: Sequence[Candidate], device: Device) -> str:
    """Fastest first."""
    lines = [f"{'step':>9}{'tokens/s/GPU':>14}{'MFU':>8}{'memory':>11}  flags"]
    for found in best:
        assert found.time is not None
        lines.append(
            f"{found.time.total:7.3f} s{found.tokens_per_second():14,.0f}{100 * mfu(found, device):6.1f} %"
            f"{found.memory.total / GIB:7.1f} GiB  {found.flags or '(as given)'}"
        )
        lines.append(f"{'':44}beside matrix products: {what_binds(found)}")
    return "\n".join(lines)


def draw(best: Sequence[Candidate], path: str) -> None:
    """Bars of where the time of each step goes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 0.5 * len(best) + 1.6), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(best)
    for name, words in WORDS.items():
        seconds = [getattr(found.time, name) for found in best]
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


def _check_failures(given: Any) -> None:
    """Raise ConfigError unless all that goodput is a function of is given, or nothing."""
    flags = {"--mtbf-hours": given.mtbf_hours, "--save-seconds": given.save_seconds}
    flags["--recovery-seconds"] = given.recovery_seconds
    missing = [flag for flag, value in flags.items() if value is None]
    if missing and len(missing) < len(flags):
        raise ConfigError(f"goodput needs {' and '.join(missing)}, too")
    for flag, value in flags.items():
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{flag} {value} has to be a number of at least 0")
    if given.mtbf_hours == 0:
        raise ConfigError("--mtbf-hours 0 has to be above 0")


def failures_in_words(given: Any, step: float) -> str:
    """How often to save, and the goodput with that; ``step`` is how long one takes, in seconds."""
    mtbf, save, recovery = 3600 * given.mtbf_hours, given.save_seconds, given.recovery_seconds
    steps = max(1, round(best_interval(save, mtbf) / step))
    shares = predicted_shares(steps * step, save, recovery, mtbf)
    rest = ", ".join(f"{name} {100 * getattr(shares, name):.1f} %" for name in ("save", "rerun", "recovery"))
    return (
        f"With a failure every {given.mtbf_hours:g} h: --save-interval {steps} (every {steps * step:,.0f} s of steps), "
        f"goodput {100 * shares.productive:.1f} %, predicted ({rest})"
    )


def _check(given: Any) -> None:
    _check_failures(given)
    for flag, value in (("gpus", given.gpus), ("top", given.top), ("gpus-per-node", given.gpus_per_node)):
        if value is not None and value < 1:
            raise ConfigError(f"--{flag} {value} has to be at least 1")
    if given.node_bandwidth is not None and given.node_bandwidth <= 0:
        raise ConfigError(f"--node-bandwidth {given.node_bandwidth} has to be above 0")
    if given.gpu == CPU:
        for flag, value in (("gpus-per-node", given.gpus_per_node), ("node-bandwidth", given.node_bandwidth)):
            if value is not None:
                raise ConfigError(f"--{flag} has no effect with --gpu cpu, which is this machine")
        return
    each = device_of(given).devices_per_node
    if given.gpus > each and given.gpus % each:
        raise ConfigError(f"--gpus {given.gpus} is no number of whole nodes of {each}; see --gpus-per-node")


def _check_fp8(asked: Config, gpu: str, device: Device) -> None:
    parallel = asked.parallel
    if parallel.fp8_format is None:
        return
    if parallel.fp8_emulate:
        raise ConfigError("--fp8-emulate: its time is not predicted on a GPU; leave it out, or give --gpu cpu")
    if not device.fp8_peak:
        able = ", ".join(name for name, one in sorted(DEVICES.items()) if one.fp8_peak)
        raise ConfigError(f"--fp8-format {parallel.fp8_format}: {gpu} has no FP8 products; {able} have")


def predicted(given: Any, flags: Sequence[str]) -> tuple[list[Candidate], int, Device]:
    """Layouts that fit, fastest first; how many were tried; and what was predicted for.

    Raises:
        ConfigError: none works, or none fits.
    """
    on_cpu, why = given.gpu == CPU, list[ConfigError]()
    asked, decided = asked_for(flags, given.gpus), set(read_values(flags, PRETRAIN, ""))
    if on_cpu:
        from smp.planner.measured import this_machine, timed

        device = this_machine(given.gpus)
        decided.add("recompute_granularity")  # it saves memory, which a processor has
    else:
        device = device_of(given)
        _check_fp8(asked, given.gpu, device)
    found = list(candidates(asked, given.gpus, device, decided, why))
    fitting = ranked(found)
    if not found:
        raise ConfigError(f"no layout of {given.gpus} GPUs can train this: {why[0]}")
    if not fitting:
        least = min(found, key=lambda one: one.memory.total)
        helps = not (on_cpu or asked.optim.optimizer_cpu_offload) and asked.optim.optimizer == "adam"
        more = "; try --optimizer-cpu-offload, which is only taken when given" if helps else ""
        raise ConfigError(
            f"none of {len(found)} layouts fits into {(1 - FREE) * device.memory / GIB:.1f} GiB of {given.gpus} GPUs "
            f"({100 * FREE:.0f} % of their memory stays free); the least needs {least.memory.total / GIB:.1f} GiB: "
            f"{least.flags or '(as given)'}{more}"
        )
    if on_cpu:
        measured, times = timed(fitting, given.gpus, lambda line: print(line, file=sys.stderr, flush=True))
        fitting, device = ranked(measured), replace(device, peak=times.product_rate())
    return fitting, len(found), device


def command(given: Any, flags: Sequence[str], best: Candidate, device: Device) -> str:
    """The line that starts ``best``."""
    nodes, each = -(-given.gpus // device.devices_per_node), min(given.gpus, device.devices_per_node)
    several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if nodes > 1 else ""
    decided = read_values(flags, PRETRAIN, "")
    batch = [] if "global_batch_size" in decided else [f"--global-batch-size {best.config.data.global_batch_size}"]
    threads = ""
    if given.gpu == CPU:
        from smp.planner.measured import threads_of

        threads = f"OMP_NUM_THREADS={threads_of(each)} "  # as measured; torchrun would set 1
    start = f"{threads}torchrun {several}--nproc-per-node {each} pretrain_gpt.py"
    return " ".join([start, shlex.join(flags), *batch, best.flags]).rstrip()


def plan(argv: Sequence[str] | None) -> None:
    """Print the table, and the first line as a command."""
    given, flags = read_arguments(argv)
    _check(given)
    if given.gpu != CPU and "bf16" not in read_values(flags, PRETRAIN, ""):
        flags = [*flags, "--bf16"]
    fitting, tried, device = predicted(given, flags)
    best = fitting[: given.top]
    how = "predicted from times of what they call" if given.gpu == CPU else "predicted, not measured"
    print(f"{len(fitting)} of {tried} layouts fit; {how}:\n{table(best, device)}")
    print(f"\nCommand of the first layout; add data and --train-iters:\n{command(given, flags, best[0], device)}")
    if given.mtbf_hours is not None:
        assert best[0].time is not None
        print(f"\n{failures_in_words(given, best[0].time.total)}")
    if given.output:
        draw(best, given.output)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code, see :mod:`smp.config.command_line.command`."""
    return run_tool(lambda: plan(argv))


if __name__ == "__main__":
    sys.exit(main())
