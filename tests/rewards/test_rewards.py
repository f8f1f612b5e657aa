"""Reward functions: how they are called, what broken ones give, and the built-in ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smp.rewards.functions import BUILT_IN, Call, RewardError, RewardFunction, Scored, score
from smp.rewards.pool import RewardPool

FUNCTIONS = """
import asyncio, os, time

def length(completions, **kwargs):
    print("a function may print")
    return [len(c) for c in completions]

def named(prompts, answer):
    return [float(p == a) for p, a in zip(prompts, answer)]

async def later(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [None if c == "none" else 0.5 for c in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth and data_source == "sums")}

async def score_later(solution_str, ground_truth):
    await asyncio.sleep(0.05)
    return {"score": float(solution_str == ground_truth), "acc": 1}

def without_score(solution_str, **kwargs):
    return {"acc": 1.0}

def raises(completions, **kwargs):
    raise KeyError("no such\\nkey")

def few(completions, **kwargs):
    return [1.0]

def nan(completions, **kwargs):
    return [float("nan")] * len(completions)

def text(completions, **kwargs):
    return ["good"] * len(completions)

def numbers(completions, **kwargs):
    return ["1.0"] * len(completions)

def odd(completions, **kwargs):
    raise ValueError("\\ud800 \\x1b[31m" + "x" * 10_000)

def raw(completions, **kwargs):
    return "11"

def lazy(completions, **kwargs):
    yield 1.0
    raise ValueError("later")

def nothing(completions, **kwargs):
    return None

def number(completions, **kwargs):
    return 3

def hangs(completions, **kwargs):
    time.sleep(1000)

def ends(completions, **kwargs):
    os._exit(3)

async def waits(completions, **kwargs):
    await asyncio.sleep(1000)

def exits(completions, **kwargs):
    raise SystemExit(4)

def endless(completions, **kwargs):
    while True:
        yield 1.0

def unordered(completions, **kwargs):
    return {1.0, 0.0}

def takes(completions, completion_ids, answer, **kwargs):
    answer.clear()
    completion_ids[0].clear()
    return [float(bool(completions.pop())) for _ in range(len(completions))]

def forgets(completions, **kwargs):
    completions.pop()
    return [1.0] * len(completions)

def twice(completions, **kwargs):
    os.fork()
    return [float(len(c)) for c in completions]

