"""Gymnasium's spaces as text: what an observation says, and which action a reply means."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from silva.environments.bases.reply_form import ReplyForm
from silva.environments.foreign.library import plain
from silva.errors import ConfigError
from silva.rewards.text import extract_answer

KNOWN: Mapping[str, Sequence[str]] = {
    "FrozenLake": ("Left", "Down", "Right", "Up"),
    "Taxi": ("South", "North", "East", "West", "Pickup", "Dropoff"),
    "CliffWalking": ("Up", "Right", "Down", "Left"),
    "Blackjack": ("Stick", "Hit"),
}
"""Names of the actions of gymnasium's own text environments, by the first part of their id."""
READABLE = "Text, Discrete, MultiDiscrete, MultiBinary, or a Tuple or Dict of these"
_SGR = re.compile(r"\x1b\[([\d;]*)m(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


def refused(space: Any, path: str = "") -> str:
    """The part of a space that is no text, such as "image: Box(0, 255, (7, 7, 3), uint8)"; "" if all is."""
    kind = type(space).__name__
    if kind in ("Text", "Discrete", "MultiDiscrete", "MultiBinary"):
        return ""
    if kind == "Dict":
        return next(filter(None, (refused(part, f"{path}{key}.") for key, part in space.items())), "")
    if kind == "Tuple":
        return next(filter(None, (refused(part, f"{path}{i}.") for i, part in enumerate(space))), "")
    if kind != "Box" and isinstance(copy.deepcopy(space).sample(), str):  # a space of a library's own
        return ""
    return f"{path.rstrip('.')}: {space}" if path else str(space)


def as_text(value: Any) -> str:
    """An observation; numbers as numbers, one line for each key of a Dict."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {as_text(each)}" for key, each in value.items())
    if isinstance(value, (tuple, list)):
        return ", ".join(as_text(each) for each in value)
    if hasattr(value, "tolist"):  # of numpy
        return json.dumps(value.tolist())
    return str(value)


def drawn(text: str) -> str:
    """A rendering for a terminal without its colours: what is highlighted stands in [ ], coloured text as in
    "blue:R"."""

    def marked(found: re.Match[str]) -> str:
        codes = [int(code) for code in found[1].split(";") if code]
        if any(40 <= code < 48 or code == 7 for code in codes):
            return f"[{found[2]}]"
        colour = next((_COLOURS[code - 30] for code in codes if 30 <= code < 38), "")
        return f"{colour}:{found[2]}" if colour else found[2]

    return _ESCAPE.sub("", _SGR.sub(marked, text)).strip("\n")


class Actions:
    """The actions of a space.

    Args:
        names: of the actions of a Discrete space, in their order; without them, their numbers.

    Raises:
        ConfigError: the space cannot be written as text, or there are more or fewer names than actions.
    """

    def __init__(self, space: Any, names: Iterable[str] = ()) -> None:
        self.space, self.names = space, list(names)
        if part := refused(space):
            raise ConfigError(f"the action space has {part}: expected {READABLE}")
        self.kind = type(space).__name__
        if self.kind == "Discrete":
            self.first = int(space.start)
            count = int(space.n)
            self.names = self.names or [str(self.first + i) for i in range(count)]
            if len(self.names) != count:
                raise ConfigError(f"`actions` names {len(self.names)} actions, expected {count}")
        elif self.names:
            raise ConfigError(f"`actions` are for a Discrete action space, got {space}")

    def rules(self) -> str:
        """How to reply."""
        if self.kind == "Discrete":
            what, example = f"Actions: {', '.join(self.names)}.", self.names[0]
        elif self._is_text():
            what, example = "", "your action"
        else:
            what, example = f"An action is JSON of the form {self.space}.", self.write(self.sample(0))
        return f"{what} {ReplyForm(think=False).ask(example)}".strip()

    def read(self, reply: str) -> Any:
        """The action.

        Raises:
            ValueError: the reply is none.
        """
        text = extract_answer(reply)
        if self.kind == "Discrete":
            known = {name.casefold(): i for i, name in enumerate(self.names)}
            known |= {str(self.first + i): i for i in range(len(self.names))}
            bare = text.strip(" \t\r\n.,;:!\"'`*[]").casefold()
            if bare in known:
                return self.first + known[bare]
        else:
            try:
                action = text if self._is_text() else self._structured(self.space, json.loads(text))
            except RecursionError:
                raise ValueError("no action: nested too deeply") from None
            if self.space.contains(action):
                return action
        raise ValueError(f"no action: {text[:80]!r}")

    def write(self, action: Any) -> str:
        """The opposite of `read`, without the tags."""
        if self.kind == "Discrete":
            return self.names[int(action) - self.first]
        return action if isinstance(action, str) else json.dumps(plain(action))

    def sample(self, seed: int) -> Any:
        space = copy.deepcopy(self.space)
        space.seed(seed % (1 << 31))
        return space.sample()

    def _is_text(self) -> bool:
        return self.kind not in ("MultiDiscrete", "MultiBinary", "Tuple", "Dict")

    def _structured(self, space: Any, value: Any) -> Any:
        """JSON in the types that a space expects; as it is where it does not fit."""
        kind = type(space).__name__
        if kind == "Dict" and isinstance(value, dict) and set(value) == set(space.keys()):
            return {key: self._structured(part, value[key]) for key, part in space.items()}
        if kind == "Tuple" and isinstance(value, list) and len(value) == len(space):
            return tuple(self._structured(part, each) for part, each in zip(space, value, strict=True))
        if kind in ("MultiDiscrete", "MultiBinary") and isinstance(value, list):
            import numpy

            try:
                return numpy.array(value, dtype=space.dtype)
            except (ValueError, TypeError, OverflowError):
                return value
        return value
