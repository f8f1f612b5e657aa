"""tools/plan.py: every line that it prints starts, and its times follow from what they are made of."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from smp.config import Config, Layout, load_config, resolve
from smp.layers.heads.head import CHUNK_BYTES
from smp.models.arithmetic import training_flops_per_token
from smp.models.inventory import inventory
from smp.models.presets import PRESETS
from smp.pipeline.stage_plan import plan_pipeline
from smp.planner import measured
from smp.planner.devices import DEVICES, Device
from smp.planner.machine import MachineTimes, timed_calls
from smp.planner.outlook import Saving
from smp.planner.record import Calls
from smp.planner.search import candidates, ranked
from smp.planner.seconds import StepTime
from smp.planner.step_time import StepModel, _offloaded
from smp.planner.update import update_seconds
from smp.training.cost.memory import kept_by_blocks, largest_memory
from smp.training.cost.offload import HOST_ADAM
from smp.training.cost.weight_memory import trained_by_muon
from smp.training.settings import read_settings
from tools.plan import _check_failures, asked_for, failures_in_words, main, read_arguments, reliability

EIGHT = "--gpus 8 --gpu h100 --model llama3-8b --seq-length 8192 --global-batch-size 32"
IDEAL = Device(
    peak=1e15,
    memory=1e15,
    bandwidth=1e30,
    local_link=1e30,
    node_link=1e30,
    tiles=1,
    product_share=1.0,
    attention_share=1.0,
    memory_share=1.0,
    link_share=1.0,
    latency=0.0,
    launch=0.0,
)
"""Computes at its peak and does nothing else."""


DECIDED = {"pipeline_model_parallel_size", "pipeline_schedule"}


def config_of(flags: str) -> Config:
    return load_config(["--model", "llama3-8b", "--mock-data", "--bf16", "--dry-run", *flags.split()], PRESETS)


def config(flags: str, world: int) -> tuple[Config, Layout]:
    resolved = resolve(load_config([*flags.split(), "--bf16", "--dry-run", "--mock-data"], PRESETS), world)
    return resolved, Layout.from_config(resolved.parallel, world)


def test_the_printed_command_starts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    assert main([*EIGHT.split(), "--micro-batch-size", "2", "--top", "3", "--output", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.count("tokens/s/GPU") == 1 and out.count("besides matrix products") == 3
    assert "a step has 32 sequences of 8,192 tokens" in out.splitlines()[0]
    command = shlex.split(out.splitlines()[-1])
    assert command[:4] == ["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py"]
    started = read_settings([*command[4:], "--mock-data", "--train-iters", "1"], PRESETS, 8)
    assert started.data.micro_batch_size == 2 and started.data.global_batch_size == 32
    assert "<svg" in picture.read_text()


def test_a_schedule_of_batches_decides_the_batch() -> None:
    flags = ["--model", "llama3-8b", "--bf16", "--step-batch-size-schedule", "0:8 1M:4096"]
    assert asked_for(flags, 8).data.global_batch_size is None
    found = list(candidates(asked_for(flags, 8), 8, DEVICES["h100"], set()))
    assert found and {c.config.data.global_batch_size for c in found} == {4096}


def test_what_suits_no_layout_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--gpus 8 --gpu h100 --model llama3-8b --micro-batch-size 8"
    assert main([*flags.split(), "--seq-length", "999999"]) == 2
    assert "no layout of 8 GPUs can train this: --seq-length 999999" in capsys.readouterr().err


def test_a_batch_that_processes_do_not_divide_is_filled_up() -> None:
    """Three data-parallel processes of eight samples take as long as those of nine."""
    flags = ["--model", "llama3-8b", "--bf16", "--tensor-model-parallel-size", "2", "--global-batch-size"]
    decided = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size"}
    times = [
        [c.time.total for c in candidates(asked_for([*flags, size], 6), 6, DEVICES["h200"], decided) if c.time]
        for size in ("8", "9")
    ]
    assert times[0] and times[0] == times[1]


def test_what_was_decided_stays() -> None:
    asked = load_config(
        ["--model", "llama3-8b", "--mock-data", "--tensor-model-parallel-size", "2", "--bf16", "--dry-run"], PRESETS
    )
    asked = replace(asked, data=replace(asked.data, global_batch_size=32))
    found = list(candidates(asked, 8, DEVICES["h100"], {"tensor_model_parallel_size"}))
    assert {c.layout.tp for c in found} == {2} and len({c.layout.pp for c in found}) > 2
    times = [c.time.total for c in ranked(found) if c.time]
    assert times == sorted(times) and 1 < len(times) < len(found)


def test_gpipe_needs_memory_for_all_micro_batches() -> None:
    """Also of those that the simulation of its time leaves out."""
    flags = f"{EIGHT.replace('batch-size 32', 'batch-size 64')} --pipeline-model-parallel-size 4"
    asked = asked_for([*flags.split()[4:], "--pipeline-schedule", "gpipe"], 8)
    found = [c for c in candidates(asked, 8, DEVICES["h100"], DECIDED) if c.config.data.micro_batch_size == 1]
    assert found
    for c in found:
        plan = plan_pipeline(c.config, c.layout)
        assert c.memory == largest_memory(c.config, c.layout, CHUNK_BYTES["cuda"], plan), c.flags


def test_on_an_ideal_device_a_step_takes_its_flops() -> None:
    """Of products and attention; a backward pass of FlashAttention computes scores again, at 0.85 of the rate."""
    resolved, layout = config("--model llama3-8b --seq-length 8192 --global-batch-size 4", 1)
    time = StepModel(resolved, layout, IDEAL).predict()
    flops = training_flops_per_token(resolved.model, 8192, 128256)
    shared = time.attention * 3 / (1 + 2.5 / 0.85)
    assert (time.products + shared) * IDEAL.peak == pytest.approx(flops * 4 * 8192, rel=0.01)
    assert time.total == pytest.approx(time.products + time.attention)


@pytest.mark.parametrize(
    ("flags", "world", "part"),
    [
        ("--tensor-model-parallel-size 8 --sequence-parallel", 8, "tensor"),
        ("--pipeline-model-parallel-size 4 --global-batch-size 8", 4, "bubble"),
        ("--seq-length 512", 64, "data"),
        ("--context-parallel-size 8 --cp-comm-type all_gather", 8, "context"),
    ],
)
def test_each_way_to_split_costs_where_its_links_are_slow(flags: str, world: int, part: str) -> None:
    resolved, layout = config(f"--model llama3.2-1b {flags}", world)
    plan = plan_pipeline(resolved, layout) if layout.pp > 1 else None
    device = DEVICES["h100"]
    slow = replace(device, local_link=device.local_link / 100, node_link=device.node_link / 100)
    fast, late = (StepModel(resolved, layout, one, plan).predict() for one in (device, slow))
    assert getattr(late, part) > getattr(fast, part) and getattr(late, part) > 0
    assert late.products == fast.products


def test_what_does_not_fit_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpus", "1", "--gpu", "a100", "--model", "llama3-70b", "--top", "1"]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("error: none of")
        and "fits into 72.8 GiB of 1 GPUs (8 % of their memory stays free, with a pipeline 12 %); the least needs"
        in error
    )


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --recompute-granularity none",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --no-sequence-parallel",
    ],
)
def test_a_decision_for_the_default_stays(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EIGHT.split(), *flags.split(), "--micro-batch-size", "1"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "tokens/s" not in line and " GiB  " in line]
    assert lines and not any(word in line for line in lines for word in ("tensor", "pipeline", "sequence"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gpus 12 --gpu h100", "--gpus 12 is no number of whole nodes of 8"),
        ("--gpus 8 --gpu h100 --gpus-per-node 0", "--gpus-per-node 0 has to be at least 1"),
        ("--gpus 8 --gpu h100 --node-bandwidth 0", "--node-bandwidth 0.0 has to be above 0"),
        (
            "--gpus 8 --gpu h100 --tensor-model-parallel-size 3",
            "8 processes are not divisible by --tensor-model-parallel-size 3",
        ),
        ("--gpus 2 --gpu cpu --node-bandwidth 3", "--node-bandwidth has no effect with --gpu cpu"),
        (
            "--gpus 8 --gpu a100 --fp8-format hybrid",
            "a100 has no FP8 products; b200, b300, gb200, gb300, h100, h100-500w, h200, l40s have",
        ),
        ("--gpus 8 --gpu h100 --fp8-format hybrid --fp8-emulate", "--fp8-emulate: its time is not predicted"),
    ],
)
def test_what_cannot_be_planned(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*flags.split(), "--model", "llama3.2-1b"]) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_a_vocabulary_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpus", "2", "--gpu", "h100", "--model", "debug"]) == 2
    assert "give --vocab-size" in capsys.readouterr().err


def test_what_was_given_another_way_is_not_given_twice(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--gpus 8 --gpu h100 --model llama3.2-1b --seq-length 2048 --global-batch-size=32 --no-bf16 --top 1"
    assert main([*flags.split(), "--pipeline-model-parallel-size", "1"]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert command.count("--global-batch-size") == 1 and " --bf16" not in command


ONE = "--model llama3-8b --num-layers 8 --seq-length 8192 --global-batch-size 1"


def step_on_an_h200(flags: str) -> tuple[StepModel, StepTime]:
    resolved, layout = config(f"{ONE} {flags}", 1)
    model = StepModel(resolved, layout, DEVICES["h200"])
    return model, model.predict()


@pytest.mark.parametrize(
    ("flags", "measured"),
    [
        ("", 174.8),
        ("--fp8-format hybrid --fp8-recipe tensorwise", 133.3),
        ("--fp8-format hybrid --fp8-recipe delayed", 131.2),
        ("--fp8-format hybrid --fp8-recipe rowwise", 152.3),
        ("--recompute-granularity full", 229.4),
        ("--recompute-granularity full --offload-activations", 229.4),
        ("--offload-activations", 330.8),
    ],
)
def test_blocks_take_about_what_was_measured(flags: str, measured: float) -> None:
    """Milliseconds of eight blocks, benchmarks/results/blocks_gpu.txt: a feature costs or saves what it did there."""
    model, _ = step_on_an_h200(flags)
    milliseconds = 8e3 * (model.forward + model.backward).total
    assert milliseconds == pytest.approx(measured, rel=0.12 if flags == "--offload-activations" else 0.03)


def test_layers_left_in_bf16_take_their_time() -> None:
    """Two of eight: a quarter of what FP8 saves is gone."""
    plain, eight, mixed = (
        step_on_an_h200(flags)[0].forward.products
        for flags in ("", "--fp8-format hybrid", "--fp8-format hybrid --first-last-layers-bf16")
    )
    assert mixed == pytest.approx(eight + (plain - eight) / 4)


def test_an_optimizer_takes_what_its_state_and_its_work_take() -> None:
    """Beside AdamW's 40 bytes of a parameter: fewer of moments in bf16, one core of the host, Newton-Schulz."""
    device, parameters = DEVICES["h200"], 2_795_573_248
    times = {
        flags: step_on_an_h200(flags)[1].optimizer
        for flags in ("", "--exp-avg-dtype bf16", "--optimizer-cpu-offload", "--optimizer muon", "--optimizer sgd")
    }
    bandwidth = device.bandwidth * device.memory_share
    assert times[""] == pytest.approx(parameters * 40 / bandwidth)
    assert times["--exp-avg-dtype bf16"] == pytest.approx(parameters * 36 / bandwidth, rel=1e-3)
    assert times["--optimizer sgd"] == pytest.approx(parameters * 24 / bandwidth)
    assert times["--optimizer-cpu-offload"] == pytest.approx(parameters / HOST_ADAM)
    # Of a matrix (m, n), m <= n: 5 steps of 4 m^2 n + 2 m^3.
    sizes = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(4096, 14336)] * 3
    flops = 8 * sum(5 * (4 * m * m * n + 2 * m**3) for m, n in sizes)
    assert times["--optimizer muon"] - times[""] == pytest.approx(
        flops / (device.peak / 2 * device.product_share), rel=0.05
    )


