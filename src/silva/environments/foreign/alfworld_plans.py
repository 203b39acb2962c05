"""How the task of a made-up house is done, from wherever some commands have led."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from silva.environments.foreign.alfworld_houses import (
    ABLE,
    LAMP,
    NEEDS,
    OPENABLE,
    ROOMS,
    place_ids,
    thing_ids,
)

LONGEST_PLAN = 12  # two things, for each: go, open, take, go, open, move
_COMMAND = re.compile(
    r"(go to|open|close|take|move|clean|heat|cool|use) (\w+ \d+)(?: (?:from|to|with) (\w+ \d+))?"
)


def plan_for(house: Mapping[str, Any], said: Sequence[str]) -> list[str]:
    """Commands that do the task after these. Of these, impossible ones have changed nothing."""
    state = HouseState(house)
    for command in said:
        state.apply(command)
    return state.plan()


class HouseState:
    """What has become of a house. Things and places have the names that ALFWorld shows, such as "mug 2".

    Attributes:
        where: the place of each thing that is not held.
        changed: (verb, thing) for things that are clean, hot or cool now, and for lamps that were used.
    """

    def __init__(self, house: Mapping[str, Any]) -> None:
        self.house = house
        self.places, things = shown(place_ids(house)), shown(thing_ids(house))
        self.kinds = dict(zip(self.places, house["places"], strict=True))
        self.where: dict[str, str] = {}
        for name, (kind, place) in zip(things, house["things"], strict=True):
            self.kinds[name], self.where[name] = kind, self.places[place]
        self.held = self.here = ""
        self.opened: set[str] = set()
        self.changed: set[tuple[str, str]] = set()
        self.done: list[str] = []

    def apply(self, command: str) -> None:
        found = _COMMAND.fullmatch(command)
        verb, name, place = found.groups() if found else ("", "", "")
        if verb == "go to" and name in self.places:
            self.here = name
        elif verb in ("open", "close") and name == self.here and self.kinds[name] in OPENABLE:
            (self.opened.add if verb == "open" else self.opened.discard)(name)
        elif verb == "take" and self._reaches(place) and self.where.get(name) == place and not self.held:
            if self.kinds[name] != LAMP:
                self.held = name
                del self.where[name]
        elif verb == "move" and self._reaches(place) and name == self.held and self._fits(name, place):
            self.where[name], self.held = place, ""
        elif verb == "use" and self.kinds.get(name) == LAMP and self.where[name] == self.here:
            self.changed.add((verb, name))
        elif (name, place) == (self.held, self.here) and any(
            verb == need.verb and self.kinds[place] == need.place and self.kinds[name] in ABLE[need.able]
            for need in NEEDS.values()
        ):
            self.changed.discard(({"heat": "cool", "cool": "heat"}.get(verb, ""), name))
            self.changed.add((verb, name))

    def plan(self) -> list[str]:
        """Commands that do the task from here."""
        twin = copy.deepcopy(self)
        twin.done = []
        if self.house["task"] == "look_at_obj_in_light":
            twin._look()
        else:
            twin._bring(2 if self.house["task"] == "pick_two_obj_and_place" else 1)
        return twin.done

    # What follows changes the state, and notes the commands that do so.

    def _do(self, command: str) -> None:
        self.done.append(command)
        self.apply(command)

    def _look(self) -> None:
        lamp = next(name for name, kind in self.kinds.items() if kind == LAMP)
        if self.kinds.get(self.held) != self.house["thing"]:
            self._take(next(name for name in self.where if self.kinds[name] == self.house["thing"]))
        self._go(self.where[lamp])
        if ("use", lamp) not in self.changed:
            self._do(f"use {lamp}")

    def _bring(self, count: int) -> None:
        need = NEEDS.get(self.house["task"])
        wanted = [name for name, kind in self.kinds.items() if kind == self.house["thing"]]
        goals = [place for place in self.places if self.kinds[place] == self.house["place"]]
        goal = max(goals, key=lambda place: sum(self.where.get(name) == place for name in wanted))

        def ready(name: str) -> bool:
            return self.where.get(name) == goal and (need is None or (need.verb, name) in self.changed)

        # What is in the hand comes first.
        for name in sorted(wanted, key=lambda name: name != self.held):
            if sum(map(ready, wanted)) >= count:
                return
            if ready(name):
                continue
            self._take(name)
            if need and (need.verb, name) not in self.changed:
                place = next(place for place in self.places if self.kinds[place] == need.place)
                self._go(place)
                self._do(f"{need.verb} {name} with {place}")
            self._put(name, goal)

    def _take(self, name: str) -> None:
        if self.held == name:
            return
        if self.held:
            self._put(self.held, next(place for place in self.places if self._fits(self.held, place)))
        place = self.where[name]
        self._go(place)
        self._open(place)
        self._do(f"take {name} from {place}")

    def _put(self, name: str, place: str) -> None:
        self._go(place)
        self._open(place)
        self._do(f"move {name} to {place}")

    def _go(self, place: str) -> None:
        if self.here != place:
            self._do(f"go to {place}")

    def _open(self, place: str) -> None:
        if self.kinds[place] in OPENABLE and place not in self.opened:
            self._do(f"open {place}")

    def _reaches(self, place: str) -> bool:
        return place == self.here and (self.kinds[place] not in OPENABLE or place in self.opened)

    def _fits(self, name: str, place: str) -> bool:
        return self.kinds[place] in ROOMS[self.house["room"]].things[self.kinds[name]]


def shown(ids: Sequence[str]) -> list[str]:
    """The names that ALFWorld shows for ids: it numbers those of a kind in the reverse order of their ids."""
    kinds = defaultdict(list)
    for each in sorted(each.lower() for each in ids):
        kinds[each.partition("_bar_")[0] + ("basin" if "basin" in each else "")].append(each)
    names = {each: f"{kind} {len(all_) - i}" for kind, all_ in kinds.items() for i, each in enumerate(all_)}
    return [names[each.lower()] for each in ids]
