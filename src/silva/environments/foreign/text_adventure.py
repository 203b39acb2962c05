"""Text adventures: an engine tells what there is, a reply is one command in plain words.

    <think>The goal is north.</think><answer>go north</answer>  ->  Story.send("go north")  ->  Scene

`textworld` and `alfworld` are built on it. A fork opens a second engine and plays the same commands again.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from silva.environments.bases.reply_form import ReplyForm
from silva.environments.foreign.game import ForeignGame, ForeignGameSettings, Told
from silva.rewards.text import extract_answer
from silva.types import Task

T = TypeVar("T")

LONGEST = 200  # characters of a command; an engine's buffer is hardly longer
MOST_UNWON = 0.99  # what may be earned without winning, so that nothing else counts as a solution
_BLANK_LINES = re.compile(r"\n\s*\n\s*")


class AdventureSettings(ForeignGameSettings):
    think: bool = True
    """Ask for thoughts in <think>...</think> before the answer."""
    show_commands: bool = True
    """List the commands that are possible below every text."""


class Scene(NamedTuple):
    """What an engine says after a command.

    `earned`: the raw reward so far, from 0 to 1; 1 for a game that is won, and at most MOST_UNWON otherwise.
    """

    text: str
    commands: tuple[str, ...]  # the possible ones, in an order that is always the same
    earned: float = 0.0
    won: bool = False
    lost: bool = False


class Story(ABC):
    """One game in an engine of TextWorld. Equal commands give equal scenes.

    Attributes:
        state: what the engine said last.
    """

    state: Any = None

    def __init__(self, env: Any, walkthrough: Sequence[str]) -> None:
        self.env, self.walkthrough = env, walkthrough

    def start(self) -> Scene:
        self.state = self.env.reset()
        return self.scene()

    def send(self, command: str) -> Scene:
        self.state, _, _ = self.env.step(command)
        return self.scene()

    def refusal(self, command: str) -> str:
        """Why the engine must not get this command, or nothing."""
        return ""

    @abstractmethod
    def plan(self, said: Sequence[str]) -> Sequence[str]:
        """What wins after these commands, if that is known."""

    @abstractmethod
    def scene(self) -> Scene:
        """The engine's state, for the player."""

    def close(self) -> None:
        self.env.close()

    def told(self, name: str, kind: type[T]) -> T:
        """
        Raises:
            TypeError: the engine says nothing of it: a game that is not followed any more is not a game that
                is not won.
        """
        value = getattr(self.state, name)
        if not isinstance(value, kind):
            raise TypeError(f"the engine gives {name} = {value!r}, expected {kind.__name__}")
        return value


class Adventure(ForeignGame):
    """One episode of a game: a `Forkable` and `Scripted` environment."""

    example: ClassVar[str] = "look"  # a command that is possible anywhere
    settings: AdventureSettings

    def __init__(self, settings: AdventureSettings, task: Task) -> None:
        super().__init__(settings, task)
        self.said: list[str] = []  # commands, as the engine got them
        self.scene = Scene("", ())
        self.paid = 0.0  # of what is earned; a story may begin with a score, which the first command pays
        self.story: Story | None = None
        self.form = ReplyForm(settings.think)
        self.asked = self.form.ask(self.example, "Reply with one command")

    @abstractmethod
    def open(self) -> Story:
        """A new engine with this game."""

    @abstractmethod
    def rules(self) -> str:
        """What the game is about and how it is won."""

    async def begin(self) -> str:
        self.story = self.open()
        self.scene = self.story.start()
        return self._page([self.rules(), self.asked, self.scene.text], self.actions_left)

    async def play(self, reply: str) -> Told:
        assert self.story is not None
        command, before = self.read(reply), self.scene
        problem = self.story.refusal(command) if command else "No command was read."
        reward = 0.0
        if not problem:
            self.said.append(command)
            self.scene = self.story.send(command)
            reward, self.paid = self.scene.earned - self.paid, self.scene.earned
        text = f"{problem} {self.asked}" if problem else self.scene.text
        return Told(
            self._page([text], self.actions_left - 1),
            reward=reward,
            done=self.scene.won or self.scene.lost,
            valid=not problem,
            metrics={"action_is_effective": float(self.effective(command, before))},
        )

    def read(self, reply: str) -> str:
        """The command of a reply; empty if there is none."""
        return read_command(reply)

    def effective(self, command: str, before: Scene) -> bool:
        """Whether a command that was played was possible in the scene before it."""
        return command in {each.casefold() for each in before.commands}

    def commands(self) -> Sequence[str]:
        """What can be said now."""
        return self.scene.commands

    async def close(self) -> None:
        await super().close()
        story, self.story = self.story, None
        if story is not None:
            story.close()

    async def fork(self, seed: int) -> Self:
        story, self.story = self.story, None  # an engine cannot be copied
        try:
            twin = await super().fork(seed)
        finally:
            self.story = story
        if story is not None:
            twin.story = twin.open()
            twin.story.start()
            for command in twin.said:
                twin.story.send(command)
        return twin

    def expert_reply(self) -> str:
        """The next command of a plan that wins; a possible one if none is known."""
        plan = self.story.plan(self.said) if self.story else ()
        return self.form.say(next(iter(plan or self.commands()), self.example))

    def random_reply(self, seed: int) -> str:
        """One of the possible commands; another in every turn of the same seed."""
        rng = random.Random(f"{seed}/{self.actions_left}")
        return self.form.say(rng.choice(self.commands() or (self.example,)))

    def _page(self, parts: Sequence[str], left: int) -> str:
        lines = [_BLANK_LINES.sub("\n", part.strip()) for part in parts]
        if self.settings.show_commands and self.scene.commands:
            lines.append(f"Possible commands: {', '.join(self.scene.commands)}.")
        return "\n".join([*lines, f"Actions left: {left}."])


def read_command(reply: str) -> str:
    """The command of a reply: its answer in lower case, if that is one short line; otherwise empty."""
    text = extract_answer(reply).strip().strip("\"'`*>.!").strip()
    return "" if len(text) > LONGEST or not text.isprintable() else " ".join(text.casefold().split())


def earned(score: float, most: float, *, won: bool, partial: bool) -> float:
    """The raw reward for a score: its share of the highest one, but 1 only for a game that is won."""
    if won or not partial or most <= 0:
        return float(won)
    return min(max(score / most, 0.0), MOST_UNWON)


def left_of(walkthrough: Sequence[str], said: Sequence[str], idle: Sequence[str]) -> list[str]:
    """What is left of a walkthrough after these commands; nothing if one of them led away from it.

    Args:
        idle: first words of commands that change nothing.
    """
    rest = list(walkthrough)
    for command in said:
        if rest and command == rest[0].casefold():
            rest.pop(0)
        elif command.split(" ")[0] not in idle:
            return []
    return rest
