"""Games of TextWorld (arXiv:1806.11532): coins to collect, treasures to find, meals to cook.

    type = "textworld"
    game = "cooking"
    cooking = {recipe = 2, take = 2, go = 6, open = true}

The games are made once, by their seeds, and kept in a cache folder; or they are those of a folder of yours.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from silva.config.sections import Natural, Positive, Section
from silva.environments.foreign.library import imported
from silva.environments.foreign.text_adventure import (
    Adventure,
    AdventureSettings,
    Scene,
    Story,
    earned,
    left_of,
)
from silva.environments.foreign.textworld_games import GameFile, Wanted, found, made
from silva.environments.tasks import Draft, listed
from silva.errors import ConfigError
from silva.scratch import cache_folder
from silva.types import Task

if TYPE_CHECKING:
    from silva.protocols import TaskSet

PACKAGE = "textworld>=1.7"
MAX_ACTIONS = {"coin_collector": 25, "cooking": 80, "treasure_hunter": 40}  # those of Act-PRM
RULES = {
    "coin_collector": "You are in a text adventure. Find the coin and take it.",
    "cooking": "You are in a text adventure. Find the cookbook, follow its recipe and eat the meal.",
    "treasure_hunter": "You are in a text adventure. Find the object that is asked for and take it.",
}
IDLE = ("look", "inventory", "examine")
# The interpreter has commands of its own, which save files, restart the game or print its internals.
SYNONYMS = {"get", "x", "l", "i", "n", "s", "e", "w", "north", "south", "east", "west"}
_WORDS = re.compile(r"[a-z0-9' -]+")
# The title drawn with characters, and a status line that the interpreter prints in some games.
_NOISE = re.compile(r"^[ _|\\/$>]+$|^> {8,}-= .* =-\s*-?\d+/\d+\s*$", re.MULTILINE)
_MENU = "Would you like to RESTART"


class Cooking(Section):
    """What makes a meal difficult, as the options of `tw-make tw-cooking`."""

    recipe: Annotated[int, Field(ge=1, le=5)] = 1
    """Ingredients."""
    take: Annotated[int, Field(ge=1, le=5)] = 1
    """Ingredients that must be found; the player has the others."""
    go: Literal[1, 6, 9, 12] = 1
    """Rooms."""
    open: bool = False
    """Doors and containers are closed."""
    cook: bool = False
    """Ingredients must be cooked."""
    cut: bool = False
    """Ingredients must be cut."""
    drop: bool = False
    """The player cannot carry everything."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.take > self.recipe:
            raise ValueError(f"take = {self.take}, recipe = {self.recipe}: expected take <= recipe")
        return self


