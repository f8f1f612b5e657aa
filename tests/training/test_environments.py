"""Completions of several turns: what is read and what is trained, in every layout, and environments that fail."""

from __future__ import annotations

import asyncio
import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import finetune
from smp.data.tuning.build import chat_template_of
from smp.data.tuning.encode import Encoder
from smp.data.tuning.messages import Conversation
from smp.data.tuning.tokenizer import open_tokenizer
from smp.rewards.environment import ToolEnvironment
from tests.distributed import run_distributed
from tests.parity.result import TOLERANCE, tensor_errors
from tests.training.flag_runs import clean_process, proves
from tests.training.rl_lab import STEPS, write_inputs
from tests.training.tuning_lab import together, tune_all

pytest.importorskip("transformers")

ENVIRONMENTS = '''
import os, time

class Guess:
    """Answers until the model has said three vowels in all; its reward is how few turns that took."""
    def reset(self, prompt, answer):
        self.answer, self.vowels, self.turns = answer, 0, 0
    def step(self, text):
        self.turns += 1
        self.vowels += sum(c in "aeiou" for c in text)
        return None if self.vowels >= 3 else f"not {self.answer}"
    def reward(self):
        return -self.turns / 4

class Silent(Guess):
    reward = None

class Messages(Guess):
    async def step(self, text):
        found = super().step(text)
        return found and [{"role": "user", "content": found}, {"role": "user", "content": "go on"}]

class Raises(Guess):
    def step(self, text):
        if int(self.answer) % 2:
            raise ValueError("no idea")
        return super().step(text)

class Hangs(Guess):
    def step(self, text):
        time.sleep(100)

class Ends(Guess):
    def reset(self, prompt):
        os._exit(3)

class Assistant(Guess):
    def step(self, text):
        return [{"role": "assistant", "content": "me"}]

class Number(Guess):
    def reward(self):
        return "much"

class Unread(Guess):
    def step(self, text):
        return [{"role": "tool", "content": "x", "tool_calls": [1]}]

class Dates(Guess):
    def step(self, text):
        import datetime
        return [{"role": "user", "content": datetime.datetime.now()}]

class Marks(Guess):
    def step(self, text):
        return "a\\ufdd4b"

class Alive(Marks):
    instances = None
    def reset(self, prompt, answer):
        import weakref
        super().reset(prompt, answer)
        Alive.instances = Alive.instances if Alive.instances is not None else weakref.WeakSet()
        Alive.instances.add(self)
        with open(os.path.join(os.path.dirname(__file__), "alive.txt"), "a") as f:
            f.write(f"{len(Alive.instances)}\\n")

class Loops(Guess):
    async def reset(self, prompt, answer):
        import asyncio
        super().reset(prompt, answer)
        self.queue = asyncio.Queue()
        self.task = asyncio.get_running_loop().create_task(self.queue.put(1))
    async def step(self, text):
        assert await self.queue.get() == 1
        await self.queue.put(1)
        return super().step(text)

class Nothing:
    pass
'''
GUESS = "--objective grpo --environment {0}/env.py:Guess --max-turns 3 --max-completion-length 90"


