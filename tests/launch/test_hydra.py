"""Random command lines in Hydra's grammar: the same tree as hydra-core composes, or one line that says what is wrong.

hydra-core needs versions of libraries that others exclude, so it runs in a Python of its own, which SMP_HYDRA_PYTHON
names (``python -m venv hydra; hydra/bin/pip install hydra-core``).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest

from smp.config import ConfigError
from smp.launch import compose
from smp.launch.overrides import read_word

PYTHON = os.environ.get("SMP_HYDRA_PYTHON")
LINES = int(os.environ.get("SMP_HYDRA_LINES", 10_000))
TREE: dict[str, Any] = {
    "env_vars": None,
    "dry_run": False,
    "instances": {"a": {"devices": 8, "efa": 0}},
    "recipes": {
        "lr": 0.1,
        "trainer": {"num_nodes": 1, "devices": 8, "names": ["x", "y"]},
        "model": {"peft": {"rank": 8, "on": True}, "sizes": [1, 2, 3], "nothing": None},
    },
}
"""Keys that are numbers, truth values or anything: of a text what is typed is kept (docs/launching.md)."""
KEYS = (
    *(
        "recipes.lr",
        "recipes.trainer.num_nodes",
        "recipes.trainer.names",
        "recipes.model.peft",
        "recipes.model.peft.rank",
    ),
    *("recipes.model.nothing", "recipes.model.sizes", "recipes.model.sizes.0", "recipes.model.sizes.2", "dry_run"),
    *("instances", "instances.a.devices", "instances.b", "recipes.model.peft.new", "recipes.fresh.key", "instances.a"),
)
SCALARS = (
    *(
        "1",
        "-3",
        "1_000",
        "007",
        "0",
        "1.5",
        ".5",
        "-1e-4",
        "1e5",
        "inf",
        "-inf",
        "true",
        "False",
        "null",
        "NULL",
        "on",
    ),
    *("abc", "a-b", "s3://b/c?x", "/data/x.jsonl", "5:30", "a b", "x@y", "%d", "a+b", "'it, is'", '"q: [x]"', "''"),
    *(r"a\,b", r"a\=c", r"'a\'b'", r"\\", "a/b:c", "é", "~", "-", "*", "a|b", "1.2.3", "0x1f", "1e", "+5", "a\\ b"),
)
BROKEN = (
    "[",
    "]",
    "{a",
    "[a,,b]",
    "'open",
    "{a:1,}",
    "[1,2",
    "a,b",
    "choice(1,2)",
    "{:1}",
    "[a]b",
    "a]",
    "{a:}",
    "(x)",
)


def value(random: Random, depth: int = 0) -> str:
    kind = random.random()
    if kind < 0.5 or depth > 2:
        return random.choice(SCALARS)
    blank = random.choice(["", " ", "", ""])
    parts = [value(random, depth + 1) for _ in range(random.randrange(4))]
    if kind < 0.75:
        return f"[{blank}{f',{blank}'.join(parts)}{blank}]"
    names = [random.choice(["a", "b", "long_name", "x.y", "1", "'k k'", "c-d"]) for _ in parts]
    pairs = [f"{name}{blank}:{blank}{part}" for name, part in zip(names, parts, strict=True)]
    return f"{{{f',{blank}'.join(pairs)}}}"


def word(random: Random) -> str:
    sign, key = random.choice(["", "", "", "+", "++", "~"]), random.choice(KEYS)
    if sign == "~" and random.random() < 0.7:
        return f"~{key}"
    text = random.choice(BROKEN) if random.random() < 0.1 else value(random)
    return f"{sign}{key}={text}"


def ours(words: list[str]) -> tuple[Any, str | None]:
    tree = deepcopy(TREE)
    try:
        for typed in words:
            compose._apply(tree, read_word(typed), Path("x.yaml"), [])
    except ConfigError as error:
        assert "\n" not in str(error) and str(error).strip(), words
        return None, str(error)
    return tree, None


def with_lists(node: Any) -> Any:
    """An item of what is not there yet is that of a list here, as HyperPod's scripts mean it; of Hydra a key 0."""
    if isinstance(node, dict):
        return (
            [with_lists(node["0"])] if node.keys() == {"0"} else {key: with_lists(item) for key, item in node.items()}
        )
    return [with_lists(item) for item in node] if isinstance(node, list) else node


REFUSED_HERE = {
    "there is no such key in": 0.05,  # a typed key that is not there
    "and has no keys": 0.01,  # a key below a number
    "is no number of an item": 0.005,  # an item behind the end of a list
    "and is not removed": 0.005,  # ~key=value with another value than the key has
}
"""What the message of a line says that Hydra takes and this project refuses, and the largest share of all lines."""
TAKEN_HERE = {
    "OverrideParseException": 0.2,  # letters and keys with blanks in quotes
    "Could not append to config": 0.08,  # + before a key that is there
    "Error merging override": 0.1,  # a section that becomes a list
    "list indices must be integers": 0.04,  # an item of a list that is removed
}
"""The same of lines that Hydra refuses."""


def kind(message: str, kinds: dict[str, float]) -> str:
    return next((part for part in kinds if part in message), f"unknown: {message}")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(PYTHON is None, reason="SMP_HYDRA_PYTHON names no Python with hydra-core")
def test_ten_thousand_random_lines_are_what_hydra_composes() -> None:
    """The same tree where both compose one. Here lists may also be changed by what Hydra has no words for (an item
    removed, or one behind the last), letters be any, and a section become a list, which the reader of a key refuses.
    Lines of which one takes what the other refuses are few, and of known kinds."""
    random, counts, apart = Random(0), Counter[str](), list[Any]()
    assert PYTHON is not None
    command = [PYTHON, str(Path(__file__).with_name("hydra_server.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        for _ in range(LINES):
            words = [word(random) for _ in range(random.choice([1, 1, 1, 2, 3]))]
            print(json.dumps([TREE, words]), file=server.stdin, flush=True)
            answer = json.loads(server.stdout.readline())
            tree, error = ours(words)
            if error is None and "tree" in answer:
                counts["both"] += 1
                if with_lists(answer["tree"]) != tree:
                    apart.append((words, tree, answer["tree"]))
            elif error is not None and "tree" in answer:
                counts[kind(error, REFUSED_HERE)] += 1
            elif error is None:
                counts[kind(answer["error"], TAKEN_HERE)] += 1
            else:
                counts["neither"] += 1
        server.stdin.close()
    print(counts)
    assert not apart, "\n".join(map(str, apart[:40]))
    assert not [name for name in counts if name.startswith("unknown")]
    assert counts["both"] > 0.4 * LINES and counts["neither"] < 0.35 * LINES
    for name, share in (REFUSED_HERE | TAKEN_HERE).items():
        assert counts[name] <= share * LINES, name
