"""What users of TRL, verl, NeMo-RL, OpenRLHF and others have reported of reinforcement learning, rebuilt here. The
numbers are of the reports; docs/reinforcement-learning.md lists them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from smp.rewards.verifiers import exact_match
from smp.training.rollouts.advantages import advantages, spreads
from smp.training.rollouts.rollout import Rollout
from smp.training.rollouts.source import RolloutSource
from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE, tensor_errors
from tests.training.rl_lab import flags, write_inputs
from tests.training.tuning_lab import Recording, together, tune

pytest.importorskip("transformers")

REWARDS = """
import json, os

def length(completion_ids, **columns):
    return [len(ids) / 9 for ids in completion_ids]

def partly(completion_ids, number):
    if number[0] % 3 == 0:
        return [None] * len(completion_ids)
    return [len(ids) / 9 if i else None for i, ids in enumerate(completion_ids)]

def always(completions, **columns):
    return [1.0] * len(completions)

def by_number(completion_ids, number):
    return [len(ids) * (number[0] % 4 == 0) / 9 for ids in completion_ids]

def notes(prompts, completions, number):
    with open(os.environ["NOTES"], "a") as f:
        f.write(json.dumps([prompts, len(completions), number]) + "\\n")
    return [float(len(text) % 3) for text in completions]
"""
GRPO = "--objective grpo --reward-funcs {0}/own.py:length"
MOVES = "--lr 0.3"
CASES = {
    "plain": f"{GRPO} {MOVES} --split 100,0,0",
    "micro-batches of 1": f"{GRPO} --micro-batch-size 1",
    "micro-batches of 8": f"{GRPO} --micro-batch-size 8",
    "partly": f"{GRPO.replace('length', 'partly')} --train-iters 2",
    "long": "--objective dapo --reward-funcs {0}/own.py:always --overlong-buffer-len 6 --max-sampling-rounds 2 "
    "--train-iters 1",
    "calls": f"{GRPO.replace('length', 'notes')} --train-iters 2",
    "epoch": f"{GRPO} --one-step-off-policy --train-epochs 1",
    "unlike rows": f"{GRPO.replace('length', 'notes')} --train-iters 1 --data-path {{0}}/unlike.jsonl --split 100,0,0",
    "again": f"{GRPO} {MOVES} --data-path {{0}}/one.jsonl --split 100,0,0",
    "two iterations": f"{GRPO} {MOVES} --num-iterations 2 --epsilon 1e-9",
    "uneven": "--objective dapo --reward-funcs {0}/own.py:by_number --max-sampling-rounds 3 --train-iters 2",
}


class Kept(Recording):
    """With what was written."""

    def record(self) -> Kept:
        super().record()
        assert isinstance(self.batches, RolloutSource)
        self.rollouts: list[Rollout] = []
        prepared = self.batches._prepared

        def keep(rollout: Rollout) -> Rollout:
            self.rollouts.append(prepared(rollout))
            return rollout

        self.batches._prepared = keep  # type: ignore[method-assign]
        return self


def run_all(rank: int, world: int, lines: dict[str, str], folder: Path) -> dict[str, dict[str, Any]]:
    import os

    out, runs = {}, list[Kept]()

    class Here(Kept):
        def record(self) -> Kept:
            runs.append(self)
            return super().record()

    for name, line in lines.items():
        os.environ["NOTES"] = str(folder / f"{name}.jsonl")
        out[name] = tune(rank, world, line, Here)
        out[name]["rollouts"] = runs[-1].rollouts
    return out


def line_of(folder: Path, name: str) -> str:
    line = flags(folder, CASES[name])
    return line.replace("--train-iters 4 ", "", 1) if "--train-epochs" in line else line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The padding token is the one that ends a text, and many others end one, too."""
    folder = tmp_path_factory.mktemp("reported")
    write_inputs(folder)
    (folder / "own.py").write_text(REWARDS)
    told = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(told | {"pad_token": told["eos_token"]}))
    unlike = [{"prompt": "what is one?", "number": 1}, {"prompt": "what is two?"}]
    (folder / "unlike.jsonl").write_text("".join(json.dumps(row) + "\n" for row in unlike))
    (folder / "one.jsonl").write_text(json.dumps({"prompt": "what is one?", "number": 1}) + "\n")
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, dict[str, Any]]:
    (found,) = run_distributed(run_all, 1, {name: line_of(folder, name) for name in CASES}, folder)
    return found


