"""Every setting of FP8 changes a real run; a resumed run goes on with the same bits, on other processes too."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.config import Config, Layout, ParallelConfig
from smp.layers.fp8.apply import fp8_history
from smp.layers.linear import linear_layers
from smp.models.inventory import inventory
from smp.models.presets import PRESETS
from smp.training.cost.fake_step import fake_gpu_step
from smp.training.eight_bit import choose_fp8
from smp.training.pretraining import Pretraining
from smp.training.process import Process
from smp.training.run import Run as TrainingRun
from smp.training.runtime import StopSignal
from smp.training.settings import read_settings
from tests.distributed import run_distributed
from tests.training.flag_runs import TINY, Run, Runs, Watched, proves, run_here

FP8 = "--fp8-format hybrid --fp8-emulate "
TENSORWISE = FP8 + "--fp8-recipe tensorwise "
TP = "--tensor-model-parallel-size 2 --sequence-parallel "
WIDE = "--hidden-size 128 --ffn-hidden-size 128 --kv-channels 128 --num-layers 1 --seq-length 128 --micro-batch-size 1 "


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield Runs(tmp_path_factory.mktemp("fp8"))


def line_of(run: Run) -> str:
    """What the user hears of FP8."""
    (line,) = (line for line in run.out.splitlines() if line.startswith("FP8: "))
    return line


@proves("fp8_format")
def test_the_format_is_that_of_gradients(runs: Runs) -> None:
    """--fp8-format hybrid and e4m3 compute the same loss, which is another one than without, and other gradients."""
    hybrid, e4m3, none = runs(TENSORWISE), runs(TENSORWISE + "--fp8-format e4m3"), runs()
    assert hybrid.losses[0] == e4m3.losses[0] != none.losses[0]
    assert hybrid.losses[0] == pytest.approx(none.losses[0], rel=2e-2)
    name = "layers.0.mlp.up.weight"
    first, second, exact = (run.grads[0][name] for run in (hybrid, e4m3, none))
    assert 0 < (first - exact).norm() < 0.5 * exact.norm() and not torch.equal(first, second)
    assert "gradients e5m2" in line_of(hybrid) and "e5m2" not in line_of(e4m3)
    assert "in fp32: embedding, norms, attention, output layer and loss" in line_of(hybrid)
    assert "FP8" not in none.out


@proves("fp8_recipe")
def test_recipes_differ(runs: Runs) -> None:
    """--fp8-recipe: delayed begins without FP8, each of the others rounds in its own way; gradients of weights are
    exact products with rowwise."""
    losses = {name: runs(f"{FP8} --fp8-recipe {name}").losses for name in ("delayed", "tensorwise", "rowwise")}
    assert losses["delayed"][0] == runs().losses[0] and losses["delayed"][1] != runs().losses[1]
    assert len({values[2] for values in losses.values()}) == 3
    assert runs(FP8).losses == losses["delayed"], "the default"
    blocks, whole = (runs(f"{FP8} {WIDE} --fp8-recipe {name}") for name in ("blockwise", "rowwise"))
    assert blocks.losses[0] == whole.losses[0], "numbers of one binade: powers of two round them alike"
    assert blocks.losses[1] != whole.losses[1], "gradients of weights"
    mx = runs(f"{FP8} {WIDE} --fp8-recipe mxfp8")
    assert mx.losses[0] == pytest.approx(blocks.losses[0], rel=1e-5), "few numbers are small within 32 neighbours"
    assert mx.losses[1] not in (blocks.losses[1], whole.losses[1])
    nv = runs(f"--fp8-format e2m1 --fp8-emulate {WIDE} --fp8-recipe nvfp4")
    assert nv.losses[0] == pytest.approx(runs(WIDE).losses[0], rel=2e-2) and nv.losses[0] != mx.losses[0]
    assert "in e2m1, nvfp4 scales, emulated: rounded to 4 bits" in line_of(nv) and "gradients of weights" in line_of(nv)
    assert "gradients of weights" in line_of(whole) and "gradients of weights" not in line_of(blocks)


def history_of(run: Watched) -> dict[str, torch.Tensor]:
    history = fp8_history(run.trainer.model)
    assert history is not None
    return {name: tensor.clone() for name, tensor in history.state().items()} | {"inverse": history.inverse.clone()}


@proves("fp8_amax_history_len")
def test_the_history_is_as_long_as_asked_for(runs: Runs) -> None:
    """--fp8-amax-history-len 2: of a run of three steps the last two, newest first, once per step whatever the number
    of micro-batches and with full recompute."""
    flags = f"{FP8} --micro-batch-size 1 --recompute-granularity full --train-iters 3"
    long = runs.fresh(flags, probe=history_of).probed["fp8.amax_history.layers.1.mlp.down"]
    short = runs.fresh(f"{flags} --fp8-amax-history-len 2", probe=history_of).probed[
        "fp8.amax_history.layers.1.mlp.down"
    ]
    assert long.shape == (1024, 3) and (long[:3] > 0).all() and not long[3:].any()
    assert short.shape == (2, 3) and torch.equal(short[1], long[1])


@proves("fp8_amax_compute_algo")
def test_the_scale_is_of_the_largest_or_of_the_last(runs: Runs) -> None:
    """--fp8-amax-compute-algo most_recent: scales shrink with the maxima; with max they do not."""
    flags = f"{FP8} --train-iters 6 --lr 0.3"
    top, last = (
        runs.fresh(f"{flags} --fp8-amax-compute-algo {name}", probe=history_of) for name in ("max", "most_recent")
    )
    assert top.losses[:2] == last.losses[:2] and top.losses != last.losses
    found = last.probed
    names = [name for name in found if name != "inverse"]
    newest = torch.stack([found[name][0] for name in names])
    ends = torch.tensor([448.0, 448.0, 57344.0])
    assert ((newest / found["inverse"] <= ends) & (newest / found["inverse"] > ends / 2)).all()
    largest = torch.stack([top.probed[name].amax(0) for name in names])
    assert (largest / top.probed["inverse"] > ends / 2).all()


@proves("fp8_emulate")
def test_a_cpu_computes_in_fp8_only_when_it_may_emulate(runs: Runs) -> None:
    """Without --fp8-emulate nothing is emulated in silence."""
    refused = runs.fresh("--fp8-format hybrid --fp8-recipe tensorwise --bf16")
    assert refused.code == 2 and len(refused.errors) == 1
    assert "a CPU has no FP8 products" in refused.errors[0] and "--fp8-emulate" in refused.errors[0]
    assert "emulated" in line_of(runs(TENSORWISE + "--fp8-emulate"))


def in_fp8(run: Watched) -> list[int]:
    layers = linear_layers(run.trainer.model)
    return sorted({int(name.split(".")[1]) for name, layer in layers.items() if layer.scaling is not None})


@proves("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
def test_first_and_last_layers_stay_as_they_are(runs: Runs) -> None:
    """--first-last-layers-bf16 leaves one at each end; --num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16
    say how many."""
    flags = TENSORWISE + "--num-layers 5 "
    ends = {
        flags: [0, 1, 2, 3, 4],
        flags + "--first-last-layers-bf16": [1, 2, 3],
        flags + "--first-last-layers-bf16 --num-layers-at-start-in-bf16 2": [2, 3],
        flags + "--first-last-layers-bf16 --num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 3": [0, 1],
    }
    found = {words: runs.fresh(words, probe=in_fp8) for words in ends}
    assert {words: run.probed for words, run in found.items()} == ends
    assert len({run.losses[0] for run in found.values()}) == 4
    assert [line_of(run).partition("loss; ")[2] for run in found.values()] == [
        "",
        "layers 0, 4",
        "layers 0-1, 4",
        "layers 2-4",
    ]


def test_experts_compute_in_it(runs: Runs) -> None:
    """Not only the layers beside them: their products round, and delayed scaling has maxima of theirs."""
    experts = "--num-experts 4 --moe-router-topk 2 --moe-shared-expert-intermediate-size 16 "
    none, tensorwise, rowwise = (
        runs(experts + more) for more in ("", TENSORWISE, FP8 + "--fp8-recipe rowwise --recompute-granularity full")
    )
    name = "layers.1.mlp.experts.down.weight"
    # Scales are powers of two, so two recipes may round to the same loss; one step later they have parted.
    assert len({run.losses[1] for run in (none, tensorwise, rowwise)}) == 3
    assert none.losses[0] != tensorwise.losses[0] and not torch.equal(tensorwise.grads[0][name], rowwise.grads[0][name])
    for run in (tensorwise, rowwise):
        assert run.losses[0] == pytest.approx(none.losses[0], rel=2e-2)
        assert 0 < (run.grads[0][name] - none.grads[0][name]).norm() < 0.5 * none.grads[0][name].norm()
        assert "embedding, norms, attention, routers, output layer and loss" in line_of(run)
    delayed = runs.fresh(FP8 + experts, probe=history_of)
    of_down = delayed.probed["fp8.amax_history.layers.1.mlp.experts.down"]
    assert (of_down[: len(delayed.losses)] > 0).all() and delayed.losses[1] != none.losses[1]


def test_what_is_multiplied_is_8_bits(runs: Runs) -> None:
    """With recompute, too: each product of a layer quantises its operands."""
    none, counted = runs(count_ops=True), runs(TENSORWISE, count_ops=True)
    layers, passes = 7 * 2, 2 * 3
    casts = counted.ops["_to_copy"] - none.ops["_to_copy"]
    assert casts >= 3 * layers * passes, "input or weight, and gradient, to 8 bits and back"


def test_a_jump_is_counted_and_an_infinity_skips_the_step(tmp_path: Path) -> None:
    """Delayed scales are of the past: what is too large becomes the largest number, which a run says; an infinite
    number would become it too, so such a step is skipped, and its maxima are forgotten."""
    weight = "layers.0.mlp.up.weight"

    def spoil(run: Watched) -> None:
        step, parameter = run.trainer.progress.iteration, run.trainer.model.get_parameter(weight)
        if step in (2, 3):
            with torch.no_grad():
                parameter.to_local()[0, 0] = 100.0 if step == 2 else torch.inf  # type: ignore[attr-defined]

    run = run_here(tmp_path, FP8 + "--train-iters 4 --micro-batch-size 4", each_step=spoil, probe=history_of)
    assert run.code == 0, run.err
    saturated = run.records("fp8 saturated tensors")
    assert saturated[0] == 0 and saturated[2] >= 1
    kept = run.probed["fp8.amax_history.layers.0.mlp.up"][:, 1]
    assert kept[0] == 100.0 and kept.isfinite().all() and (kept > 0).sum() == 3
    assert "skipped" in run.out or run.status["status"] == "done"


def state_of(run: TrainingRun) -> dict[str, torch.Tensor]:
    history = fp8_history(run.trainer.model)
    return {} if history is None else {name: tensor.clone() for name, tensor in history.state().items()}


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    flags = FP8 + "--train-iters 4 --lr-decay-iters 4 --fp8-amax-history-len 3 "
    whole = run_here(tmp_path / "whole", flags + "--save kept --save-interval 2", probe=history_of)
    save = tmp_path / "whole" / "kept"
    again = run_here(tmp_path / "again", f"{flags} --load {save} --ckpt-step 2", probe=history_of)
    assert whole.code == again.code == 0, again.err
    assert again.losses == whole.losses[2:]
    assert all(torch.equal(again.final[name], tensor) for name, tensor in whole.final.items())
    assert all(torch.equal(again.probed[name], tensor) for name, tensor in whole.probed.items())
    other = run_here(tmp_path / "other", f"{flags} --load {save} --ckpt-step 2 --fp8-amax-history-len 5")
    assert "history of FP8 scales has another length" in other.out and other.code == 0
    plain = run_here(tmp_path / "plain", f"--train-iters 4 --lr-decay-iters 4 --load {save} --ckpt-step 2")
    assert plain.code == 0 and "fp8_format was hybrid in the checkpoint and is None now" in plain.out


def go_on(flags: str, rank: int, world: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Three steps after the checkpoint, and the history that was loaded."""
    config = read_settings([*TINY.split(), *flags.split()], PRESETS, world)
    kind = type("Quiet", (TrainingRun,), {"say": lambda self, line: None})
    run: Any = kind(Pretraining(config), Process(rank, world, rank), torch.device("cpu"), StopSignal())
    loaded = state_of(run)
    losses = [run.trainer.train_step(next(run.batches)).loss for _ in range(3)]
    run.close()
    return losses, loaded


