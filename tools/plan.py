"""Find a layout to train a model on some GPUs: command-line flags, ranked by predicted step time.

    python tools/plan.py --model llama3-70b --gpus 64 --gpu h100 --seq-length 8192 --global-batch-size 256
    python tools/plan.py --model llama3-8b --gpus 8 --gpu a100 --tensor-model-parallel-size 2 --top 5 --output plan.png
    python tools/plan.py --model debug --vocab-size 512 --gpus 2 --gpu cpu --global-batch-size 8
    python tools/plan.py --model llama3-8b --gpus 8 --gpu h100 --mtbf-hours 60 --save-seconds 2 --recovery-seconds 300
    python tools/plan.py --model llama3-70b --gpus 64 --gpu h100 --tokens 1e12 --gpu-hour-price 2.5
    python tools/plan.py --model llama3-8b --gpus 64 --gpu h100 --scaling weak strong --csv curve.csv --curve curve.png
    python tools/plan.py --model llama3-8b --gpus 8 --gpu h100 --what-if "--recompute-granularity full"
    python tools/plan.py --gpus 1 --gpu cpu --measure this_machine.yaml

Flags of pretrain_gpt.py are kept as given; the rest (tensor, pipeline and context parallelism, schedule,
sharding, recompute, micro-batch size) is tried. Memory is --dry-run's estimate, time a roofline with stated shares of
what data sheets promise: docs/planning.md has both, and how far off predictions of published runs are. --output draws
where the time goes. Nothing is run, and no GPU is needed. --gpu cpu is this machine with --gpus processes: the
operators and collectives of a step are timed first, about half a minute. --mtbf-hours, --save-seconds and
--recovery-seconds also give the best --save-interval and the goodput that failures leave (docs/watching.md); the rest,
networks, costs, curves and device files, is in docs/planning.md.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smp.config import Config, ConfigError, load_config
from smp.config.command_line.cli import read_values
from smp.config.command_line.command import CommandParser, run_tool
from smp.config.command_line.entry_points import PRETRAIN
from smp.models.presets import PRESETS
from smp.planner.devices import DEVICES, GB, GIB, Device
from smp.planner.goodput import Reliability
from smp.planner.outlook import Outlook, Saving
from smp.planner.scaling import curve, write_csv
from smp.planner.scaling import draw as draw_curves
from smp.planner.search import FREE, FREE_IN_PIPELINE, Candidate, candidates, ranked
from smp.planner.show import WORDS, draw, on_the_host, table, undecided
from smp.planner.what_if import difference

EVERYTHING = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "pipeline_schedule"),
    *("expert_model_parallel_size", "recompute_granularity", "micro_batch_size", "sequence_parallel"),
    *("hybrid_shard_degree", "data_parallel_sharding_strategy"),
)
"""What is tried unless it is decided: with --what-if all of it is."""
ALWAYS = ("save", "rerun", "recovery")
"""Shares of the time that are named even where they are none."""
CPU = "cpu"
"""The kind of GPU that is none: this machine's processor."""

KNOWN_BETTER = {
    "gpus_per_node": "devices_per_node",
    "node_bandwidth": "node_link",
    "nvlink_domain": "domain",
    "leaf_gpus": "leaf",
    "oversubscription": "oversubscription",
    "contention": "contention",
    "watts": "watts",
}
"""Options and the fields of ``Device`` that they set."""
EXPERTS_IN_BF16 = (
    "Mixtures of experts in bf16 are what the formula knows least: with published runs of Megatron it is off by 53 % "
    "(median, Blackwell) and 110 % (the one on Hopper); see docs/planning-errors.md."
)
TOP = 10
"""Layouts that are shown unless --top says how many."""
OF_A_RUN = (
    *("tokens", "gpu_hour_price", "watts", "mtbf_hours", "save_seconds", "recovery_seconds", "spares", "repair_hours"),
    *("step_spread_percent", "what_if", "top", "output"),
)
"""Options that say more of ranked layouts: curves and measurements have none."""


