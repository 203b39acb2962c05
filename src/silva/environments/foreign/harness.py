"""Programs as environments: they drive themselves, and their calls to the model are what is trained.

    type = "harness"
    path = "questions.jsonl"
    function = "agent.py:solve"            or command = ["python", "agent.py"], or remote = true
    reward = "math"                        or what the program returns or posts

    function    solve(task, endpoint) in this process; plain functions in threads
    command     a process with OPENAI_BASE_URL, ANTHROPIC_BASE_URL and SILVA_TASK (command.py)
    remote      an agent that calls in, takes a task and posts its reward when it has one

A row of the data set is the data of a task; the program reads what it likes of it.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from silva.config.plugins import load_object
from silva.data.rows import Row, read_rows
from silva.data.settings import GivenRows
from silva.environments.foreign.command import CommandProgram
from silva.environments.foreign.library import finite, solved
from silva.environments.settings import EnvironmentSettings, GatewaySettings
from silva.environments.tasks import Draft, Tasks, listed
from silva.errors import CapabilityError, RewardError, errors_about
from silva.protocols import Attempt, Endpoint, Environment, Gateway, Harness, Reward
from silva.rewards.choice import AnyReward
from silva.tools.function import called
from silva.types import Message, Step, Task


class HarnessEnvironment(GivenRows, GatewaySettings, EnvironmentSettings):
    """A program of your own, or an agent as it is."""

    licence: ClassVar[str] = "that of the program"
    needs: ClassVar[str] = "rows (`path`, `hub` or `rows`); `function`, `command` or `remote`"
    packages: ClassVar[tuple[str, ...]] = ("starlette", "uvicorn")

    type: Literal["harness"] = "harness"
    function: str = ""
    """ "file.py:name" or "package.module:name". It gets the task and its endpoint and returns the reward, a
    Step, or None if a reward is posted or `reward` grades. It may be async."""
    command: tuple[str, ...] = ()
    """A command line. {column} stands for what the row has there."""
    remote: bool = False
    """Agents call in for tasks at the gateway, and post rewards when they have them."""
    eval_path: str = ""
    """File of rows that are held out in place of a share of `path`."""
    answer: str = "answer"
    """Column with what `reward` expects. The program does not get it, unless it is a function."""
    reward: AnyReward | None = None
    """Grades the last reply of a program that gives no reward of its own."""
    solved_at: float = 1.0
    """An episode counts as solved if its reward is at least this, unless the reward says so itself."""

    @model_validator(mode="after")
    def _is_one_program(self) -> Self:
        given = [key for key in ("function", "command", "remote") if getattr(self, key)]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise ValueError(f"expected one of function, command and remote, got {got}")
        if self.workers:
            raise ValueError(f"workers = {self.workers}: a program runs by itself; leave it out")
        return self

    def taskset(self) -> HarnessTasks:
        held_out = [self._draft(row) for row in read_rows(self.eval_path)] if self.eval_path else None
        tasks = listed(self, map(self._draft, self.read()), self._refuse, evaluation=held_out)
        return HarnessTasks(self, tasks, self._harness())

    def _harness(self) -> Harness:
        if self.function:
            with errors_about(f"environment {self.label}: function = {self.function!r}"):
                return FunctionProgram(load_object(self.function, callable, "function"))
        if self.command:
            return CommandProgram(self.command, self.variables)
        return RemoteAgent()

    def _draft(self, row: Row) -> Draft:
        data = {key: value for key, value in row.values.items() if key != self.answer}
        return Draft(data, row.values.get(self.answer))

    def _refuse(self, task: Task) -> Environment:
        raise CapabilityError(
            f"environment {self.label}: a program plays it from beginning to end: it can be trained with "
            'rollout.type = "linear" and evaluated, and not be forked, imitated, checked or attacked'
        )


class HarnessTasks:
    """Implements `TaskSet` and `Driven`. Whoever plays its tasks sets `gateway`."""

    gateway: Gateway

    def __init__(self, settings: HarnessEnvironment, tasks: Tasks, harness: Harness) -> None:
        self.settings, self.harness, self._tasks = settings, harness, tasks
        self.notes, self.only_held_out = tasks.notes, tasks.only_held_out
        self.tasks, self.environment = tasks.tasks, tasks.environment
        self._reward: Reward | None = settings.reward.build() if settings.reward else None

    async def graded(self, task: Task, given: Step | None, messages: Sequence[Message]) -> Step:
        """What the program or whoever posted says, or else what the reward makes of the last reply.

        Raises:
            RewardError: nobody knows.
        """
        label = self.settings.label
        if given is not None:
            total = finite(sum(given.rewards.values()), f"environment {label}")
            won = float(solved(total, self.settings.solved_at))
            return Step(rewards=given.rewards, shaped=given.shaped, metrics={"success": won, **given.metrics})
        if self._reward is None:
            raise RewardError(
                f"environment {label}: the program has neither returned nor posted a reward, and there is no "
                "`reward` that grades"
            )
        score = await self._reward.score(Attempt(tuple(messages), task.answer, task.data))
        if not math.isfinite(score.value):
            raise ValueError(f"environment {label}: the reward is {score.value}, expected a finite number")
        metrics = {"success": float(score.solved), **score.metrics}
        return Step(rewards={"reward": score.value}, metrics=metrics)


class FunctionProgram:
    """Implements `Harness` with a function of the user's."""

    def __init__(self, function: Callable[[Task, Endpoint], Any]) -> None:
        self.function, self._given_up = function, list[threading.Thread]()

    async def run(self, task: Task, endpoint: Endpoint) -> Step | None:
        if inspect.iscoroutinefunction(self.function):
            found = await self.function(task, endpoint)
        else:
            name = getattr(self.function, "__name__", "program")
            found = await called(partial(self.function, task, endpoint), {}, name, self._given_up)
        if found is None or isinstance(found, Step):
            return found
        return Step(rewards={"reward": finite(found, "the function's result")})


class RemoteAgent:
    """Implements `Harness` with an agent that calls in."""

    async def run(self, task: Task, endpoint: Endpoint) -> Step | None:
        await endpoint.offer()
        return await endpoint.outcome()
