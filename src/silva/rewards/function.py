"""A function of your own as a reward. How it is called follows from the names of its parameters:

    reply, answer, attempt, columns     any of these, and columns of the row by name
    solution_str, ground_truth, ...     verl's compute_score: data_source and extra_info are columns
    completions, prompts, ...           TRL's: lists (of one element), and columns of the row by name

`reply` has no thoughts. The texts of verl and TRL have them, in <think>, because those functions may check
the format; they hold the policy's own words alone, so that no tool can speak in its place.

It returns a number, a bool, a table with "score", or a `Score`; TRL's a list with one of these. Everything
else is an error. Nothing ends a function that does not return: it is given up, and its attempt has no result.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import threading
import traceback
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Literal

from silva.config.plugins import load_object
from silva.config.sections import Above0
from silva.errors import ConfigError, RewardError, contained, errors_about
from silva.protocols import Attempt, Reward, Score
from silva.rewards.settings import RewardSettings
from silva.thoughts import CLOSE, OPEN
from silva.tools.function import called
from silva.types import Message, plain_number

Completions = Literal["messages", "text"]

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL = ("prompts", "completions")
ANSWERS = ("answer", "solution", "ground_truth", "target", "label")
"""Columns that TRL's functions are written for; the task's answer stands for the one that they name."""


class Function(RewardSettings):
    """A Python function of your own as a reward."""

    type: Literal["function"] = "function"
    function: str
    """ "file.py:name" or "package.module:name"."""
    solved_at: float = 1.0
    """Reward from which an attempt is solved, where the function does not say it."""
    completions: Completions = "messages"
    """How a function of TRL's form reads a completion: as a list of messages, or as one text."""
    timeout: Above0 = 60.0
    """Seconds one call may take; after that the attempt has no result."""

    def build(self) -> Reward:
        with errors_about(f"reward {self.function}"):
            function = load_object(self.function, callable, "function")
        return FunctionReward(self, function)


class FunctionReward:
    """A `silva.protocols.Reward` around a function.

    Raises:
        ConfigError: the names of its parameters say nothing about how to call it.
    """

    def __init__(self, settings: Function, function: Callable[..., Any]) -> None:
        self.settings, self.function = settings, function
        self._names, self._required, self._takes_all = _parameters(settings.function, function)
        self._form = _form(settings.function, self._names)
        self._given_up: list[threading.Thread] = []

    def check(self, answer: Any, data: Mapping[str, Any]) -> None:
        """See `silva.protocols.ChecksTasks`: whether the row has all that the function takes."""
        self._arguments(Attempt((), answer, data))

    async def score(self, attempt: Attempt) -> Score:
        """Raises RewardError, with the name of the function, for whatever is no reward."""
        name, limit = self.settings.function, asyncio.timeout(self.settings.timeout)
        arguments = self._arguments(attempt)
        try:
            async with limit:
                with contained():
                    result = await called(self.function, arguments, f"reward {name}", self._given_up)
                    result = await result if inspect.isawaitable(result) else result
        except TimeoutError as error:
            if not limit.expired():
                at = line_in(self.function, error)
                raise RewardError(f"reward {name} raised TimeoutError: {error}{at}") from error
            raise RewardError(
                f"reward {name}: no result within timeout = {self.settings.timeout:g} s"
            ) from None
        except Exception as error:
            at = line_in(self.function, error)
            raise RewardError(f"reward {name} raised {type(error).__name__}: {error}{at}") from error
        if self._form == "trl":
            result = _only_one(result, name)
        return read_score(result, self.settings.solved_at, f"reward {name}")

    def _arguments(self, attempt: Attempt) -> dict[str, Any]:
        offered = self._offered(attempt)
        missing = [name for name in self._required if name not in offered]
        if missing:
            raise RewardError(
                f"reward {self.settings.function} needs {', '.join(missing)}: got a row with "
                f"{', '.join(sorted(attempt.data)) or 'no more columns'}"
            )
        return offered if self._takes_all else {k: v for k, v in offered.items() if k in self._names}

    def _offered(self, attempt: Attempt) -> dict[str, Any]:
        columns = dict(attempt.data)
        if self._form == "verl":
            return {
                "data_source": columns.get("data_source", ""),
                "solution_str": spoken(attempt),
                "ground_truth": attempt.answer,
                "extra_info": columns.get("extra_info", {}),
            }
        if self._form == "trl":
            answers = {name: attempt.answer for name in ANSWERS if name in self._names}
            prompt, completion = _split(attempt, self.settings.completions)
            batch = {**answers, **columns, "prompts": prompt, "completions": completion}
            return {name: [value] for name, value in batch.items()}
        own = {"reply": attempt.reply, "answer": attempt.answer, "attempt": attempt, "columns": columns}
        return {**columns, **own}


