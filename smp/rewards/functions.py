"""Reward functions: from names to rewards of completions.

A function is called as TRL calls it, by keywords: ``prompts``, ``completions``, ``completion_ids`` and every column of
the data, each a list with a value for every completion; it returns a list of numbers, None where it does not apply. A
function without ``**kwargs`` gets what it names. One may be ``async``: those of one call run together. Functions with
verl's signature (``solution_str``, ``ground_truth``, ...) are called once for each completion.

This project calls them with the completions of one prompt, and not with those of a batch: the rewards do not depend on
how prompts are divided over processes.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import inspect
import itertools
import math
import sys
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from smp.rewards import verifiers

BUILT_IN = {
    "exact_match": verifiers.exact_match,
    "number": verifiers.number,
    "math": verifiers.math,
    "json_schema": verifiers.json_schema,
    "regex": verifiers.regex,
}
_VERL = "solution_str"


class RewardError(ValueError):
    """A reward function that cannot be used, or an invalid result; the message names the function."""


class Call(NamedTuple):
    """The arguments of functions: some completions, each list as long as ``completions``.

    Attributes:
        prompts, completions: texts or lists of messages.
        completion_ids: token ids.
        columns: of the data.
    """

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]

    def copied(self) -> Call:
        """A copy for one function, which may change its arguments."""
        rest = copy.deepcopy(self._replace(completion_ids=[]))
        return rest._replace(completion_ids=[list(ids) for ids in self.completion_ids])  # many, and plain


class RewardFunction:
    """One reward function.

    Args:
        spec: ``FILE.py:NAME`` or the name of a built-in one.

    Raises:
        RewardError: there is none.
    """

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.name = spec.rpartition(":")[2]
        self._function: Callable[..., Any] = BUILT_IN[spec] if spec in BUILT_IN else load(spec, "--reward-funcs")
        try:
            parameters = inspect.signature(self._function).parameters.values()
        except (TypeError, ValueError):
            raise RewardError(f"reward function {spec} has no signature") from None
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        # Positional-only parameters cannot be passed by keyword.
        self._names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}

    def start(self, call: Call) -> Any:
        """The rewards, or an awaitable of them for async functions."""
        if _VERL in self._names:
            made = [self._of_verl(call, i) for i in range(len(call.completions))]
            return _together(made) if any(map(inspect.isawaitable, made)) else made
        given = {"prompts": call.prompts, "completions": call.completions, "completion_ids": call.completion_ids}
        # These lists win over columns of the same name.
        given = call.columns | given
        return self._function(**{name: x for name, x in given.items() if self._takes_all or name in self._names})

    def _of_verl(self, call: Call, i: int) -> Any:
        # verl's data sets have the truth in reward_model["ground_truth"].
        row = {name: values[i] for name, values in call.columns.items()}
        model = row.get("reward_model")
        known = [model.get("ground_truth")] if isinstance(model, dict) else [row.get("ground_truth"), row.get("answer")]
        truth = next((x for x in known if x is not None), None)
        given = {
            "data_source": row.get("data_source"),
            "solution_str": verifiers.text_of(call.completions[i]),
            "ground_truth": truth,
            "extra_info": row.get("extra_info"),
        }
        return self._function(**{name: x for name, x in given.items() if self._takes_all or name in self._names})

    def checked(self, found: Any, count: int) -> list[float | None]:
        """The result as numbers; None where the function does not apply.

        Raises:
            RewardError: it is something else.
        """
        if found is None:
            return [None] * count
        try:
            # A text is a sequence, too, and a set has no order. Not all is read: a generator may have no end.
            plain = not isinstance(found, (str, bytes, dict, set, frozenset))
            values = list(itertools.islice(found, count + 1)) if plain else None
        except TypeError:
            values = None
        if values is None:
            raise RewardError(f"reward function {self.spec} returned {type(found).__name__}, not a list") from None
        if len(values) != count:
            read = len(values) if len(values) < count else f"more than {count}"
            many = len(found) if hasattr(found, "__len__") else read
            raise RewardError(f"reward function {self.spec} returned {many} rewards for {count} completions")
        return [self._number(self._score_of(value)) for value in values]

    def _score_of(self, value: Any) -> Any:
        """verl's functions may return a dictionary with "score" and more to log."""
        if not (isinstance(value, dict) and _VERL in self._names):
            return value
        if "score" not in value:
            raise RewardError(f"reward function {self.spec} returned a dictionary without score: {value!r:.100}")
        return value["score"]

    def _number(self, value: Any) -> float | None:
        if value is None:
            return None
        try:
            number = None if isinstance(value, (str, bytes)) else float(value)  # "1.0" is a text
        except (TypeError, ValueError, OverflowError):
            number = None
        if number is None:
            raise RewardError(f"reward function {self.spec} returned {value!r:.100}, which is no number")
        if not math.isfinite(number):
            raise RewardError(f"reward function {self.spec} returned {number}")
        return number


