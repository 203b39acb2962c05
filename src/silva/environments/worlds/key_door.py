"""A key and a door: one early decision decides, and only the end tells whether it was right.

A way of rooms leads to a locked door. In each room a sign shows the exit; the other one leads back into the
same room. On the way lie several keys under a note that says which one the door needs, and only one can be
taken. At the door the episode ends: it opens, or the key does not fit.

The world asks what gets the credit. A wrong exit costs a turn and shows at once. A wrong key makes all turns
after it worthless, and none of them says so.
"""

from __future__ import annotations

import random
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from silva.config.sections import Natural, Positive
from silva.environments.bases.text_game import Outcome, TextGame, TextGameSettings
from silva.environments.tasks import Draft, Tasks, generated
from silva.types import Task

COLOURS = ("red", "green", "blue", "yellow", "white", "pink", "orange", "violet")
EXITS = ("Left", "Right")


class KeyDoor(TextGameSettings):
    type: Literal["key_door"] = "key_door"
    keys: Annotated[int, Field(ge=2, le=len(COLOURS))] = 4
    """Keys to choose from."""
    before: Natural = 1
    """Rooms before the keys. 0: the first turn decides."""
    after: Natural = 3
    """Rooms between the keys and the door."""
    max_actions_per_turn: Positive = 1
    """Further actions of the same turn are ignored."""
    max_actions: Positive = 9
    """Actions of one episode; a turn without a valid action uses up one."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        needed = self.before + 1 + self.after + 1
        if self.max_actions < needed:
            raise ValueError(
                f"max_actions = {self.max_actions}: {self.before} rooms, a key, {self.after} rooms and the "
                f"door need {needed}"
            )
        return self

    def taskset(self) -> Tasks:
        return generated(self, self._draw, lambda task: KeyDoorGame(self, task))

    def _draw(self, rng: random.Random) -> Draft:
        keys = rng.sample(COLOURS, self.keys)
        exits = [rng.choice(EXITS) for _ in range(self.before + self.after)]
        return Draft({"keys": keys, "exits": exits}, rng.choice(keys))


class KeyDoorGame(TextGame):
    reward_name = "opened"
    settings: KeyDoor

    def __init__(self, settings: KeyDoor, task: Task) -> None:
        super().__init__(settings, task)
        signs = list(task.data["exits"])
        self.way = [*signs[: settings.before], "key", *signs[settings.before :], "door"]
        self.place = 0
        self.taken = ""

    def instructions(self) -> str:
        return (
            "A way of rooms leads to a locked door. Leave each room by the exit that its sign shows. Keys "
            "lie on the way, and you can take one: take the one that the door needs. You win if it opens."
        )

    def actions(self) -> dict[str, str]:
        takes = {f"Take {colour}": colour[0] for colour in self.task.data["keys"]}
        return {"Left": "(", "Right": ")", "Open": "=", **takes}

    def render(self) -> str:
        here, compact = self.way[self.place], self.settings.style == "compact"
        keys = self.task.data["keys"]
        if here == "key":
            letters = "".join(colour[0] for colour in keys)
            told = f"Keys lie here: {', '.join(keys)}. A note says: the door is {self.task.answer}."
            return f"{self.task.answer[0]}:{letters}" if compact else told
        if here == "door":
            return "=" if compact else "You stand at the door."
        return self.actions()[here] if compact else f"A room. The sign shows {here.lower()}."

    def apply(self, action: str) -> Outcome:
        here = self.way[self.place]
        if here == "door" and action == "Open":
            self.solved = self.taken == self.task.answer
            note = "The door opens." if self.solved else "The key does not fit."
            return Outcome(float(self.solved), done=True, note=self._note(note))
        if here == "key" and action.startswith("Take "):
            self.taken = action.removeprefix("Take ")
        elif action != here:
            return Outcome(effective=False, note=self._note("Nothing changes."))
        self.place += 1
        return Outcome()

    def expert_actions(self) -> list[str]:
        here = self.way[self.place]
        return [{"key": f"Take {self.task.answer}", "door": "Open"}.get(here, here)]

    def random_reply(self, seed: int) -> str:
        """One of the actions that have an effect in a place like this, uniformly."""
        here, rng = self.way[self.place], random.Random(f"{seed}/{self.actions_left}")
        takes = [f"Take {colour}" for colour in self.task.data["keys"]]
        return self.reply([rng.choice({"key": takes, "door": ["Open"]}.get(here, list(EXITS)))])

    def _note(self, note: str) -> str:
        return "" if self.settings.style == "compact" else note
