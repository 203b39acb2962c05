"""Two arms with telling names: one pays little and surely, the other much and rarely.

The names hint at which is which; with `reverse` they mislead, and only experience helps. Success means
that the better arm was picked (by expected reward), whatever it paid: a lucky draw is no success, an
unlucky one no failure. The single outcome can therefore rank the worse arm first; only the mean over
episodes cannot.

The prompt depends on the task's data and the payout on its seed: episodes of one task read the same
prompt. Held-out tasks are pairs of names that do not occur in training in either order (each single
name does).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from silva.config.sections import Fraction, Positive
from silva.environments.bases.text_game import Outcome, TextGame, TextGameSettings
from silva.environments.tasks import Draft, Tasks, listed

CAUTIOUS = ("Anchor", "Turtle", "Librarian", "Savings", "Harbor", "Clerk", "Oak", "Brick", "Gardener",
            "Fence", "Ox", "Teacup", "Pension", "Notary", "Snail", "Cellar")  # fmt: skip
DARING = ("Rocket", "Dragon", "Gambler", "Lottery", "Storm", "Pirate", "Lightning", "Casino",
          "Acrobat", "Volcano", "Falcon", "Dice", "Comet", "Smuggler", "Tiger", "Trapeze")  # fmt: skip


class Bandit(TextGameSettings):
    type: Literal["bandit"] = "bandit"
    eval_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of all pairs of names that is held out."""
    max_actions_per_turn: Positive = 1
    """Further actions of the same turn are ignored."""
    max_actions: Positive = 1
    """Actions of one episode; a turn without a valid action uses up one."""
    safe_reward: Annotated[float, Field(gt=0)] = 0.1
    """Paid by the safe arm, always."""
    risky_reward: Annotated[float, Field(gt=0)] = 1.0
    """Paid by the risky arm when it pays."""
    risky_chance: Fraction = 0.25
    """How often the risky arm pays."""
    reverse: bool = False
    """The daring name is the safe arm."""

    @model_validator(mode="after")
    def _one_is_better(self) -> Self:
        if abs(self.risky_chance * self.risky_reward - self.safe_reward) < 1e-9:
            raise ValueError("both arms pay the same on average: expected one to be better")
        return self

    @property
    def better(self) -> str:
        """The arm with the higher expected reward: "risky" or "safe"."""
        return "risky" if self.risky_chance * self.risky_reward > self.safe_reward else "safe"

    def taskset(self) -> Tasks:
        return listed(self, self._drafts(), lambda task: BanditGame(self, task))

    def _drafts(self) -> Iterator[Draft]:
        for cautious, daring in itertools.product(CAUTIOUS, DARING):
            safe, risky = (daring, cautious) if self.reverse else (cautious, daring)
            for shown in ([cautious, daring], [daring, cautious]):
                yield Draft({"safe": safe, "risky": risky, "shown": shown}, keys=[[cautious, daring]])


class BanditGame(TextGame):
    reward_name = "payout"
    settings: Bandit

    def instructions(self) -> str:
        first, second = self.task.data["shown"]
        return (
            f"There are two slot machines, {first} and {second}. One pays a little every time, the other "
            "pays a lot but seldom. Their names may tell which is which. "
            "Choose the one that pays more on average."
        )

    def actions(self) -> dict[str, str]:
        return {name: name for name in self.task.data["shown"]}

    def render(self) -> str:
        return " or ".join(self.task.data["shown"]) + "?"

    def apply(self, action: str) -> Outcome:
        settings = self.settings
        self.solved = action == self.task.data[settings.better]
        if action == self.task.data["safe"]:
            return Outcome(settings.safe_reward, done=True)
        paid = self.rng.random() < settings.risky_chance
        return Outcome(settings.risky_reward if paid else 0.0, done=True)

    def expert_actions(self) -> list[str]:
        return [self.task.data[self.settings.better]]
