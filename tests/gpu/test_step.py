"""A training step on a GPU: the host never waits in it, and kernels change its speed, not its curve."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.flag_runs import Runs, Watched

pytestmark = pytest.mark.gpu
RUN = "--seq-length 64 --hidden-size 64 --num-query-groups 2"


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def steps_without_a_wait(run: Watched) -> int:
    """Three more steps in which torch raises an error whenever the host waits for the device."""
    issued = []
    for _ in range(3):
        batch = next(run.batches)
        torch.cuda.set_sync_debug_mode("error")
        try:
            issued.append(run.trainer.start_step(batch))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(run.trainer.finish(step).skipped is False for step in issued)


@pytest.mark.parametrize(
    "flags",
    [
        "--bf16",
        "--bf16 --kernels torch",
        "--bf16 --hidden-dropout 0.1 --global-batch-size 8",
        "--bf16 --recompute-granularity selective",
        "--bf16 --window-size 16",
        "--bf16 --window-size 16 --recompute-granularity selective",
        "--bf16 --window-size 16 --compile",
        "--bf16 --compile",
        "--bf16 --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.1 --moe-shared-expert-intermediate-size 32",
        "--bf16 --num-experts 4 --moe-router-topk 2 --compile",
        "--bf16 --fp8-format hybrid --fp8-recipe delayed",
        "--bf16 --num-layers 4 --offload-activations --recompute-granularity full",
    ],
)
def test_the_host_does_not_wait_in_a_step(runs: Runs, flags: str) -> None:
    if "experts" in flags and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("experts' rows are counted on the host of this GPU")
    run = runs.fresh(f"{RUN} {flags}", probe=steps_without_a_wait)
    assert run.code == 0, run.err
    assert run.probed == 3


@pytest.mark.parametrize("flags", ["", "--bf16", "--bf16 --recompute-granularity selective", "--bf16 --compile"])
def test_200_steps_follow_the_same_curve_with_and_without_kernels(runs: Runs, flags: str) -> None:
    """With a learning rate at which training makes little of rounding: weights that begin 2^-9 apart (bf16; 2^-12 in
    fp32) end with losses 0.0016 (0.0002) apart on a CPU, and 0.02 at ten times the rate."""
    curves = {}
    for kernels in ("torch", "triton"):
        run = runs.fresh(f"{RUN} {flags} --lr 1e-3 --train-iters 200 --kernels {kernels}")
        assert run.code == 0, run.err
        assert f"kernels: {kernels} for cross_entropy, norm, swiglu, rope" in run.out
        curves[kernels] = torch.tensor(run.losses)
    assert curves["torch"][-20:].mean() < curves["torch"][:20].mean() - 0.1
    apart = (curves["torch"] - curves["triton"]).abs() / curves["torch"]
    assert apart.mean() < (1e-2 if "bf16" in flags else 1e-3), apart


@pytest.mark.parametrize("window", ["", "--window-size 16"])
@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn", "math"])
def test_each_attention_backend_trains_alike_or_is_refused(runs: Runs, backend: str, window: str) -> None:
    """A window is a mask, or for FlashAttention spans of its variable-length kernel."""
    auto = runs.fresh(f"{RUN} --bf16 {window}")
    run = runs.fresh(f"{RUN} --bf16 {window} --attention-backend {backend}")
    assert auto.code == 0, auto.err
    assert ("attention: flash's variable-length kernel (the first of" if window else "attention: ") in auto.out
    if run.code == 0:
        assert f"attention: {backend}" in run.out and f"(--attention-backend {backend}" in run.out
        assert run.losses == pytest.approx(auto.losses, rel=1e-2)
    else:
        assert run.errors and f"--attention-backend {backend} does not take" in run.errors[0]


def test_a_step_that_is_not_finite_is_skipped_without_asking_the_host(runs: Runs) -> None:
    def spoil(run: Watched) -> None:
        if run.trainer.progress.iteration == 1:
            run.trainer.model.register_forward_hook(
                lambda module, args, out: (
                    out._replace(loss=out.loss * float("inf")) if run.trainer.progress.iteration == 1 else out
                )
            )

    run = runs.fresh("--train-iters 4", each_step=spoil)
    assert run.code == 0, run.err
    assert run.records("skipped iterations") == [0, 1, 1, 1]
    assert all(weight.isfinite().all() for weight in run.final.values())
    assert {int(step) for step in run.state["step"].values()} == {3}
