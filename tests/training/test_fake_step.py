"""A step on fake tensors takes as much memory as a real one, and what is known by hand."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from smp.config import Layout
from smp.config.layers import layer_specs
from smp.config.objectives import ObjectiveConfig
from smp.config.rules.finetune import ALL_LINEAR
from smp.config.schema import LoraConfig
from smp.kernels import Kernels
from smp.kernels.experts import grouped
from smp.layers.context_parallel.cost import bytes_sent
from smp.layers.heads.head import CHUNK_BYTES
from smp.models.presets import PRESETS
from smp.pipeline.stage_plan import plan_pipeline
from smp.pipeline.validate_schedule import peak_activations, peak_losses
from smp.training.cost.fake_step import fake_gpu_step, fake_step
from smp.training.cost.memory import estimate_memory, largest_memory
from smp.training.cost.predict import tuned_parts
from smp.training.exchange import exchange_of, exchanged, recurrence_bytes
from smp.training.settings import read_settings
from tests.training.measured_memory import compare, fake, settings

PIPE = "--pipeline-model-parallel-size 2 --global-batch-size 8 "
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 192"
"""All on each rank: with expert parallelism the host waits for how many rows go where."""
CUT = [
    "--context-parallel-size 2 --cp-comm-type p2p",
    "--context-parallel-size 2 --cp-comm-type all_gather --bf16",
    "--context-parallel-size 2 --cp-comm-type a2a --recompute-granularity full --num-query-groups 2",
]
FINE = "--num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 64"
MANY = "--pipeline-model-parallel-size 2 --global-batch-size 16 "
BOTH_CUT = "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"
LAYOUTS = {
    1: [
        "",
        "--bf16",
        "--global-batch-size 6",
        "--bf16 --recompute-granularity full",
        "--recompute-granularity selective --num-query-groups 1",
        "--no-untie-embeddings-and-output-weights --optimizer sgd --sgd-momentum 0.9",
        "--offload-activations --min-offloaded-tensor-size 4096 --recompute-granularity none",
        "--offload-activations --activation-loading-horizon 1 --optimizer-cpu-offload --recompute-granularity full",
        "--optimizer muon",
        "--exp-avg-dtype fp8 --exp-avg-sq-dtype bf16",
        "--fp8-format hybrid --fp8-emulate",
        f"{EXPERTS} --global-batch-size 6 --moe-shared-expert-intermediate-size 64",
        f"{EXPERTS} --bf16 --recompute-granularity selective --moe-aux-loss-coeff 0.01",
    ],
    2: [
        "",
        "--bf16",
        "--bf16 --global-batch-size 12",
        "--tensor-model-parallel-size 2",
        "--optimizer muon",
        "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity selective",
        "--tensor-model-parallel-size 2 --sequence-parallel --bf16",
        f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel",
        PIPE,
        f"{PIPE} --bf16 --pipeline-schedule zb-v",
        f"{PIPE} --recompute-granularity full --offload-activations",
        *CUT,
        f"{FINE} --expert-model-parallel-size 2 --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
        "--data-parallel-sharding-strategy optim --bf16 --global-batch-size 12",
        "--data-parallel-sharding-strategy optim_grads --bf16 --global-batch-size 12",
        "--hybrid-shard-degree 1 --bf16",
        "--offload-activations --activation-loading-horizon 3 --min-offloaded-tensor-size 4096 --bf16",
        "--optimizer-cpu-offload --bf16 --global-batch-size 12",
        "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp8 --bf16 --global-batch-size 12",
        "--fp8-format hybrid --fp8-emulate --fp8-param-gather --bf16",
        "--fp8-format hybrid --fp8-emulate --fp8-recipe tensorwise --bf16 --recompute-granularity full",
    ],
    4: [
        "--hybrid-shard-degree 2 --recompute-granularity full",
        "--tensor-model-parallel-size 2 --sequence-parallel --bf16",
        f"{PIPE} --bf16 --pipeline-reshard",
        MANY,
        f"{MANY} --bf16 --pipeline-schedule interleaved",
        f"{MANY} --bf16 --pipeline-schedule zb-h1",
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --cp-comm-type p2p",
        "--hybrid-shard-degree 2 --bf16 --global-batch-size 24",
        "--hybrid-shard-degree 2 --data-parallel-sharding-strategy optim --bf16 --global-batch-size 24",
        "--tensor-model-parallel-size 2 --sequence-parallel --fp8-format hybrid --fp8-emulate --bf16",
        *(f"{BOTH_CUT} --bf16 {kind}" for kind in ("", "--cp-comm-type a2a", "--cp-comm-type all_gather")),
        f"{BOTH_CUT} --cp-comm-type a2a --recompute-granularity full",
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes '2 2' --bf16",
    ],
}


EXACT = {1: LAYOUTS[1], 2: [flags for flags in LAYOUTS[2] if PIPE in flags]}
"""One process, and pipelines of two."""
A_FEW = {1: [EXACT[1][i] for i in (3, 5, 7, 9, 12)], 2: EXACT[2][-1:]}
"""Recompute, tied matrices, both kinds of offload, moments of 8 bits, experts; and a pipeline that offloads."""


@pytest.mark.parametrize(
    "layouts", [A_FEW, pytest.param(EXACT, marks=[pytest.mark.slow, pytest.mark.timeout(900)])], ids=["a few", "all"]
)
def test_the_memory_of_one_process_and_of_pipelines(layouts: dict[int, list[str]], tmp_path: Path) -> None:
    limit = 270.0 if layouts is A_FEW else 400.0
    assert max(map(abs, compare(layouts, tmp_path, steps=3, timeout=limit))) < 0.003


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_memory_of_layouts(tmp_path: Path) -> None:
    assert len(compare(LAYOUTS, tmp_path, steps=12, timeout=1700)) >= 12


LLAMA = "--seq-length 8192 --micro-batch-size 1 --global-batch-size 8 --bf16 --mock-data --dry-run "


@pytest.mark.parametrize(
    ("world", "flags", "gib"),
    [
        (8, "--model llama3-8b", 43.6),
        pytest.param(
            64,
            "--model llama3-70b --tensor-model-parallel-size 8 --sequence-parallel",
            30.7,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_memory_of_models_that_was_added_up_by_hand(world: int, flags: str, gib: float) -> None:
    config = read_settings([*LLAMA.split(), *flags.split()], PRESETS, world)
    layout = Layout.from_config(config.parallel, world)
    found = fake_gpu_step(config, layout)
    assert found.peak / 2**30 == pytest.approx(gib, abs=0.05)


RECURRENCES = {
    "gated delta net": "--linear-attention-type gated_delta_net --linear-num-key-heads 4 --linear-num-value-heads 8 "
    "--linear-key-head-dim 16 --linear-value-head-dim 8",
    "kimi": "--linear-attention-type kda --linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 8 "
    "--linear-value-head-dim 8",
    "mamba2": "--linear-attention-type mamba2 --mamba-num-heads 8 --mamba-num-groups 4 --mamba-head-dim 8 "
    "--mamba-state-dim 16",
}


EXCHANGES = [*((mixer, kind, 4) for mixer in RECURRENCES for kind in ("p2p", "a2a")), ("kimi", "p2p", 2)]
"""Two ranks for one of them: how the bytes depend on their number is the same for all."""


@pytest.mark.parametrize(("mixer", "kind", "cp"), EXCHANGES)
def test_what_a_recurrence_exchanges_is_what_the_formula_says(mixer: str, kind: str, cp: int) -> None:
    """Of each micro-batch, each way as many, to the byte; and all are messages from process to process: gloo would make
    an all-reduce of a reduce-scatter, which sends twice as much. (a2a also gathers the tokens' numbers.)"""
    flags = f"{RECURRENCES[mixer]} --bf16 --context-parallel-size {cp} --cp-comm-type {kind} --global-batch-size 4"
    config = settings(f"{flags} --num-layers 1 --hidden-size 64 --seq-length 64", cp)
    traffic = fake(config, cp).counts.traffic
    states, heads = recurrence_bytes(config, layer_specs(config.model)[0].mixer)
    sent = {kind: of.sent for (group, kind), of in traffic.items() if group == "cp" and of.calls}
    assert sent.pop("all-to-all") == 2 * 2 * (heads if kind == "a2a" else states)
    assert sent.keys() == ({"all-gather"} if kind == "a2a" else set())


@pytest.mark.parametrize(
    ("kind", "cp", "recompute"),
    [("p2p", 4, "none"), ("all_gather", 2, "full"), ("a2a", 2, "none"), ("a2a+p2p", 4, "full")],
)
def test_what_attention_exchanges_is_what_the_formula_says(kind: str, cp: int, recompute: str) -> None:
    """Of each layer and micro-batch; a2a also gathers the tokens' numbers, once for all layers."""
    flags = f"--context-parallel-size {cp} --cp-comm-type {kind} --bf16 --num-query-groups 2 --global-batch-size 4 "
    sizes = "--hierarchical-context-parallel-sizes '2 2' " if kind == "a2a+p2p" else ""
    config = settings(f"{flags}{sizes}--num-layers 1 --recompute-granularity {recompute}", cp)
    counts = fake(config, cp).counts
    sent = sum(traffic.sent for (group, _), traffic in counts.traffic.items() if group == "cp")
    exchange, micro_batches = exchange_of(config, "cuda"), 2
    each = bytes_sent(exchange.kind, replace(exchanged(config), heads_group=exchange.heads_group))
    forward = each.forward * (2 if recompute == "full" else 1)
    tokens, group = 2 * 256 // cp, 2
    numbers = 8 * tokens * (group - 1) if "a2a" in kind else 0
    assert sent == (forward + each.backward + numbers) * micro_batches


FURTHER = "--num-layers 4 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 8 --seq-length 2048 "
FURTHER += "--vocab-size 32000 "


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        pytest.param(1, "", marks=pytest.mark.slow),
        (1, "--bf16 --recompute-granularity selective"),
        pytest.param(1, "--bf16 --no-untie-embeddings-and-output-weights", marks=pytest.mark.slow),
        pytest.param(4, "--bf16", marks=pytest.mark.slow),
        (4, "--bf16 --zero-hpz-partition-size 2"),
        (4, "--tensor-model-parallel-size 2 --sequence-parallel --bf16"),
    ],
)
def test_the_formula_follows_layers_that_predict_further(world: int, flags: str) -> None:
    """What each of two takes more, beside a step on fake tensors."""
    steps, estimates = [], []
    for more in ("", " --mtp-num-layers 1", " --mtp-num-layers 2"):
        config = settings(FURTHER + flags + more, world)
        layout = Layout.from_config(config.parallel, world)
        steps.append(fake_gpu_step(config, layout))
        estimates.append(estimate_memory(config, layout, CHUNK_BYTES["cuda"]))
    for step, estimate in zip(steps, estimates, strict=True):
        assert estimate.total == pytest.approx(step.peak, rel=0.03) and estimate.parameters == step.parameters
        assert estimate.secondary == pytest.approx(step.secondary, rel=1e-3)
    grown, said = (
        [two - one for one, two in pairwise(peaks)] for peaks in ([s.peak for s in steps], [e.total for e in estimates])
    )
    assert said == pytest.approx(grown, rel=0.2) and said[1] == pytest.approx(grown[1], rel=0.03)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("", marks=pytest.mark.slow),
        pytest.param("--pipeline-reshard", marks=pytest.mark.slow),
        "--num-experts 8 --moe-layer-freq [0,0,0,1] --moe-ffn-hidden-size 512",
    ],
)
def test_the_formula_follows_them_in_the_last_stage(flags: str) -> None:
    """Also where the stage has no layer of its own: what its layers are is read from the further ones."""
    config = settings(f"{FURTHER} {PIPE} --bf16 --mtp-num-layers 2 {flags}", 2)
    layout = Layout.from_config(config.parallel, 2)
    plan = plan_pipeline(config, layout)
    held, losses = peak_activations(plan.training)[1], peak_losses(plan.training)
    found = fake_gpu_step(config, layout, plan, 1)
    estimate = estimate_memory(config, layout, CHUNK_BYTES["cuda"], list(plan.stages_of(1).values()), held, losses)
    assert estimate.total == pytest.approx(found.peak, rel=0.03)


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_what_a_plan_says_of_the_last_stage_is_what_it_computes(recompute: str) -> None:
    """FLOPs with those of further predictions, whose matrices' gradients come in the forward pass."""
    flags = f"{FURTHER} {PIPE} --seq-length 128 --recompute-granularity {recompute} "
    flags += "--pipeline-model-parallel-layout Ett|ttL"
    said, counted = [], []
    for more in ("", " --mtp-num-layers 1", " --mtp-num-layers 2"):
        config = settings(flags + more, 2)
        layout = Layout.from_config(config.parallel, 2)
        plan = plan_pipeline(config, layout)
        said.append(plan.costs[1].total * plan.training.micro_batches)
        counted.append(fake_gpu_step(config, layout, plan, 1).counts.flops)
    for one in range(2):
        assert said[one + 1] - said[one] == pytest.approx(counted[one + 1] - counted[one], rel=0.005)