ENDS = {2, *range(100, 130)}


def completions(run: dict[str, Any]) -> list[tuple[list[int], list[bool], bool]]:
    """Of each: ids, which of them are trained, and whether the length ended it."""
    out = []
    for rollout in run["rollouts"]:
        for i, begin in enumerate(rollout.prompts):
            ids, trained = rollout.samples[i]
            assert not trained[:begin].any(), "prompts are not"
            out.append((ids[begin:].tolist(), trained[begin:].tolist(), bool(rollout.truncated[i])))
    return out


def test_the_token_that_ends_a_text_is_trained(found: dict[str, Any]) -> None:
    """TRL 4970 and 6357: masks that are inferred from ids leave it out where padding is the same token."""
    ended = [(ids, trained) for ids, trained, truncated in completions(found["plain"]) if not truncated]
    assert len(ended) > 5 and all(ids[-1] in ENDS and all(trained) for ids, trained in ended)


def test_each_of_several_end_tokens_ends_a_text(found: dict[str, Any]) -> None:
    """TRL 7039: a second end token was read over, nearly all counted as truncated. TRL 2708: tokens behind the end."""
    last = [ids[-1] for ids, _, truncated in completions(found["plain"]) if not truncated]
    assert len(set(last)) > 3
    assert not any(set(ids[:-1]) & ENDS for ids, _, _ in completions(found["plain"]))


@pytest.mark.parametrize("size", [1, 8])
def test_micro_batches_change_nothing(found: dict[str, Any], folder: Path, size: int) -> None:
    """TRL 3021, 5619 and 6024, ms-swift 10117: a loss that depends on accumulation."""
    (two,) = run_distributed(run_all, 1, {"two": flags(folder, GRPO)}, folder)
    got, want = found[f"micro-batches of {size}"], two["two"]
    assert got["losses"] == pytest.approx(want["losses"], rel=TOLERANCE, abs=1e-7)
    assert max(tensor_errors(got["final"], want["final"], want["final"]).values()) <= TOLERANCE


def test_completions_without_a_reward_are_no_number_in_nothing(found: dict[str, Any]) -> None:
    """ms-swift 8123, TRL 5773: None made NaN of all advantages, or counted as the reward 0."""
    without = 0
    for rollout in found["partly"]["rollouts"]:
        for group, rewards in zip(rollout.advantages.reshape(-1, 4), rollout.rewards.reshape(-1, 4), strict=True):
            none = np.isnan(rewards)
            without += int(none.sum())
            assert np.isfinite(group).all() and not group[none].any()
            assert none.all() or group[~none].sum() == pytest.approx(0, abs=1e-12)
    assert without > 2 and all(np.isfinite(found["partly"]["losses"]))


def test_groups_are_left_out_by_their_rewards_and_not_by_lengths(found: dict[str, Any]) -> None:
    """NeMo-RL 2431, verl-recipe 125: punished lengths gave spread to groups that were all wrong."""
    (step,) = found["long"]["more"]
    assert step["overlong penalty"] < 0 and step["groups without spread"] == 1.0


def test_a_function_gets_the_completions_of_one_prompt(found: dict[str, Any], folder: Path) -> None:
    """R1-V 67, TRL 2961: means over completions of several prompts."""
    calls = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    assert len(calls) == 2 * 2
    assert all(count == 4 and len(set(prompts)) == 1 and len(set(numbers)) == 1 for prompts, count, numbers in calls)