def read_score(result: Any, solved_at: float, name: str) -> Score:
    """The score that a user's function or service means.

    Raises:
        RewardError: it is none, or not finite; the message begins with `name`.
    """
    if isinstance(result, Score):
        score = result
    elif isinstance(result, Mapping):
        if "score" not in result:
            keys = ", ".join(map(str, result)) or "no keys"
            raise RewardError(f"{name} returned a table with {keys}: expected a key score")
        value = _number(result["score"], name)
        said = plain_number(result.get("solved"))
        if said is not None and not isinstance(said, bool):
            raise RewardError(f"{name} returned solved = {said!r}: expected true or false")
        score = Score(value, value >= solved_at if said is None else said, _metrics(result))
    else:
        value = _number(result, name)
        score = Score(value, value >= solved_at)
    _number(score.value, name)
    return score


def spoken(attempt: Attempt) -> str:
    """The last reply with its thoughts, as text."""
    last = next((m for m in reversed(attempt.messages) if m.role == "assistant"), None)
    return "" if last is None else _with_thoughts(last)


def line_in(function: Callable[..., Any], error: BaseException) -> str:
    """Where in the file of `function` an exception came from, as " (file.py:12)"; "" if it did not."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if code is not None and frame.filename == code.co_filename]
    return f" ({os.path.relpath(code.co_filename)}:{lines[-1]})" if code is not None and lines else ""


def _parameters(name: str, function: Callable[..., Any]) -> tuple[set[str], list[str], bool]:
    """(names, those without a default, whether it takes any others)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(f"reward {name}: its parameters cannot be read; wrap it in a function") from None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise ConfigError(f"reward {name}: it has parameters without names, but arguments are given by name")
    required = [p.name for p in named if p.default is p.empty]
    return {p.name for p in named}, required, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _form(function: str, names: set[str]) -> Literal["own", "verl", "trl"]:
    if "completions" in names:
        return "trl"
    if "solution_str" in names:
        return "verl"
    if names & {"reply", "attempt"}:
        return "own"
    raise ConfigError(
        f"reward {function}: got parameters {', '.join(sorted(names)) or 'without names'}; expected (reply, "
        f"answer), (attempt), verl's ({', '.join(VERL)}) or TRL's ({', '.join(TRL)}, **columns)"
    )


def _split(attempt: Attempt, form: Completions) -> tuple[Any, Any]:
    """Prompt and completion as TRL gives them. The completion follows the last message of the user."""
    messages = attempt.messages
    start = max((i + 1 for i, message in enumerate(messages) if message.role == "user"), default=0)
    if form == "text":
        prompt = messages[start - 1].content if start else ""
        return prompt, spoken(attempt)
    return [_as_table(m) for m in messages[:start]], [_as_table(m) for m in messages[start:]]


def _as_table(message: Message) -> dict[str, Any]:
    content = _with_thoughts(message) if message.role == "assistant" else message.content
    return {"role": message.role, "content": content}


def _with_thoughts(message: Message) -> str:
    if message.reasoning is None or CLOSE in message.content:
        return message.content
    return f"{OPEN}{message.reasoning}{CLOSE}{message.content}"


def _only_one(result: Any, name: str) -> Any:
    if hasattr(result, "tolist"):  # an array of numpy, a tensor of torch
        result = result.tolist()
    if not isinstance(result, list | tuple) or len(result) != 1:
        got = f"{len(result)} rewards" if isinstance(result, list | tuple) else type(result).__name__
        raise RewardError(f"reward {name} returned {got}: expected a list with one reward for one completion")
    return result[0]


def _number(value: Any, name: str) -> float:
    value = plain_number(value)
    if not isinstance(value, Real):
        raise RewardError(
            f"{name} returned {type(value).__name__}: expected a number, a bool, a table with score, or a "
            "Score"
        )
    if not math.isfinite(value):
        raise RewardError(f"{name} returned {value}: expected a finite number")
    return float(value)


def _metrics(result: Mapping[Any, Any]) -> dict[str, float]:
    """The other numbers of a table."""
    numbers = {key: plain_number(value) for key, value in result.items() if isinstance(key, str)}
    return {
        key: float(value)
        for key, value in numbers.items()
        if key not in ("score", "solved") and isinstance(value, Real) and math.isfinite(value)
    }