def test_experts_products_by_a_fused_kernel_count_as_pytorchs() -> None:
    config = settings("--num-experts 4 --moe-router-topk 2", 1)
    chosen = Kernels(), Kernels(grouped_gemm="triton")
    plain, fused = (fake_step(config, Layout(), kernels, "cuda") for kernels in chosen)
    assert fused.counts.flops == plain.counts.flops and fused.peak <= plain.peak


def test_auto_is_what_the_device_would_choose_and_gloo_copies() -> None:
    """A CPU's exchange on a CPU, where an all-gather and a reduce-scatter work on a copy of the whole tensor."""
    flags = f"{BOTH_CUT} --bf16 --cp-comm-type"
    chosen, told, heads = (settings(f"{flags} {kind}", 4) for kind in ("auto", "p2p", "a2a"))
    layout = Layout.from_config(chosen.parallel, 4)
    assert (exchange_of(chosen, "cpu").kind, exchange_of(chosen, "cuda").kind) == ("p2p", "a2a")
    on_cpu, on_gpu = fake(chosen, 4), fake_step(chosen, layout, Kernels(), "cuda")
    assert on_cpu.counts.traffic == fake(told, 4).counts.traffic != on_gpu.counts.traffic
    copies, none = (fake_step(heads, layout, Kernels(), device).peak for device in ("cpu", "cuda"))
    assert copies > 1.02 * none


