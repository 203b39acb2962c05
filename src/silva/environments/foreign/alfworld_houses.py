"""Made-up houses for ALFWorld: a room with places and things, and one of six kinds of tasks, as plain data.

    {"room": "kitchen", "places": ["Fridge", "Cabinet", ...], "things": [["Apple", 1], ...],
     "task": "pick_heat_then_place_in_recep", "thing": "Apple", "place": "Fridge"}

A thing stands with the number of its place. `problem` writes a house for the planner that runs ALFWorld.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

TaskKind = Literal[
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
]
KINDS: tuple[TaskKind, ...] = get_args(TaskKind)

OPENABLE = {"Fridge", "Microwave", "Cabinet", "Drawer", "Safe"}
LAMP = "DeskLamp"
_TABLES = ("CounterTop", "DiningTable")
_DESKS = ("Desk", "Dresser", "SideTable", "Drawer", "Shelf")
_BATH = ("CounterTop", "Cabinet", "Drawer", "Toilet")


class Need(NamedTuple):
    """What must be done with a thing first: the verb, where, the predicates before and after, the result."""

    verb: str
    place: str
    able: str
    state: str
    adjective: str


NEEDS = {
    "pick_clean_then_place_in_recep": Need("clean", "SinkBasin", "cleanable", "isClean", "clean"),
    "pick_heat_then_place_in_recep": Need("heat", "Microwave", "heatable", "isHot", "hot"),
    "pick_cool_then_place_in_recep": Need("cool", "Fridge", "coolable", "isCool", "cool"),
}


class RoomKind(NamedTuple):
    """`places`: type -> fewest and most of them. `things`: type -> where it may lie."""

    places: Mapping[str, tuple[int, int]]
    things: Mapping[str, Sequence[str]]


ROOMS = {
    "kitchen": RoomKind(
        {
            "Cabinet": (2, 6),
            "CoffeeMachine": (1, 1),
            "CounterTop": (1, 3),
            "DiningTable": (0, 1),
            "Drawer": (1, 5),
            "Fridge": (1, 1),
            "GarbageCan": (1, 1),
            "Microwave": (1, 1),
            "Shelf": (0, 3),
            "SinkBasin": (1, 1),
            "StoveBurner": (2, 4),
        },
        {
            **dict.fromkeys(
                ("Apple", "Egg", "Potato", "Tomato"),
                (*_TABLES, "Fridge", "GarbageCan", "Microwave", "SinkBasin"),
            ),
            **dict.fromkeys(("Bread", "Lettuce"), (*_TABLES, "Fridge")),
            **dict.fromkeys(("Cup", "Plate"), (*_TABLES, "Cabinet", "Microwave", "Shelf", "SinkBasin")),
            "Mug": (*_TABLES, "Cabinet", "CoffeeMachine", "Microwave", "Shelf", "SinkBasin"),
            "Bowl": (*_TABLES, "Cabinet", "Fridge", "Shelf", "SinkBasin"),
            **dict.fromkeys(("Pan", "Pot"), (*_TABLES, "Cabinet", "SinkBasin", "StoveBurner")),
            **dict.fromkeys(("Fork", "Knife", "Spatula", "Spoon"), (*_TABLES, "Drawer", "SinkBasin")),
            **dict.fromkeys(("PepperShaker", "SaltShaker"), (*_TABLES, "Cabinet", "Drawer", "Shelf")),
            "SoapBottle": (*_TABLES, "Cabinet", "GarbageCan"),
        },
    ),
    "bedroom": RoomKind(
        {
            "Bed": (1, 1),
            "Desk": (1, 2),
            "Drawer": (2, 6),
            "Dresser": (0, 1),
            "GarbageCan": (1, 1),
            "Safe": (0, 1),
            "Shelf": (0, 5),
            "SideTable": (1, 2),
        },
        {
            **dict.fromkeys(("Book", "CellPhone"), (*_DESKS, "Bed")),
            **dict.fromkeys(("CD", "Pen", "Pencil"), (*_DESKS, "GarbageCan")),
            **dict.fromkeys(("CreditCard", "KeyChain", "Watch"), (*_DESKS, "Safe")),
            **dict.fromkeys(("Laptop", "Pillow"), ("Bed", "Desk")),
            **dict.fromkeys(("AlarmClock", "Mug"), ("Desk", "Dresser", "Shelf", "SideTable")),
        },
    ),
    "bathroom": RoomKind(
        {
            "Cabinet": (2, 5),
            "CounterTop": (1, 2),
            "Drawer": (1, 4),
            "GarbageCan": (1, 1),
            "Shelf": (0, 4),
            "SinkBasin": (1, 2),
            "Toilet": (1, 1),
        },
        {
            **dict.fromkeys(("Cloth", "SoapBar"), (*_BATH, "SinkBasin")),
            **dict.fromkeys(("SoapBottle", "SprayBottle", "ToiletPaper"), (*_BATH, "GarbageCan", "Shelf")),
            **dict.fromkeys(("Candle", "Perfume"), (*_BATH, "Shelf")),
        },
    ),
}
_FOOD = {"Apple", "Bread", "Egg", "Potato", "Tomato"}
_DISHES = {"Cup", "Mug", "Plate"}
ABLE = {  # what can be done with which things, by the predicate of ALFWorld
    "heatable": _FOOD | _DISHES,
    "coolable": _FOOD | _DISHES | {"Bowl", "Lettuce", "Pan", "Pot"},
    "cleanable": (_FOOD - {"Bread"})
    | _DISHES
    | {"Bowl", "Cloth", "Fork", "Knife", "Lettuce", "Pan", "Pot", "SoapBar", "Spatula", "Spoon"},
    "sliceable": _FOOD | {"Lettuce"},
}
_CONSTANTS = {
    "rtype": {"SinkBasin", "Microwave", "Fridge"},
    "otype": {"Knife", "ButterKnife"},
}  # of the domain


def draw(rng: random.Random, kinds: Sequence[TaskKind] = KINDS) -> dict[str, Any]:
    """A house whose task can be done, and is not done yet."""
    while True:
        kind = rng.choice(kinds)
        name = "bedroom" if kind == "look_at_obj_in_light" else rng.choice([*ROOMS])
        room = ROOMS[name]
        places = [place for place, ends in room.places.items() for _ in range(rng.randint(*ends))]
        need = NEEDS.get(kind)
        able = [thing for thing in room.things if need is None or thing in ABLE[need.able]]
        if able and (need is None or need.place in places):
            return _furnished(rng, kind, name, places, rng.choice(able))


def layout(house: Mapping[str, Any]) -> list[Any]:
    """What makes one room differ from another: its places."""
    return [house["room"], *house["places"]]


def goal(house: Mapping[str, Any]) -> str:
    """The task in words."""
    thing, place = house["thing"].lower(), house["place"].lower()
    if house["task"] == "look_at_obj_in_light":
        return f"look at the {thing} under the {LAMP.lower()}"
    if house["task"] == "pick_two_obj_and_place":
        return f"put two {thing}s in/on the {place}"
    need = NEEDS.get(house["task"])
    return f"put {f'a {need.adjective}' if need else 'some'} {thing} in/on the {place}"


def problem(house: Mapping[str, Any]) -> str:
    """The house as a problem in PDDL, for the domain of ALFWorld."""
    places, things = place_ids(house), thing_ids(house)
    place_kinds = sorted({*house["places"], *_CONSTANTS["rtype"]})
    thing_kinds = sorted({*(kind for kind, _ in house["things"]), *_CONSTANTS["otype"]})
    objects = [
        "agent1 - agent",
        *(f"loc{i} - location" for i in range(len(places) + 1)),
        *(f"{place} - receptacle" for place in places),
        *(f"{thing} - object" for thing in things),
        *(f"{kind}Type - rtype" for kind in place_kinds),
        *(f"{kind}Type - otype" for kind in thing_kinds),
    ]
    facts = ["= (total-cost) 0", f"atLocation agent1 loc{len(places)}"]
    for i, (place, kind) in enumerate(zip(places, house["places"], strict=True)):
        facts += [f"receptacleAtLocation {place} loc{i}", f"receptacleType {place} {kind}Type"]
        facts += [f"openable {place}"] if kind in OPENABLE else []
    for thing, (kind, where) in zip(things, house["things"], strict=True):
        facts += [f"objectType {thing} {kind}Type", f"inReceptacle {thing} {places[where]}"]
        facts += [f"objectAtLocation {thing} loc{where}"]
        facts += [f"toggleable {thing}"] if kind == LAMP else [f"pickupable {thing}"]
        facts += [f"{able} {thing}" for able, kinds in ABLE.items() if kind in kinds]
    fits = ROOMS[house["room"]].things
    for kind in sorted({kind for kind, _ in house["things"]} & fits.keys()):
        facts += [f"canContain {place}Type {kind}Type" for place in fits[kind] if place in house["places"]]
    return (
        "(define (problem house) (:domain alfred)\n"
        f"(:objects\n{_lines(objects, '{}')})\n(:init\n{_lines(facts, '({})')})\n"
        f"(:goal {_goal(house)})\n(:metric minimize (total-cost)))\n"
    )


def place_ids(house: Mapping[str, Any]) -> list[str]:
    """ALFWorld shows what stands before the first bar, and adds "basin" if that is in the id."""
    ids = {"SinkBasin": "Sink_bar_{}_bar_SinkBasin"}
    return [ids.get(kind, f"{kind}_bar_{{}}").format(i) for i, kind in enumerate(house["places"])]


def thing_ids(house: Mapping[str, Any]) -> list[str]:
    return [f"{kind}_bar_{i}" for i, (kind, _) in enumerate(house["things"])]


def _furnished(rng: random.Random, kind: str, name: str, places: list[str], thing: str) -> dict[str, Any]:
    def which(kinds: Sequence[str]) -> list[int]:
        return [i for i, place in enumerate(places) if place in kinds]

    fits = {other: which(kinds) for other, kinds in ROOMS[name].things.items()}
    # The thing must go to another type of place; at least two types in each room take it.
    target = rng.choice(sorted({places[i] for i in fits[thing]}))
    elsewhere = [i for i in fits[thing] if places[i] != target]
    things = [[thing, rng.choice(elsewhere)] for _ in range(1 + (kind == "pick_two_obj_and_place"))]
    others = [other for other in fits if other != thing]
    for _ in range(rng.randint(6, 12)):
        other = rng.choice(others)
        things.append([other, rng.choice(fits[other])])
    if kind == "look_at_obj_in_light":
        things.append([LAMP, rng.choice(which(["Desk", "SideTable"]))])
        target = ""
    things.sort(key=lambda each: (each[1], each[0]))
    return {"room": name, "places": places, "things": things, "task": kind, "thing": thing, "place": target}


def _goal(house: Mapping[str, Any]) -> str:
    thing, place = f"{house['thing']}Type", f"{house['place']}Type"
    if house["task"] == "look_at_obj_in_light":
        lamp = f"(objectType ?t {LAMP}Type) (isToggled ?t) (inReceptacle ?t ?r)"
        return (
            "(and (exists (?t - object ?r - receptacle ?a - agent ?l - location) (and "
            f"{lamp} (receptacleAtLocation ?r ?l) (atLocation ?a ?l))) "
            f"(exists (?o - object ?a - agent) (and (objectType ?o {thing}) (holds ?a ?o))))"
        )
    there = f"(objectType ?o {thing}) (inReceptacle ?o ?r)"
    if house["task"] == "pick_two_obj_and_place":
        return (
            f"(exists (?r - receptacle ?o - object ?p - object) (and (receptacleType ?r {place}) {there} "
            f"(objectType ?p {thing}) (inReceptacle ?p ?r) (not (= ?o ?p))))"
        )
    need = NEEDS.get(house["task"])
    done = f" ({need.state} ?o)" if need else ""
    return f"(exists (?r - receptacle ?o - object) (and (receptacleType ?r {place}) {there}{done}))"


def _lines(parts: Sequence[str], form: str) -> str:
    return "\n".join(form.format(part) for part in parts)
