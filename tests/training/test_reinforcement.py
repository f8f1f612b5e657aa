"""Reinforcement learning is the same under every layout: texts, rewards, losses, gradients and weights."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE, tensor_errors
from tests.training.rl_lab import flags, write_inputs, write_reward_model
from tests.training.tuning_lab import together, tune_all

pytest.importorskip("transformers")

SHORT = "--train-iters 2"
"""Of four steps: the policy that sampled and another one, or two generations."""
METHODS = {
    "grpo": f"--objective grpo {SHORT}",
    "several steps": "--objective grpo --loss-type grpo --steps-per-generation 2 --num-iterations 2 --beta 0.05 "
    "--temperature 0.7",
    "dr_grpo, lora": f"--objective dr_grpo --lora-rank 4 --beta 0.05 --kl-estimator k2 {SHORT}",
    "gspo": f"--objective gspo --num-iterations 2 --epsilon 0.002 --epsilon-high 0.003 --beta 0.02 {SHORT}",
    "cispo": f"--objective cispo --num-iterations 2 --epsilon-high 1.0 {SHORT}",
    "rloo": f"--objective rloo --num-iterations 2 {SHORT}",
    "reinforce++": "--objective reinforce++ --beta 0.1 --eval-interval 2 --num-generations 1",
    "dapo": "--objective dapo --reward-funcs {0}/rewards.py:rare --max-sampling-rounds 3 --overlong-buffer-len 4",
    "ahead": "--objective grpo --one-step-off-policy --mask-truncated-completions --importance-sampling-mode "
    "sequence_truncate --importance-sampling-clip-max 1.01 --max-completion-length 16",
    "chat": "--objective grpo --data-path {0}/chat.jsonl --off-policy-mask-threshold -0.001 --num-iterations 2",
    "reward model": f"--objective grpo --reward-model {{0}}/rm --reward-model-weight 0.5 {SHORT}",
    "following": "--objective grpo --beta 0.3 --num-iterations 2 --sync-ref-model --ref-model-sync-steps 3",
    "sapo": "--objective grpo --loss-type sapo --steps-per-generation 2",
}
LAYOUTS = {
    "tp 2 + sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp 2": (2, "--pipeline-model-parallel-size 2"),
    "shard 2": (2, ""),
    "tp 2 x pp 2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    "shard 2 x tp 2": (4, "--tensor-model-parallel-size 2"),
    "cp 2": (2, "--context-parallel-size 2 --cp-comm-type p2p"),
    "cp 2 x shard 2": (4, "--context-parallel-size 2 --cp-comm-type all_gather"),
}
FAST = {
    "tp 2 + sp": ("grpo", "following", "several steps", "ahead", "reward model"),
    "pp 2": ("several steps", "reward model", "dapo", "rloo"),
    "shard 2": ("following", "grpo", "dr_grpo, lora", "reinforce++", "cispo"),
    "tp 2 x pp 2": ("gspo",),
    "shard 2 x tp 2": ("chat", "reward model"),
    "cp 2": ("reward model", "gspo", "ahead", "rloo", "several steps"),
    "cp 2 x shard 2": ("sapo",),
}
SLOW = {layout: tuple(method for method in METHODS if method not in fast) for layout, fast in FAST.items()}
Results = dict[tuple[str, str], dict[str, Any]]
TIMED = ("seconds", "tokens/s")


@pytest.fixture(scope="module", params=[FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["fast", "slow"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Runs by layout and method, one start per number of processes."""
    folder = tmp_path_factory.mktemp("rl")
    write_inputs(folder)
    write_reward_model(folder / "rm")
    out = {}
    layouts, chosen = {"alone": (1, "")} | LAYOUTS, {"alone": tuple(METHODS)} | request.param
    for world in (1, 2, 4):
        here = [name for name, (processes, _) in layouts.items() if processes == world]
        cases = [(layout, method) for layout in here for method in chosen[layout]]
        lines = [flags(folder, METHODS[method], layouts[layout][1]) for layout, method in cases]
        ranks = run_distributed(tune_all, world, lines)
        for i, case in enumerate(cases):
            out[case] = together([r[i] for r in ranks])
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_rank(results: Results, layout: str) -> None:
    for there, method in results:
        if there != layout:
            continue
        got, want = results[layout, method], results["alone", method]
        for step, metrics in enumerate(want["more"]):
            for name, value in metrics.items():
                if not any(word in name for word in TIMED):
                    assert got["more"][step][name] == pytest.approx(value, rel=1e-4, abs=1e-5), (method, step, name)
        assert any(g.any() for gradients in want["gradients"] for g in gradients.values()), method
        for step, gradients in enumerate(want["gradients"]):
            if not any(g.any() for g in gradients.values()):  # no prompt with a spread of rewards
                assert not any(g.any() for g in got["gradients"][step].values()), (method, step)
                continue
            errors = tensor_errors(got["gradients"][step], gradients, gradients)
            assert max(errors.values()) <= TOLERANCE, (method, step, max(errors.items(), key=lambda item: item[1]))
        errors = tensor_errors(got["final"], want["final"], want["final"])
        assert max(errors.values()) <= TOLERANCE, method
        if want["validation"] is not None:
            assert got["validation"][1] == pytest.approx(want["validation"][1], rel=TOLERANCE)


def test_sampling_is_training(results: Results) -> None:
    """Log-probabilities of what was sampled are those of the training forward pass, in each layout."""
    for (layout, method), result in results.items():
        first = result["more"][0]
        assert first["sampling difference"] < 1e-5, (layout, method)
        if method == "ahead":  # written by the weights before
            assert result["more"][1]["sampling difference"] > 1e-4


def test_what_is_measured(results: Results) -> None:
    of = {method: results["alone", method]["more"] for method in METHODS}
    assert {"reward", "rewards/vowels", "rewards/short", "reward deviation", "completion length"} <= set(of["grpo"][0])
    assert of["several steps"][0]["KL"] < 1e-9 < of["several steps"][3]["KL"]
    assert of["following"][2]["KL"] > 1e-9  # two steps on the first generation
    assert of["gspo"][1]["clipped low"] + of["gspo"][1]["clipped high"] > 0
    assert of["cispo"][1]["clipped high"] > 0
    assert max(step["sampling rounds"] for step in of["dapo"]) > 1 and of["dapo"][0]["groups without spread"] > 0
    assert of["ahead"][1]["importance weight"] != 1.0
    assert results["alone", "reinforce++"]["validation"][0] == 4