LAYOUTS = (
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
    "--hybrid-shard-degree 2",
)


def go_on_everywhere(rank: int, world: int, folder: str, flags: str) -> list[Any]:
    os.chdir(folder)
    return [go_on(f"{flags} {layout}", rank, world) for layout in LAYOUTS]


def test_a_history_moves_to_other_processes(tmp_path: Path) -> None:
    """A checkpoint of one process goes on under tensor and sequence parallelism, a pipeline and sharding, with the same
    history and losses."""
    flags = FP8 + "--seq-length 16 --fp8-amax-history-len 3 --micro-batch-size 1 --lr 1e-3 --lr-decay-iters 9 "
    first = run_here(tmp_path / "first", flags + "--train-iters 2 --save kept")
    assert first.code == 0, first.err
    flags += f"--train-iters 5 --load {tmp_path / 'first' / 'kept'}"
    whole = run_here(tmp_path / "whole", flags)
    saved = run_here(tmp_path / "saved", f"{flags} --train-iters 2", probe=history_of).probed
    for number, ranks in enumerate(zip(*run_distributed(go_on_everywhere, 2, str(tmp_path), flags), strict=True)):
        held: dict[str, torch.Tensor] = {}
        for losses, loaded in ranks:
            assert losses == pytest.approx(whole.losses, rel=1e-4), LAYOUTS[number]
            held |= loaded
        assert held.keys() == saved.keys() - {"inverse"}
        assert all(torch.equal(tensor, saved[name]) for name, tensor in held.items())


