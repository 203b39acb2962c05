"""The made-up catalogue: the same each time, and varied."""

from __future__ import annotations

from collections import Counter

from silva.environments.worlds.webshop_catalogue import BRANDS, KINDS, catalogue


def test_products_differ() -> None:
    rows, instructions = catalogue(300)
    assert catalogue(300) == (rows, instructions)
    assert {row.values["asin"] for row in catalogue(30, 1)[0]}.isdisjoint(instructions)
    assert len({row.values["asin"] for row in rows}) == len(instructions) == 300
    assert len({row.values["name"].split()[0] for row in rows}) == 300  # brands
    assert set(Counter(row.values["query"] for row in rows).values()) == {300 // len(KINDS)}


def test_an_instruction_asks_for_attributes_of_its_product_and_names_its_kind() -> None:
    rows, instructions = catalogue(100, 3)
    for row in rows:
        about = instructions[row.values["asin"]]
        assert len(about["attributes"]) == 3 and len(about["instruction_attributes"]) == 2
        assert set(about["instruction_attributes"]) <= set(about["attributes"])
        assert about["instruction"].endswith(row.values["query"])
        for attribute in about["instruction_attributes"]:
            assert attribute in about["instruction"]


def test_every_brand_has_a_name_of_its_own() -> None:
    rows, _ = catalogue(BRANDS)
    assert len({row.values["name"].split()[0] for row in rows}) == BRANDS