@pytest.mark.parametrize(
    ("flags", "kind"), [("", "p2p"), ("--attention-chunk-size 32", "a2a"), ("--window-size 8", "a2a")]
)
def test_windows_and_chunks_choose_the_exchange_of_a_dry_run(flags: str, kind: str) -> None:
    """They are left out of its attention, and still say what attention sends."""
    sizes = "--num-layers 1 --hidden-size 512 --num-attention-heads 16 --num-query-groups 2 --seq-length 16384 --bf16 "
    flags = f"{sizes} --max-position-embeddings 16384 --context-parallel-size 4 {flags} --cp-comm-type"
    chosen, told = (settings(f"{flags} {way}", 4) for way in ("auto", kind))
    assert exchange_of(chosen, "cuda").kind == kind
    layout = Layout.from_config(chosen.parallel, 4)
    assert fake_gpu_step(chosen, layout).counts.traffic == fake_gpu_step(told, layout).counts.traffic


LATENT = "--multi-latent-attention --kv-lora-rank 128 --q-lora-rank 192 --qk-head-dim 32 --qk-pos-emb-head-dim 16 "
LATENT += "--v-head-dim 32 --qk-layernorm --normalization RMSNorm --bf16"


@pytest.mark.parametrize(
    ("tp", "recompute"),
    [
        (1, "none"),
        (2, "selective"),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1, "selective"), (2, "none"))),
    ],
)
def test_the_formula_follows_latent_attention(tp: int, recompute: str) -> None:
    """What two more blocks keep of each token until the loss."""
    flags = f"{LATENT} --recompute-granularity {recompute} --tensor-model-parallel-size {tp} "
    flags += "--sequence-parallel" if tp > 1 else ""
    steps, estimates = [], []
    for layers in (2, 4):
        config = settings(f"{flags} --num-layers {layers}", 2 * tp)
        layout = Layout.from_config(config.parallel, 2 * tp)
        step = fake_gpu_step(config, layout)
        steps.append(step.peaks["forward"] - step.parameters - step.optimizer)
        estimates.append(estimate_memory(config, layout, CHUNK_BYTES["cuda"]).activations)
    assert estimates[1] - estimates[0] == pytest.approx(steps[1] - steps[0], rel=0.02)