def test_columns_that_a_row_does_not_have_are_none(found: dict[str, Any], folder: Path) -> None:
    """As in tables of Hugging Face's datasets, where a function names the column."""
    calls = [json.loads(line) for line in (folder / "unlike rows.jsonl").read_text().splitlines()]
    assert {number for _, _, numbers in calls for number in numbers} == {1, None}


def test_an_epoch_ends_with_what_was_trained(found: dict[str, Any], folder: Path) -> None:
    """NeMo-RL 3248: epochs counted by what was written ahead. 23 prompts of 24, two in a step: 12 steps, the last of
    which takes one prompt of the next pass."""
    assert len(found["epoch"]["losses"]) == 12
    rows = [(rollout, i) for rollout in found["epoch"]["rollouts"] for i in range(len(rollout))]
    seen = Counter(rollout.samples[i][0][: rollout.prompts[i]].tobytes() for rollout, i in rows)
    assert len(seen) == 23 and sorted(seen.values()) == [4] * 22 + [8]


def test_a_text_is_of_the_weights_at_hand(found: dict[str, Any]) -> None:
    """TRL 6344, ms-swift 6343: keys and values of a prompt were kept when the weights had changed."""
    steps = found["again"]["more"]
    assert len(steps) == 4 and all(step["sampling difference"] < 1e-5 for step in steps)
    assert len(set(found["again"]["norms"])) == 4


def test_the_first_step_on_a_generation_is_on_its_policy(found: dict[str, Any]) -> None:
    """verl 2996 and 6280: ratios other than 1 before any update. Here even --epsilon 1e-9 clips nothing in it."""
    clipped = [step["clipped low"] + step["clipped high"] for step in found["two iterations"]["more"]]
    assert clipped[0] == clipped[2] == 0 < min(clipped[1], clipped[3])


def test_prompts_that_are_left_out_unevenly_stop_no_rank(found: dict[str, Any], folder: Path) -> None:
    """verl 5228: one rank had no prompt left and the others waited for it."""
    line = line_of(folder, "uneven")
    ranks = run_distributed(run_all, 2, {"uneven": line}, folder)
    cut, alone = together([rank["uneven"] for rank in ranks]), found["uneven"]
    assert max(step["sampling rounds"] for step in alone["more"]) > 1
    assert [step["reward"] for step in cut["more"]] == [step["reward"] for step in alone["more"]]
    assert max(tensor_errors(cut["final"], alone["final"], alone["final"]).values()) <= TOLERANCE


def test_a_group_is_left_out_as_a_whole() -> None:
    """NeMo-RL 4158: by the deviations of the others only the loser was left out. OpenRLHF 1270 and 1272: rewards that
    differ by rounding are equal."""
    rewards = np.array([0.0] + [0.95] * 7 + [0.95] * 8 + [0.3, 0.3 + 1e-9] * 4)
    assert spreads(rewards, 8).tolist() == [True, False, False]
    found = advantages(rewards, 8, "rloo", "group").reshape(3, 8)
    assert found[0].tolist() == pytest.approx([-0.95] + [0.95 / 7] * 7) and abs(found[1:]).max() < 1e-8
    assert abs(advantages(rewards, 8, "grpo", "group")[16:]).max() < 1e-4


def test_answers_of_tools_are_not_the_model_s() -> None:
    """verl 6392: a tool's message that held the answer was rewarded."""
    said = [{"role": "assistant", "content": "let me see"}, {"role": "tool", "content": "42"}]
    given = [[*said, {"role": "assistant", "content": "7"}], [*said, {"role": "assistant", "content": "42"}], said]
    assert exact_match(given, answer=["42"] * 3) == [0.0, 1.0, 0.0]


def test_logits_that_are_no_numbers_end_the_run_in_a_line(folder: Path, tmp_path: Path) -> None:
    """torchtitan 3602, DeepAnalyze 116: NaN went into the weights, step after step."""
    import safetensors.torch

    from finetune import main
    from tests.training.flag_runs import clean_process

    for file in folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with clean_process():
        assert main(f"{flags(tmp_path, GRPO)} --no-tensorboard --no-progress-bar".split()) == 1
