"""Problems of reasoning-gym, graded by its own `score_answer`.

    type = "reasoning_gym"
    task = "leg_counting"
    config = {min_animals = 2}

Solved only if the library gives 1.0. What it gives for less is credit for an unsolved answer, times
`partial_weight`, which is below 1.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from silva.config.sections import Natural
from silva.environments.foreign.library import OwnRandomness, finite, imported
from silva.environments.settings import EnvironmentSettings
from silva.environments.single_answer import Grade, SingleAnswer
from silva.environments.tasks import Draft, generated
from silva.errors import CapabilityError, ConfigError
from silva.rewards.text import extract_answer
from silva.types import Task

if TYPE_CHECKING:
    from silva.protocols import TaskSet

PACKAGE = "reasoning-gym>=0.1.20"
LONGEST = 10_000  # characters of an answer that are graded: some graders take quadratic time
FORM = "Reply in this form: <answer>your answer</answer>"


class ReasoningGym(EnvironmentSettings):
    """Problems of reasoning-gym, by the name of the data set."""

    licence: ClassVar[str] = "Apache-2.0 (reasoning-gym)"
    needs: ClassVar[str] = "`task`"
    packages: ClassVar[tuple[str, ...]] = ("reasoning_gym",)

    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """Name of a data set of reasoning-gym, such as "leg_counting"."""
    config: Mapping[str, Any] = {}
    """Its parameters."""
    instructions: str = FORM
    """Stands after the question; what is outside of <answer> is not graded if there is such a tag."""
    partial_weight: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Weight of the library's partial credit, for unsolved answers."""
    workers: Natural = 1
    """Processes that run its episodes: other libraries block. 0: this process."""

    @property
    def label(self) -> str:
        return self.name or self.task or self.type

    def taskset(self) -> TaskSet:
        library = imported("reasoning_gym", self.type, PACKAGE)
        problems = functools.partial(problem, library, self)

        def draw(rng: random.Random) -> Draft:
            seed = rng.randrange(1 << 31)
            entry = problems(seed)[1]
            answer = entry["answer"]
            # The question alone is the key: another answer to the same question does not make it new.
            data = {"seed": seed, "question": entry["question"]}
            return Draft(data, None if answer is None else str(answer), [entry["question"]])

        problems(0)  # a name or parameter that is wrong is said at the start
        return generated(self, draw, lambda task: ReasoningGymEpisode(self, task, library))


class ReasoningGymEpisode(SingleAnswer):
    settings: ReasoningGym

    def __init__(self, settings: ReasoningGym, task: Task, library: Any) -> None:
        super().__init__(settings, task)
        self.library = library
        self.partial_weight = settings.partial_weight

    def prompt(self) -> str:
        return "\n".join(filter(None, (self.task.data["question"], self.settings.instructions)))

    def grade(self, reply: str) -> Grade:
        answer = extract_answer(reply)[:LONGEST]
        if not answer:
            return Grade(False, valid=False)
        seed = self.task.data["seed"]
        dataset, entry = problem(self.library, self.settings, seed)
        with OwnRandomness(seed):
            score = dataset.score_answer(answer, entry)
        score = finite(score, f"environment {self.settings.label}")
        # Some graders give a wrong answer a hundredth for being there, others less than nothing.
        return Grade(score >= 1.0, min(max(score, 0.0), 1.0))

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
        _, entry = problem(self.library, self.settings, seed % (1 << 31))
        return f"<answer>{entry['answer']}</answer>"

    def _shared(self) -> tuple[Any, ...]:
        return (*super()._shared(), self.library)


def problem(library: Any, settings: ReasoningGym, seed: int) -> tuple[Any, Any]:
    """The data set of one problem, which grades it, and the problem."""
    try:
        with OwnRandomness(seed):
            dataset = library.create_dataset(settings.task, seed=seed, size=1, **settings.config)
            return dataset, dataset[0]
    except Exception as error:  # unknown name, wrong parameter, a package that is missing: the user's
        raise ConfigError(
            f"environment {settings.label}: reasoning-gym cannot make {settings.task!r}: "
            f"{type(error).__name__}: {str(error)[:300]}"
        ) from error
