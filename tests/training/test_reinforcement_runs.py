"""Reinforcement learning: resume amid a generation, what settings change, and what broken inputs say."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune
from smp.training.reporting.goodput import FILE
from smp.training.trainer import Progress, StepResult
from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE, tensor_errors
from tests.programs import run_program
from tests.training.flag_runs import clean_process, proves
from tests.training.rl_lab import STEPS, flags, write_inputs, write_reward_model
from tests.training.tuning_lab import QUIET, Recording, together, tune, tune_all

pytest.importorskip("transformers")
GRPO = "--objective grpo"
TIMED = ("seconds", "tokens/s")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rl")
    write_inputs(folder)
    return folder


def runs(world: int, lines: list[str]) -> list[dict[str, Any]]:
    ranks = run_distributed(tune_all, world, lines)
    return [together([rank[i] for rank in ranks]) for i in range(len(lines))]


def measured(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: x for name, x in step.items() if not any(word in name for word in TIMED)} for step in steps]


RESUMED = {
    "amid": "--objective grpo --steps-per-generation 2 --num-iterations 2 --beta 0.05 --train-iters 6",
    "following": "--objective grpo --beta 0.05 --train-iters 6 --sync-ref-model --ref-model-sync-steps 3",
    "ahead": "--objective rloo --one-step-off-policy --train-iters 6 --steps-per-generation 2",
    "rounds": "--objective dapo --reward-funcs {0}/rewards.py:rare --max-sampling-rounds 2 --train-iters 6",
}


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(folder: Path, tmp_path: Path) -> None:
    """Saved after three steps: amid a generation, with the next one written already, after prompts were left out."""
    lines = []
    for name, method in RESUMED.items():
        saved = f"--save {tmp_path / name} --save-interval 3"
        lines += [flags(folder, method), flags(folder, method, saved, "--exit-interval 3")]
        lines += [flags(folder, method, saved, "--resume")]
    found = runs(2, lines)
    for i, name in enumerate(RESUMED):
        whole, first, second = found[3 * i : 3 * i + 3]
        assert (len(first["losses"]), len(second["losses"])) == (3, 3), name
        assert whole["losses"] == first["losses"] + second["losses"], name
        assert measured(whole["more"]) == measured(first["more"] + second["more"]), name
        assert all(torch.equal(tensor, second["final"][n]) for n, tensor in whole["final"].items()), name


def test_another_layout_goes_on_amid_a_generation(folder: Path, tmp_path: Path) -> None:
    saved = f"--save {tmp_path} --save-interval 3"
    whole, _ = runs(1, [flags(folder, RESUMED["amid"]), flags(folder, RESUMED["amid"], saved, "--exit-interval 3")])
    (rest,) = runs(
        4, [flags(folder, RESUMED["amid"], saved, "--resume --tensor-model-parallel-size 2 --sequence-parallel")]
    )
    for step, metrics in enumerate(measured(rest["more"])):
        assert metrics == pytest.approx(measured(whole["more"])[3 + step], rel=1e-4, abs=1e-5)
    assert max(tensor_errors(rest["final"], whole["final"], whole["final"]).values()) <= TOLERANCE


def test_completions_of_other_settings_are_not_trained_on(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    method = f"{GRPO} --one-step-off-policy --train-iters 4"
    saved = f"--save {tmp_path} --save-interval 2 --log-dir {tmp_path}/logs"
    with clean_process():
        assert run(flags(folder, method, saved, "--exit-interval 2")) == 0
        assert run(flags(folder, method, saved, "--resume --num-generations 2 --exit-interval 3")) == 0
    assert "the completions in the checkpoint are of other settings" in capfd.readouterr().out


def test_bf16_with_a_temperature_samples_as_it_trains(folder: Path) -> None:
    """The division is in fp32 on both sides: what is left is the distance of two bf16 forward passes."""
    lines = [flags(folder, f"{GRPO} --bf16 --temperature {t} --train-iters 1") for t in (1.0, 0.7)]
    (found,) = run_distributed(tune_all, 1, lines)
    plain, divided = (result["more"][0]["sampling difference"] for result in found)
    assert divided < 3 * plain + 1e-6


KILLED = """
import os, signal, sys
import finetune
from smp.generation.generator import Generator
from torch.optim.optimizer import register_optimizer_step_post_hook

