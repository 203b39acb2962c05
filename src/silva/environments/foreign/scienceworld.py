"""Experiments of ScienceWorld (arXiv:2203.07540): thirty families of tasks in a simulated school.

    type = "scienceworld"            # pip install scienceworld; it needs Java
    tasks = ["boil", "find-plant"]

The reward is the score of the package, from 0 to 1. A wrong answer (focusing on a wrong thing) ends an
episode with 0, whatever it had earned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from silva.config.sections import Positive
from silva.environments.foreign.library import imported
from silva.environments.foreign.scienceworld_engine import (
    Experiment,
    Simulator,
    gold_path,
    simulator,
    variations,
)
from silva.environments.foreign.text_adventure import (
    Adventure,
    AdventureSettings,
    Scene,
    Story,
    earned,
    left_of,
)
from silva.environments.tasks import Draft, listed

if TYPE_CHECKING:
    from silva.protocols import TaskSet

PACKAGE = "scienceworld>=1.2.3"
Family = Literal[
    "boil", "change-the-state-of-matter-of", "chemistry-mix", "chemistry-mix-paint-secondary-color",
    "chemistry-mix-paint-tertiary-color", "find-animal", "find-living-thing", "find-non-living-thing",
    "find-plant", "freeze", "grow-fruit", "grow-plant", "identify-life-stages-1", "identify-life-stages-2",
    "inclined-plane-determine-angle", "inclined-plane-friction-named-surfaces",
    "inclined-plane-friction-unnamed-surfaces", "lifespan-longest-lived",
    "lifespan-longest-lived-then-shortest-lived", "lifespan-shortest-lived",
    "measure-melting-point-known-substance", "measure-melting-point-unknown-substance", "melt",
    "mendelian-genetics-known-plant", "mendelian-genetics-unknown-plant", "power-component",
    "power-component-renewable-vs-nonrenewable-energy", "test-conductivity",
    "test-conductivity-of-unknown-substances", "use-thermometer",
]  # fmt: skip
Simplification = Literal[
    "easy", "teleportAction", "openDoors", "openContainers", "selfWateringFlowerPots", "noElectricalAction"
]
FAMILIES: tuple[Family, ...] = get_args(Family)
ELECTRICAL = ("power-component", "conductivity")
MOST = 100  # the score of a solution
IDLE = ("look", "inventory", "task", "examine")
NOT_UNDERSTOOD = "No known action matches that input."


class ScienceWorld(AdventureSettings):
    """Experiments of ScienceWorld, in words."""

    licence: ClassVar[str] = "Apache-2.0 (scienceworld)"
    needs: ClassVar[str] = "Java 8 or later"
    packages: ClassVar[tuple[str, ...]] = ("scienceworld",)
    programs: ClassVar[tuple[str, ...]] = ("java",)

    type: Literal["scienceworld"] = "scienceworld"
    tasks: Annotated[tuple[Family, ...], Field(min_length=1)] = FAMILIES
    """Families of tasks."""
    simplify: tuple[Simplification, ...] = ("easy",)
    """What is made easier, by the package's names; `easy` is all that a task allows."""
    held_out: Literal["dev", "test"] = "test"
    """The variations of the package that evaluate; its training variations train."""
    show_commands: bool = False
    """List the commands that are possible below every text: hundreds to thousands."""
    max_actions: Positive = 250
    """Commands of one episode. The package allows 100; some gold paths are longer."""
    partial: bool = True
    """Pay the score as it comes; off: 1 for a solution, nothing else."""

    @model_validator(mode="after")
    def _electricity_where_needed(self) -> Self:
        wrong = [task for task in self.tasks if any(part in task for part in ELECTRICAL)]
        if wrong and "noElectricalAction" in self.simplify:
            raise ValueError(f"simplify: got noElectricalAction, but {wrong[0]} needs electrical actions")
        return self

    def taskset(self) -> TaskSet:
        imported("scienceworld", self.type, PACKAGE)
        parts = variations(self.tasks)

        def drafts(part: str) -> list[Draft]:
            return [
                Draft({"task": task, "variation": number})
                for task in self.tasks
                for number in parts[task][part]
            ]

        return listed(
            self,
            drafts("train"),
            lambda task: ScienceWorldEpisode(self, task),
            evaluation=drafts(self.held_out),
        )


class ScienceWorldEpisode(Adventure):
    """One experiment."""

    settings: ScienceWorld
    story: ScienceWorldStory | None

    def open(self) -> ScienceWorldStory:
        experiment = Experiment(
            self.task.data["task"], self.task.data["variation"], ",".join(self.settings.simplify)
        )
        return ScienceWorldStory(experiment, show=self.settings.show_commands, partial=self.settings.partial)

    def rules(self) -> str:
        assert self.story is not None
        forms = ", ".join(self.story.env.templates())
        return (
            f"{self.story.env.task()}\nForms of commands, with the names of things for OBJ: {forms}. If a "
            "command may mean several things, they are listed with numbers: reply with one of these."
        )

    def effective(self, command: str, before: Scene) -> bool:
        """Whether it was understood: to list all that is possible costs more than to play."""
        return bool(command) and self.scene.text.strip() != NOT_UNDERSTOOD

    def commands(self) -> Sequence[str]:
        over = self.story is None or self.scene.won or self.scene.lost
        return () if over or self.story is None else self.story.env.commands()


class ScienceWorldStory(Story):
    """An experiment in a simulator.

    Args:
        show: list what is possible.
        partial: pay the score as it comes.
    """

    env: Simulator

    def __init__(self, experiment: Experiment, *, show: bool, partial: bool) -> None:
        super().__init__(simulator(), ())
        self.experiment, self.show, self.partial = experiment, show, partial

    def start(self) -> Scene:
        self.state = self.env.load(self.experiment)
        return self.scene()

    def send(self, command: str) -> Scene:
        self.state = self.env.step(command)
        return self.scene()

    def plan(self, said: Sequence[str]) -> Sequence[str]:
        """The rest of the gold path; nothing after a command that led away from it."""
        return left_of(gold_path(self.experiment), said, IDLE)

    def scene(self) -> Scene:
        score, completed = self.told("score", int), self.told("completed", bool)
        won = completed and score >= MOST
        lost = not won and (completed or score < 0)
        listed = tuple(self.env.commands()) if self.show and not (won or lost) else ()
        return Scene(self.state.text, listed, earned(score, MOST, won=won, partial=self.partial), won, lost)
