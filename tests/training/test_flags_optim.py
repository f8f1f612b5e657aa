"""Every setting of the optimizer and its schedule: each run is compared with arithmetic on its own gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.training.flag_runs import Run, Runs, Tensors, proves

DECAY = "--train-iters 8 --lr 0.008 "


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield Runs(tmp_path_factory.mktemp("optim"))


def adamw_by_hand(
    run: Run,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    rates: list[float] | None = None,
    decayed: tuple[str, ...] = (),
) -> Tensors:
    """Final weights after the run's gradients at the run's rates (Loshchilov & Hutter 2019, algorithm 2); vectors decay
    whose names end in one of ``decayed``."""
    out = {}
    for name, start in run.initial.items():
        w, m, v = start.double(), torch.zeros(()), torch.zeros(())
        for t, (grads, lr) in enumerate(zip(run.grads, rates or run.rates, strict=True), 1):
            g = grads[name].double()
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            w = w * (1 - lr * (decay if w.ndim > 1 or name.endswith(decayed) else 0.0))
            w = w - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
        out[name] = w
    return out


def sgd_by_hand(run: Run, momentum: float) -> Tensors:
    """Final weights of SGD without decay."""
    out = {}
    for name, start in run.initial.items():
        w, buffer = start.double(), torch.zeros(())
        for grads, lr in zip(run.grads, run.rates, strict=True):
            buffer = momentum * buffer + grads[name].double()
            w = w - lr * buffer
        out[name] = w
    return out


def muon_by_hand(run: Run, momentum: float, nesterov: bool, steps: int, scale: Callable[[int, int], float]) -> Tensors:
    """Final weights in float64: singular values go through the quintic (Jordan et al. 2024), no matrix does."""
    out = adamw_by_hand(run, 0.9, 0.95, 1e-8, 0.1)
    for name, start in run.initial.items():
        if not name.startswith("layers.") or start.ndim == 1:
            continue
        w, buffer = start.double(), torch.zeros(())
        for grads, lr in zip(run.grads, run.rates, strict=True):
            g = grads[name].double()
            buffer = momentum * buffer + (1 - momentum) * g
            update = momentum * buffer + (1 - momentum) * g if nesterov else buffer
            left, sizes, right = torch.linalg.svd(update, full_matrices=False)
            sizes = sizes / sizes.norm(dim=-1, keepdim=True)
            for _ in range(steps):
                sizes = 3.4445 * sizes - 4.7750 * sizes**3 + 2.0315 * sizes**5
            w = w * (1 - lr * 0.1) - lr * scale(*w.shape[-2:]) * (left * sizes.unsqueeze(-2)) @ right
        out[name] = w
    return out


def distance(got: Tensors, want: Tensors) -> float:
    """Largest difference of any weight."""
    return max((got[name].double() - w).abs().max().item() for name, w in want.items())


# setting -> flags and (beta1, beta2, eps, weight decay) that they mean; the baseline's are 0.9, 0.95, 1e-8, 0.1
ADAM = {
    "weight_decay": ("--weight-decay 0.9", (0.9, 0.95, 1e-8, 0.9)),
    "adam_beta1": ("--adam-beta1 0.5", (0.5, 0.95, 1e-8, 0.1)),
    "adam_beta2": ("--adam-beta2 0.5", (0.9, 0.5, 1e-8, 0.1)),
    "adam_eps": ("--adam-eps 0.01", (0.9, 0.95, 0.01, 0.1)),
}


@proves(*ADAM)
@pytest.mark.parametrize("name", ADAM)
def test_adamw_is_what_its_settings_say(runs: Runs, name: str) -> None:
    flags, values = ADAM[name]
    run = runs(flags)
    assert distance(run.final, adamw_by_hand(run, *values)) < 2e-6
    assert distance(run.final, adamw_by_hand(run, 0.9, 0.95, 1e-8, 0.1)) > 1e-4


@proves("decoupled_lr", "decoupled_min_lr")
@pytest.mark.parametrize("tie", ["", " --no-untie-embeddings-and-output-weights"])
def test_the_vocabularys_matrices_have_a_rate_of_their_own(runs: Runs, tie: str) -> None:
    """Linear from 0.02 to 0.004 where others go from 0.008 to 0, to the same point of the way at each step."""
    plain = f"{DECAY}--lr-decay-style linear{tie}"
    run = runs(f"{plain} --decoupled-lr 0.02 --decoupled-min-lr 0.004")
    others, own = adamw_by_hand(run, 0.9, 0.95, 1e-8, 0.1), run.rates
    assert own[0] == 0.008 and own[-1] == pytest.approx(0.001)
    moved = adamw_by_hand(run, 0.9, 0.95, 1e-8, 0.1, [0.004 + 2 * rate for rate in own])
    names = {name for name in run.final if name.startswith(("embedding.", "head."))}
    assert len(names) == (1 if tie else 2)
    assert distance(run.final, others | {name: moved[name] for name in names}) < 2e-6
    assert distance(run.final, others) > 1e-3
    least = runs(f"{plain} --decoupled-lr 0.02")  # down to --min-lr, which is 0
    moved = adamw_by_hand(least, 0.9, 0.95, 1e-8, 0.1, [2.5 * rate for rate in own])
    assert max((least.final[name].double() - moved[name]).abs().max().item() for name in names) < 2e-6


@proves("optimizer", "sgd_momentum")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_what_its_settings_say(runs: Runs, momentum: float) -> None:
    flags = "--optimizer sgd --weight-decay 0 --save ck"
    run = runs(f"{flags} --sgd-momentum {momentum}" if momentum else flags)
    assert distance(run.final, sgd_by_hand(run, momentum)) < 1e-6
    assert distance(run.final, sgd_by_hand(run, 0.9 - momentum)) > 1e-4
    assert set(run.state) == ({"momentum_buffer"} if momentum else set())
    assert set(runs().state) == {"exp_avg", "exp_avg_sq", "step"}


def spectral(rows: int, columns: int) -> float:
    return 0.2 * max(rows, columns) ** 0.5


# setting -> flags and what they mean; the baseline's are 0.95, Nesterov, 5 steps, 0.2 x sqrt(largest side)
MUON: dict[str, tuple[str, tuple[float, bool, int, Callable[[int, int], float]]]] = {
    "baseline": ("", (0.95, True, 5, spectral)),
    "experts": ("--num-experts 4", (0.95, True, 5, spectral)),
    "muon_momentum": ("--muon-momentum 0.5", (0.5, True, 5, spectral)),
    "muon_use_nesterov": ("--no-muon-use-nesterov", (0.95, False, 5, spectral)),
    "muon_num_ns_steps": ("--muon-num-ns-steps 2", (0.95, True, 2, spectral)),
    "muon_scale_mode": (
        "--muon-scale-mode shape_scaling",
        (0.95, True, 5, lambda rows, columns: 0.2 * max(1, rows / columns) ** 0.5),
    ),
    "unit_rms_norm": (
        "--muon-scale-mode unit_rms_norm",
        (0.95, True, 5, lambda rows, columns: 0.2 * (rows / columns) ** 0.5),
    ),
    "muon_extra_scale_factor": (
        "--muon-extra-scale-factor 0.5",
        (0.95, True, 5, lambda rows, columns: 2.5 * spectral(rows, columns)),
    ),
}


@proves("optimizer", *MUON.keys() - {"baseline", "experts", "unit_rms_norm"})
@pytest.mark.parametrize("name", MUON)
def test_muon_is_what_its_settings_say(runs: Runs, name: str) -> None:
    flags, values = MUON[name]
    run = runs(f"--optimizer muon --save ck {flags}")
    assert distance(run.final, muon_by_hand(run, *values)) < 5e-6
    if name not in ("baseline", "experts"):
        assert distance(run.final, muon_by_hand(run, *MUON["baseline"][1])) > 1e-3
    matrices = set(run.state["momentum_buffer"])
    assert matrices == {n for n, w in run.initial.items() if n.startswith("layers.") and w.ndim > 1}
    assert set(run.state["exp_avg"]) == set(run.initial) - matrices


@proves("exp_avg_dtype", "exp_avg_sq_dtype")
def test_moments_rest_in_what_was_asked_for(runs: Runs) -> None:
    base = adamw_by_hand(runs("--save ck"), 0.9, 0.95, 1e-8, 0.1)
    for flag, moment in (("--exp-avg-dtype", "exp_avg"), ("--exp-avg-sq-dtype", "exp_avg_sq")):
        for name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
            run = runs(f"{flag} {name} --save ck")
            assert {t.dtype for t in run.state[moment].values() if t.ndim > 1} == {dtype}
            assert {t.dtype for t in run.state[moment].values() if t.ndim == 1} == {torch.float32}
            other = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}[moment]
            assert {t.dtype for t in run.state[other].values()} == {torch.float32}
            assert 1e-6 < distance(run.final, base) < 0.02  # of a learning rate of 0.01


def test_apex_adam_without_apex_is_refused(runs: Runs) -> None:
    run = runs.fresh("--optimizer apex-adam")
    assert run.code == 2 and len(run.errors) == 1 and "apex" in run.errors[0]
    assert not run.files


@proves("lr")
def test_adams_first_step_is_the_learning_rate(runs: Runs) -> None:
    """m / sqrt(v) is the gradient's sign then, wherever the gradient is far above epsilon."""
    for lr in (0.01, 0.002):
        run = runs(f"--train-iters 1 --lr-decay-style constant --weight-decay 0 --lr {lr}")
        assert run.rates == [lr]
        assert distance(run.final, run.initial) == pytest.approx(lr, rel=1e-3)