phase = sys.argv.pop(1)
calls = []

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def one_pass(self, *given, own=Generator._pass):
    calls.append(1)
    if len(calls) == 4:
        kill()
    return own(self, *given)

if phase == "sampling":
    Generator._pass = one_pass
if phase == "update":  # weights have changed, and nobody has saved them
    register_optimizer_step_post_hook(lambda *_: calls.append(1) or len(calls) == 2 and kill())
sys.exit(finetune.main(sys.argv[1:]))
"""
DEADLY_REWARD = """
import os, signal, time

def first(completion_ids, **columns):
    if os.environ.get("PHASE") == "scoring":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return [float(ids[0] % 7) for ids in completion_ids]
"""


class Logged(Recording):
    """As users have it, with files of metrics and completions."""

    def record(self) -> Logged:
        written = self.console.step
        super().record()
        noted = self.console.step

        def step(progress: Progress, result: StepResult) -> None:
            noted(progress, result)
            written(progress, result)

        self.console.step = step  # type: ignore[method-assign]
        return self


def logged(rank: int, world: int, lines: list[str]) -> list[dict[str, Any]]:
    return [tune(rank, world, line, Logged) for line in lines]


TRAINED = {"update": 1, "sampling": 2, "scoring": 2}
"""Steps that are saved when a run was killed once in each phase, one after the other."""
ELSEWHERE = {
    "update": "--tensor-model-parallel-size 2 --sequence-parallel",
    "sampling": "--pipeline-model-parallel-size 2",
    "scoring": "",
}


def test_a_run_killed_in_each_phase_ends_as_an_undisturbed_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL of a process in an update, while it samples, while it scores; after each the same command line goes on,
    to the last bit, and so does another layout, with the same texts and rewards."""
    (tmp_path / "deadly.py").write_text(DEADLY_REWARD)
    (tmp_path / "killed.py").write_text(KILLED)
    method = f"{GRPO} --reward-funcs {tmp_path}/deadly.py:first --train-iters 5 --num-iterations 2 --log-interval 1"

    def words(name: str) -> str:
        saved = f"--log-dir {tmp_path}/{name} --save {tmp_path}/{name}/saved --save-interval 1 --log-completions 8"
        return flags(folder, method, f"{saved} --resume {QUIET}")

    def start(name: str, phase: str) -> int:
        monkeypatch.setenv("PHASE", phase)
        done = run_program(tmp_path / "killed.py", [phase, *words(name).split()], tmp_path)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode

    def steps(name: str) -> list[dict[str, float]]:
        found = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        wanted = ("iteration", "lm loss", "grad norm", "reward", "entropy", "completion length")
        return [{key: record[key] for key in wanted} for record in found]

    def texts(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / name / "completions.jsonl").read_text().splitlines()]

    assert start("whole", "") == 0
    for phase, trained in TRAINED.items():
        assert start("killed", phase) == -signal.SIGKILL, phase
        assert len(steps("killed")) == trained, phase
        shutil.copytree(tmp_path / "killed", tmp_path / phase)
    assert start("killed", "") == 0
    assert steps("killed") == steps("whole") and len(steps("whole")) == 5
    assert texts("killed") == texts("whole") and len(texts("whole")) == 3 * 8
    ranks = run_distributed(logged, 2, [f"{words(phase)} {ELSEWHERE[phase]}" for phase in TRAINED])
    for i, phase in enumerate(TRAINED):
        other = together([rank[i] for rank in ranks])
        left = steps("whole")[TRAINED[phase] :]
        assert other["losses"] == pytest.approx([step["lm loss"] for step in left], rel=1e-4, abs=1e-5), phase
        assert [step["reward"] for step in other["more"]] == [step["reward"] for step in left], phase
        assert texts(phase) == texts("whole"), phase


