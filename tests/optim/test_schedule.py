from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp.config import OptimizerConfig
from smp.optim.lr_scheduler import learning_rate

STYLES = ("cosine", "linear", "WSD", "constant")


def schedule(style: str, **settings: float) -> OptimizerConfig:
    """A peak of 1 after 10 of 110 iterations and a floor of 0.1."""
    settings = {"lr": 1.0, "min_lr": 0.1, "lr_warmup_iters": 10, "lr_decay_iters": 110} | settings
    if style == "WSD":
        settings.setdefault("lr_wsd_decay_iters", 20)
    return OptimizerConfig(lr_decay_style=style, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("style", STYLES)
def test_warm_up_is_linear_from_zero_to_the_peak(style: str) -> None:
    """As Megatron's: the rate of a step is that of the steps behind it, of which the first has none."""
    optim = schedule(style)
    assert [learning_rate(optim, i) for i in range(1, 12)] == pytest.approx([i / 10 for i in range(11)])
    assert learning_rate(optim, 1) == 0.0 and learning_rate(optim, 11) == 1.0  # exactly


@pytest.mark.parametrize("style", STYLES)
def test_without_warm_up_the_first_step_is_on_the_decay(style: str) -> None:
    optim = schedule(style, lr_warmup_iters=0)
    assert learning_rate(optim, 1) == 1.0
    assert learning_rate(optim, 2) == 1.0 if style in ("WSD", "constant") else 0.98 < learning_rate(optim, 2) < 1.0


@pytest.mark.parametrize("style", STYLES)
def test_a_run_of_one_step_is_at_the_peak(style: str) -> None:
    assert learning_rate(OptimizerConfig(lr_decay_style=style, lr_decay_iters=1, lr_wsd_decay_iters=1), 1) == 3e-4  # type: ignore[arg-type]


def test_cosine() -> None:
    optim = schedule("cosine")
    # with half of the way behind, at 61: 0.1 + 0.9 x (1 + cos 90) / 2; with a third, 10 + 300/3: cos 60 = 1/2
    assert learning_rate(optim, 61) == pytest.approx(0.55)
    assert learning_rate(schedule("cosine", lr_decay_iters=310), 111) == pytest.approx(0.1 + 0.9 * 0.75)


def test_cosine_and_warm_up_are_those_of_transformers() -> None:
    import torch
    from transformers import get_cosine_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs, rates = get_cosine_schedule_with_warmup(optimizer, 10, 110), []
    for _ in range(110):
        rates.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    optim = schedule("cosine", min_lr=0.0)
    assert [learning_rate(optim, i) for i in range(1, 111)] == pytest.approx(rates, rel=1e-12)


def test_linear() -> None:
    assert [learning_rate(schedule("linear"), i) for i in (11, 12, 61, 110)] == pytest.approx([1.0, 0.991, 0.55, 0.109])


def test_wsd_stays_then_decays_by_megatrons_default_shape() -> None:
    optim = schedule("WSD")
    assert [learning_rate(optim, i) for i in (11, 50, 91)] == [1.0, 1.0, 1.0]
    # half of the decay behind, at 101: 2 x 0.5^0.5 - 1 = 0.41421
    assert learning_rate(optim, 101) == pytest.approx(0.1 + 0.9 * 0.41421356)
    assert learning_rate(optim, 92) < 1.0


@pytest.mark.parametrize(
    ("style", "height"), [("linear", 0.75), ("cosine", 0.85355339), ("minus_sqrt", 0.5), ("exponential", 0.68179283)]
)
def test_wsd_decays_by_each_of_megatrons_shapes(style: str, height: float) -> None:
    """A quarter of the decay behind, at 96; and at both ends."""
    optim = schedule("WSD", lr_wsd_decay_style=style)
    assert learning_rate(optim, 96) == pytest.approx(0.1 + 0.9 * height)
    assert learning_rate(optim, 91) == 1.0 and 0.1 < learning_rate(optim, 110) < 0.35


@pytest.mark.parametrize("style", ["cosine", "linear", "WSD"])
def test_the_floor_is_reached_after_the_decay_and_kept(style: str) -> None:
    optim = schedule(style)
    assert [learning_rate(optim, i) for i in (111, 112, 10_000)] == [0.1] * 3
    assert learning_rate(optim, 110) > 0.1


def test_constant_knows_no_end() -> None:
    assert learning_rate(schedule("constant", lr_decay_iters=20), 1000) == 1.0


def test_iterations_count_from_one() -> None:
    with pytest.raises(AssertionError):
        learning_rate(schedule("cosine"), 0)


@given(
    style=st.sampled_from(STYLES),
    warmup=st.integers(0, 50),
    decay=st.integers(1, 100),
    final=st.integers(1, 100),
    lr=st.floats(1e-6, 1.0),
    floor=st.floats(0.0, 1.0),
)
def test_rises_to_the_peak_then_never_rises_again_and_stays_in_bounds(
    style: str, warmup: int, decay: int, final: int, lr: float, floor: float
) -> None:
    optim = OptimizerConfig(
        lr_decay_style=style,  # type: ignore[arg-type]
        lr=lr,
        min_lr=floor * lr,
        lr_warmup_iters=warmup,
        lr_decay_iters=warmup + decay,
        lr_wsd_decay_iters=min(final, decay) if style == "WSD" else None,
    )
    rates = [learning_rate(optim, i) for i in range(1, warmup + decay + 3)]
    slack = 1e-12 * lr
    assert all(0 < rate <= lr + slack for rate in rates[1 : warmup + decay])
    assert all(a < b for a, b in pairwise(rates[: warmup + 1]))
    after = rates[warmup:]
    assert all(a >= b - slack for a, b in pairwise(after))
    assert all(rate >= floor * lr - slack for rate in after)
    assert rates[0] == 0.0 if warmup else rates[0] > 0.0
    assert warmup == 0 or rates[warmup] == lr