def cosine(top: float, low: float, done: float) -> float:
    return low + (top - low) * (1 + math.cos(math.pi * done)) / 2


# setting -> flags, rates of the 8 iterations
RATES: dict[str, tuple[str, list[float]]] = {
    "baseline": ("", [cosine(0.008, 0, i / 8) for i in range(8)]),
    "min_lr": ("--min-lr 0.002", [cosine(0.008, 0.002, i / 8) for i in range(8)]),
    "lr_decay_iters": ("--lr-decay-iters 4", [cosine(0.008, 0, min(1, i / 4)) for i in range(8)]),
    "lr_warmup_iters": (
        "--lr-warmup-iters 4",
        [0.0, 0.002, 0.004, 0.006, *(cosine(0.008, 0, i / 4) for i in range(4))],
    ),
    "lr_warmup_fraction": (
        "--lr-warmup-fraction 0.25",
        [0.0, 0.004, *(cosine(0.008, 0, i / 6) for i in range(6))],
    ),
    "linear": ("--lr-decay-style linear", [0.008 - 0.001 * i for i in range(8)]),
    "constant": ("--lr-decay-style constant", [0.008] * 8),
    "WSD": ("--lr-decay-style WSD", [0.008] * 8),
    "lr_wsd_decay_iters": (
        "--lr-decay-style WSD --lr-wsd-decay-iters 4",
        [0.008] * 4 + [0.008 * (2 * 0.5 ** (i / 4) - 1) for i in range(4)],
    ),
    "lr_wsd_decay_style": (
        "--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-style minus_sqrt",
        [0.008] * 4 + [0.008 * (1 - (i / 4) ** 0.5) for i in range(4)],
    ),
}