def read_arguments(argv: Sequence[str] | None) -> tuple[Any, list[str]]:
    """This tool's options, and the flags of training."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--gpus", type=int, required=True, help="number of GPUs (with --gpu cpu: of processes)")
    parser.add_argument(
        "--gpu",
        required=True,
        type=_kind,
        metavar="KIND",
        help=f"kind of GPU: {', '.join([CPU, *sorted(DEVICES)])}, or a file that --measure wrote",
    )
    parser.add_argument("--gpus-per-node", type=int, help="GPUs per node (default: 8)")
    parser.add_argument("--node-bandwidth", type=float, help="GB/s that each GPU can send to other nodes")
    network = parser.add_argument_group("the network")
    network.add_argument("--nvlink-domain", type=int, help="GPUs that NVLink connects (default: by the kind of GPU)")
    network.add_argument("--leaf-gpus", type=int, help="GPUs below one set of leaf switches (default: all)")
    network.add_argument("--oversubscription", type=float, help="of the spine: all cards together, relative to it")
    network.add_argument("--contention", type=float, help="of the spine other jobs leave one part in so many")
    parser.add_argument("--mtbf-hours", type=float, help="mean time between failures of the whole job, in hours")
    parser.add_argument("--save-seconds", type=float, help="how long a save stops the training")
    parser.add_argument("--recovery-seconds", type=float, help="from a failure to the first step of the next start")
    parser.add_argument("--spares", type=int, help="nodes that take the place of those that failed (default: enough)")
    parser.add_argument("--repair-hours", type=float, help="mean time until a node that failed is back")
    parser.add_argument("--step-spread-percent", type=float, help="standard deviation of one GPU's step time")
    parser.add_argument("--tokens", type=float, help="tokens to train on in all, as 15e12: days, GPU hours, energy")
    parser.add_argument("--gpu-hour-price", type=float, help="with --tokens: price of a GPU hour")
    parser.add_argument("--watts", type=float, help="with --tokens: what a GPU and its share of the rest take")
    parser.add_argument("--what-if", metavar="FLAGS", help="flags that change the first layout: what changes, and why")
    parser.add_argument("--scaling", nargs="+", choices=["weak", "strong"], help="scaling curves up to --gpus")
    parser.add_argument("--csv", help="with --scaling: file for its points (default: printed)")
    parser.add_argument("--curve", help="with --scaling: file for a picture of it (png, svg, pdf)")
    parser.add_argument("--measure", metavar="FILE", help="measure one device of this machine, write FILE, and stop")
    parser.add_argument("--top", type=int, help=f"number of layouts to show (default: {TOP})")
    parser.add_argument("--output", help="file for a picture of where the time goes (png, svg, pdf)")
    return parser.parse_known_args(argv)


def _kind(word: str) -> str:
    """A kind of GPU in any case, or a file's name as it is."""
    return word.lower() if word.lower() in (CPU, *DEVICES) else word


def device_of(given: Any) -> Device:
    """The kind of GPU, with what the user knows better."""
    if given.gpu in DEVICES:
        device = DEVICES[given.gpu]
    elif Path(given.gpu).is_file():
        from smp.planner.measure import read_device

        device = read_device(Path(given.gpu))
    else:
        kinds = ", ".join([CPU, *sorted(DEVICES)])
        raise ConfigError(f"--gpu {given.gpu} is none of {kinds}, and no file that --measure wrote")
    known: dict[str, Any] = {
        name: getattr(given, flag) for flag, name in KNOWN_BETTER.items() if getattr(given, flag) is not None
    }
    if "node_link" in known:
        known["node_link"] *= GB
    # NVLink then connects a node of another size, but where it connects a rack, whatever its nodes are.
    if given.gpus_per_node is not None and given.nvlink_domain is None and device.domain <= device.devices_per_node:
        known["domain"] = 0
    return replace(device, **known)


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
    _check_more_of_failures(given)


def _check_more_of_failures(given: Any) -> None:
    """What says more of failures needs them, and is a number that makes sense."""
    flags = {"--spares": given.spares, "--repair-hours": given.repair_hours}
    flags["--step-spread-percent"] = given.step_spread_percent
    for flag, value in flags.items():
        if value is not None and given.mtbf_hours is None:
            raise ConfigError(f"{flag} needs --mtbf-hours, --save-seconds and --recovery-seconds")
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{flag} {value} has to be a number of at least 0")
    if (given.spares is None) != (given.repair_hours is None):
        raise ConfigError("--spares and --repair-hours say together how long a run waits for nodes: give both")


def reliability(given: Any) -> Reliability:
    """What the user says of failures."""
    return Reliability(
        3600 * given.mtbf_hours,
        given.save_seconds,
        given.recovery_seconds,
        given.spares or 0,
        3600 * (given.repair_hours or 0.0),
        (given.step_spread_percent or 0.0) / 100,
    )


def failures_in_words(given: Any, saving: Saving) -> str:
    """How often to save, and the goodput with that."""
    shares = vars(saving.shares)
    named = (name for name, share in shares.items() if name in ALWAYS or (share and name != "productive"))
    lost = ", ".join(f"{name} {100 * shares[name]:.1f} %" for name in named)
    return (
        f"With a failure every {given.mtbf_hours:g} h: --save-interval {saving.steps} (every {saving.seconds:,.0f} s "
        f"of steps), goodput {100 * saving.shares.productive:.1f} %, predicted ({lost})"
    )