def test_a_gather_moves_bytes() -> None:
    """Under sequence parallelism an all-gather of 8-bit numbers sends half of what one of bf16 sends; rowwise scales
    travel beside them, and the backward pass gathers bf16."""
    sent = {}
    for recipe in ("", "delayed", "tensorwise", "rowwise"):
        flags = f"--seq-length 64 --hidden-size 128 --bf16 {TP}" + (
            f"--fp8-format hybrid --fp8-recipe {recipe}" if recipe else ""
        )
        config = read_settings([*TINY.split(), "--num-query-groups", "4", *flags.split()], PRESETS, 2)
        step = fake_gpu_step(config, Layout.from_config(config.parallel, 2))
        sent[recipe] = step.counts.traffic["tp", "all-gather"].sent
    for recipe in ("delayed", "tensorwise"):
        assert sent[recipe] < 0.62 * sent[""], recipe
    assert sent["delayed"] == sent["tensorwise"] < sent["rowwise"] < sent[""]


@proves("fp8_param_gather")
def test_a_gather_of_weights_moves_bytes() -> None:
    """--fp8-param-gather: weights of FP8 layers travel as 1 byte in place of bf16's 2, those of embedding and output
    layer as they did."""
    sent = []
    for more in ("", "--fp8-param-gather"):
        flags = f"--seq-length 64 --hidden-size 128 --bf16 --fp8-format hybrid {more}".split()
        config = read_settings([*TINY.split(), *flags], PRESETS, 2)
        step = fake_gpu_step(config, Layout.from_config(config.parallel, 2))
        sent.append(step.counts.traffic["dp_shard", "all-gather"].sent)
        model = config.model
    in_fp8 = sum(math.prod(p.shape) for p in inventory(model) if p.name.startswith("layers.") and len(p.shape) == 2)
    passes = 2 * (config.data.global_batch_size or 0) // (2 * config.data.micro_batch_size)
    assert sent[0] - sent[1] == pytest.approx(passes * in_fp8 / 2, rel=1e-3)


@pytest.mark.parametrize(("there", "word"), [(True, "Triton"), (False, "PyTorch, which is slower")])
def test_a_run_on_a_gpu_says_what_rounds(monkeypatch: pytest.MonkeyPatch, there: bool, word: str) -> None:
    monkeypatch.setattr("smp.training.eight_bit.has_kernels", lambda device: there)
    parallel = ParallelConfig(fp8_format="hybrid", fp8_emulate=True)
    lines = choose_fp8(Config(parallel=parallel), torch.device("cuda"))
    assert f"transposes by {word}" in lines[-1] and len(lines) == 2
    assert choose_fp8(Config(parallel=parallel), torch.device("cpu")) == lines[:1]
    assert choose_fp8(Config(), torch.device("cuda")) == []
