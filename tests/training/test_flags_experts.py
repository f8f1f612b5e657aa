"""Every setting of a mixture of experts changes a real run; saved experts go on on any other processes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from smp.checkpoint import load, read_manifest
from smp.checkpoint.folders.folder import open_folder
from smp.models.presets import PRESETS
from smp.training.pretraining import Pretraining
from smp.training.process import Process
from smp.training.run import Run as TrainingRun
from smp.training.runtime import StopSignal
from smp.training.settings import read_settings
from tests.distributed import run_distributed
from tests.training.flag_runs import TINY, Run, Runs, proves, run_here

Check = Callable[[Run, Run], object]
MOE = "--num-experts 4 "
SIGMOID = MOE + "--moe-router-score-function sigmoid "
ONE = SIGMOID + "--moe-router-topk 1 "
BIAS = SIGMOID + "--moe-router-enable-expert-bias "
GROUPS = "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 1 "
TWO_OF_A_GROUP = "--num-experts 8 --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2 "
FULL = MOE + "--moe-expert-capacity-factor 0.5 "
SHARED = MOE + "--moe-shared-expert-intermediate-size 24 "
BALANCED = MOE + "--global-batch-size 8 --moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type "


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield Runs(tmp_path_factory.mktemp("experts"))


def other_math(got: Run, base: Run) -> None:
    assert got.shapes == base.shapes and got.losses[0] != base.losses[0]


def shapes(expected: dict[str, tuple[int, ...] | None]) -> Check:
    """Of the parameters of layer 1, and that training is another one."""

    def check(got: Run, base: Run) -> None:
        assert got.losses != base.losses
        for name, shape in expected.items():
            assert got.shapes.get(f"layers.1.mlp.{name}.weight") == shape, name

    return check


def minimises(name: str, coefficient: float) -> Check:
    """The loss is reported beside the model's, which is the same at first; gradients differ."""

    def check(got: Run, base: Run) -> None:
        found = got.records(name)
        assert got.losses[0] == base.losses[0] and got.losses[-1] != base.losses[-1]
        assert len(found) == 3 and found[0] > 0 and base.records(name) == []
        if name == "load balancing loss":
            assert found[0] >= 0.98 * 2 * coefficient  # of two layers; at an even load it is the coefficient
        router = "layers.0.mlp.router.weight"
        assert not torch.equal(got.grads[0][router], base.grads[0][router])
        assert "load balancing loss" not in base.out and f"{name}: " in got.out

    return check


def shared(got: Run, base: Run) -> None:
    shapes({"shared_experts.up": (24, 32), "shared_experts.down": (32, 24), "experts.up": (4, 64, 32)})(got, base)


def moves_the_bias(got: Run, base: Run) -> None:
    """Choices are the same in the first step; then another expert is taken here and there."""
    assert got.losses[0] == base.losses[0] and got.losses[1:] != base.losses[1:]


def gated(got: Run, base: Run) -> None:
    shapes({"shared_expert_gate": (1, 32), "shared_experts.up": (24, 32)})(got, base)


def other_balance(got: Run, base: Run) -> None:
    name = "load balancing loss"
    assert got.records(name)[0] > 0 and got.records(name) != base.records(name)
    assert got.losses[0] == base.losses[0] and got.losses[-1] != base.losses[-1]


def as_before(got: Run, base: Run) -> None:
    assert got.losses == base.losses and "load balancing loss" not in got.out


def drops(got: Run, base: Run) -> None:
    other_math(got, base)
    shares = got.records("dropped share")
    assert shares and all(0.4 <= share < 1 for share in shares) and not base.records("dropped share")


def same_numbers(got: Run, base: Run) -> None:
    """What it changes is how many rows are computed, see ``tests/layers/moe/test_capacity.py``."""
    assert got.losses == pytest.approx(base.losses, rel=1e-6)
    assert got.records("dropped share") == base.records("dropped share") and got.records("dropped share")[0] > 0


def same_losses(got: Run, base: Run) -> None:
    assert got.losses == base.losses and got.records("dropped share") == [0.0] * 3


