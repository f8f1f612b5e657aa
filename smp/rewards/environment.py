"""A process with episodes of an environment: ``python -m smp.rewards.environment FILE.py:CLASS``.

An environment is a class; each completion gets an instance of its own.

    reset(prompt, **columns)    before the first turn: the messages of the prompt and the columns of its row, those that
                                the method names, or all by ``**columns``
    step(text)                  after each turn of the model, with what it said: the answer, as a text (a user's
                                message), a message, or a list of messages; None ends the episode
    reward()                    at the end, if there is such a method: a number, or None

Methods may be ``async``. :class:`ToolEnvironment` answers calls of tools, in the form of Hermes and Qwen.

In: ``[method, episode, arguments]``. Out: ``{"answer": value}`` or ``{"error": why}``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
from collections.abc import Callable
from typing import Any

from smp.rewards.child import Say, run, serve
from smp.rewards.functions import RewardError, load, one_line

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolEnvironment:
    """An environment whose public methods are tools, but for ``reset``, ``step`` and ``reward``.

    A turn calls them by ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``; each call is answered by a
    message of the role ``tool``: the result, or the error of a tool that raises or does not exist. A turn without calls
    ends the episode;
    ``text`` is what it said.
    """

    text = ""

    def reset(self, prompt: list[dict[str, Any]], **columns: Any) -> None:
        """Does nothing; to be overridden."""

    async def step(self, text: str) -> list[dict[str, Any]] | None:
        """Answer the tool calls in a turn."""
        self.text = text
        return [await self._answer(call) for call in _CALL.findall(text)] or None

    async def _answer(self, text: str) -> dict[str, Any]:
        name = "unknown"
        # The model's text is data: whatever it asks for, an error is an answer.
        try:
            call = json.loads(text)
            name = str(call["name"])
            # Private names and the protocol's own methods are no tools: a model may ask for any
            # name.
            if name in ("reset", "step", "reward") or name.startswith("_") or not callable(getattr(self, name, None)):
                raise KeyError(f"there is no tool {name}")
            found = getattr(self, name)(**(call.get("arguments") or {}))
            if inspect.isawaitable(found):
                found = await found
            said = found if isinstance(found, str) else json.dumps(found)
        except Exception as error:  # the model reads it and may try again
            said = f"error: {type(error).__name__}: {error}"
        return {"role": "tool", "name": name, "content": said}


class _Episodes:
    """Instances of the class by the name of their episode."""

    def __init__(self, spec: str) -> None:
        self._spec, self._kind = spec, load(spec, "--environment", "class")
        if not callable(getattr(self._kind, "step", None)) or not callable(getattr(self._kind, "reset", None)):
            raise RewardError(f"--environment {spec} has no methods reset and step")
        self._held: dict[str, Any] = {}
        # One loop for all: what an episode has opened in it stays usable.
        self._loop = asyncio.Runner()

    def answer(self, message: Any, say: Say) -> None:
        method, episode, arguments = message
        try:
            found = getattr(self, f"_{method}")(episode, **arguments)
            json.dumps(found)  # what cannot be said is the episode's error, and not the end of this process
        except Exception as error:
            # An episode after an error is in an unknown state.
            self._held.pop(episode, None)
            # Joined to one line: messages are lines.
            said = str(error) if isinstance(error, RewardError) else f"raised {type(error).__name__}: {error}"
            say(error=one_line(f"environment {self._spec}: {method} {said}"))
            return
        say(answer=found)

    def _awaited(self, made: Any) -> Any:
        async def whole() -> Any:
            return await made

        return self._loop.run(whole()) if inspect.isawaitable(made) else made

    def _reset(self, episode: str, prompt: list[Any], columns: dict[str, Any]) -> None:
        instance = self._kind()
        parameters = inspect.signature(instance.reset).parameters.values()
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = {p.name for p in parameters}
        # Only what the method names, or everything with **columns.
        given = {name: x for name, x in (columns | {"prompt": prompt}).items() if takes_all or name in names}
        if self._awaited(instance.reset(**given)) is not None:
            raise RewardError("returned something: what is said first stands in the prompt")
        self._held[episode] = instance

    def _step(self, episode: str, text: str) -> list[dict[str, Any]] | None:
        found = self._awaited(self._held[episode].step(text))
        if found is None:
            return None
        if isinstance(found, str):
            return [{"role": "user", "content": found}]
        messages = [found] if isinstance(found, dict) else found
        listed = messages if isinstance(messages, list) else [None]
        roles = [message.get("role") if isinstance(message, dict) else None for message in listed]
        if not all(isinstance(role, str) and role != "assistant" for role in roles):
            raise RewardError(f"returned {found!r:.100}, which is neither None, a text nor messages of others")
        # An empty list would be a turn without an answer: it ends the episode.
        return messages or None

    def _drop(self, episode: str) -> None:
        """Forget an episode that ended without a reward."""
        self._held.pop(episode, None)

    def _reward(self, episode: str) -> float | None:
        instance = self._held.pop(episode)
        if not callable(getattr(instance, "reward", None)):
            return None
        found = self._awaited(instance.reward())
        if found is None:
            return None
        number = float(found)
        if not math.isfinite(number):
            raise RewardError(f"returned {number}")
        return number


def main(specs: list[str]) -> int:
    """Serve until the input ends."""

    def prepare() -> Callable[[Any, Say], None]:
        return _Episodes(specs[0]).answer

    return serve(prepare)


if __name__ == "__main__":
    run(main)
