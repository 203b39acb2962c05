"""The classes that TRL calls `environment_factory`, unchanged.

    type = "trl"
    factory = "my_env.py:GuessEnv"
    path = "train.jsonl"                  # or hub, or rows; without them, tasks are seeds

    class GuessEnv:
        def reset(self, **row) -> str | None: ...       # its text is added to the prompt
        def guess(self, number: int) -> str:            # every public method is a tool
            '''Guess the number.

            Args:
                number: between 1 and 9.
            '''
        def get_reward(self) -> float: ...              # or `reward`, an attribute or a method

A reply without a tool call ends the episode. TRL itself is not needed. The class gets the random numbers of
`random` and `numpy.random` as the task and the episode seed them; an async method gets those of the process.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from silva.config.plugins import load_object
from silva.data.row_shapes import Shape, problem
from silva.data.rows import Row
from silva.data.settings import GivenRows
from silva.environments.foreign.dialogue import (
    ForeignDialogue,
    ForeignDialogueSettings,
    ForeignSession,
    Graded,
)
from silva.environments.foreign.docstrings import described
from silva.environments.foreign.library import OwnRandomness
from silva.environments.foreign.settings import ForeignSettings
from silva.environments.tasks import Draft, generated, listed
from silva.errors import CapabilityError, ConfigError, errors_about
from silva.tools.function import tool
from silva.types import Message, Task

if TYPE_CHECKING:
    from silva.protocols import TaskSet

NO_TOOLS = ("reset", "get_reward", "reward", "close")


class Trl(GivenRows, ForeignSettings, ForeignDialogueSettings):
    """A class written for TRL's `environment_factory`."""

    licence: ClassVar[str] = "that of the class"
    needs: ClassVar[str] = "`factory`; rows, if the class wants them"
    named_by: ClassVar[str] = "factory"
    rows_needed: ClassVar[bool] = False

    type: Literal["trl"] = "trl"
    factory: str
    """ "file.py:Class" or "package.module:Class"; called without arguments for every episode."""
    path: str = ""
    """File or folder of rows: a row's values are the arguments of `reset`."""

    def taskset(self) -> TaskSet:
        with errors_about(f"environment {self.label}: factory"):
            factory = load_object(self.factory, callable, "class")
        _check(self, factory)

        def build(task: Task) -> ForeignDialogue:
            return ForeignDialogue(self, task, lambda: TrlSession.of(self, factory(), task))

        if not (self.path or self.hub or self.rows):
            return generated(self, lambda rng: Draft({"seed": rng.randrange(1 << 31)}), build)
        return listed(self, _drafts(self), build)


class TrlSession(ForeignSession):
    """An instance of the class after `reset`, with its methods as tools."""

    def __init__(self, settings: Trl, instance: Any, own: OwnRandomness, noise: int) -> None:
        self.settings, self.instance, self.own, self.noise = settings, instance, own, noise
        self.tools = [_tool(settings, getattr(instance, name), own) for name in _methods(type(instance))]

    @classmethod
    def of(cls, settings: Trl, instance: Any, task: Task) -> TrlSession:
        own = OwnRandomness(task.content())
        row = task.data.get("row")
        takes_seed = row is None and "seed" in inspect.signature(instance.reset).parameters
        with own:  # without a row, the seed decides by these random numbers if `reset` does not take it
            shown = instance.reset(**(task.data if takes_seed else row or {}))
        if shown is not None and not isinstance(shown, str):
            raise TypeError(
                f"{type(instance).__name__}.reset() returned {type(shown).__name__}: expected text or None"
            )
        own.seed(f"{task.seed}/noise")
        session = cls(settings, instance, own, task.seed)
        session.opening = _opening(settings, row, shown)
        return session

    async def grade(self, messages: Sequence[Message]) -> Graded:
        with self.own:
            found = _reward(self.instance)
        return Graded(await found if inspect.isawaitable(found) else found)

    async def fork(self, seed: int) -> TrlSession:
        try:
            instance = copy.deepcopy(self.instance)
        except Exception as error:
            raise CapabilityError(
                f"environment {self.settings.label}: {type(self.instance).__name__} cannot be copied: {error}"
            ) from error
        own = copy.deepcopy(self.own)
        if seed != self.noise:
            own.seed(f"{self.noise}/fork/{seed}")
        return TrlSession(self.settings, instance, own, seed)

    async def close(self) -> None:
        closing = getattr(self.instance, "close", None)
        if callable(closing):
            done = closing()
            if inspect.isawaitable(done):
                await done


def _check(settings: Trl, factory: Callable[[], Any]) -> None:
    """That the class has what is needed, and that all of its tools can be described: at the start."""
    instance = factory()
    if not callable(getattr(instance, "reset", None)):
        raise ConfigError(f"environment {settings.label}: {type(instance).__name__} has no method reset()")
    TrlSession(settings, instance, OwnRandomness(0), 0)


def _methods(kind: type) -> list[str]:
    """Names of those that are tools. Of the class: looking at an instance would run its properties."""
    found = inspect.getmembers(kind, inspect.isfunction)
    return [name for name, _ in found if not name.startswith("_") and name not in NO_TOOLS]


def _tool(settings: Trl, method: Callable[..., Any], own: OwnRandomness) -> Any:
    """A method as a tool. It runs here and now, one after the other, as TRL does it."""

    @functools.wraps(method)
    async def call(**arguments: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(**arguments)
        with own:
            return method(**arguments)

    return described(tool(call, timeout=settings.tool_timeout, max_chars=settings.max_result_chars))


def _reward(instance: Any) -> Any:
    for name in ("get_reward", "reward"):
        found = getattr(instance, name, None)
        if found is not None:
            return found() if callable(found) else found
    raise TypeError(
        f"{type(instance).__name__} has no reward: expected a method get_reward(), or `reward`, which is a "
        "method or is set when the episode is over"
    )


def _drafts(settings: Trl) -> list[Draft]:
    """A task for each row. Equal rows, as TRL's scripts often have them, are tasks with other random numbers.

    All tasks of a row are on one side of the split, unless it is the only one.
    """
    values: list[dict[str, Any]] = []
    keys: list[str] = []
    for row in settings.read():
        try:
            keys.append(json.dumps(row.values, sort_keys=True))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"environment {settings.label}: {row.where}: {error}") from None
        values.append(dict(row.values))
    seen: Counter[str] = Counter()
    drafts = []
    for value, key in zip(values, keys, strict=True):
        copy_, seen[key] = seen[key], seen[key] + 1
        data = {"row": value, "copy": copy_} if copy_ else {"row": value}
        drafts.append(Draft(data, None, [key if keys.count(key) < len(keys) else [key, copy_]]))
    return drafts


def _opening(settings: Trl, row: Mapping[str, Any] | None, shown: str | None) -> list[Any]:
    said: list[Any] = []
    if row is not None and "prompt" in row:
        messages = problem(Row(f"environment {settings.label}", row), Shape("TRL", "prompt")).messages
        said = [(message.role, message.content) for message in messages]
    if shown and said:
        said[-1] = (said[-1][0], said[-1][1] + shown)  # without a space between them, as TRL does it
    elif shown:
        said = [("user", shown)]
    if not said:
        raise ConfigError(
            f"environment {settings.label}: nothing to show: expected a row with `prompt`, or text from "
            "reset()"
        )
    return said