def flags(folder: Path, method: str, *more: str) -> str:
    line = f"--load {{0}} --log-dir {{0}}/logs --data-path {{0}}/chat.jsonl {STEPS} {method} {' '.join(more)}"
    return line.replace("--seq-length 48", "--seq-length 140").format(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("env")
    write_inputs(folder, positions=160)
    (folder / "env.py").write_text(ENVIRONMENTS)
    return folder


LAYOUTS = {
    "tp 2 + sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp 2": (2, "--pipeline-model-parallel-size 2"),
    "shard 2": (2, "--reward-workers 2"),
    "cp 2": (2, "--context-parallel-size 2 --cp-comm-type all_gather"),
}


@proves("environment", "max_turns")
def test_layout_equals_one_rank(folder: Path) -> None:
    lines = [flags(folder, GUESS), flags(folder, GUESS.replace("turns 3", "turns 1"))]
    ((alone, single),) = run_distributed(tune_all, 1, lines)
    assert alone["losses"] != single["losses"]
    assert alone["more"][0]["completion length"] > single["more"][0]["completion length"]
    assert any(step["reward"] < -0.25 for step in alone["more"]) and single["more"][0]["reward"] == -0.25
    ranks = run_distributed(tune_all, 2, [flags(folder, GUESS, layout) for _, layout in LAYOUTS.values()])
    for i, name in enumerate(LAYOUTS):
        cut = together([rank[i] for rank in ranks])
        for got, want in zip(cut["more"], alone["more"], strict=True):
            for metric in ("reward", "completion length", "truncated", "entropy"):
                assert got[metric] == pytest.approx(want[metric], rel=1e-5), (name, metric)
            assert want["sampling difference"] < 1e-5, "also behind what the environment said"
        assert cut["losses"] == pytest.approx(alone["losses"], rel=1e-5, abs=1e-6), name
        assert max(tensor_errors(cut["final"], alone["final"], alone["final"]).values()) <= TOLERANCE, name


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(folder: Path, tmp_path: Path) -> None:
    method, saved = f"{GUESS} --steps-per-generation 2", f"--save {tmp_path} --save-interval 3"
    lines = [flags(folder, method), flags(folder, method, saved, "--exit-interval 3")]
    (found,) = run_distributed(tune_all, 1, [*lines, flags(folder, method, saved, "--resume")])
    whole, first, second = found
    assert whole["losses"] == first["losses"] + second["losses"] and len(second["losses"]) == 1
    assert all(torch.equal(tensor, second["final"][n]) for n, tensor in whole["final"].items())


def run(words: str) -> int:
    return finetune.main(f"{words} --no-tensorboard --no-progress-bar --log-interval 1".split())


def test_completions_are_the_chat_templates_conversations(folder: Path, tmp_path: Path) -> None:
    """What reward functions see, and the ids, which are those that the template gives the whole conversation."""
    (tmp_path / "sees.py").write_text(
        "import json\n"
        "def sees(prompts, completions, completion_ids, answer):\n"
        f"    with open('{tmp_path}/seen.jsonl', 'a') as f:\n"
        "        for row in zip(prompts, completions, completion_ids, answer):\n"
        "            f.write(json.dumps(row) + '\\n')\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    with clean_process():
        assert run(flags(folder, GUESS, f"--train-iters 1 --reward-funcs {tmp_path}/sees.py:sees")) == 0
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    tokenizer = open_tokenizer(folder)
    encoder = Encoder(tokenizer, chat_template_of(None, tokenizer))
    several = 0
    for prompt, completion, ids, answer in seen:
        roles = [message["role"] for message in completion]
        assert roles == ["assistant", "user"] * (len(roles) // 2) + ["assistant"] * (len(roles) % 2)
        assert all(m["content"] == f"not {answer}" for m in completion if m["role"] == "user")
        several += len(roles) > 2
        texts = [m["content"] for m in completion if m["role"] == "assistant"]
        if any("\ufffd" in text or tokenizer.decode(tokenizer.encode(text)) != text for text in texts):
            continue
        heading, conversation = (
            encoder.prompt(Conversation(tuple(prompt), (False,) * len(prompt))),
            [*prompt, *completion],
        )
        whole = encoder.template.render(Conversation(tuple(conversation), (False,) * len(conversation)))[0]  # type: ignore[union-attr]
        said = tokenizer.decode([*heading, *ids])
        assert whole.startswith(said.removesuffix("<|im_end|>")) or said.startswith(whole.rstrip()), "the same text"
    assert several > 3


def test_rewards_of_an_environment_and_without_one(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cases = {
        "Messages": f"{GUESS.replace('Guess', 'Messages')} --reward-funcs {{0}}/rewards.py:short",
        "Silent": f"{GUESS.replace('Guess', 'Silent')} --reward-funcs {{0}}/rewards.py:short",
    }
    (found,) = run_distributed(tune_all, 1, [flags(folder, words) for words in cases.values()])
    messages, silent = (run["more"][0] for run in found)
    assert messages["rewards/environment"] < 0 and messages["reward"] == pytest.approx(
        messages["rewards/environment"] + messages["rewards/short"]
    )
    assert np.isnan(silent["rewards/environment"]) and silent["reward"] == silent["rewards/short"]


FAILING = {
    "Raises": "environment {0}/env.py:Raises: step raised ValueError: no idea",
    "Hangs": "environment {0}/env.py:Hangs: step did not return within 1 s (--reward-timeout)",
    "Ends": "environment {0}/env.py:Ends: reset ended its process",
    "Assistant": "which is neither None, a text nor messages of others",
    "Number": "reward raised ValueError: could not convert string to float: 'much'",
    "Unread": "cannot be shown to the model: message 0 has tool_calls",
    "Dates": "step raised TypeError: Object of type datetime is not JSON serializable",
    "Marks": "it holds one of U+FDD0 to U+FDD4",
    "Nothing": "has no methods reset and step",
    "Absent": "has no class Absent",
}


@pytest.mark.parametrize("name", FAILING)
def test_environments_that_fail_are_named(folder: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    line = flags(folder, GUESS.replace("Guess", name), "--reward-timeout 1")
    with clean_process():
        assert run(line) in (1, 2)
    said = capfd.readouterr().err.strip().splitlines()
    assert len(said) == 1 and FAILING[name].format(folder) in said[0], said
    if name in ("Raises", "Number", "Marks"):
        with clean_process():
            assert run(f"{line} --reward-errors skip --reward-funcs {folder}/rewards.py:short") == 0


def test_a_refused_answer_of_one_rank_is_heard_by_all(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Weights are sharded: a rank that speaks alone would wait for the others' parts for ever."""
    (folder / "odd.py").write_text(
        ENVIRONMENTS.replace('return "a\\ufdd4b"', 'return "a\\ufdd4b" if int(self.answer) % 5 == 0 else "again"')
    )
    line = flags(folder, GUESS.replace("env.py:Guess", "odd.py:Marks"))
    with pytest.raises(RuntimeError, match="cannot be shown to the model"):
        run_distributed(tune_all, 2, [line])


def test_refused_episodes_leave_their_process(folder: Path) -> None:
    """Each answer is refused: of four steps of eight episodes no more than eight are held at a time."""
    method = GUESS.replace("Guess", "Alive") + " --reward-errors skip --reward-funcs {0}/rewards.py:short"
    (found,) = run_distributed(tune_all, 1, [flags(folder, method)])
    assert all(step["reward errors"] > 0 for step in found[0]["more"])
    alive = [int(line) for line in (folder / "alive.txt").read_text().split()]
    assert len(alive) == 4 * 8 and max(alive) == 8


def test_no_more_is_read_after_the_last_turn(folder: Path) -> None:
    (found,) = run_distributed(tune_all, 1, [flags(folder, GUESS.replace("--max-turns 3", "--max-turns 1"))])
    plain = GUESS.replace("--environment {0}/env.py:Guess --max-turns 3", "--reward-funcs {0}/rewards.py:short")
    (other,) = run_distributed(tune_all, 1, [flags(folder, plain)])
    assert found[0]["more"][0]["completion length"] == other[0]["more"][0]["completion length"]
    assert found[0]["more"][0]["truncated"] == other[0]["more"][0]["truncated"]


def test_a_failed_episode_has_no_reward(folder: Path) -> None:
    """It is neither the best nor the worst of its group: it is not trained on."""
    method = GUESS.replace("Guess", "Raises") + " --reward-errors skip --reward-funcs {0}/rewards.py:short"
    (found,) = run_distributed(tune_all, 1, [flags(folder, method)])
    steps = found[0]["more"]
    assert any(step["reward errors"] > 0 and step["without reward"] > 0 for step in steps)


def test_an_environment_keeps_its_event_loop(folder: Path) -> None:
    (found,) = run_distributed(tune_all, 1, [flags(folder, GUESS.replace("Guess", "Loops"))])
    assert len(found[0]["losses"]) == 4


def test_prompts_have_to_be_messages(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with clean_process():
        assert run(flags(folder, GUESS).replace("chat.jsonl", "prompts.jsonl")) == 2
        assert run(flags(folder, "--objective grpo --environment env.py")) == 2
    error = capfd.readouterr().err
    assert "24 prompts are texts: give messages" in error and "give FILE.py:CLASS" in error


class Calculator(ToolEnvironment):
    def add(self, a: float, b: float) -> float:
        return a + b

    def now(self) -> datetime.datetime:
        return datetime.datetime(2026, 1, 1)

    async def later(self) -> str:
        return "done"

    def reward(self) -> float:
        return float("7" in self.text)


def test_calls_of_tools() -> None:
    environment: Any = Calculator()
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
    step = lambda text: asyncio.run(environment.step(text))  # noqa: E731
    assert step(f"I add. {call}") == [{"role": "tool", "name": "add", "content": "7"}]
    (wrong,) = step('<tool_call>{"name": "reward", "arguments": {}}</tool_call>')
    assert wrong["content"] == "error: KeyError: 'there is no tool reward'"
    (broken,) = step("<tool_call>{</tool_call>")
    assert broken["content"].startswith("error: JSONDecodeError")
    (untold,) = step('<tool_call>{"name": "now"}</tool_call>')
    assert untold["content"].startswith("error: TypeError")
    (later,) = step('<tool_call>{"name": "later"}</tool_call>')
    assert later["content"] == "done"
    assert step("it is 7") is None and environment.reward() == 1.0
