"""Silva's configuration while it is made of another framework's."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

ORDER = (
    "name", "seed", "output_dir", "steps", "model", "data", "environments", "rollout", "algorithm", "engine",
    "trainer", "eval", "checkpoint", "monitoring", "placement",
)  # fmt: skip
"""Of the sections that are written."""


class Computed(str):
    """An expression in Python, which is not computed."""


@dataclass(frozen=True)
class Found:
    """A value in another framework's file; `place` is FILE:LINE."""

    value: Any
    place: str


@dataclass(frozen=True)
class Note:
    """A remark on a key, or (`key` = "") on the whole.

    `dropped`: it was not carried over, since it has no equal or needs none; otherwise somebody has to decide.
    """

    place: str
    key: str
    value: Any
    text: str
    dropped: bool = False


@dataclass
class Carried:
    """`given`: by dotted key, lists of tables by number. `values`: Silva's, by dotted key."""

    given: Mapping[str, Found]
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    environments: list[dict[str, Any]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    _used: set[str] = field(default_factory=set)

    def take(self, key: str, usual: Any = None) -> Any:
        """The value of a key, which counts as carried over; `usual` if it is missing or null."""
        found = self.given.get(key)
        self._used.add(key)
        return usual if found is None or found.value is None else found.value

    def used(self, key: str) -> bool:
        """Whether something was said or made of it."""
        return key in self._used

    def first(self, *keys: str) -> str:
        """The first of these keys that has a value; "" if none has."""
        return next((key for key in keys if key in self.given and self.given[key].value is not None), "")

    def below(self, prefix: str) -> list[str]:
        return [key for key in self.given if key.startswith(f"{prefix}.")]

    def set(self, ours: str, value: Any, *theirs: str) -> None:
        """Set Silva's key; `theirs`: what it comes from."""
        self.values[ours] = value
        places = [f"{key} ({self.given[key].place})" for key in theirs if key in self.given]
        if places:
            self.origins[ours] = ", ".join(places)

    def move(
        self, ours: str, *theirs: str, usual: Any = None, change: Callable[[Any], Any] | None = None
    ) -> Any:
        """Carry the first of their keys over as it is, or changed; `usual` is their default. What was set."""
        key = self.first(*theirs)
        value = self.take(key) if key else usual
        if isinstance(value, Computed):
            self.note(key, f"computed by code: set {ours}")
            value = usual
        if value is None:
            return None
        self.set(ours, change(value) if change else value, *([key] if key else []))
        return self.values[ours]

    def lengths(self, prompt: str, reply: str, usual: tuple[int | None, int | None] = (None, None)) -> None:
        """Carry over the most tokens of a prompt and of a reply, which are under these two keys; `usual` are
        their defaults."""
        most, ours = number(self.take(prompt, usual[0])), number(self.take(reply, usual[1]))
        if isinstance(ours, int):
            self.set("rollout.limits.max_turn_tokens", ours, reply)
            if isinstance(most, int):
                self.set("rollout.limits.max_episode_tokens", most + ours, prompt, reply)

    def note(self, key: str, text: str) -> None:
        """Say something about a key that the file has, or about the whole (`key` = "")."""
        found = self.given.get(key, Found(None, ""))
        self._used.add(key)
        self.notes.append(Note(found.place, key, found.value, text))

    def rest(self, reasons: Mapping[str, str]) -> None:
        """Every key that nothing has used becomes a note; `reasons`: by pattern, the first that fits."""
        for key, found in self.given.items():
            if key in self._used or found.value is None or found.value in ({}, []):
                continue
            text = next(
                (why for pattern, why in reasons.items() if fnmatch.fnmatch(key, pattern)), "no equal"
            )
            if text:
                self.notes.append(Note(found.place, key, found.value, text, dropped=True))

    def table(self) -> dict[str, Any]:
        """The configuration as nested tables, in Silva's order of keys where it matters to readers."""
        whole: dict[str, Any] = {}
        for key, value in self.values.items():
            *above, last = key.split(".")
            table = whole
            for part in above:
                table = table.setdefault(part, {})
            table[last] = value
        if self.environments:
            whole["environments"] = self.environments
        return {key: whole[key] for key in ORDER if key in whole}


def number(value: Any) -> Any:
    """YAML 1.1 reads 1e-6 as a text."""
    if isinstance(value, str):
        try:
            return float(value) if any(c in value for c in ".eE") else int(value)
        except ValueError:
            return value
    return value


def share(whole: Any, part: Any) -> int | None:
    """How many parts a whole has, at least 1; None where that is not known."""
    whole, part = number(whole), number(part)
    if isinstance(whole, int) and isinstance(part, int) and whole > 0 and part > 0:
        return max(1, round(whole / part))
    return None


def real(value: Any) -> Any:
    value = number(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def whole(value: Any) -> Any:
    value = number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def texts(value: Any) -> list[str]:
    """A list of texts, or one text; whatever else stands there names nothing."""
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]


def steps(value: Any) -> Any:
    """-1 means never."""
    value = number(value)
    return max(0, value) if isinstance(value, int) else value