MIXTURE = (
    "--vocab-size 32000 --num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --num-experts 16 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 4096 --global-batch-size 16 --max-position-embeddings 4096"
)


def test_experts_are_spread_where_that_pays(capsys: pytest.CaptureFixture[str]) -> None:
    decided = "--micro-batch-size 1 --pipeline-model-parallel-size 1 --recompute-granularity none --top 40"
    assert main(["--gpus", "8", "--gpu", "h100", *MIXTURE.split(), *decided.split()]) == 0
    out = capsys.readouterr().out
    assert "--expert-model-parallel-size 8" in out
    resolved, layout = config(f"{MIXTURE} --expert-model-parallel-size 4", 8)
    parts, slow = DEVICES["h100"], replace(DEVICES["h100"], local_link=1e9)
    spread, late = (StepModel(resolved, layout, device).predict() for device in (parts, slow))
    rows = 4096 * 2 * 2048 * 2  # bytes of a micro-batch's
    passes = 4 * 8 * 2  # all-to-alls of both passes, of each layer, of each micro-batch
    took = passes * (rows * 3 / 4 / (parts.local_link * parts.link_share) + 3 * parts.latency)
    assert spread.experts == pytest.approx(took) and late.experts > 100 * spread.experts
    alone, _ = config(MIXTURE, 8)
    together = StepModel(alone, Layout.from_config(alone.parallel, 8), parts).predict()
    assert together.experts == 0 and together.data > spread.data  # all experts are gathered instead