TABLE: list[tuple[str, str, str, Check]] = [
    (
        "num_experts",
        MOE,
        "",
        shapes({"experts.gate": (4, 64, 32), "experts.down": (4, 32, 64), "router": (4, 32), "up": None}),
    ),
    ("moe_router_topk", MOE + "--moe-router-topk 3", MOE, other_math),
    ("moe_ffn_hidden_size", MOE + "--moe-ffn-hidden-size 40", MOE, shapes({"experts.up": (4, 40, 32)})),
    ("moe_shared_expert_intermediate_size", MOE + "--moe-shared-expert-intermediate-size 24", MOE, shared),
    ("moe_layer_freq", MOE + "--moe-layer-freq 2", MOE, shapes({"experts.up": None, "up": (64, 32)})),
    ("moe_router_score_function", SIGMOID, MOE, other_math),
    ("moe_router_pre_softmax", MOE + "--moe-router-pre-softmax", MOE, other_math),
    ("moe_router_topk_scaling_factor", MOE + "--moe-router-topk-scaling-factor 2.5", MOE, other_math),
    ("moe_router_num_groups", GROUPS, "--num-experts 8 ", other_math),
    ("moe_router_group_topk", GROUPS.replace("topk 1", "topk 2"), GROUPS, other_math),
    ("moe_router_group_score", TWO_OF_A_GROUP + "--moe-router-group-score max", TWO_OF_A_GROUP, other_math),
    ("moe_apply_probs_on_input", ONE + "--moe-apply-probs-on-input", ONE, other_math),
    ("moe_expert_capacity_factor", MOE + "--moe-expert-capacity-factor 0.5", MOE, drops),
    ("moe_expert_capacity_factor", MOE + "--moe-expert-capacity-factor 4", MOE, same_losses),
    ("moe_pad_expert_input_to_capacity", FULL + "--moe-pad-expert-input-to-capacity", FULL, same_numbers),
    ("moe_token_drop_policy", FULL + "--moe-token-drop-policy position", FULL, other_math),
    ("moe_router_enable_expert_bias", BIAS + "--moe-router-bias-update-rate 0.5", SIGMOID, moves_the_bias),
    ("moe_router_bias_update_rate", BIAS + "--moe-router-bias-update-rate 0.5", BIAS, moves_the_bias),
    ("moe_shared_expert_gate", SHARED + "--moe-shared-expert-gate", SHARED, gated),
    ("moe_router_load_balancing_type", BALANCED + "seq_aux_loss", BALANCED + "aux_loss", other_balance),
    ("moe_router_load_balancing_type", BALANCED + "global_aux_loss", BALANCED + "aux_loss", other_balance),
    ("moe_router_load_balancing_type", MOE + "--moe-router-load-balancing-type none", MOE, as_before),
    ("moe_router_load_balancing_type", MOE + "--moe-router-load-balancing-type sinkhorn", MOE, other_math),
    ("moe_aux_loss_coeff", MOE + "--moe-aux-loss-coeff 0.1", MOE, minimises("load balancing loss", 0.1)),
    ("moe_z_loss_coeff", MOE + "--moe-z-loss-coeff 0.1", MOE, minimises("z loss", 0.1)),
]


@proves(*{row[0] for row in TABLE})
@pytest.mark.parametrize(("name", "flags", "base", "check"), TABLE, ids=[row[1] for row in TABLE])
def test_a_setting_of_experts(runs: Runs, name: str, flags: str, base: str, check: Check) -> None:
    check(runs(flags), runs(base))


def test_the_load_is_reported(runs: Runs) -> None:
    loads = runs(MOE).records("expert load max/mean")
    assert len(loads) == 3 and all(1 <= load <= 4 for load in loads)
    entropies = runs(MOE).records("router entropy")
    assert len(entropies) == 3 and all(0 < entropy <= math.log(4) for entropy in entropies)


def test_validation_has_no_auxiliary_loss(runs: Runs) -> None:
    still = MOE + "--optimizer sgd --lr 1e-30 --weight-decay 0 --eval-interval 3 --eval-iters 1 "
    plain, pushed = runs(still), runs(still + "--moe-aux-loss-coeff 0.5")
    assert plain.records("validation loss") == pushed.records("validation loss")


