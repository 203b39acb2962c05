"""Household tasks of ALFWorld (arXiv:2010.03768): find a thing, clean, heat or cool it, put it somewhere.

    type = "alfworld"
    path = "alfworld/json_2.1.1"     # what alfworld-download writes; without it houses are made up

The reward is 1 for a task that is done, otherwise 0 (RAGEN pays 10; it also allows 50 steps).
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from silva.config.sections import Positive
from silva.environments.foreign.alfworld_houses import KINDS, TaskKind, draw, goal, layout, problem
from silva.environments.foreign.alfworld_plans import LONGEST_PLAN, plan_for
from silva.environments.foreign.library import imported
from silva.environments.foreign.text_adventure import Adventure, AdventureSettings, Scene, Story, left_of
from silva.environments.tasks import Draft, generated, listed
from silva.errors import ConfigError
from silva.types import Task

if TYPE_CHECKING:
    from silva.protocols import TaskSet

PACKAGE = "alfworld>=0.4.2"
ENGINE = "alfworld.agents.environment.alfred_tw_env"
# Engines without a game, to be used again: each loads a copy of the planner's library, and after unloading
# one Python crashes when it ends.
_FREE: list[Any] = []
IDLE = ("look", "inventory", "examine", "help")
_TITLE = "-= Welcome to TextWorld, ALFRED! =-"


class AlfWorld(AdventureSettings):
    """Household tasks of ALFWorld, in houses that are made up or those of ALFWorld."""

    licence: ClassVar[str] = "MIT (alfworld), GPL-3.0 (fast-downward), GPL-2.0 (jericho)"
    needs: ClassVar[str] = "`path` for ALFWorld's own houses"
    packages: ClassVar[tuple[str, ...]] = ("alfworld", "textworld")

    type: Literal["alfworld"] = "alfworld"
    path: str = ""
    """Folder with train/, valid_seen/ and valid_unseen/, or any folder of game.tw-pddl files; empty: made-up
    houses. The files hold expressions that ALFWorld evaluates as Python: use files that you trust."""
    held_out: Literal["seen", "unseen"] = "unseen"
    """`unseen`: evaluate in rooms that do not occur in training; `seen`: other tasks in rooms that may."""
    tasks: Annotated[tuple[TaskKind, ...], Field(min_length=1)] = KINDS
    """Kinds of tasks."""
    eval_size: Positive = 100
    """Held-out tasks."""

    @model_validator(mode="after")
    def _enough_actions(self) -> Self:
        if not self.path and self.max_actions < LONGEST_PLAN:
            raise ValueError(
                f"max_actions: got {self.max_actions}, but a task may take {LONGEST_PLAN} commands"
            )
        return self

    def taskset(self) -> TaskSet:
        imported(ENGINE, self.type, PACKAGE)
        if not self.path:
            return generated(self, self._draw, lambda task: AlfWorldEpisode(self, task, made_up(task.data)))
        folder = Path(self.path).expanduser()

        def build(task: Task) -> AlfWorldEpisode:
            game = json.loads((folder / task.data["file"]).read_text())
            return AlfWorldEpisode(self, task, game)

        held_out = folder / f"valid_{self.held_out}"
        if not (folder / "train").is_dir():
            return listed(self, self._found(folder, folder), build)
        return listed(
            self, self._found(folder, folder / "train"), build, evaluation=self._found(folder, held_out)
        )

    def _draw(self, rng: random.Random) -> Draft:
        house = draw(rng, self.tasks)
        return Draft(house, None, [layout(house)] if self.held_out == "unseen" else [])

    def _found(self, folder: Path, part: Path) -> list[Draft]:
        """Games below a folder: those that ALFWorld plays as text, of the kinds in `tasks`."""
        drafts = []
        for file in sorted(part.rglob("game.tw-pddl")):
            name = file.relative_to(folder).as_posix()
            if "movable" in name or "Sliced" in name or not any(kind in name for kind in self.tasks):
                continue
            game = json.loads(file.read_text())
            if game.get("solvable"):
                content = hashlib.sha256(game["pddl_problem"].encode()).hexdigest()[:16]
                drafts.append(Draft({"file": name, "content": content}, game.get("walkthrough"), [content]))
        if not drafts:
            raise ConfigError(
                f"environment {self.label}: {part}: expected solvable games of ALFWorld (game.tw-pddl, in "
                f"folders named by their task, such as {self.tasks[0]}-Mug-None-Desk-308), got none"
            )
        return drafts


class AlfWorldEpisode(Adventure):
    """`game`: what is in a file game.tw-pddl."""

    settings: AlfWorld

    def __init__(self, settings: AlfWorld, task: Task, game: Mapping[str, Any]) -> None:
        super().__init__(settings, task)
        self.game = game

    def open(self) -> AlfWorldStory:
        if self.settings.path:
            return AlfWorldStory(self.game, walkthrough=self.task.answer or ())
        return AlfWorldStory(self.game, planner=functools.partial(plan_for, self.task.data))

    def rules(self) -> str:
        return "You are in a house and have a task to do. You can carry one thing at a time."

    def _shared(self) -> tuple[Any, ...]:
        return (*super()._shared(), self.game)


class AlfWorldStory(Story):
    """A game in the planner that runs it, which plays what it lists, and says of anything else that nothing
    happens.

    Args:
        planner: gives what wins after some commands. If there is none, it is the rest of the walkthrough;
            elsewhere the planner of the package looks for it, which may take seconds.
    """

    def __init__(
        self,
        game: Mapping[str, Any],
        *,
        walkthrough: Sequence[str] = (),
        planner: Callable[[Sequence[str]], Sequence[str]] | None = None,
    ) -> None:
        super().__init__(_engine(), walkthrough)
        self.game, self.planner = game, planner
        self.env.load(dict(game))

    def plan(self, said: Sequence[str]) -> Sequence[str]:
        if self.planner is not None:
            return self.planner(said)
        return left_of(self.walkthrough, said, IDLE) or self._searched(said)

    def close(self) -> None:
        _FREE.append(self.env)

    def _searched(self, said: Sequence[str]) -> Sequence[str]:
        """What the package's planner finds; in a second engine, as this one would search at every command."""
        twin = AlfWorldStory(self.game)
        try:
            twin.start()
            for command in said:
                twin.send(command)
            twin.env.request_infos.policy_commands = True
            twin.send("look")
            return list(twin.state.policy_commands or ())
        finally:
            twin.env.request_infos.policy_commands = False
            twin.close()

    def scene(self) -> Scene:
        text = self.state.feedback.replace(_TITLE, "")
        won = self.told("won", bool)
        return Scene(text, () if won else tuple(self.state.admissible_commands), float(won), won)


def made_up(house: Mapping[str, Any]) -> dict[str, Any]:
    """A made-up house as a game, with the rules and the texts of the package."""
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

    texts = Path(ALFRED_TWL2_PATH).read_text()
    return {
        "pddl_domain": Path(ALFRED_PDDL_PATH).read_text(),
        "grammar": texts.replace("UNKNOWN GOAL", goal(house)),
        "pddl_problem": problem(house),
    }


def _engine() -> Any:
    """An environment of TextWorld, without a game."""
    if _FREE:
        return _FREE.pop()
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld.envs.pddl import PddlEnv

    return AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))