BESIDE = "--num-layers 3 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 8 --bf16 "
BESIDE += "--seq-length 2048 --micro-batch-size 2 --vocab-size 16000 "
MODELS = {
    "dense": "--num-query-groups 2",
    "latent": LATENT.removesuffix("--bf16"),
    "experts": "--num-query-groups 2 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1408",
}
FSDP, EP = (8, ""), (8, "--expert-model-parallel-size 8")
TP, PP = (2, "--tensor-model-parallel-size 2 --sequence-parallel"), (2, PIPE)
PAIRS = [(model, layout) for model in MODELS for layout in (FSDP, TP, PP)] + [("experts", EP)]
QUICK = [("latent", FSDP), ("experts", EP), ("dense", PP)]


@pytest.mark.parametrize(
    ("model", "layout"), [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in PAIRS]
)
def test_the_formula_is_near_the_step_and_orders_recompute(model: str, layout: tuple[int, str]) -> None:
    world, flags = layout
    said, found = [], []
    for recompute in ("none", "selective", "full"):
        config = settings(f"{BESIDE} {MODELS[model]} {flags} --recompute-granularity {recompute}", world)
        mesh = Layout.from_config(config.parallel, world)
        plan = plan_pipeline(config, mesh) if mesh.pp > 1 else None
        said.append(largest_memory(config, mesh, CHUNK_BYTES["cuda"], plan).total)
        found.append(max(fake_gpu_step(config, mesh, plan, rank).peak for rank in range(mesh.pp)))
    errors = [one / truth - 1 for one, truth in zip(said, found, strict=True)]
    print(model, flags, *(f"{100 * error:+.1f} %" for error in errors))
    assert all(-0.03 < error < 0.05 for error in errors), errors
    assert said == sorted(said, reverse=True)