value = 3
"""
SCHEMA = {"properties": {"a": {"type": "integer"}}}
CALL = Call(["a", "b"], ["a", "none"], [[1], [2, 3]], {"answer": ["a", "x"], "data_source": ["sums", "sums"]})


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "checks.py"
    path.write_text(FUNCTIONS)
    return path


def found(file: Path, *names: str, call: Call = CALL) -> list[Any]:
    functions = [RewardFunction(f"{file}:{name}") for name in names]
    return [(list(s.rewards), s.error.replace(str(file), "F")) for s in scored(functions, call)]


def scored(functions: list[RewardFunction], call: Call) -> list[Scored]:
    """By the number of the function, whatever the order in which they end."""
    heard = dict[int, Scored]()
    score(functions, call, lambda i, found: None if found is None else heard.update({i: found}))
    return [heard[i] for i in range(len(functions))]


def test_functions_get_what_they_name(file: Path) -> None:
    verl = CALL._replace(columns={"data_source": ["sums"] * 2, "ground_truth": ["a", "b"]})
    assert found(file, "length", "named", "later") == [([1.0, 4.0], ""), ([1.0, 0.0], ""), ([0.5, None], "")]
    assert found(file, "compute_score", "score_later", call=verl) == [([1.0, 0.0], "")] * 2


BROKEN = {
    "raises": "reward function F:raises raised KeyError: 'no such\\nkey'",
    "few": "reward function F:few returned 1 rewards for 2 completions",
    "nan": "reward function F:nan returned nan",
    "text": "reward function F:text returned 'good', which is no number",
    "number": "reward function F:number returned int, not a list",
    "raw": "reward function F:raw returned str, not a list",
    "lazy": "reward function F:lazy raised ValueError: later",
    "numbers": "reward function F:numbers returned '1.0', which is no number",
    "endless": "reward function F:endless returned more than 2 rewards for 2 completions",
    "unordered": "reward function F:unordered returned set, not a list",
    "forgets": "reward function F:forgets returned 1 rewards for 2 completions",
    "without_score": "reward function F:without_score returned a dictionary without score: {'acc': 1.0}",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_functions_are_named_in_a_line(file: Path, name: str) -> None:
    assert found(file, name, "length") == [([None, None], BROKEN[name]), ([1.0, 4.0], "")]


def test_what_a_function_says_is_a_short_line_for_any_terminal(file: Path) -> None:
    ((_, error),) = found(file, "odd")
    assert error.startswith("reward function F:odd raised ValueError: \\ud800 \\x1b[31mxxx") and len(error) < 520


def test_a_function_may_change_what_it_is_given(file: Path) -> None:
    """The next one sees what the first saw."""
    assert found(file, "takes", "named", "length")[1:] == [([1.0, 0.0], ""), ([1.0, 4.0], "")]


def test_copies_of_the_process_say_nothing(file: Path) -> None:
    """Of a function that forks: a second answer would be taken for that of the next call."""
    pool = RewardPool([f"{file}:twice"])
    try:
        for longer in range(1, 4):
            call = Call(["a"], ["x" * longer], [[1]], {})
            assert pool.submit(call).result(60)[0].rewards == [float(longer)]
    finally:
        pool.close()


def test_what_a_function_started_ends_with_its_process(file: Path, tmp_path: Path) -> None:
    program = "import subprocess, time\ndef f(completions, **kw):\n"
    program += "    child = subprocess.Popen(['sleep', '1000'])\n"
    program += f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
    (tmp_path / "starts.py").write_text(program + "    time.sleep(1000)\n")
    pool = RewardPool([f"{tmp_path}/starts.py:f"], timeout=1.0)
    try:
        assert "did not return" in pool.submit(CALL).result(60)[0].error
    finally:
        pool.close()
    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_processes_load_their_files_at_the_same_time(tmp_path: Path) -> None:
    """Each waits for the other: started one by one, the first would never be ready."""
    program = f"import os, pathlib, time\nfolder = pathlib.Path({str(tmp_path)!r})\n"
    program += "(folder / f'{os.getpid()}.started').touch()\n"
    program += "while len(list(folder.glob('*.started'))) < 2:\n    time.sleep(0.01)\n"
    (tmp_path / "meets.py").write_text(program + "def f(completions, **kw):\n    return [1.0] * len(completions)\n")
    pool = RewardPool([f"{tmp_path}/meets.py:f"], workers=2)
    try:
        assert pool.submit(CALL).result(60)[0].rewards == [1.0, 1.0]
    finally:
        pool.close()


def test_none_applies_nowhere(file: Path) -> None:
    assert found(file, "nothing") == [([None, None], "")]


def test_a_function_that_hangs_or_ends_its_process_costs_one_call(file: Path) -> None:
    pool = RewardPool([f"{file}:length", f"{file}:hangs"], workers=2, timeout=1.0)
    try:
        answers = [pool.submit(CALL) for _ in range(3)]
        for answer in answers:
            errors = [scored.error for scored in answer.result(60)]
            assert errors == ["", f"reward function {file}:hangs did not return within 1 s (--reward-timeout)"]
    finally:
        pool.close()
    pool = RewardPool([f"{file}:length", f"{file}:ends"])
    try:
        assert pool.submit(CALL).result(60)[1].error == f"reward function {file}:ends ended its process"
        assert pool.submit(CALL).result(60)[1].error == f"reward function {file}:ends ended its process"
    finally:
        pool.close()


def test_the_other_functions_keep_their_rewards(file: Path) -> None:
    """Those before the one that hangs or ends its process, those behind it, and async ones that have ended."""
    names = ["length", "hangs", "later", "named", "ends", "waits", "exits"]
    pool = RewardPool([f"{file}:{name}" for name in names], timeout=1.0)
    try:
        scores = dict(zip(names, pool.submit(CALL).result(60), strict=True))
    finally:
        pool.close()
    assert {name: s.rewards for name, s in scores.items() if not s.error} == {
        "length": [1.0, 4.0],
        "later": [0.5, None],
        "named": [1.0, 0.0],
    }
    assert scores["ends"].error.endswith("ends ended its process")
    assert scores["exits"].error.endswith("exits raised SystemExit: 4")
    assert all("did not return within 1 s" in scores[name].error for name in ("hangs", "waits"))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("{0}/none.py:f", "there is no file"),
        ("{0}/checks.py:absent", "has no function absent"),
        ("{0}/checks.py:value", "has no function value"),
        ("{0}/broken.py:f", "broken.py fails: SyntaxError"),
    ],
)
def test_what_cannot_be_found_is_said_at_the_start(file: Path, spec: str, said: str) -> None:
    (file.parent / "broken.py").write_text("def f(:\n")
    with pytest.raises(RewardError, match=said):
        RewardPool([spec.format(file.parent)])


@pytest.mark.parametrize(
    ("name", "completions", "columns", "wanted"),
    [
        ("exact_match", [" 12\n", "13", "12"], {"answer": ["12", "12", None]}, [1.0, 0.0, None]),
        ("exact_match", ["x"], {"other": ["x"]}, [None]),
        ("exact_match", ["x", "y"], {"answer": [None, "z"], "target": ["x", "y"]}, [1.0, 0.0]),
        ("number", ["it is 1,234.50", "so 7", "none"], {"answer": ["1234.5", "#### 8", "3"]}, [1.0, 0.0, 0.0]),
        ("number", [[{"role": "assistant", "content": "= -3"}]], {"ground_truth": [-3]}, [1.0]),
        ("math", [r"so $\boxed{\frac{1}{2}}$", "$3$"], {"answer": ["0.5", "4"]}, [1.0, 0.0]),
        ("json_schema", ['{"a": 1}', '{"a": "x"}', "{"], {"schema": [SCHEMA] * 3}, [1.0, 0.0, 0.0]),
        ("json_schema", ["[" * 100_000], {"schema": [SCHEMA]}, [0.0]),
        ("regex", ["abc\nd", "xabc"], {"pattern": ["a.*d", "abc"]}, [1.0, 0.0]),
    ],
)  # fmt: skip
def test_built_in_ones(name: str, completions: list[Any], columns: dict[str, Any], wanted: list[Any]) -> None:
    if name == "math":
        pytest.importorskip("math_verify")
    call = Call(["p"] * len(completions), completions, [[1]] * len(completions), columns)
    (found,) = scored([RewardFunction(name)], call)
    assert (found.rewards, found.error) == (wanted, "")
    assert set(BUILT_IN) == {"exact_match", "number", "math", "json_schema", "regex"}
