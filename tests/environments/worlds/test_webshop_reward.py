"""The reward of WebShop: values worked by hand, and that only a perfect match earns 1."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silva.environments.worlds.webshop_products import Goal, Product
from silva.environments.worlds.webshop_reward import Match, has_attribute, has_option, match, type_match
from silva.environments.worlds.webshop_store import made_up

MUG = Product(
    asin="B1",
    title="Tarvo Hand Painted Coffee Mug",
    query="coffee mug",
    category=("Home & Kitchen", "Drinkware", "Mugs"),
    price=19.99,
    options={"color": ("navy blue", "red"), "size": ("8 ounces", "12 ounces")},
    attributes=("hand painted", "lead free"),
    features=("Dishwasher-safe glaze.",),
    description="A handled mug.",
)
GOAL = Goal(
    "B1", "Find it", ["lead free", "dishwasher safe"], [["color", "navy blue"], ["size", "12 ounces"]], 20.0
)
RIGHT = {"color": "navy blue", "size": "12 ounces"}
STORE = made_up(60, 0, 2)


@pytest.mark.parametrize(
    ("chosen", "changes", "expected"),
    [
        (RIGHT, {}, Match(1.0, 1.0, 1.0, 1.0, 1.0)),
        ({}, {}, 3 / 5),
        ({"color": "navy blue"}, {}, 4 / 5),
        ({"color": "red", "size": "12 ounces"}, {}, 4 / 5),
        ({"color": "red", "size": "8 ounces"}, {}, 3 / 5),
        (RIGHT, {"price": 20.01}, 4 / 5),
        (RIGHT, {"price": 20.0}, 1.0),
        (RIGHT, {"features": ()}, 4 / 5),
        (RIGHT, {"attributes": (), "features": ()}, 3 / 5),
    ],
)
def test_every_part_counts_the_same(chosen: dict[str, str], changes: dict[str, Any], expected: Any) -> None:
    got = match(dataclasses.replace(MUG, **changes), chosen, GOAL, MUG)
    assert got == expected if isinstance(expected, Match) else got.score == pytest.approx(expected)
    assert got.perfect == (got.score == 1.0)


LONG = dataclasses.replace(MUG, title="Mug " + " ".join(f"word{letter}" for letter in "abcdefghi"))
LONGER = dataclasses.replace(LONG, title=f"{LONG.title} wordk wordl")


@pytest.mark.parametrize(
    ("wanted", "title", "query", "category", "expected"),
    [
        (MUG, "Belmo Lead Free Coffee Mug", "x", (), 1.0),  # two of the words tarvo, coffee and mug
        (MUG, "Hand Painted Lead Free Towel", "x", (), 0.0),  # shares but what it is like
        (MUG, "Hand Painted Towel", "coffee mug", MUG.category, 0.0),
        (LONG, "Mug", "x", (), 0.5),  # a tenth
        (LONG, "Mug", "coffee mug", (), 1.0),
        (LONG, "Mug", "x", MUG.category[:2], 1.0),
        (LONG, "Mug", "x", MUG.category[:1], 0.5),
        (LONG, "Mug worda wordb", "x", (), 1.0),  # three tenths
        (LONGER, "Mug", "coffee mug", MUG.category, 0.1),
    ],
)
def test_what_makes_a_product_another_kind(wanted, title: str, query: str, category, expected: float) -> None:
    other = dataclasses.replace(MUG, asin="B2", title=title, query=query, category=category)
    assert type_match(other, GOAL, wanted) == expected


def test_words_of_the_query_say_what_a_product_is() -> None:
    """Attributes of WebShop's products may name the kind too."""
    pants = dataclasses.replace(
        MUG, title="Zel Yoga Pants", query="yoga pants", attributes=("yoga pants",), category=("Clothing",)
    )
    other = dataclasses.replace(pants, asin="B2", title="Orl Yoga Pants with Pockets")
    painted = dataclasses.replace(pants, asin="B3", title="Yoga Pants Poster", query="poster")
    assert type_match(other, GOAL, pants) == 1.0
    assert type_match(painted, GOAL, pants) == 0.0


def test_more_choices_than_were_wanted_earn_nothing_more() -> None:
    """With WebShop's counter, three chosen values that occur in the title made up for missing attributes."""
    tricky = dataclasses.replace(
        MUG, title="red 12 ounces navy blue coffee mug", attributes=(), features=(), description=""
    )
    goal = GOAL._replace(options=[["color", "navy blue"]])
    assert match(tricky, {**RIGHT, "style": "red"}, goal, MUG).score == pytest.approx(2 / 4)


def test_attributes_are_found_as_whole_words() -> None:
    said = ["lead free", "free", "dishwasher safe", "safe dishwasher", "led", "hand", "!"]
    assert [text for text in said if has_attribute(MUG, text)] == [
        "lead free",
        "free",
        "dishwasher safe",
        "hand",
    ]


@pytest.mark.parametrize(
    ("chosen", "name", "value", "found"),
    [
        ({"color": "red"}, "", "red", True),
        ({"color": "red"}, "size", "red", False),
        ({"color": "red"}, "colour", "red", True),  # the product calls it differently
        ({"color": "navy blue"}, "color", "blue", True),  # "blue" alone is not offered
        ({"size": "12 ounces"}, "size", "ounces", False),  # no other size
        ({"size": "12 ounces"}, "", "ounces", False),
        ({}, "color", "red", False),
    ],
)
def test_which_option_counts(chosen: dict[str, str], name: str, value: str, found: bool) -> None:
    assert has_option(MUG, chosen, name, value) is found
    # A value that is offered must be chosen.
    two = dataclasses.replace(MUG, options={"color": ("blue", "navy blue")})
    assert not has_option(two, {"color": "navy blue"}, "color", "blue")


@given(st.data())
def test_nothing_but_a_perfect_match_earns_one(data: st.DataObject) -> None:
    """Any product with any choice of options: 1 needs every part, anything else stays a part below."""
    goal = data.draw(st.sampled_from(STORE.goals))
    wanted = STORE.wanted(goal)
    alike = [product for product in STORE.products if product.query == wanted.query]
    product = data.draw(st.sampled_from([wanted, *alike, STORE.products[0]]))
    chosen = {
        name: data.draw(st.sampled_from(values))
        for name, values in product.options.items()
        if data.draw(st.booleans())
    }
    got = match(product, chosen, goal, wanted)
    parts = len(goal.attributes) + len(goal.options) + 1
    right = (
        product.query == wanted.query
        and set(goal.attributes) <= set(product.attributes)
        and all(chosen.get(name) == value for name, value in goal.options)
        and product.price <= goal.price_limit
    )
    assert got.perfect == right
    assert got.score == 1.0 if right else 0.0 <= got.score <= 1 - 1 / parts


def test_no_product_of_another_kind_is_a_perfect_match_for_any_goal() -> None:
    """Whatever its options are: nothing makes up for the kind."""
    for goal in STORE.goals:
        wanted = STORE.wanted(goal)
        for product in STORE.products:
            if product.query != wanted.query:
                assert type_match(product, goal, wanted) == 0.0