SMALL_EXPERTS = "--num-query-groups 2 --num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 256 "
SHARDED = "--expert-model-parallel-size 2"
SPLIT = "--pipeline-model-parallel-size 2 --global-batch-size 16 --pipeline-schedule zb-h1"
GPIPE = "--pipeline-model-parallel-size 2 --global-batch-size 16 --pipeline-schedule gpipe"
TWO_STAGES, FULL = "--pipeline-model-parallel-size 2", "--recompute-granularity full"
MATH, CAPPED, KEYS = (
    "--attention-backend math",
    "--attn-logit-softcapping 50",
    "--context-parallel-size 4 --cp-comm-type",
)
SHORT = "--micro-batch-size 1 --seq-length 256 --global-batch-size 4"
WIDE = "--num-layers 4 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --seq-length 512"
MANY_EXPERTS = "--num-query-groups 2 --num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 512 "
MANY_EXPERTS += "--moe-shared-expert-intermediate-size 1024 --global-batch-size 16"
OVER_TP, UNEVEN = (
    "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
    "--pipeline-model-parallel-layout Et|tt|tt|tttL",
)
TIED = "--no-untie-embeddings-and-output-weights"
UNUSUAL = [
    (2, f"{SMALL_EXPERTS} {SHARDED}"),
    (2, f"{SMALL_EXPERTS} {SHARDED} --recompute-granularity full"),
    (4, f"{SMALL_EXPERTS} {SHARDED} --tensor-model-parallel-size 2 --sequence-parallel"),
    (2, "--global-batch-size 12"),
    (4, "--hybrid-shard-degree 2 --global-batch-size 24"),
    (2, "--hybrid-shard-degree 1 --global-batch-size 12"),
    (4, "--data-parallel-sharding-strategy optim_grads --global-batch-size 24"),
    (4, "--data-parallel-sharding-strategy optim --global-batch-size 24"),
    (4, "--data-parallel-sharding-strategy optim --recompute-granularity full"),
    (2, "--attention-dropout 0.1"),
    (2, "--offload-activations"),
    (2, "--optimizer-cpu-offload"),
    (2, "--optimizer muon"),
    (2, "--exp-avg-dtype fp8 --exp-avg-sq-dtype bf16"),
    (2, "--fp8-format hybrid"),
    (2, "--fp8-format hybrid --fp8-recipe rowwise --recompute-granularity selective"),
    (4, "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"),
    (4, "--context-parallel-size 4 --cp-comm-type p2p --recompute-granularity selective"),
    (4, SPLIT),
    (4, f"{SPLIT} --recompute-granularity full"),
    (4, f"{SPLIT.replace('zb-h1', 'zb-v')} --num-layers 4"),
    (2, "--kernels torch"),
    (2, "--position-embedding-type alibi"),
    (2, "--attn-logit-softcapping 50 --recompute-granularity full"),
    (2, GPIPE),
    (2, f"{GPIPE} --recompute-granularity full --global-batch-size 8"),
    (2, "--final-logit-softcapping 30"),
    (8, f"{TIED} {FULL}"),
    (2, f"{TIED} {FULL} --global-batch-size 12"),
    (2, f"{TWO_STAGES} --global-batch-size 2 {FULL}"),
    (4, f"{TWO_STAGES} --global-batch-size 4 {FULL}"),
    (2, f"{TWO_STAGES} --global-batch-size 2"),
    (2, f"{TWO_STAGES} --global-batch-size 4 --num-layers 4 --pipeline-schedule interleaved {FULL}"),
    (2, f"{GPIPE} {FULL}"),
    (8, f"{MODELS['experts']} {TWO_STAGES} --expert-model-parallel-size 4 --global-batch-size 32"),
    (2, "--attention-dropout 0.1 --recompute-granularity selective"),
    (2, f"--attention-dropout 0.1 {FULL}"),
    (2, f"--hidden-dropout 0.1 {FULL}"),
    (2, "--hidden-dropout 0.1"),
    (2, MATH),
    (2, f"{MATH} {FULL}"),
    (2, f"{MATH} --recompute-granularity selective"),
    (2, f"{CAPPED} --attention-dropout 0.1"),
    (2, f"{CAPPED} --attention-dropout 0.1 {FULL}"),
    (2, f"{CAPPED} --attention-dropout 0.1 --recompute-granularity selective"),
    (4, f"{KEYS} all_gather"),
    (4, f"{KEYS} all_gather {FULL}"),
    (4, f"{KEYS} p2p {FULL}"),
    (4, f"{KEYS} a2a+p2p --hierarchical-context-parallel-sizes '2 2' {FULL}"),
    (2, f"{TWO_STAGES} --global-batch-size 2 --vocab-size 128000"),
    (8, f"{TWO_STAGES} --global-batch-size 8 --vocab-size 128000"),
    (2, f"{SPLIT} {FULL} {WIDE}"),
    (4, f"--data-parallel-sharding-strategy optim {TIED} --vocab-size 64000"),
    (4, f"{SHORT} --data-parallel-sharding-strategy optim {MODELS['experts']} --num-layers 4"),
    (2, f"{SPLIT} --global-batch-size 2 --num-layers 1 --vocab-size 64000"),
    (2, f"{SPLIT.replace('zb-h1', 'zb-v')} {WIDE} --num-layers 6 --pipeline-model-parallel-layout 'Et|t|ttt|tL'"),
    (8, f"{TWO_STAGES} --pipeline-model-parallel-layout E|tL {WIDE} --num-layers 1 --vocab-size 32000"),
    # Where other estimators were wrong: experts as dense layers (Megatron-LM 1784), split over TP (4050), even stages
    # (Megatron Bridge 5077).
    (4, f"{MANY_EXPERTS} --num-layers 6 --moe-layer-freq [0]*2+[1]*4 --expert-model-parallel-size 4"),
    (4, f"{MANY_EXPERTS} --num-layers 4 --tensor-model-parallel-size 4 --sequence-parallel {OVER_TP}"),
    (4, f"{MANY_EXPERTS} --num-layers 8 --moe-layer-freq [0]*5+[1]*3 --pipeline-model-parallel-size 4 {UNEVEN}"),
]
FAST = (1, 3, 8, 17, 19, 20, 21, 25, 26, 27, 32, 34, 37, 39, 42, 47, 50, 52, 54, 55, 56)
"""Of ``UNUSUAL``: one of each part of a step that it knows."""