class TextWorld(AdventureSettings):
    """Text adventures of TextWorld: collect a coin, find a treasure, cook a meal."""

    licence: ClassVar[str] = "MIT (textworld), GPL-2.0 (jericho)"
    needs: ClassVar[str] = "some seconds for each game, once"
    packages: ClassVar[tuple[str, ...]] = ("textworld",)

    type: Literal["textworld"] = "textworld"
    game: Literal["coin_collector", "cooking", "treasure_hunter"] = "coin_collector"
    """Which kind of game is made."""
    level: Annotated[int, Field(ge=1, le=300)] = 5
    """Of coin_collector: level % 100 rooms lie on the way to the coin; above 100 there are as many dead ends,
    above 200 twice as many. Of treasure_hunter: 1 to 30."""
    hints: bool = False
    """Begin coin_collector and treasure_hunter with TextWorld's instructions, which tell all steps."""
    cooking: Cooking = Cooking()
    """Difficulty of game = "cooking"."""
    path: str = ""
    """Folder of games of your own (`tw-make` writes .z8 and .json); none are made then."""
    games: Positive = 20
    """Different games to train on; training goes through them again and again."""
    eval_size: Positive = 5
    """Held-out games."""
    max_actions: Natural = 0
    """Commands of one episode; 0: 25 for coin_collector, 80 for cooking, 40 for treasure_hunter."""
    partial: bool = True
    """Pay the share of the game's points as they are scored; off: 1 for winning, nothing else."""
    cache_path: str = ""
    """Folder for games that are made; empty: textworld/ in SILVA_CACHE or the user's cache folder."""

    @model_validator(mode="after")
    def _known_level(self) -> Self:
        if self.game == "treasure_hunter" and self.level > 30:
            raise ValueError(f'level: got {self.level}, expected 1 to 30 for game = "treasure_hunter"')
        return self

    def taskset(self) -> TaskSet:
        library = imported("textworld", self.type, PACKAGE)
        games, notes = self._games(library.__version__)
        for game in games:
            if len(game.walkthrough) > self.most_actions:
                raise ConfigError(
                    f"environment {self.label}: {game.path.name} takes {len(game.walkthrough)} commands, and "
                    f"max_actions is {self.most_actions}: raise max_actions"
                )
        paths = {game.name: game.path for game in games}
        drafts = [
            Draft({"file": game.name, "content": game.content}, list(game.walkthrough), [game.content])
            for game in games
        ]
        return listed(
            self, drafts, lambda task: TextWorldEpisode(self, task, paths[task.data["file"]]), notes=notes
        )

    @property
    def most_actions(self) -> int:
        return self.max_actions or MAX_ACTIONS[self.game]

    def _games(self, version: str) -> tuple[list[GameFile], list[str]]:
        if self.path:
            games, left_out = found(Path(self.path).expanduser(), self.label)
            return games, [f"{self.label}: {left_out} .z8 files have no .json file"] if left_out else []
        keys = {"level": self.level, "hints": self.hints}
        if self.game == "cooking":
            keys = self.cooking.model_dump()
        wanted = Wanted(f"tw-{self.game}", keys, self.games, self.eval_size, self.eval_share, self.seed)
        cache = Path(self.cache_path).expanduser() if self.cache_path else cache_folder() / "textworld"
        digest = hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:8]
        return made(wanted, cache / f"{self.game}-{version}-{digest}", self.label), []


class TextWorldEpisode(Adventure):
    settings: TextWorld

    def __init__(self, settings: TextWorld, task: Task, path: Path) -> None:
        super().__init__(settings, task)
        self.actions_left = settings.most_actions
        self.path = path

    def open(self) -> TextWorldStory:
        return TextWorldStory(self.path, self.task.answer, partial=self.settings.partial)

    def rules(self) -> str:
        return "You are in a text adventure." if self.settings.path else RULES[self.settings.game]


class TextWorldStory(Story):
    """A game in its interpreter."""

    def __init__(self, path: Path, walkthrough: Sequence[str], *, partial: bool) -> None:
        import textworld

        wanted = ("won", "lost", "score", "max_score", "verbs", "admissible_commands", "policy_commands")
        infos = textworld.EnvInfos(**dict.fromkeys(wanted, True))
        super().__init__(textworld.start(str(path), infos), walkthrough)
        self.env.seed(0)
        self.partial = partial

    def refusal(self, command: str) -> str:
        if command in {each.casefold() for each in self.state.admissible_commands}:
            return ""
        words = command.split(" ")
        if _WORDS.fullmatch(command) and "then" not in words and words[0] in SYNONYMS.union(self.state.verbs):
            return ""
        return f"The game has no command {command!r}."

    def plan(self, said: Sequence[str]) -> Sequence[str]:
        """The rest of the walkthrough; elsewhere the way that TextWorld knows, if it does."""
        return left_of(self.walkthrough, said, IDLE) or self.state.policy_commands or []

    def scene(self) -> Scene:
        text = _NOISE.sub("", self.state.feedback).partition(_MENU)[0]
        won, lost = self.told("won", bool), self.told("lost", bool)
        score, most = self.told("score", int), self.told("max_score", int)
        reward = earned(score, most, won=won, partial=self.partial)
        return Scene(text, () if won or lost else tuple(self.state.admissible_commands), reward, won, lost)