def test_on_an_ideal_device_experts_take_the_flops_of_those_that_a_token_gets() -> None:
    resolved, layout = config(f"{MIXTURE} --expert-model-parallel-size 8", 8)
    time = StepModel(resolved, layout, IDEAL).predict()
    flops = training_flops_per_token(resolved.model, 4096, 32000)
    shared = time.attention * 3 / (1 + 2.5 / 0.85)
    assert (time.products + shared) * IDEAL.peak == pytest.approx(flops * 2 * 4096, rel=0.01)


LATENT = (
    "--model deepseek-v2-lite --num-layers 4 --moe-layer-freq [0,1,1,1] --vocab-size 32000 --seq-length 4096 "
    "--kv-lora-rank 448 --ffn-hidden-size 11264 --moe-ffn-hidden-size 1536 --global-batch-size 4"
)


@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 2 --sequence-parallel"])
def test_on_an_ideal_device_latent_attention_takes_its_flops(flags: str) -> None:
    """Also where each of two processes has the down projections whole, for half of the tokens. (Widths are whole
    tiles.)"""
    world = 2 if flags else 1
    resolved, layout = config(f"{LATENT} {flags}", world)
    time = StepModel(resolved, layout, IDEAL).predict()
    flops = training_flops_per_token(resolved.model, 4096, 32000)
    shared = time.attention * 3 / (1 + 2.5 / 0.85)
    assert (time.products + shared) * IDEAL.peak == pytest.approx(flops * 4 * 4096 / world, rel=0.01)