def error_of_the_formula(world: int, flags: str) -> float:
    """Relative to the step of the rank that needs most."""
    config = settings(f"{BESIDE} {flags}", world)
    mesh = Layout.from_config(config.parallel, world)
    plan = plan_pipeline(config, mesh) if mesh.pp > 1 else None
    found = max(fake_gpu_step(config, mesh, plan, rank).peak for rank in range(mesh.pp))
    return largest_memory(config, mesh, CHUNK_BYTES["cuda"], plan).total / found - 1


ADAPTERS = [
    (4, "--data-parallel-sharding-strategy optim_grads --global-batch-size 24"),  # gathers once, and copies out of it
    (2, ""),
    (4, "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout E|tt|t|L --global-batch-size 16"),
]


@pytest.mark.parametrize(("world", "flags"), ADAPTERS)
def test_the_formula_knows_adapters(world: int, flags: str) -> None:
    """Weights have no gradients, the product in the MLP is kept, and a stage without layers trains nothing."""
    config = settings(f"{BESIDE} {flags}", world)
    lora = LoraConfig(lora_rank=64, lora_alpha=128.0, lora_target_modules=ALL_LINEAR, lora_dropout=0.0)
    config = replace(config, lora=lora, objective=ObjectiveConfig(objective="sft"))
    mesh = Layout.from_config(config.parallel, world)
    plan = plan_pipeline(config, mesh) if mesh.pp > 1 else None
    found = max(fake_gpu_step(config, mesh, plan, rank).peak for rank in range(mesh.pp))
    said = largest_memory(config, mesh, CHUNK_BYTES["cuda"], plan, tuned_parts(config, mesh)).total
    assert -0.05 < said / found - 1 < 0.05


