"""Products and shopping goals in WebShop's file formats (arXiv:2207.01206).

items_shuffle.json     [{"asin", "name", "query", "product_category": "a › b › c", "pricing": "$9.99",
                         "customization_options": {"color": [{"value": "red"}]},
                         "small_description": [...], "full_description"}]
items_ins_v2.json      {asin: {"attributes": [...], "instruction", "instruction_attributes": [...]}}
items_human_ins.json   {asin: [{"instruction", "instruction_attributes", "instruction_options": [...]}]}
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from silva.data.rows import Row
from silva.errors import ConfigError

NO_PRICE = 100.0  # dollars of a product without a price, as in WebShop
LONGEST_ASIN = 10  # longer ones are mistakes of the published file
PRICE_STEP = 10  # limits are multiples of it
_PRICE = re.compile(r"\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Product:
    """`query` is what shoppers search for to find such a product; `price` is in dollars, the highest of a
    range."""

    asin: str
    title: str
    query: str
    category: tuple[str, ...]  # from general to special
    price: float
    options: Mapping[str, tuple[str, ...]]
    attributes: tuple[str, ...]
    features: tuple[str, ...]
    description: str

    @property
    def text(self) -> str:
        """All that is said of it, for the search."""
        values = [value for offered in self.options.values() for value in offered]
        parts = (self.title, self.query, *self.category, *self.features, self.description, *values)
        return "\n".join(parts)


class Goal(NamedTuple):
    """What is to be bought, as plain JSON. Options are [name, value]; the name is "" if it is not known."""

    asin: str  # one product that fits
    instruction: str
    attributes: Sequence[str]
    options: Sequence[Sequence[str]]
    price_limit: float


def read_products(rows: Iterable[Row], instructions: Mapping[str, Any]) -> list[Product]:
    """The products of a file.

    Args:
        rows: of items_shuffle.json. Rows without a usable asin, and repeated ones, are left out.
        instructions: items_ins_v2.json, for the attributes.

    Raises:
        ConfigError: a row lacks something; it names the row and the key.
    """
    products: dict[str, Product] = {}
    for row in rows:
        asin = _text(row, "asin")
        if asin not in products and asin != "nan" and len(asin) <= LONGEST_ASIN:
            about = instructions.get(asin)
            attributes = about.get("attributes") if isinstance(about, Mapping) else None
            products[asin] = _product(row, asin, tuple(map(str, attributes or ())))
    return list(products.values())


def instruction_goals(
    products: Iterable[Product], instructions: Mapping[str, Any], per_product: int
) -> Iterator[Goal]:
    """Goals from items_ins_v2.json: its instruction with values of all options, at most `per_product`."""
    for product in products:
        about = instructions.get(product.asin)
        if not isinstance(about, Mapping) or not about.get("instruction"):
            continue
        attributes = [str(attribute) for attribute in about.get("instruction_attributes") or ()]
        if attributes:
            for options in _combinations(product, per_product):
                chosen = " and ".join(f"{name}: {value}" for name, value in options)
                said = _said(about["instruction"]) + (f" with {chosen}" if chosen else "")
                yield _goal(product, said, attributes, options)


def human_goals(products: Iterable[Product], instructions: Mapping[str, Any]) -> Iterator[Goal]:
    """Goals from items_human_ins.json, whose instructions were written by people."""
    for product in products:
        for about in instructions.get(product.asin) or ():
            attributes = [str(attribute) for attribute in about.get("instruction_attributes") or ()]
            options = about.get("instruction_options") or ()
            pairs = options.items() if isinstance(options, Mapping) else [("", value) for value in options]
            if attributes and about.get("instruction"):
                wanted = [[str(name).lower(), _value(value)] for name, value in pairs]
                yield _goal(product, _said(about["instruction"]), attributes, wanted)


def read_instructions(path: str) -> Mapping[str, Any]:
    """An instruction file: an object whose keys are asins.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    try:
        found = json.loads(Path(path).expanduser().read_text("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: got {type(found).__name__}, expected an object whose keys are asins")
    return found


def _product(row: Row, asin: str, attributes: tuple[str, ...]) -> Product:
    features = row.values.get("small_description") or ()
    prices = [float(price.replace(",", "")) for price in _PRICE.findall(str(row.values.get("pricing") or ""))]
    return Product(
        asin=asin,
        title=_text(row, "name"),
        query=_text(row, "query").lower(),
        category=tuple(part.strip() for part in _text(row, "product_category").split("›")),
        price=max(prices[:2], default=NO_PRICE),
        options=_options(row),
        attributes=attributes,
        features=tuple(map(str, [features] if isinstance(features, str) else features)),
        description=str(row.values.get("full_description") or ""),
    )


def _options(row: Row) -> dict[str, tuple[str, ...]]:
    found = row.values.get("customization_options") or {}
    try:
        options = {
            name.strip().lower(): tuple(dict.fromkeys(_value(content["value"]) for content in contents))
            for name, contents in found.items()
            if contents
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f'{row.where}: customization_options: expected {{"color": [{{"value": "red"}}]}}, got '
            f"{json.dumps(found)[:100]}"
        ) from error
    return {name: tuple(filter(None, values)) for name, values in options.items() if any(values)}


def _value(value: Any) -> str:
    return " ".join(str(value).replace("/", " | ").lower().split())


def _said(instruction: Any) -> str:
    return str(instruction).strip().rstrip(".")


def _goal(product: Product, said: str, attributes: Sequence[str], options: Sequence[Sequence[str]]) -> Goal:
    rng = random.Random(f"{product.asin}/{said}")
    limit = float(PRICE_STEP * (int(product.price // PRICE_STEP) + rng.randint(1, 4)))
    return Goal(product.asin, f"{said}, for at most {limit:.2f} dollars", attributes, options, limit)


def _combinations(product: Product, count: int) -> list[list[list[str]]]:
    """Different choices of one value for each option. They are numbered, as there may be millions."""
    total = 1
    for values in product.options.values():
        total *= len(values)
    chosen = []
    for number in random.Random(f"{product.asin}/options").sample(range(total), min(count, total)):
        choice = []
        for name, values in sorted(product.options.items()):
            number, index = divmod(number, len(values))
            choice.append([name, values[index]])
        chosen.append(choice)
    return chosen


def _text(row: Row, key: str) -> str:
    value = row.values.get(key)
    if not isinstance(value, str):
        raise ConfigError(f"{row.where}: {key}: got {type(value).__name__}, expected text")
    return value.strip()
