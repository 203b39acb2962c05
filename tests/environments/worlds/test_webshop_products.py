"""Rows as in WebShop's files: what is read, what is left out, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from silva.data.rows import Row
from silva.environments.worlds.webshop_products import (
    Product,
    human_goals,
    instruction_goals,
    read_instructions,
    read_products,
)
from silva.errors import ConfigError


def row(**changes: Any) -> Row:
    values = {
        "asin": "B09QKP7XQL", "name": "Wireless Headphones, 40 h ", "query": "Headphones ",
        "category": "electronics", "product_category": "Electronics › Headphones › Over-Ear",
        "pricing": "$1,011.99$1,299.00",
        "customization_options": {
            "Color": [{"is_selected": False, "value": "Black/Red", "image": None}, {"value": " blue "}],
            "Model": None,
        },
        "small_description": ["soft", "light"], "full_description": "They sound good.", "images": [],
    }  # fmt: skip
    return Row("items.json: row 1", {**values, **changes})


ABOUT = {
    "B09QKP7XQL": {
        "attributes": ["wireless bluetooth", "long lasting"],
        "instruction": "find me wireless bluetooth headphones.",
        "instruction_attributes": ["wireless bluetooth"],
    }
}


def test_a_row_of_webshop_is_understood() -> None:
    assert read_products([row()], ABOUT) == [
        Product(
            asin="B09QKP7XQL",
            title="Wireless Headphones, 40 h",
            query="headphones",
            category=("Electronics", "Headphones", "Over-Ear"),
            price=1299.0,
            options={"color": ("black | red", "blue")},
            attributes=("wireless bluetooth", "long lasting"),
            features=("soft", "light"),
            description="They sound good.",
        )
    ]


def test_what_rows_may_lack_and_broken_asins() -> None:
    bare = row(pricing=None, customization_options="", small_description="one", full_description=None)
    (product,) = read_products([bare], {})
    assert (product.price, product.options, product.attributes) == (100.0, {}, ())
    assert (product.features, product.description) == (("one",), "")
    rows = [row(), row(name="again"), row(asin="nan"), row(asin="B0123456789")]
    assert [product.title for product in read_products(rows, {})] == ["Wireless Headphones, 40 h"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": None}, "items.json: row 1: name: got NoneType, expected text"),
        ({"query": 7}, "items.json: row 1: query: got int, expected text"),
        ({"customization_options": {"color": ["red"]}}, "items.json: row 1: customization_options: expected"),
        ({"customization_options": ["red"]}, "items.json: row 1: customization_options: expected"),
    ],
)
def test_a_wrong_row_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_products([row(**changes)], {})
    assert str(error.value).startswith(said)


def test_goals_with_every_choice_of_options() -> None:
    products = read_products([row()], ABOUT)
    goals = list(instruction_goals(products, ABOUT, 9))
    assert {tuple(goal.options[0]) for goal in goals} == {("color", "black | red"), ("color", "blue")}
    assert len(list(instruction_goals(products, ABOUT, 1))) == 1
    for goal in goals:
        value, limit = goal.options[0][1], goal.price_limit
        assert limit in (1300.0, 1310.0, 1320.0, 1330.0)  # the price is 1299
        assert goal.instruction == (
            f"find me wireless bluetooth headphones with color: {value}, for at most {limit:.2f} dollars"
        )
        assert list(goal.attributes) == ["wireless bluetooth"]
    assert goals == list(instruction_goals(products, ABOUT, 9))


def test_goals_that_people_wrote() -> None:
    asked = {
        "B09QKP7XQL": [
            {"instruction": "i want blue ones.", "instruction_attributes": ["long lasting"],
             "instruction_options": ["Blue"]},
            {"instruction": "any will do", "instruction_attributes": ["long lasting"],
             "instruction_options": {"Color": "black/red"}},
            {"instruction": "asks for nothing", "instruction_attributes": [], "instruction_options": []},
        ]
    }  # fmt: skip
    first, second = human_goals(read_products([row()], ABOUT), asked)
    assert first.instruction.startswith("i want blue ones, for at most 13")
    assert (first.options, second.options) == ([["", "blue"]], [["color", "black | red"]])


def test_millions_of_choices_are_not_written_out() -> None:
    many = {name: [{"value": f"{name}{i}"} for i in range(50)] for name in "abcdefgh"}  # 50^8
    products = read_products([row(customization_options=many)], ABOUT)
    goals = list(instruction_goals(products, ABOUT, 5))
    assert len({json.dumps(goal.options) for goal in goals}) == 5
    assert all([name for name, _ in goal.options] == list("abcdefgh") for goal in goals)


def test_an_instruction_file_must_be_an_object(tmp_path: Path) -> None:
    for name, text, said in [("list.json", "[]", "got list"), ("bad.json", "{", "cannot be read as JSON")]:
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_instructions(str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"missing\.json: cannot be read"):
        read_instructions(str(tmp_path / "missing.json"))