def _check(given: Any) -> None:
    _check_failures(given)
    for name in ("gpus", "top", "gpus_per_node", "nvlink_domain", "leaf_gpus"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} has to be at least 1")
    for name in ("node_bandwidth", "tokens", "gpu_hour_price", "watts"):
        value = getattr(given, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} {value} has to be above 0")
    for name in ("oversubscription", "contention"):
        value = getattr(given, name)
        if value is not None and not 1 <= value < math.inf:
            raise ConfigError(f"--{name} {value} has to be at least 1")
    _check_idle(given)
    if given.what_if is not None:
        changed_by(given)
    if given.gpu == CPU:
        return
    device = device_of(given)
    each = device.devices_per_node
    if given.gpus > each and given.gpus % each:
        raise ConfigError(f"--gpus {given.gpus} is no number of whole nodes of {each}; see --gpus-per-node")


def _check_idle(given: Any) -> None:
    """Raise ConfigError for an option without another one that it needs, or with one that leaves it nothing to do."""
    for one, idle in (("measure", (*OF_A_RUN, "scaling", "csv", "curve")), ("scaling", OF_A_RUN)):
        for option in idle if getattr(given, one) is not None else ():
            if getattr(given, option) is not None:
                raise ConfigError(f"--{option.replace('_', '-')} has no effect with --{one}")
    for option, needed in (("gpu_hour_price", "tokens"), ("watts", "tokens"), ("csv", "scaling"), ("curve", "scaling")):
        if getattr(given, option) is not None and getattr(given, needed) is None:
            raise ConfigError(f"--{option.replace('_', '-')} has no effect without --{needed}")
    for option, spine in (("oversubscription", "leaf_gpus"), ("contention", "leaf_gpus")):
        if getattr(given, option) is not None and getattr(given, spine) is None:
            raise ConfigError(f"--{option} is of the spine between leaves: give --leaf-gpus, too")
    if given.gpu == CPU:
        for name in (*KNOWN_BETTER, "scaling", "what_if"):
            if getattr(given, name) is not None and name != "watts":
                raise ConfigError(f"--{name.replace('_', '-')} has no effect with --gpu cpu, which is this machine")


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
            f"({100 * FREE:.0f} % of their memory stays free, with a pipeline {100 * FREE_IN_PIPELINE:.0f} %); "
            f"the least needs {least.memory.total / GIB:.1f} GiB: "
            f"{least.flags or '(as given)'}{more}"
        )
    if on_cpu:
        measured, times = timed(fitting, given.gpus, lambda line: print(line, file=sys.stderr, flush=True))
        fitting, rate = ranked(measured), times.product_rate()
        # As a data sheet's, which is of bf16; products in fp32 were measured.
        device = replace(device, peak=rate / device.peak_of(bf16=asked.parallel.bf16) * device.peak)
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


def outlook(given: Any, best: Candidate, device: Device, goodput: float) -> str:
    """What all tokens take."""
    watts = given.watts or (None if given.gpu == CPU else device.watts or None)
    per_second = best.tokens_per_second() * given.gpus
    found = Outlook.of(given.tokens, per_second, given.gpus, goodput, price=given.gpu_hour_price, watts=watts)
    failures = "" if given.mtbf_hours is not None else "; failures cost nothing here: say how many with --mtbf-hours"
    return f"{given.tokens:g} tokens with the first layout: {found}{failures}"


def changed_by(given: Any) -> tuple[Any, list[str]]:
    """This tool's options with those of --what-if, and its flags of training.

    Raises:
        ConfigError: one of them changes no step.
    """
    try:
        words = shlex.split(given.what_if)
    except ValueError as error:
        raise ConfigError(f"--what-if {given.what_if!r}: {error}") from None
    changed, more = read_arguments(["--gpus", str(given.gpus), "--gpu", given.gpu, *words])
    for name, value in vars(changed).items():
        if value is not None and (name == "watts" or name not in ("gpus", "gpu", *KNOWN_BETTER)):
            raise ConfigError(f"--what-if: --{name.replace('_', '-')} changes no step")
    if changed.gpu == CPU:
        raise ConfigError("--what-if: --gpu cpu is measured, not predicted; plan for it by itself")
    for name, value in vars(given).items():
        if name not in ("what_if", "gpus", "gpu") and getattr(changed, name) is None:
            setattr(changed, name, value)
    _check(changed)
    return changed, more


