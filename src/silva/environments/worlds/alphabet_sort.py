"""Sort names; in each further turn more names come, and the whole list is asked for again.

    Sort these names by last name: Mia Vargas, Omar Lindt     Omar Lindt
                                                              Mia Vargas
    Here are more names: Ines Moreau                          Omar Lindt
                                                              Ines Moreau // new name!
                                                              Mia Vargas

An exact list earns 1 / turns. Any other earns at most half of that, times its similarity to the exact one
raised to `similarity_power`; the similarity is the share of names in common, in order. So only an episode of
exact lists earns 1. First names and last names are each distinct within an episode, hence the order is never
in doubt.
"""

from __future__ import annotations

import random
import re
from difflib import SequenceMatcher
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from silva.config.sections import Above0, Positive
from silva.environments.bases.environment import BaseEnvironment
from silva.environments.settings import EnvironmentSettings
from silva.environments.tasks import Draft, Tasks, generated
from silva.environments.worlds.names import FIRST_NAMES, LAST_NAMES
from silva.rewards.text import extract_answer
from silva.types import Message, Observation, Step, Task

PARTIAL = 0.5  # of a turn's reward, for a list that is all but exact
MARK = " // new name!"
COMPACT_MARK = "*"
MOST_NAMES = 60  # of one episode


class AlphabetSort(EnvironmentSettings):
    bounds: ClassVar = ("turns", "names")
    reward_range: ClassVar = (0.0, 1.0)

    type: Literal["alphabet_sort"] = "alphabet_sort"
    style: Literal["full", "compact"] = "full"
    """`full` asks in words for lists of full names; `compact` shows first names alone, in one line (small
    models)."""
    min_turns: Positive = 1
    """Fewest turns, each with more names."""
    max_turns: Positive = 3
    """Most turns."""
    min_names: Positive = 1
    """Fewest names that come in one turn."""
    max_names: Positive = 5
    """Most names that come in one turn; the first turn brings two at least."""
    by: Literal["first", "last", "either"] = "either"
    """Sort by first or last name; `either`: each task says which. The compact style has first names only."""
    mark_new: bool = True
    """From the second turn on, names that have just come are to be marked."""
    similarity_power: Above0 = 4.0
    """The higher, the less is paid for lists that are not exact."""
    partial: bool = True
    """Credit for lists that are not exact."""
    format_penalty: Annotated[float, Field(le=0)] = -0.1
    """Shaped reward of a turn with an empty reply."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.max_turns * self.max_names > MOST_NAMES:
            raise ValueError(
                f"max_turns = {self.max_turns} and max_names = {self.max_names}: expected a product of "
                f"{MOST_NAMES} or less"
            )
        if self.max_names < 2:
            raise ValueError("max_names = 1: expected 2 or more, since one name needs no sorting")
        return self

    def taskset(self) -> Tasks:
        return generated(self, self._draw, lambda task: SortEpisode(self, task))

    def _draw(self, rng: random.Random) -> Draft:
        turns = rng.randint(self.min_turns, self.max_turns)
        counts = [rng.randint(self.min_names, self.max_names) for _ in range(turns)]
        counts[0] = max(counts[0], 2)
        compact = self.style == "compact"
        by = "first" if compact else rng.choice(("first", "last")) if self.by == "either" else self.by
        names = rng.sample(FIRST_NAMES, sum(counts))
        if not compact:
            names = [f"{a} {b}" for a, b in zip(names, rng.sample(LAST_NAMES, sum(counts)), strict=True)]
        come = [[names.pop() for _ in range(count)] for count in counts]
        return Draft({"names": come, "by": by}, keys=[sorted(come[0])])


class SortEpisode(BaseEnvironment):
    """Every turn is played, whatever the one before earned."""

    settings: AlphabetSort

    def __init__(self, settings: AlphabetSort, task: Task) -> None:
        super().__init__(settings, task)
        self.come: list[list[str]] = task.data["names"]
        self.by: str = task.data["by"]
        self.turn = 0
        self.exact = 0  # turns

    async def reset(self) -> Observation:
        self._begin()
        return self._ask()

    async def step(self, message: Message) -> Step:
        self._check_running()
        given = extract_answer(message.content)
        exact = self._read(given) == self.expected()
        self.exact += exact
        share = 1.0 if exact else self._near(given)
        reward = share / len(self.come)
        self.turn += 1
        over = self.turn == len(self.come)
        metrics = {"action_is_valid": float(bool(given))}
        if over:
            self._end()
            # Adding up shares may miss 1 by a rounding error.
            reward = 1.0 - (self.turn - 1) / self.turn if self.exact == self.turn else reward
            metrics |= {"success": float(self.exact == self.turn), "exact": self.exact / self.turn}
        return Step(
            Observation() if over else self._ask(),
            rewards={"sorted": reward},
            shaped={"format": 0.0 if given else self.settings.format_penalty},
            terminated=over,
            metrics=metrics,
        )

    def expected(self) -> list[str]:
        """The lines of the exact reply to the open question."""
        known = [name for names in self.come[: self.turn + 1] for name in names]
        key = 0 if self.by == "first" else -1
        new = set(self.come[self.turn]) if self.turn and self.settings.mark_new else set()
        ordered = sorted(known, key=lambda name: name.split()[key])
        return [name + self._mark() if name in new else name for name in ordered]

    def expert_reply(self) -> str:
        return self._write(self.expected())

    def random_reply(self, seed: int) -> str:
        """All names in any order."""
        lines = self.expected()
        random.Random(f"{seed}/{self.turn}").shuffle(lines)
        return self._write(lines)

    def _ask(self) -> Observation:
        names = self.come[self.turn]
        if self.settings.style == "compact":
            return Observation((self.say(" ".join(names)),))
        if self.turn:
            mark = f' Write "{MARK.strip()}" after each of the new ones.' if self.settings.mark_new else ""
            text = f"Here are more names: {', '.join(names)}.\nNow sort all names, old and new, again.{mark}"
        else:
            text = (
                f"Sort these names by {self.by} name, in alphabetical order: {', '.join(names)}.\n"
                "Write one name a line, and nothing else, between <answer> and </answer>."
            )
        return Observation((self.say(text),))

    def _read(self, given: str) -> list[str]:
        if self.settings.style == "compact":
            return given.split()
        # Commas do as well: a person at a terminal writes one line.
        return [" ".join(name.split()) for name in re.split(r"[\n,]", given) if name.strip()]

    def _write(self, lines: list[str]) -> str:
        if self.settings.style == "compact":
            return " ".join(lines)
        return "<answer>\n" + "\n".join(lines) + "\n</answer>"

    def _mark(self) -> str:
        return COMPACT_MARK if self.settings.style == "compact" else MARK

    def _near(self, given: str) -> float:
        """Half the power of the share of names in common, in order (lists are compared, not letters)."""
        if not self.settings.partial:
            return 0.0
        expected = self.expected()
        names = self._read(given)[: 2 * len(expected)]
        return (
            PARTIAL * SequenceMatcher(None, names, expected, False).ratio() ** self.settings.similarity_power
        )
