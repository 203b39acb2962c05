"""Problems of reasoning-gym, graded by its own `score_answer`.

    type = "reasoning_gym"
    task = "leg_counting"
    config = {min_animals = 2}

Solved only if the library gives 1.0. What it gives for less is credit for an unsolved answer, times
`partial_weight`, which is below 1. Some of its graders evaluate the answer as Python, so all of them run in a
sandbox, and answers that are programs earn nothing (reasoning_gym_grader.py).
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import secrets
import signal
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from silva.environments.bases.attempts import Attempts, Verdict
from silva.environments.foreign.library import OwnRandomness, finite, imported
from silva.environments.foreign.settings import ForeignSettings
from silva.environments.tasks import Draft, generated
from silva.errors import CapabilityError, ConfigError, RewardError
from silva.rewards.text import extract_answer
from silva.sandbox.process import Sandbox
from silva.sandbox.settings import SandboxSettings
from silva.sandbox.walls import chosen
from silva.types import Task

if TYPE_CHECKING:
    from silva.protocols import TaskSet

PACKAGE = "reasoning-gym>=0.1.20"
LONGEST = 10_000  # characters of an answer that are graded: some graders take quadratic time
DRAWS = 20  # seeds that are tried for one problem: some data sets fail with a few of them
GRADER = Path(__file__).with_name("reasoning_gym_grader.py")
CPU_SECONDS = 5  # of one grading; an answer that needs more is not solved
ANSWERS_DOING = (signal.SIGXCPU, signal.SIGSEGV)  # 9**9**9, a hundred thousand brackets
REAL_SECONDS = 60.0  # after which the machine is at fault
FORM = "Reply in this form: <answer>your answer</answer>"


class ReasoningGym(ForeignSettings):
    """Problems of reasoning-gym, by the name of the data set."""

    licence: ClassVar[str] = "Apache-2.0 (reasoning-gym)"
    needs: ClassVar[str] = "`task`"
    packages: ClassVar[tuple[str, ...]] = ("reasoning_gym",)
    named_by: ClassVar[str] = "task"

    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """Name of a data set of reasoning-gym, such as "leg_counting"."""
    config: Mapping[str, Any] = {}
    """Its parameters."""
    instructions: str = FORM
    """Stands after the question; what is outside of <answer> is not graded if there is such a tag."""
    partial_weight: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Weight of the library's partial credit, for unsolved answers."""
    sandbox: Literal["auto", "bubblewrap", "userns", "none"] = "auto"
    """Walls around the library's grader, as of the tool `python`."""

    def taskset(self) -> TaskSet:
        library = imported("reasoning_gym", self.type, PACKAGE)
        problems = functools.partial(problem, library, self)
        grade = Grader(self)

        def draw(rng: random.Random) -> Draft:
            seed, entry = problems(rng)
            answer = entry["answer"]
            # The question alone is the key: another answer to the same question does not make it new.
            data = {"seed": seed, "question": entry["question"]}
            return Draft(data, None if answer is None else str(answer), [entry["question"]])

        problems(random.Random(0))  # a name or parameter that is wrong is said at the start
        return generated(self, draw, lambda task: ReasoningGymEpisode(self, task, library, grade))


Grades = Callable[[str, Task], Awaitable[float]]


class ReasoningGymEpisode(Attempts):
    settings: ReasoningGym

    def __init__(self, settings: ReasoningGym, task: Task, library: Any, grader: Grades) -> None:
        super().__init__(settings, task)
        self.library, self.grader = library, grader
        self.partial_weight = settings.partial_weight

    def prompt(self) -> str:
        return "\n".join(filter(None, (self.task.data["question"], self.settings.instructions)))

    async def judge(self, reply: str) -> Verdict:
        answer = extract_answer(reply)[:LONGEST]
        if not answer:
            return Verdict(False, valid=False)
        score = finite(await self.grader(answer, self.task), f"environment {self.settings.label}")
        # Some graders give a wrong answer a hundredth for being there, others less than nothing.
        return Verdict(score >= 1.0, partial=min(max(score, 0.0), 1.0))

    def expert_reply(self) -> str:
        """The library's own answer, which it grades as a solution.

        Raises:
            CapabilityError: this problem has none.
        """
        if self.task.answer is None:
            raise CapabilityError(f"environment {self.settings.label}: this problem comes without an answer")
        return f"<answer>{self.task.answer}</answer>"

    def random_reply(self, seed: int) -> str:
        """The answer to another problem."""
        _, entry = problem(self.library, self.settings, random.Random(seed))
        return f"<answer>{entry['answer']}</answer>"

    def _shared(self) -> tuple[Any, ...]:
        return (*super()._shared(), self.library, self.grader)


class Grader:
    """What the library gives for an answer: one sandbox, in which each answer has a process of its own.

    Args:
        code: what runs there.
        ready: modules that are imported before the first answer.

    Raises:
        ConfigError: no sandbox works here.
    """

    def __init__(
        self, settings: ReasoningGym, code: str = "", ready: Sequence[str] = ReasoningGym.packages
    ) -> None:
        self.settings, self.ready = settings, ready
        self.code = code or GRADER.read_text("utf-8")
        self.limits = SandboxSettings(sandbox=settings.sandbox, seconds=REAL_SECONDS, cpu_seconds=CPU_SECONDS)
        self.walls = chosen(self.limits)
        self._sandboxes: weakref.WeakKeyDictionary[Any, Sandbox] = weakref.WeakKeyDictionary()

    async def __call__(self, answer: str, task: Task) -> float:
        """
        Raises:
            RewardError: the grader itself failed.
        """
        loop = asyncio.get_running_loop()  # a sandbox belongs to one
        if loop not in self._sandboxes:
            self._sandboxes[loop] = Sandbox(self.limits, self.walls, ready=self.ready)
        mark = secrets.token_hex(8)
        asked = {"task": self.settings.task, "config": self.settings.config, "answer": answer, "mark": mark}
        result = await self._sandboxes[loop].run(self.code, json.dumps({**asked, **task.data}))
        if result.how == "ok" and mark in result.output:
            return float(json.loads(result.output.rpartition(mark)[2]))
        if result.how == "signal" and result.detail in ANSWERS_DOING:
            return 0.0
        raise RewardError(
            f"environment {self.settings.label}: the grader: {result.how}: {result.output[-300:]!r}"
        )


def problem(library: Any, settings: ReasoningGym, rng: random.Random) -> tuple[int, Any]:
    """A problem and its seed: the first of `DRAWS` that the library can make.

    Raises:
        ConfigError: it can make none of them.
    """
    for _ in range(DRAWS):
        seed = rng.randrange(1 << 31)
        try:
            with OwnRandomness(seed):
                return seed, library.create_dataset(settings.task, seed=seed, size=1, **settings.config)[0]
        except Exception as error:  # unknown name, wrong parameter, a package that is missing; or bad luck
            failed = error
    raise ConfigError(
        f"environment {settings.label}: reasoning-gym cannot make {settings.task!r}: "
        f"{type(failed).__name__}: {str(failed)[:300]}"
    ) from failed
