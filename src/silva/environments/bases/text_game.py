"""Games in text: what to show, how a reply is read, what counts as a turn.

A game subclasses `TextGame` and says what its actions are called, what a position looks like, what an action
does and what an expert would play; its settings subclass `TextGameSettings`. The state is kept in attributes:
`__init__` makes them from `task.data`; `apply` changes them, and sets `self.solved` when the game is won. A
complete game is in docs/environments.md.

    full style, thoughts on:   <think>The goal is below.</think><answer>Down || Right</answer>
    compact style:             <answer>D||R</answer>      or, with answer_tags off:      D||R

A turn without any valid action costs one action, so that every game ends; the penalty for it is a
shaped reward, apart from the game's own.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import Field

from silva.config.sections import Positive
from silva.environments.bases.environment import BaseEnvironment
from silva.environments.bases.reply_form import ReplyForm
from silva.environments.settings import EnvironmentSettings
from silva.types import Message, Observation, Step, Task

T = TypeVar("T")


class TextGameSettings(EnvironmentSettings):
    style: Literal["full", "compact"] = "full"
    """`full` explains rules and format; `compact` shows the bare position (for small models)."""
    think: bool = True
    """Ask for thoughts in <think>...</think> before the answer."""
    answer_tags: bool = True
    """Actions stand in <answer>...</answer>; off: the reply is the actions alone."""
    format: Literal["lenient", "strict"] = "lenient"
    """`strict` reads nothing from a reply that is not exactly in the format."""
    prefill: bool = False
    """Begin the reply with the first tag of the format."""
    separator: Annotated[str, Field(min_length=1)] = "||"
    """Stands between the actions of one turn."""
    max_actions_per_turn: Positive = 5
    """Further actions of the same turn are ignored."""
    max_actions: Positive = 10
    """Actions of one episode; a turn without a valid action uses up one."""
    format_penalty: Annotated[float, Field(le=0)] = -0.1
    """Shaped reward of a turn from which no valid action could be read."""

    @property
    def reply_form(self) -> ReplyForm:
        return ReplyForm(self.think, self.answer_tags, self.prefill, self.format == "strict")


class Outcome(NamedTuple):
    """What one action did: its raw reward, whether the episode is over, whether the position changed
    (`effective`), and a line to show before the new position."""

    reward: float = 0.0
    done: bool = False
    effective: bool = True
    note: str = ""


class TextGame(BaseEnvironment, ABC):
    """One episode of a game: a `Forkable` and `Scripted` environment.

    A subclass keeps its state in attributes that hold plain data (a fork copies them), takes random numbers
    from `self.rng`, and sets `self.solved` when the game is won: evaluation counts that as success.
    """

    reward_name = "score"
    settings: TextGameSettings

    def __init__(self, settings: TextGameSettings, task: Task) -> None:
        super().__init__(settings, task)
        self.solved = False
        self.actions_left = settings.max_actions

    # What a game defines.

    @abstractmethod
    def instructions(self) -> str:
        """The rules, in full style; the format of replies is added to them."""

    @abstractmethod
    def render(self) -> str:
        """The position as text."""

    @abstractmethod
    def actions(self) -> Mapping[str, str]:
        """Maps each action's name to its short form (or to itself if it has none); at least one action."""

    @abstractmethod
    def apply(self, action: str) -> Outcome:
        """Plays an action, given by its long name: changes the state, and sets `self.solved` if it wins."""

    @abstractmethod
    def expert_actions(self) -> Sequence[str]:
        """Long names of the actions that win from here, or the first of them."""

    # The environment.

    async def reset(self) -> Observation:
        self._begin()
        if self.settings.style == "compact":
            return self._observe("")
        rules = self._expect(self.instructions(), str, "instructions()")
        return self._observe(f"{rules}\n{self._format_rules()}\n")

    async def step(self, message: Message) -> Step:
        self._check_running()
        actions, all_valid = self.read(message)
        outcomes = []
        for action in actions[: min(self.settings.max_actions_per_turn, self.actions_left)]:
            outcomes.append(self._expect(self.apply(action), Outcome, f"apply({action!r})"))
            if outcomes[-1].done:
                break
        self.actions_left -= max(len(outcomes), 1)
        done = bool(outcomes) and outcomes[-1].done
        truncated = not done and self.actions_left == 0
        metrics = {
            "action_is_valid": float(all_valid),
            "action_is_effective": sum(outcome.effective for outcome in outcomes) / max(len(outcomes), 1),
            "actions": float(len(outcomes)),
        }
        if done or truncated:
            metrics["success"] = float(self.solved)
            self._end()
        return Step(
            self._observe(self._feedback(outcomes)),
            rewards={self.reward_name: sum(outcome.reward for outcome in outcomes)},
            shaped={"format": 0.0 if outcomes else self.settings.format_penalty},
            terminated=done,
            truncated=truncated,
            metrics=metrics,
        )

    def expert_reply(self) -> str:
        actions, known = self.expert_actions(), self._actions()
        names = list(actions) if isinstance(actions, Iterable) and not isinstance(actions, str) else []
        if not names or any(name not in known for name in names):
            raise TypeError(
                f"{type(self).__name__}.expert_actions() returned {actions!r}: expected a list of one or "
                f"more of {', '.join(known)}"
            )
        return self.reply(names[: self.settings.max_actions_per_turn])

    def random_reply(self, seed: int) -> str:
        """One action, uniformly; another in every turn of the same seed."""
        rng = random.Random(f"{seed}/{self.actions_left}")
        return self.reply([rng.choice(list(self._actions()))])

    def reply(self, actions: Sequence[str]) -> str:
        """A reply in the expected format, as sampled (after the prefill, if there is one)."""
        compact = self.settings.style == "compact"
        names = self._actions()
        separator = self.settings.separator if compact else f" {self.settings.separator} "
        text = separator.join(names[action] if compact else action for action in actions)
        return self.settings.reply_form.say(text, ", ".join(actions))

    def wrap(self, text: str) -> str:
        """Bare actions, as a person types them, in the expected format; other text as it is."""
        actions, all_valid = self._actions_in(text)
        return self.reply(actions) if all_valid else text

    def read(self, message: Message) -> tuple[list[str], bool]:
        """The valid actions of a reply (long names), and whether all that was read was valid."""
        return self._actions_in(self.settings.reply_form.read(message) or "")

    def _actions_in(self, answer: str) -> tuple[list[str], bool]:
        parts = [part for part in answer.split(self.settings.separator) if part.strip()]
        known = _names(*self._actions().items())
        actions = [known[name] for name in map(_plain, parts) if name in known]
        return actions, bool(actions) and len(actions) == len(parts)

    def _actions(self) -> Mapping[str, str]:
        actions = self._expect(self.actions(), Mapping, "actions()")  # type: ignore[type-abstract]
        if not actions:
            raise TypeError(f"{type(self).__name__}.actions() returned no action: expected at least one")
        return actions

    def _expect(self, got: T, kind: type[T], call: str) -> T:
        if not isinstance(got, kind):
            article = "an" if kind.__name__[0] in "AEIOU" else "a"
            raise TypeError(
                f"{type(self).__name__}.{call} returned {got!r}: expected {article} {kind.__name__}"
            )
        return got

    def _observe(self, before: str) -> Observation:
        left = self.actions_left
        count = str(left) if self.settings.style == "compact" else f"Actions left: {left}."
        text = f"{before}{self._expect(self.render(), str, 'render()')}\n{count}"
        return Observation((self.say(text),), prefill=self.settings.reply_form.prefill)

    def _feedback(self, outcomes: Sequence[Outcome]) -> str:
        compact = self.settings.style == "compact"
        if not outcomes:
            return "?\n" if compact else f"No valid action was read. {self._format_rules()}\n"
        notes = [outcome.note for outcome in outcomes if outcome.note]
        return "".join(f"{note}\n" for note in notes)

    def _format_rules(self) -> str:
        names = list(self._actions())
        several = self.settings.max_actions_per_turn > 1
        answer = f"{names[0]} {self.settings.separator} {names[:2][-1]}" if several else names[0]
        limit = f" At most {self.settings.max_actions_per_turn} actions a turn." if several else ""
        return f"Actions: {', '.join(names)}.{limit} {self.settings.reply_form.ask(answer)}"


@lru_cache(1024)  # a game asks in every turn, mostly for the same
def _names(*actions: tuple[str, str]) -> Mapping[str, str]:
    """The long names by what a reply may call them."""
    return {_plain(name): long for long, short in actions for name in (long, short)}


def _plain(text: str) -> str:
    return text.strip(" \t\r\n.,;:!\"'`*").casefold()