CHANGES = {
    "num_generations": "--num-generations 2",
    "max_completion_length": "--max-completion-length 5",
    "temperature": "--temperature 0.5",
    "top_k": "--top-k 5",
    "top_p": "--top-p 0.5",
    "num_iterations": "--num-iterations 2",
    "steps_per_generation": "--steps-per-generation 2",
    "one_step_off_policy": "--one-step-off-policy",
    "advantage_estimator": "--advantage-estimator rloo",
    "scale_rewards": "--scale-rewards off",
    "loss_type": "--loss-type luspo",
    "beta": "--beta 0.3",
    "reward_funcs": "--reward-funcs {0}/rewards.py:rare",
    "reward_weights": "--reward-weights 1 -3",
    "overlong_buffer_len": "--overlong-buffer-len 6",
    "mask_truncated_completions": "--mask-truncated-completions",
}
"""Beside plain GRPO."""
CLIPPED = "--num-iterations 3 --beta 0.3 --lr 0.5 "
FURTHER = {
    "importance_sampling_level": "--importance-sampling-level sequence",
    "epsilon": "--epsilon 0.01",
    "epsilon_high": "--epsilon-high 0.01",
    "delta": "--delta 1.2 --epsilon-high 0.1",
    "kl_placement": "--kl-placement reward",
    "kl_estimator": "--kl-estimator k2",
    "use_bias_correction_kl": "--no-use-bias-correction-kl",
    "off_policy_mask_threshold": "--off-policy-mask-threshold -0.001",
    "importance_sampling_mode": "--importance-sampling-mode token_mask --importance-sampling-clip-max 1.0000001",
}
"""Beside several updates with a reference."""
AHEAD = "--one-step-off-policy --lr 0.5 --importance-sampling-mode token_truncate --importance-sampling-clip-max 1.01 "
CORRECTED = {
    "importance_sampling_clip_max": "--importance-sampling-clip-max 1.5",
    "importance_sampling_clip_min": "--importance-sampling-clip-min 0.999",
}
COMPARED = "--beta 0.3 --lr 0.5 "
MOVED = {"sync_ref_model": "--sync-ref-model --ref-model-sync-steps 1"}
FOLLOWS = COMPARED + MOVED["sync_ref_model"]
FOLLOWING = {
    "ref_model_mixup_alpha": "--ref-model-mixup-alpha 0.1",
    "ref_model_sync_steps": "--ref-model-sync-steps 2",
}
GATE = "--loss-type sapo --num-iterations 2 --lr 0.5 "
GATES = {
    "sapo_temperature_pos": "--sapo-temperature-pos 3",
    "sapo_temperature_neg": "--sapo-temperature-neg 3",
}


@proves(*CHANGES, *FURTHER, *CORRECTED, *MOVED, *FOLLOWING, *GATES)
def test_each_setting_changes_what_is_trained(folder: Path) -> None:
    groups = [
        ("", CHANGES),
        (CLIPPED, FURTHER),
        (AHEAD, CORRECTED),
        (COMPARED, MOVED),
        (FOLLOWS, FOLLOWING),
        (GATE, GATES),
    ]
    names, lines = [], []
    for base, changes in groups:
        for name, change in [("", ""), *changes.items()]:
            names.append(name)
            lines.append(flags(folder, f"{GRPO} {base} {change}", "--train-iters 3"))
    (found,) = run_distributed(tune_all, 1, lines)
    base: dict[str, Any] = {}
    for name, result in zip(names, found, strict=True):
        if not name:
            base = result
            continue
        changed = any(not torch.equal(tensor, base["final"][n]) for n, tensor in result["final"].items())
        assert changed, name