async def _together(made: list[Any]) -> list[Any]:
    """Results of calls for one completion each, awaited together."""
    return list(await asyncio.gather(*made))


def load(spec: str, flag: str, kind: str = "function") -> Callable[..., Any]:
    """A function or class of ``FILE.py:NAME``; ``flag`` names it in errors.

    Raises:
        RewardError: there is none, or the file fails.
    """
    file, _, name = spec.partition(":")
    path = Path(file)
    if not path.is_file():
        raise RewardError(f"{flag} {spec}: there is no file {file}")
    # A file with several functions is run once: they may share state.
    known = f"smp_rewards_{path.resolve().as_posix().replace('/', '_').replace('.', '_')}"
    module = sys.modules.get(known)
    if module is None:
        found = importlib.util.spec_from_file_location(known, path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        # Registered before it runs, as import does: classes of the file are looked up there by
        # pickle and dataclasses.
        sys.modules[known] = module
        # What lies next to the file can be imported, as when it is run.
        sys.path.insert(0, str(path.resolve().parent))
        try:
            found.loader.exec_module(module)
        # BaseException: a file may call sys.exit.
        except BaseException as error:
            del sys.modules[known]
            raise RewardError(f"{flag} {spec}: {file} fails: {type(error).__name__}: {error}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise RewardError(f"{flag} {spec}: {file} has no {kind} {name}")
    return function


class Scored(NamedTuple):
    """The result of one function.

    Attributes:
        rewards: None where it does not apply.
        error: why it gave none; empty: it did.
        seconds: that the call took.
    """

    rewards: list[float | None]
    error: str
    seconds: float


Tell = Callable[[int, Scored | None], None]
"""Hears of function i: None before it runs, and then what it gave."""


def score(functions: Sequence[RewardFunction], call: Call, tell: Tell, known: Container[int] = ()) -> None:
    """Call all functions but those ``known``. Async ones run last and together, under the number of the first that has
    not ended."""
    # A loop of its own: the process has no other.
    asyncio.run(_score(functions, call, tell, known))


async def _score(functions: Sequence[RewardFunction], call: Call, tell: Tell, known: Container[int]) -> None:
    waiting: dict[int, tuple[Any, float]] = {}
    for i, function in enumerate(functions):
        if i in known:
            continue
        tell(i, None)
        started = time.perf_counter()
        try:
            made = function.start(call.copied())
        except (Exception, SystemExit) as error:
            tell(i, _failed(function, call, error, started))
            continue
        if inspect.isawaitable(made):
            waiting[i] = made, started
        else:
            tell(i, _finished(function, call, made, started))
    left = set(waiting)

    async def ended(i: int, made: Any, started: float) -> None:
        try:
            scored = _finished(functions[i], call, await made, started)
        except (Exception, SystemExit) as error:
            scored = _failed(functions[i], call, error, started)
        left.remove(i)
        tell(i, scored)
        if left:
            tell(min(left), None)

    if left:
        tell(min(left), None)
    await asyncio.gather(*(ended(i, *of) for i, of in waiting.items()))


def _finished(function: RewardFunction, call: Call, made: Any, started: float) -> Scored:
    try:
        rewards = function.checked(made, len(call.completions))
    except RewardError as error:
        return Scored([None] * len(call.completions), str(error), time.perf_counter() - started)
    except Exception as error:  # a generator, which runs only now
        return _failed(function, call, error, started)
    return Scored(rewards, "", time.perf_counter() - started)


def _failed(function: RewardFunction, call: Call, error: BaseException, started: float) -> Scored:
    said = one_line(f"reward function {function.spec} raised {type(error).__name__}: {error}")
    return Scored([None] * len(call.completions), said, time.perf_counter() - started)


def one_line(text: str) -> str:
    """What code of others says, as a line of a few hundred characters that any terminal and any file can take."""
    plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))
    return plain if len(plain) <= 500 else f"{plain[:500]} ..."