@proves(
    *("min_lr", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction", "lr_wsd_decay_iters"),
    "lr_wsd_decay_style",
)
@pytest.mark.parametrize("name", RATES)
def test_the_schedule_is_what_was_asked_for_and_what_the_weights_got(runs: Runs, name: str) -> None:
    flags, rates = RATES[name]
    run = runs(DECAY + flags)
    assert run.rates == pytest.approx(rates, abs=1e-12)
    assert distance(run.final, adamw_by_hand(run, 0.9, 0.95, 1e-8, 0.1)) < 2e-6


@proves("apply_wd_to_qk_layernorm")
def test_norms_of_queries_and_keys_decay_where_that_is_asked_for(runs: Runs) -> None:
    run = runs("--weight-decay 3 --lr 0.01 --qk-layernorm --apply-wd-to-qk-layernorm")
    by_hand = adamw_by_hand(run, 0.9, 0.95, 1e-8, 3, decayed=("query_norm.weight", "key_norm.weight"))
    assert distance(run.final, by_hand) < 2e-6 < distance(run.final, adamw_by_hand(run, 0.9, 0.95, 1e-8, 3))
    refused = runs.fresh("--apply-wd-to-qk-layernorm")
    assert refused.code == 2 and "has no effect without --qk-layernorm" in refused.errors[0]


@proves("clip_grad")
def test_clipping_bounds_what_is_applied_not_what_is_reported(runs: Runs) -> None:
    def applied(run: Run) -> list[float]:
        return [torch.stack([g.norm() for g in grads.values()]).norm().item() for grads in run.grads]

    tight, off = runs("--clip-grad 0.25"), runs("--clip-grad 0")
    assert min(tight.records("grad norm")) > 0.25
    assert applied(tight) == pytest.approx([0.25] * 3, rel=1e-4)
    assert applied(off) == pytest.approx(off.records("grad norm"), rel=1e-4)
    assert tight.records("grad norm")[0] == off.records("grad norm")[0]
    assert tight.losses != off.losses


@proves("lr_warmup_init")
def test_the_warm_up_begins_at_a_rate(runs: Runs) -> None:
    rates = runs("--lr 1 --lr-decay-style constant --lr-warmup-iters 4 --lr-warmup-init 0.2 --train-iters 5").rates
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1])
    refused = runs.fresh("--lr 0.1 --lr-warmup-iters 2 --lr-warmup-init 0.2")
    assert refused.code == 2 and "--lr-warmup-init 0.2 is above the peak 0.1" in refused.errors[0]


