"""Made-up houses and their plans; test_alfworld.py plays them in the engine of ALFWorld."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.environments.foreign.alfworld_houses import KINDS, NEEDS, ROOMS, draw, goal, layout, problem
from silva.environments.foreign.alfworld_plans import LONGEST_PLAN, HouseState, plan_for, shown

HOUSE = {
    "room": "kitchen",
    "places": ["Cabinet", "Cabinet", "CounterTop", "Fridge", "Microwave", "SinkBasin"],
    "things": [["Apple", 2], ["Apple", 3], ["Mug", 0]],
    "task": "pick_heat_then_place_in_recep",
    "thing": "Apple",
    "place": "Fridge",
}


def finished(state: HouseState) -> bool:
    """The task, said in another way than in the planner."""
    house = state.house
    there = [
        n
        for n, p in state.where.items()
        if (state.kinds[n], state.kinds[p]) == (house["thing"], house["place"])
    ]
    match house["task"]:
        case "look_at_obj_in_light":
            lamps = [name for verb, name in state.changed if verb == "use"]
            return state.kinds.get(state.held) == house["thing"] and any(
                state.where[n] == state.here for n in lamps
            )
        case "pick_two_obj_and_place":
            return len(there) > len({state.where[n] for n in there})
        case "pick_and_place_simple":
            return bool(there)
        case kind:
            return any((NEEDS[kind].verb, n) in state.changed for n in there)


@given(st.integers(0, 10**9), st.sampled_from(KINDS))
def test_every_task_can_be_done_and_is_not_done_yet(seed, kind) -> None:
    house = draw(random.Random(seed), [kind])
    assert house["task"] == kind and len(house["places"]) > max(place for _, place in house["things"])
    state = HouseState(house)
    assert not finished(state)
    plan = state.plan()
    assert state.done == [] and len(plan) <= LONGEST_PLAN
    for command in plan:
        assert not finished(state)
        state.apply(command)
    assert finished(state)


@given(st.integers(0, 10**9), st.integers(0, 30))
def test_a_plan_begins_wherever_some_commands_have_led(seed, length) -> None:
    rng = random.Random(seed)
    house = draw(rng)
    state, said = HouseState(house), ["look"]
    state.apply("look")
    names, verbs = (
        [*state.kinds],
        ["go to", "go to", "open", "take", "move", "heat", "clean", "cool", "use", "close"],
    )
    for _ in range(length):
        verb, name, other = rng.choice(verbs), rng.choice(names), rng.choice(names)
        name = state.here if verb in ("open", "close") and state.here else name
        if verb == "take" and (near := [n for n, place in state.where.items() if place == state.here]):
            name, other = rng.choice(near), state.here
        joined = {"take": f" from {other}", "move": f" to {other}"}.get(verb, "")
        joined = f" with {other}" if verb in ("heat", "clean", "cool") else joined
        said.append(f"{verb} {name}{joined}")
        state.apply(said[-1])
        if finished(state):
            return
    for command in plan_for(house, said):
        state.apply(command)
    assert finished(state)


def test_a_plan_worked_by_hand() -> None:
    assert plan_for(HOUSE, []) == [
        "go to countertop 1",
        "take apple 2 from countertop 1",
        "go to microwave 1",
        "heat apple 2 with microwave 1",
        "go to fridge 1",
        "open fridge 1",
        "move apple 2 to fridge 1",
    ]
    said = ["go to fridge 1", "take apple 1 from fridge 1", "open fridge 1", "take apple 1 from fridge 1"]
    assert plan_for(HOUSE, said) == [
        "go to microwave 1",
        "heat apple 1 with microwave 1",
        "go to fridge 1",
        "move apple 1 to fridge 1",
    ]
    cooled = [*plan_for(HOUSE, [])[:4], "go to fridge 1", "cool apple 2 with fridge 1"]
    assert plan_for(HOUSE, cooled)[:2] == ["go to microwave 1", "heat apple 2 with microwave 1"]


def test_a_hand_that_is_full_is_emptied_first() -> None:
    said = ["go to cabinet 2", "open cabinet 2", "take mug 1 from cabinet 2", "go to sinkbasin 1"]
    assert plan_for(HOUSE, said)[:4] == [
        "go to cabinet 2",
        "move mug 1 to cabinet 2",
        "go to countertop 1",
        "take apple 2 from countertop 1",
    ]


def test_names_are_those_that_alfworld_shows() -> None:
    """It sorts ids as text, and counts down."""
    assert shown(["Cabinet_bar_0", "Cabinet_bar_1", "Mug_bar_0"]) == ["cabinet 2", "cabinet 1", "mug 1"]
    assert shown([f"Drawer_bar_{i}" for i in (8, 9, 10)]) == ["drawer 2", "drawer 1", "drawer 3"]
    assert shown(["Sink_bar_4_bar_SinkBasin"]) == ["sinkbasin 1"]


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("pick_and_place_simple", "put some apple in/on the fridge"),
        ("look_at_obj_in_light", "look at the apple under the desklamp"),
        ("pick_clean_then_place_in_recep", "put a clean apple in/on the fridge"),
        ("pick_heat_then_place_in_recep", "put a hot apple in/on the fridge"),
        ("pick_cool_then_place_in_recep", "put a cool apple in/on the fridge"),
        ("pick_two_obj_and_place", "put two apples in/on the fridge"),
    ],
)
def test_a_task_in_words(task, words) -> None:
    assert goal({**HOUSE, "task": task}) == words


def test_a_house_as_a_problem() -> None:
    text = problem(HOUSE)
    assert text.count("(") == text.count(")")
    objects = dict(re.findall(r"^(\w+) - (\w+)", text.partition("(:init")[0], re.MULTILINE))
    assert objects["Sink_bar_5_bar_SinkBasin"] == "receptacle" and objects["Mug_bar_2"] == "object"
    assert {"KnifeType", "ButterKnifeType", "MicrowaveType"} <= objects.keys()  # the domain names them
    facts = set(re.findall(r"^\((.*)\)$", text, re.MULTILINE))
    assert {
        "inReceptacle Apple_bar_1 Fridge_bar_3",
        "objectAtLocation Apple_bar_1 loc3",
        "heatable Apple_bar_1",
    } <= facts
    assert "canContain CabinetType AppleType" not in facts and "canContain FridgeType AppleType" in facts
    assert {word for fact in facts for word in fact.split()[1:] if "_bar_" in word} <= objects.keys()


def test_a_draw_depends_on_its_numbers_only() -> None:
    houses = [draw(random.Random(seed)) for seed in range(30)]
    assert houses == [draw(random.Random(seed)) for seed in range(30)]
    assert {house["room"] for house in houses} == {*ROOMS}
    assert len({str(layout(house)) for house in houses}) > 25