@pytest.mark.slow
def test_the_formula_is_near_the_step_of_unusual_layouts() -> None:
    errors = {case: error_of_the_formula(*case) for case in UNUSUAL}
    report = "\n".join(f"{100 * error:+6.2f} % {case}" for case, error in errors.items())
    print(report)
    assert all(-0.05 < error < 0.03 for error in errors.values()), report
    assert statistics.median(map(abs, errors.values())) < 0.015, report


@pytest.mark.parametrize("case", [UNUSUAL[i] for i in FAST])
def test_the_formula_follows(case: tuple[int, str]) -> None:
    """What it did not know: rows on their way to experts, the reduction of an earlier micro-batch, a ring's results
    before they are merged, what waits between both parts of backward passes; that a GPU's RMSNorm is a kernel without
    Triton, too; scores that attention keeps; losses and gradients where all micro-batches go forward first; the
    derivative of a cap on logits; a tied matrix and its gradient until the embedding's; gradients that come for the
    first time in a pipeline; what experts let go of before their gradients come; masks
    while they are made; attention by operators because it was asked for, and a cap with dropout; other processes' keys;
    what is beside a pipeline's reduction; what was gathered last; that a step's first micro-batch has no gradients
    before it; and what an input part's blocks have kept."""
    assert -0.045 < error_of_the_formula(*case) < 0.03


def test_sparse_attention_of_a_cut_sequence_has_a_step_without_data() -> None:
    """Which columns a rank has was asked in a way that tensors without data cannot answer."""
    sparse = "--experimental-attention-variant dsa --q-lora-rank 64 --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 32"
    error = error_of_the_formula(2, f"{MODELS['latent']} {sparse} --context-parallel-size 2 --cp-comm-type all_gather")
    assert -0.05 < error < 0.05


def test_experts_rows_on_a_gpu_are_not_padded_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's oneDNN makes a program for each number of rows, so there products in bf16 have few different ones."""
    config = settings(f"--seq-length 1030 --bf16 {EXPERTS}", 1)
    layout = Layout.from_config(config.parallel, 1)
    found = fake_gpu_step(config, layout)
    monkeypatch.setattr(grouped, "_rounded_rows", lambda count: count)
    exact = fake_gpu_step(config, layout)
    assert (found.peak, found.counts.flops) == (exact.peak, exact.counts.flops)