@proves("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")
def test_the_schedule_counts_samples(runs: Runs) -> None:
    """Of 2 2 6 6 4 samples: 0, 2, 4, 10 and 16 are behind the steps."""
    batches = "--global-batch-size none --step-batch-size-schedule 0:2 68:6 238:4 --train-iters 5 --lr 1 "
    rates = runs(batches + "--lr-decay-style linear --lr-warmup-samples 4 --lr-decay-samples 16").rates
    assert rates == pytest.approx([0, 0.5, 1, 0.5, 0])
    wsd = runs(batches + "--lr-decay-style WSD --lr-decay-samples 20 --lr-wsd-decay-samples 8").rates
    assert wsd == pytest.approx([1, 1, 1, 1, 2 * 0.5**0.5 - 1])
    length = batches.replace("--train-iters 5", "--train-iters none --train-samples 20")
    assert runs(length + "--lr-decay-style linear").rates == pytest.approx([1, 0.9, 0.8, 0.5, 0.2])
    constant = "--train-iters 3 --lr 1 --lr-decay-style linear "
    assert runs(constant + "--lr-decay-samples 12").rates == runs(constant).rates  # with one size they are the same
    refused = runs.fresh("--lr-warmup-samples 2 --lr-decay-iters 5")
    assert refused.code == 2 and "give all in one unit" in refused.errors[0]
    refused = runs.fresh("--lr-warmup-samples 9 --lr-decay-samples 8")
    assert refused.code == 2 and "--lr-warmup-samples 9 must be below --lr-decay-samples 8" in refused.errors[0]