def what_if(given: Any, flags: Sequence[str], best: Candidate) -> str:
    """The first layout with other flags, of training or of this tool."""
    changed, more = changed_by(given)
    start = [*flags, *shlex.split(best.flags), "--global-batch-size", str(best.config.data.global_batch_size)]
    asked = asked_for([*start, *more], changed.gpus)
    why = list[ConfigError]()
    decided = {*read_values([*start, *more], PRETRAIN, ""), *EVERYTHING}
    found = list(candidates(asked, changed.gpus, device_of(changed), decided, why))
    if not found:
        return f"With {given.what_if}: {why[0]}"
    return "\n".join([f"With {given.what_if}:", *difference(best, found[0], WORDS)])


def scale(given: Any, flags: Sequence[str]) -> None:
    """Write the curves."""
    asked, device = asked_for(flags, given.gpus), device_of(given)
    decided = set(read_values(flags, PRETRAIN, ""))
    curves = [curve(kind, asked, given.gpus, device, decided, _tell) for kind in dict.fromkeys(given.scaling)]
    if given.csv:
        with open(given.csv, "w", encoding="utf-8", newline="") as file:
            write_csv(curves, file)
    else:
        write_csv(curves, sys.stdout)
    if given.curve:
        draw_curves(curves, Path(given.curve))


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measure_device(given: Any) -> None:
    """Write what one device of this machine does."""
    import torch

    from smp.planner.measure import measured, write_device

    on_cpu = given.gpu == CPU
    if not on_cpu and not torch.cuda.is_available():
        raise ConfigError(
            f"--measure: this machine has no GPU to measure as {given.gpu}; --gpu cpu measures its processor"
        )
    base = Device(1.0, 1.0, 1.0, 1.0, 1.0) if on_cpu else device_of(given)
    found = measured(base, torch.device("cpu" if on_cpu else "cuda"))
    write_device(found, Path(given.measure))
    rate = found.peak * found.product_share / (2 if on_cpu else 1) / 1e12
    print(
        f"{given.measure}: products {rate:.3g} TFLOP/s ± {100 * found.errors.product:.0f} %, attention "
        f"{100 * found.attention_share / found.product_share:.0f} % of that ± {100 * found.errors.attention:.0f} %, "
        f"memory {found.bandwidth * found.memory_share / GB:.3g} GB/s ± {100 * found.errors.memory:.0f} %; "
        f"use it as --gpu {given.measure}"
    )


def plan(argv: Sequence[str] | None) -> None:
    """Print the table, and the first line as a command."""
    given, flags = read_arguments(argv)
    _check(given)
    if given.measure:
        if flags:
            raise ConfigError(f"{flags[0]} has no effect with --measure")
        measure_device(given)
        return
    if given.gpu != CPU and device_of(given).family != "cpu" and "bf16" not in read_values(flags, PRETRAIN, ""):
        flags = [*flags, "--bf16"]
    if given.scaling:
        scale(given, flags)
        return
    fitting, tried, device = predicted(given, flags)
    best = fitting[: given.top or TOP]
    how = "predicted from times of what they call" if given.gpu == CPU else "predicted, not measured"
    data = best[0].config.data
    size = f"a step has {data.global_batch_size:,} sequences of {data.seq_length:,} tokens"
    print(f"{len(fitting)} of {tried} layouts fit; {how}; {size}:\n{table(best, device)}")
    for line in (undecided(best, device), on_the_host(best[0], device)):
        if line:
            print(line)
    model, parallel = best[0].config.model, best[0].config.parallel
    if given.gpu != CPU and model.num_experts and parallel.fp8_format is None:
        print(EXPERTS_IN_BF16)
    print(f"\nCommand of the first layout; add data and --train-iters:\n{command(given, flags, best[0], device)}")
    _more(given, flags, best[0], device)
    if given.output:
        draw(best, given.output)


def _more(given: Any, flags: Sequence[str], best: Candidate, device: Device) -> None:
    """Failures, what a run costs, and what a change does."""
    assert best.time is not None
    goodput = 1.0
    if given.mtbf_hours is not None:
        saving = Saving.best(reliability(given), best.time.total, given.gpus)
        goodput = saving.shares.productive
        print(f"\n{failures_in_words(given, saving)}")
    if given.tokens is not None:
        print(f"\n{outlook(given, best, device, goodput)}")
    if given.what_if:
        print(f"\n{what_if(given, flags, best)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code, see :mod:`smp.config.command_line.command`."""
    return run_tool(lambda: plan(argv))


if __name__ == "__main__":
    sys.exit(main())