def test_latent_attention_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{LATENT} --pipeline-model-parallel-size 1 --recompute-granularity none --micro-batch-size 1 --top 40"
    assert main(["--gpus", "4", "--gpu", "h100", *flags.split()]) == 0
    assert "--expert-model-parallel-size 4" in capsys.readouterr().out


LAST = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*6|t*10L"


@pytest.mark.parametrize(("flags", "world"), [("", 1), (LAST, 2)])
def test_further_predictions_take_their_flops(flags: str, world: int) -> None:
    """A block, a projection and the output matrix for each, alone and in the last stage of a pipeline."""
    times, flops = [], []
    for further in ("", "--mtp-num-layers 2"):
        resolved, layout = config(
            f"--model llama3.2-1b --seq-length 4096 --global-batch-size 8 {flags} {further}", world
        )
        plan = plan_pipeline(resolved, layout) if layout.pp > 1 else None
        times.append(StepModel(resolved, layout, IDEAL, plan).predict())
        flops.append(training_flops_per_token(resolved.model, 4096, 128256))
    plain, ahead = times
    shared = (ahead.attention - plain.attention) * 3 / (1 + 2.5 / 0.85)
    grown = (flops[1] - flops[0]) * 8 * 4096
    assert (ahead.products - plain.products + shared) * IDEAL.peak == pytest.approx(grown, rel=0.01)


def test_further_predictions_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EIGHT.split(), "--mtp-num-layers", "1", "--micro-batch-size", "1", "--top", "1"]) == 0
    assert "--mtp-num-layers 1" in capsys.readouterr().out


