"""A process that calls reward functions: ``python -m smp.rewards.worker SPEC ...``. A line of JSON in, lines out.

In: ``[prompts, completions, completion_ids, columns]``. Out: ``{"begin": i}`` before function i runs, and at the end
``{"scored": [[rewards, error, seconds], ...]}``. What functions print goes to the error output.
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
            say(scored=score(functions, Call(*message), lambda i: say(begin=i)))

        return answer

    return serve(prepare)


if __name__ == "__main__":
    run(main)
