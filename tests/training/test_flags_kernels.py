"""--kernels and --attention-backend, and a step in which the host never waits for the device."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from smp.kernels.attention_cores import sdpa
from smp.kernels.cpp.library import why_not
from smp.optim.optimizer import step_on_device_if
from smp.training import trainer
from tests.training.flag_runs import Runs, Watched, proves


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield Runs(tmp_path_factory.mktemp("kernels"))


@proves("kernels")
def test_kernels_says_what_runs_and_refuses_what_cannot(runs: Runs) -> None:
    why = why_not(torch.float32)
    chosen, reason = ("torch", f"runs on cpu; cpp does not: {why}") if why else ("cpp", "fused on a CPU")
    run = runs()
    assert f"kernels: {chosen} for cross_entropy, norm, swiglu, rope ({reason})" in run.out
    other = runs("--no-swiglu --position-embedding-type learned_absolute")
    assert f"kernels: {chosen} for cross_entropy, norm ({reason})" in other.out, "a model without the other two"
    experts = runs("--num-experts 4")
    assert "kernels: torch for router, permute, grouped_gemm (runs on cpu)" in experts.out
    wished = runs("--kernels torch")
    assert "(--kernels torch)" in wished.out and wished.losses == pytest.approx(run.losses, rel=1e-5)
    if not why:
        assert runs("--kernels cpp").losses == run.losses
    for wish in ("triton", "cuda", "apex"):
        refused = runs.fresh(f"--kernels {wish}")
        assert refused.code == 2 and len(refused.errors) == 1
        assert refused.errors[0].startswith(f"error: --kernels {wish} needs a CUDA device, this run is on cpu")


REPEATED = "each key/value head is repeated for its query heads"


@proves("attention_backend")
def test_attention_backend(runs: Runs) -> None:
    flash, math = runs(count_ops=True), runs("--attention-backend math", count_ops=True)
    operator = "_scaled_dot_product_flash_attention_for_cpu"
    assert flash.ops[operator] == 3 * 2 * 2 and math.ops[operator] == 0
    assert "attention: flash (the first of flash, math that takes this model)" in flash.out
    assert f"attention: math (--attention-backend math; {REPEATED})" in math.out
    assert math.losses == pytest.approx(flash.losses, rel=1e-5) and math.ops["bmm"] > flash.ops["bmm"]
    refused = runs.fresh("--attention-backend cudnn")
    assert refused.code == 2 and len(refused.errors) == 1 and "--attention-backend cudnn does not take" in refused.err


def test_key_value_heads_go_to_attention_as_they_are(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    heads: set[tuple[int, int]] = set()
    plain = sdpa.CPU["flash"]

    def noted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: sdpa.Scores) -> Any:
        heads.add((q.shape[1], k.shape[1]))
        return plain.forward(q, k, v, scores)

    monkeypatch.setitem(sdpa.CPU, "flash", replace(plain, forward=noted))
    run = runs.fresh("--num-query-groups 1")
    assert {k for _, k in heads} == {1} and min(q for q, _ in heads) > 1
    assert REPEATED not in run.out
    heads.clear()
    run = runs.fresh("--num-query-groups 1 --bf16")
    assert all(q == k for q, k in heads) and heads and REPEATED in run.out


class Waits(TorchDispatchMode):
    """Who reads a tensor's value on the host: functions of ours, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.callers: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero"):
            ours = [f.name for f in traceback.extract_stack() if f"{os.sep}smp{os.sep}" in f.filename]
            self.callers.append(ours[-1] if ours else "?")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "flags", ["", "--hidden-dropout 0.1 --window-size 5 --optimizer sgd", "--bf16 --recompute-granularity full"]
)
def test_a_step_reads_nothing_from_the_device(runs: Runs, monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    """On a CPU every tensor looks alike, so the test takes the GPU's way through the optimizer; the number of valid
    tokens is counted on the host, before anything is on the device."""

    def step(wanted: torch.Tensor, optimizer: Any) -> None:
        if "sgd" not in flags:
            step_on_device_if(wanted, optimizer)

    monkeypatch.setattr(trainer, "step_if", step)

    def probe(run: Watched) -> list[str]:
        batch = next(run.batches)
        with Waits() as waits:
            issued = run.trainer.start_step(batch)
        run.trainer.finish(issued)
        return waits.callers

    assert set(runs.fresh(flags, probe=probe).probed) <= {"sum_over_ranks", "num_valid"}


def test_the_probe_sees_waits() -> None:
    with Waits() as waits:
        torch.ones(2).sum().item()
    assert waits.callers == ["?"]


def test_a_step_that_is_not_finite_is_skipped_on_the_device(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does: the same weights, moments and counts as when the host decides."""

    by_host = runs.fresh("--train-iters 4", each_step=spoil)
    monkeypatch.setattr(trainer, "step_if", step_on_device_if)
    by_device = runs.fresh("--train-iters 4", each_step=spoil)
    assert by_host.losses[2:] == by_device.losses[2:] and len(by_host.losses) == 4
    assert by_host.records("skipped iterations") == by_device.records("skipped iterations") == [0, 1, 1, 1]
    for name, weight in by_host.final.items():
        assert torch.equal(weight, by_device.final[name]), name
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(by_host.state[key][name], by_device.state[key][name]), (key, name)


def spoil(run: Watched) -> None:
    """Make the loss of iteration 2 infinite."""
    if run.trainer.progress.iteration == 1:
        run.trainer.model.register_forward_hook(
            lambda module, args, out: out._replace(loss=out.loss * float("inf")) if run.iteration == 1 else out
        )


def test_with_a_device_that_is_behind_logs_come_a_step_later_and_say_the_same(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps whose numbers are never there at once are finished after the next one is issued, and all before a save."""
    flags = "--train-iters 5 --eval-interval 2 --eval-iters 1 --save ck --save-interval 3"
    plain = runs.fresh(flags)
    order: list[str] = []
    start, finish = trainer.Trainer.start_step, trainer.Trainer.finish
    monkeypatch.setattr(trainer.HostCopy, "arrived", lambda self: False)
    monkeypatch.setattr(trainer.Trainer, "start_step", lambda self, *a: (order.append("start"), start(self, *a))[1])
    monkeypatch.setattr(
        trainer.Trainer, "finish", lambda self, s: (order.append(f"finish {s.iteration}"), finish(self, s))[1]
    )
    late = runs.fresh(flags)
    assert order[:5] == ["start", "start", "finish 1", "finish 2", "start"]  # 2 at once: there is an evaluation
    assert order[-3:] == ["start", "finish 4", "finish 5"] or order[-2:] == ["start", "finish 5"]
    for name in ("lm loss", "grad norm", "learning rate", "consumed samples", "validation loss", "skipped iterations"):
        assert late.records(name) == plain.records(name), name