@proves("objective", "dpo_reference")
def test_objectives_are_presets_of_these_settings(folder: Path) -> None:
    """What the table says of dapo, written out with grpo, is the same run; so are others."""
    same = {
        "--objective dr_grpo": "--objective grpo --loss-type dr_grpo --scale-rewards off",
        "--objective dapo": "--objective grpo --epsilon-high 0.28 --max-sampling-rounds 10 --overlong-buffer-len 1",
        "--objective gspo": "--objective grpo --loss-type grpo --importance-sampling-level sequence --epsilon 3e-4 "
        "--epsilon-high 4e-4",
        "--objective cispo": "--objective grpo --loss-type cispo --epsilon-high 5",
        "--objective reinforce++ --beta 0.1": "--objective grpo --beta 0.1 --advantage-estimator reinforce++ "
        "--kl-placement reward",
        "--objective rloo --num-generations 4": "--objective grpo --advantage-estimator rloo --loss-type grpo "
        "--importance-sampling-level sequence_sum --beta 0.05 --kl-placement reward --scale-rewards group",
        "--objective grpo --beta 0.1 --lora-rank 2": "--objective grpo --beta 0.1 --lora-rank 2 --dpo-reference copy",
    }
    words = [word for pair in same.items() for word in pair]
    (found,) = run_distributed(
        tune_all, 1, [flags(folder, word, "--train-iters 2 --num-iterations 2") for word in words]
    )
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert all(torch.equal(tensor, other["final"][n]) for n, tensor in one["final"].items())