def test_a_coefficient_may_change_on_a_resume(tmp_path: Path) -> None:
    first = run_here(tmp_path, f"{MOE} --save {tmp_path}/saved --moe-aux-loss-coeff 0.01")
    changed = f"{MOE} --load {tmp_path}/saved --train-iters 4 --moe-aux-loss-coeff 0.1"
    second = run_here(tmp_path, changed)
    assert (first.code, second.code) == (0, 0), second.err
    assert "differs from how it was trained: --moe-aux-loss-coeff 0.01 -> 0.1\n" in second.out


APART = "--expert-tensor-parallel-size 1"
LAYOUTS = [
    (4, "--expert-model-parallel-size 4", 2),
    (1, "", 8),
    (4, "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel", 4),
    (2, "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel " + APART, 4),
]
"""Processes, flags, and how many of 8 experts a process holds."""


def step_and_save(rank: int, world: int, folder: str, number: int) -> tuple[int, float]:
    """The first layout trains two steps and saves; the others load, save, and train one more. Experts of this process,
    and the last loss."""
    os.chdir(folder)
    _, flags, _ = LAYOUTS[number]
    said = f"--num-experts 8 --seq-length 16 {flags} --save {number} --moe-aux-loss-coeff 0.01 --micro-batch-size 1 "
    said += "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    said += f" --load {number - 1}" if number else ""
    config = read_settings([*TINY.split(), *said.split()], PRESETS, world)
    run = TrainingRun(Pretraining(config), Process(rank, world, rank), torch.device("cpu"), StopSignal())
    weight = run.trainer.model.get_parameter("layers.0.mlp.experts.up.weight")
    assert isinstance(weight, DTensor)
    mesh = weight.device_mesh
    held = weight.shape[0] // dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)).get("ep", 1)
    for _ in range(0 if number else 2):
        run.trainer.train_step(next(run.batches))
    run.save()
    loss = run.trainer.train_step(next(run.batches)).loss
    run.close()
    return held, loss


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint, whole."""
    entries = read_manifest(open_folder(str(run / "iter_0000002"))).tensors
    state = {name: torch.empty(entry.shape, dtype=torch.float32) for name, entry in entries.items()}
    load(state, run / "iter_0000002")
    return state


@proves("expert_model_parallel_size", "expert_tensor_parallel_size")
def test_experts_move_between_processes(tmp_path: Path) -> None:
    """ep 4 -> 1 -> 2 (with TP) -> 2 (of TP, with ETP 1): weights, expert biases and optimizer to the bit, and the next
    loss."""
    losses = []
    for number, (world, _, experts) in enumerate(LAYOUTS):
        found = run_distributed(step_and_save, world, str(tmp_path), number)
        assert [held for held, _ in found] == [experts] * world
        losses.append(found[0][1])
    first, *others = (tensors(tmp_path / str(number)) for number in range(len(LAYOUTS)))
    assert first["optim.exp_avg.layers.0.mlp.experts.down.weight"].abs().sum(dim=(1, 2)).min() > 0
    assert first["model.layers.0.mlp.router.expert_bias"].abs().max() > 0
    for other in others:
        assert other.keys() == first.keys()
        assert [name for name in first if not torch.equal(first[name], other[name])] == []
    assert max(abs(loss / losses[0] - 1) for loss in losses) < 1e-5


def test_the_share_of_further_predictions_may_change_on_a_resume(tmp_path: Path) -> None:
    flags = "--mtp-num-layers 1 --mtp-loss-scaling-factor"
    first = run_here(tmp_path, f"{flags} 0.1 --train-iters 2 --save {tmp_path}/saved")
    second = run_here(tmp_path, f"{flags} 0.3 --train-iters 3 --load {tmp_path}/saved")
    assert (first.code, second.code) == (0, 0), second.err
    assert "differs from how it was trained: --mtp-loss-scaling-factor 0.1 -> 0.3\n" in second.out
    other = run_here(tmp_path, f"--mtp-num-layers 2 --train-iters 3 --load {tmp_path}/saved")
    assert other.code == 2 and "the checkpoint was trained with --mtp-num-layers 1, this run has 2" in other.err
