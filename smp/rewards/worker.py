"""A process that calls reward functions: ``python -m smp.rewards.worker SPEC ...``. A line of JSON in, lines out.

In: ``[known, [prompts, completions, completion_ids, columns]]``, known: numbers of functions that are not to be called.
Out, for each other function: ``{"function": i}`` before it runs, and ``{"function": i, "scored": [rewards, error,
seconds]}`` after it. What functions print goes to the error output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smp.rewards.child import Say, run, serve
from smp.rewards.functions import Call, RewardFunction, score


def main(specs: list[str]) -> int:
    """Serve until the input ends."""

    def prepare() -> Callable[[Any, Say], None]:
        functions = [RewardFunction(spec) for spec in specs]

        def answer(message: Any, say: Say) -> None:
            known, call = message
            score(functions, Call(*call), lambda i, scored: say(function=i, scored=scored), known)

        return answer

    return serve(prepare)


if __name__ == "__main__":
    run(main)
