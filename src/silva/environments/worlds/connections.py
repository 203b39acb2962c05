"""Find the groups of words that belong together on a shuffled board.

`single`: one reply holds all groups. Reward 1 for all of them. Otherwise nothing or, with `partial`, half the
share of groups that are right, and nothing at all for a reply with more groups than the board has, with a
word twice or with a word that is not on the board: neither listing nor repeating pays.
`turns`: one group a turn, found groups leave the board, and a few wrong ones end the episode.

Each word fits one group only. Groups of held-out tasks do not occur in training (`held_out = "boards"`: their
combinations do not).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from math import comb
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from silva.config.sections import Positive
from silva.environments.bases.attempts import Attempts, Verdict
from silva.environments.bases.environment import BaseEnvironment
from silva.environments.settings import EnvironmentSettings
from silva.environments.tasks import Draft, Tasks, generated, held_out
from silva.environments.worlds.word_groups import WORD_GROUPS
from silva.errors import ConfigError
from silva.rewards.text import extract_answer
from silva.types import Message, Observation, Step, Task

PARTIAL = 0.5  # of the reward, for a board of which all but the last group was found
_GROUP = re.compile(r"<group>([^<>]*)</group>")


class Connections(EnvironmentSettings):
    reward_range: ClassVar = (0.0, 1.0)

    type: Literal["connections"] = "connections"
    form: Literal["single", "turns"] = "single"
    """`single`: all groups in one answer; `turns`: one group a turn."""
    groups: Annotated[int, Field(ge=2, le=8)] = 4
    """Groups on a board."""
    size: Annotated[int, Field(ge=2, le=6)] = 4
    """Words of a group."""
    mistakes: Positive = 4
    """`turns` only: as many wrong groups end the episode."""
    partial: bool = True
    """Credit, below 0.5, for some of the groups."""
    held_out: Literal["groups", "boards"] = "groups"
    """What is kept for evaluation: groups of words, or only their combinations."""
    format_penalty: Annotated[float, Field(le=0)] = -0.1
    """Shaped reward of a reply that is no group, or no list of groups, of words on the board."""

    @model_validator(mode="after")
    def _not_to_be_tried_out(self) -> Self:
        tries = comb(self.groups * self.size - 1, self.size - 1) - 1
        if self.form == "turns" and self.mistakes > tries:
            raise ValueError(
                f"mistakes = {self.mistakes}: expected {tries} or less, since on a board of {self.groups} "
                f"groups of {self.size} a group could be found by trying all"
            )
        return self

    def taskset(self) -> Tasks:
        boards = self.held_out == "boards"
        sides = {
            side: [name for name in WORD_GROUPS if boards or held_out(name, self.eval_share) == side]
            for side in (True, False)
        }
        for side, names in sides.items():
            if len(names) < self.groups:
                raise ConfigError(
                    f"environment {self.label}: eval_share = {self.eval_share:g} leaves {len(names)} groups "
                    f"for {'evaluation' if side else 'training'}, expected groups = {self.groups} or more"
                )
        return generated(
            self, lambda rng: self._draw(rng, sides[rng.random() < self.eval_share]), self._build
        )

    def _build(self, task: Task) -> ConnectionsAnswer | ConnectionsGame:
        return ConnectionsAnswer(self, task) if self.form == "single" else ConnectionsGame(self, task)

    def _draw(self, rng: random.Random, names: Sequence[str]) -> Draft:
        chosen = sorted(rng.sample(names, self.groups))
        solution = {name: sorted(rng.sample(WORD_GROUPS[name].split(), self.size)) for name in chosen}
        words = [word for group in solution.values() for word in group]
        rng.shuffle(words)
        keys: list[Any] = chosen if self.held_out == "groups" else [sorted(solution.values())]
        return Draft({"words": words}, solution, keys)


class ConnectionsAnswer(Attempts):
    settings: Connections

    def __init__(self, settings: Connections, task: Task) -> None:
        super().__init__(settings, task)
        self.partial_weight = PARTIAL if settings.partial else 0.0
        self.format_penalty = settings.format_penalty
        self.words: list[str] = task.data["words"]
        self.solution = [set(group) for group in task.answer.values()]

    def prompt(self) -> str:
        count, size = len(self.solution), len(self.solution[0])
        example = f"<group>{', '.join(f'word{i}' for i in range(1, size + 1))}</group>"
        return (
            f"These words form {count} groups of {size} that belong together: {', '.join(self.words)}.\n"
            f"Give all groups in this form: <answer>{example}...</answer>"
        )

    def judge(self, reply: str) -> Verdict:
        groups = self._read(extract_answer(reply))
        if groups is None:
            return Verdict(solved=False, valid=False)
        found = sum(group in self.solution for group in groups)
        return Verdict(solved=found == len(self.solution), partial=found / len(self.solution))

    def expert_reply(self) -> str:
        return _answer(self.task.answer.values())

    def random_reply(self, seed: int) -> str:
        """All words, in any groups."""
        words, size = list(self.words), len(self.solution[0])
        random.Random(seed).shuffle(words)
        return _answer([words[i : i + size] for i in range(0, len(words), size)])

    def _read(self, text: str) -> list[set[str]] | None:
        """The groups, if there are no more than on the board, and no word stands twice or is not there."""
        groups = [_words(group) for group in _GROUP.findall(text)]
        named = [word for group in groups for word in group]
        proper = groups and len(groups) <= len(self.solution) and not _GROUP.sub("", text).strip()
        if not proper or len(set(named)) < len(named) or not set(named) <= set(self.words):
            return None
        return [set(group) for group in groups]


class ConnectionsGame(BaseEnvironment):
    """A found group pays a share of PARTIAL, the last one whatever is left to 1."""

    settings: Connections

    def __init__(self, settings: Connections, task: Task) -> None:
        super().__init__(settings, task)
        self.words: list[str] = list(task.data["words"])  # still on the board
        self.open: dict[str, list[str]] = dict(task.answer)
        self.mistakes_left = settings.mistakes
        self.paid = 0.0
        self.turn = 0

    async def reset(self) -> Observation:
        self._begin()
        count, size = len(self.open), self.settings.size
        rules = (
            f"These words form {count} groups of {size} that belong together. Name one group a turn, in this "
            f"form: <answer>{', '.join(f'word{i}' for i in range(1, size + 1))}</answer>"
        )
        return Observation((self.say(f"{rules}\n{self._board()}"),))

    async def step(self, message: Message) -> Step:
        self._check_running()
        self.turn += 1
        named = _words(extract_answer(message.content))
        valid = len(named) == len(set(named)) == self.settings.size and set(named) <= set(self.words)
        name = next((name for name, group in self.open.items() if set(group) == set(named)), None)
        reward = 0.0
        if name is not None:
            reward = self._found(name)
            text = f"Right: {name}."
        else:
            self.mistakes_left -= 1
            text = self._wrong(named) if valid else f"Name {self.settings.size} different words of the board."
        solved, lost = not self.open, self.mistakes_left == 0
        metrics = {"action_is_valid": float(valid)}
        if solved or lost:
            self._end()
            found = 1 - len(self.open) / self.settings.groups
            metrics |= {"success": float(solved), "found": found, "turns": float(self.turn)}
        return Step(
            Observation() if solved or lost else Observation((self.say(f"{text}\n{self._board()}"),)),
            rewards={"correct": reward},
            shaped={"format": 0.0 if valid else self.settings.format_penalty},
            terminated=solved or lost,
            metrics=metrics,
        )

    def expert_reply(self) -> str:
        return f"<answer>{', '.join(next(iter(self.open.values())))}</answer>"

    def random_reply(self, seed: int) -> str:
        """Any words of the board."""
        words = random.Random(f"{seed}/{self.turn}").sample(self.words, self.settings.size)
        return f"<answer>{', '.join(words)}</answer>"

    def _found(self, name: str) -> float:
        """What a group earns that is taken off the board."""
        group = self.open.pop(name)
        self.words = [word for word in self.words if word not in group]
        share = PARTIAL / self.settings.groups if self.settings.partial else 0.0
        reward = share if self.open else 1.0 - self.paid
        self.paid += reward
        return reward

    def _wrong(self, named: list[str]) -> str:
        near = max(len(set(named) & set(group)) for group in self.open.values())
        return "Wrong, but one word away." if near == self.settings.size - 1 > 1 else "Wrong."

    def _board(self) -> str:
        left = self.mistakes_left
        return f"Words: {', '.join(self.words)}. {left} mistake{'s' if left > 1 else ''} left."


def _words(text: str) -> list[str]:
    return [word.strip().casefold() for word in text.split(",")]


def _answer(groups: Iterable[Sequence[str]]) -> str:
    listed = "".join(f"<group>{', '.join(group)}</group>" for group in groups)
    return f"<answer>{listed}</answer>"