def test_this_machines_processor_is_planned_with_times_of_calls(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call takes a millisecond, so layouts with fewer calls come first. The times are measured elsewhere."""

    def calibrate(processes: int, steps: list[Calls], kinds: list[str], *, threads: int) -> MachineTimes:
        return MachineTimes(dict.fromkeys(timed_calls(steps), 1e-3), dict.fromkeys(kinds, 0.0))

    monkeypatch.setattr(measured, "calibrate", calibrate)
    sizes = "--vocab-size 60 --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16"
    decided = "--pipeline-model-parallel-size 1 --data-parallel-sharding-strategy optim"
    assert main(["--gpus", "2", "--gpu", "cpu", *sizes.split(), *decided.split(), "--global-batch-size", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "predicted from times" in lines[0] and lines[-1].startswith(
        "OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 pretrain_gpt.py"
    )
    assert "--micro-batch-size" in lines[-1] and not any("bf16" in line or "recompute" in line for line in lines)
    steps = [float(line.split()[0]) for line in lines if " GiB  " in line]
    assert steps == sorted(steps) and steps[0] < steps[-1] and len(steps) > 4
    # Nothing is a share of a data sheet: only the sum of the calls may be off.
    assert {re.findall(r"± *\d+ %", line)[0] for line in lines if " GiB  " in line} == {"± 16 %"}


def test_a_slow_network_keeps_tensor_parallelism_inside_of_a_node() -> None:
    asked = config_of("--global-batch-size 64")
    device = replace(DEVICES["h100"], devices_per_node=2)
    assert {c.layout.tp for c in candidates(asked, 8, device)} == {1, 2}


def test_muon_over_context_parallel_ranks_of_two_nodes_takes_the_link_between_them() -> None:
    """Shards lie over shard 4 x context parallelism 2, on nodes of four."""
    flags = "--model llama3-8b --num-layers 2 --global-batch-size 8 --optimizer muon --context-parallel-size 2"
    resolved, layout = config(flags, 8)
    assert (layout.dp_shard, layout.cp) == (4, 2)
    nodes = replace(DEVICES["h100"], devices_per_node=4)
    matrix = next(p for p in inventory(resolved.model) if trained_by_muon(resolved.optim, p))
    fast, slow = (update_seconds(resolved, layout, d, [(matrix, 1e6)]) for d in (nodes, replace(nodes, node_link=1e9)))
    assert slow > 2 * fast


def test_a_mean_block_is_offloaded_not_the_largest() -> None:
    flags = "--model llama3-8b --num-layers 4 --num-experts 8 --moe-layer-freq [0,0,0,1] --global-batch-size 1"
    resolved, layout = config(f"{flags} --offload-activations --activation-loading-horizon 1", 1)
    kept = kept_by_blocks(resolved, layout)
    assert len(set(kept)) == 2
    assert _offloaded(resolved, layout) == pytest.approx(sum(kept) / 4)


def test_what_waits_in_the_hosts_memory_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """16 bytes of each parameter: weight, gradient and both moments; and the activations of blocks that wait."""
    base = "--gpus 8 --gpu h100 --model llama3.2-1b --seq-length 2048 --pipeline-model-parallel-size 1 --top 1"
    base += " --tensor-model-parallel-size 1 --micro-batch-size 1 --recompute-granularity none"
    said = {}
    for flags in ("", "--optimizer-cpu-offload", "--offload-activations"):
        assert main([*base.split(), *flags.split()]) == 0
        said[flags] = re.findall(r"takes ([\d.]+) GiB of each host's memory", capsys.readouterr().out)
    resolved, layout = config("--model llama3.2-1b --seq-length 2048 --recompute-granularity none", 8)
    parameters = sum(math.prod(p.shape) for p in inventory(resolved.model))
    assert said[""] == [] and said["--optimizer-cpu-offload"] == [f"{16 * parameters / 2**30:.1f}"]
    away = 8 * (16 - resolved.parallel.activation_loading_horizon)
    kept = kept_by_blocks(resolved, layout)[0] / 2**30
    assert float(said["--offload-activations"][0]) == pytest.approx(away * kept, abs=0.06)


def test_goodput_and_how_often_to_save(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--model", "llama3-8b", "--gpus", "64", "--gpu", "h100", "--top", "1"]
    assert main([*base, "--mtbf-hours", "60", "--save-seconds", "2", "--recovery-seconds", "300"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("With a failure every 60 h: ")]
    found = re.search(r"--save-interval (\d+) \(every ([\d,]+) s of steps\), goodput ([\d.]+) %", line)
    assert found is not None
    assert float(found[2].replace(",", "")) == pytest.approx((2 * 2 * 60 * 3600) ** 0.5, rel=0.02)
    assert 98 < float(found[3]) < 99.9
    assert main([*base, "--mtbf-hours", "60"]) == 2
    assert "goodput needs --save-seconds and --recovery-seconds, too" in capsys.readouterr().err
    assert main([*base, "--mtbf-hours", "0", "--save-seconds", "2", "--recovery-seconds", "300"]) == 2
    assert "--mtbf-hours 0 has to be above 0" in capsys.readouterr().err


def test_goodput_of_saves_that_cost_nothing_and_of_failures_in_every_step() -> None:
    base = ["--gpus", "1", "--gpu", "h100", "--save-seconds", "0", "--recovery-seconds", "300", "--mtbf-hours"]
    for hours, words in (("60", "--save-interval 1 (every 10 s of steps), goodput 99."), ("1e-6", "goodput 0.0 %")):
        given, _ = read_arguments([*base, hours])
        _check_failures(given)
        assert words in failures_in_words(given, Saving.best(reliability(given), 10.0, 1))