@proves("generation_batch_size", "reward_workers")
def test_how_many_are_written_at_once_changes_no_text(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [flags(folder, GRPO, more) for more in ("", "--generation-batch-size 16", "--reward-workers 2")]
    (found,) = run_distributed(tune_all, 1, lines)
    assert found[0]["more"][0]["reward"] == found[1]["more"][0]["reward"] == found[2]["more"][0]["reward"]


def run(words: str, *more: str) -> int:
    return finetune.main([*f"{words} --no-tensorboard --no-progress-bar --log-interval 1".split(), *more])


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@proves("num_generations_eval", "eval_temperature", "log_completions", "max_sampling_rounds")
def test_evaluations_and_logs(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    evaluated = "--eval-interval 2 --split 50,50 --train-iters 2 --eval-iters 1"
    cases = {"plain": "", "more": "--num-generations-eval 8", "greedy": "--eval-temperature 0 --log-completions 2"}
    cases |= {"rounds": "--max-sampling-rounds 3 --reward-funcs {0}/rewards.py:rare"}
    with clean_process():
        for name, more in cases.items():
            assert run(flags(folder, f"{GRPO} {evaluated} {more}", f"--log-dir {tmp_path / name}")) == 0
    found = {
        name: [r["validation reward"] for r in records(tmp_path / name) if "validation reward" in r] for name in cases
    }
    assert all(len(values) == 2 for values in found.values())
    assert found["plain"][0] != found["more"][0] != found["greedy"][0]
    assert "validation reward at iteration 2:" in capfd.readouterr().out
    shown = {name: (tmp_path / name / "completions.jsonl").read_text().splitlines() for name in cases}
    assert len(shown["plain"]) == 2 * 4 and len(shown["greedy"]) == 2 * 2
    assert set(json.loads(shown["plain"][0])) == {"iteration", "prompt", "completion", "reward", "truncated"}
    assert any(record.get("sampling rounds", 0) > 1 for record in records(tmp_path / "rounds"))
    spent = json.loads((tmp_path / "plain" / FILE).read_text())["seconds"]
    assert spent["rollout"] > 0 == spent["data"], "writing completions is no waiting for data"


@proves("reward_model", "reward_model_weight")
def test_a_reward_model_scores_as_transformers_does(folder: Path, tmp_path: Path) -> None:
    import transformers

    write_reward_model(tmp_path / "rm")
    method = f"{GRPO} --train-iters 1 --log-completions 8 --reward-model {tmp_path}/rm --reward-model-weight 2"
    line = flags(folder, method, f"--log-dir {tmp_path}/logs")
    with clean_process():
        assert run(line.replace(f"--reward-funcs {folder}/rewards.py:vowels {folder}/rewards.py:short", "")) == 0
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "rm")
    rows = [json.loads(line) for line in (tmp_path / "logs" / "completions.jsonl").read_text().splitlines()]
    assert len(rows) == 8 and len({row["reward"] for row in rows}) > 4
    for row in rows:
        if "\ufffd" in row["completion"] or "<|" in row["completion"]:
            continue  # what is shown is not what was scored
        ids = tokenizer(row["prompt"] + row["completion"], add_special_tokens=False).input_ids
        with torch.no_grad():
            score = model(torch.tensor([[*ids, 2]])).logits[0, 0].item()
        assert row["reward"] == pytest.approx(2 * score, abs=1e-4)


BROKEN = """
import time
def raises(completions, number):
    if number[0] == 7:
        raise ValueError("no reward for seven")
    return [float(len(text) % 5) for text in completions]
def few(completions, **columns):
    return [1.0]
def many(completions, **columns):
    return [1.0] * 100
def nan(completions, **columns):
    return [float("nan")] * len(completions)
def infinite(completions, **columns):
    return [1e400] * len(completions)
def text(completions, **columns):
    return ["good"] * len(completions)
def number(completions, **columns):
    return 1.0
def hangs(completions, **columns):
    time.sleep(100)
def ends(completions, **columns):
    import os
    os._exit(1)
def needs(completions, no_such_column):
    return [0.0] * len(completions)
"""
FAILING = {
    "raises": "reward function {0}/broken.py:raises raised ValueError: no reward for seven",
    "few": "returned 1 rewards for 4 completions",
    "many": "returned 100 rewards for 4 completions",
    "nan": "broken.py:nan returned nan",
    "infinite": "broken.py:infinite returned inf",
    "text": "broken.py:text returned 'good', which is no number",
    "number": "broken.py:number returned float, not a list",
    "hangs": "broken.py:hangs did not return within 1 s (--reward-timeout)",
    "ends": "broken.py:ends ended its process",
    "needs": "missing 1 required positional argument: 'no_such_column'",
}


@pytest.mark.parametrize("name", FAILING)
@proves("reward_timeout", "reward_errors")
def test_a_broken_function_ends_the_run_in_a_line_or_is_counted(
    folder: Path, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    limit = 1 if name == "hangs" else 60  # a busy machine is slow, too
    method = f"{GRPO} --reward-funcs {tmp_path}/broken.py:{name} {{0}}/rewards.py:vowels --reward-timeout {limit}"
    rest = f"--log-dir {tmp_path}/logs --train-iters 12 --lr 1e-4 --save {tmp_path}/saved --save-interval 1"
    with clean_process():
        assert run(flags(folder, method, rest)) == 1
        said = capfd.readouterr().err.strip().splitlines()
        assert len(said) == 1 and FAILING[name].format(tmp_path) in said[0] and "--reward-errors skip" in said[0]
        # What was trained before is there.
        go_on = f"--train-iters 6 --save {tmp_path}/saved --resume" if name == "raises" else "--train-iters 1"
        short = f"--log-dir {tmp_path}/skipped {go_on} --reward-errors skip"
        assert run(flags(folder, method, short, "--lr 1e-4")) == 0
    skipped = records(tmp_path / "skipped")
    assert sum(record.get("reward errors", 0) for record in skipped) > 0
    if name == "raises":
        before = [record["iteration"] for record in records(tmp_path / "logs")]
        assert before and [*before, *(record["iteration"] for record in skipped)] == list(range(1, 7))


REFUSED = {
    "": "there is no reward: give --reward-funcs, --reward-model or --environment",
    "--reward-model {0}": "--reward-model {0} is no reward model, which gives one score",
    "--reward-model {0}/none": "--reward-model {0}/none: there is no such folder",
    "--reward-funcs {0}/none.py:f": "there is no file {0}/none.py",
    "--reward-funcs {0}/rewards.py:absent": "has no function absent",
    "--reward-funcs vowels": "--reward-funcs vowels: neither FILE.py:NAME nor one of exact_match, number, math",
    "--reward-funcs number number": "number is named twice",
    "--reward-funcs number --reward-weights 1 2": "--reward-weights needs 1 numbers",
    "--reward-funcs number --reward-weights x": "--reward-weights x are no numbers",
    "--reward-funcs number --num-generations 1": "--num-generations 1: --advantage-estimator grpo compares",
    "--reward-funcs number --num-generations 3": "no whole number of prompts with --num-generations 3",
    "--reward-funcs number --loss-type cispo --epsilon-high 0.2": "with --loss-type cispo it is the largest weight",
    "--reward-funcs number --delta 1.1": "--delta 1.1 is below 1 + --epsilon-high 0.2",
    "--reward-funcs number --loss-type sapo --epsilon 0.1": "--epsilon has no effect with --loss-type sapo",
    "--reward-funcs number --kl-estimator k2": "--kl-estimator k2 has no effect without --beta",
    "--reward-funcs number --importance-sampling-clip-max 2": "have no effect without a mode",
    "--reward-funcs number --temperature 0.001": "--temperature 0.001",
    "--reward-funcs number --hidden-dropout 0.1": "--hidden-dropout 0.1: with dropout the ratio of two policies",
    "--reward-funcs number --max-completion-length 48": "leaves no room for prompts in --seq-length 48",
    "--reward-funcs number --dpo-reference copy": "--dpo-reference copy has no effect without --beta",
    "--reward-funcs number --kl-placement loss --beta 1 --dpo-reference precomputed": "take adapters-off or copy",
    "--reward-funcs number --packing best-fit": "--packing best-fit",
    "--reward-funcs number --sync-ref-model": "--sync-ref-model has no effect without --beta",
    "--reward-funcs number --sync-ref-model --beta 1 --lora-rank 2": "--sync-ref-model: with adapters the reference is",
    "--reward-funcs number --sync-ref-model --beta 1 --ref-model-mixup-alpha 1.5": "--ref-model-mixup-alpha 1.5",
    "--reward-funcs number --sync-ref-model --beta 1 --peer-snapshot-interval 2": "--peer-snapshot-interval 2: it",
    "--reward-funcs number --data-path {0}/answers.jsonl": "a prompt is under prompt, messages",
    "--reward-funcs number --data-path {0}/pairs.jsonl": "give --objective dpo, orpo or reward",
    "--reward-funcs number --data-path {0}/long.jsonl": "there is room for",
    "--reward-funcs number --data-path {0}/said.jsonl": "its prompt ends with the assistant",
    "--reward-funcs number --data-path {0}/taken.jsonl": "key completions: reward functions get something else by",
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_cannot_be_is_refused_in_a_line(folder: Path, given: str, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "answers.jsonl").write_text('{"completion": "a"}\n')
    (folder / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (folder / "long.jsonl").write_text(json.dumps({"prompt": "what " * 200}) + "\n")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (folder / "taken.jsonl").write_text('{"prompt": "a", "completions": ["b"]}\n')
    (folder / "said.jsonl").write_text(json.dumps({"prompt": turns}) + "\n")
    data = "" if "--data-path" in given else "--data-path {0}/prompts.jsonl"
    line = f"--load {{0}} --objective grpo {STEPS} --log-dir {{0}}/logs {data} {given}".format(folder)
    with clean_process():
        assert run(line) == 2
    said = capfd.readouterr().err.strip().splitlines()
    assert len(said) == 1 and REFUSED[given].format(folder) in said[0], said


def test_settings_of_reinforcement_learning_are_refused_beside_others(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with clean_process():
        line = f"--load {folder} --objective sft --data-path {folder}/prompts.jsonl --train-iters 1 --num-generations 4"
        assert run(line) == 2
    assert "--num-generations 4 has no effect without --objective grpo" in capfd.readouterr().err
