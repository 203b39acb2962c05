"""A made-up catalogue in WebShop's file formats, so that the environment runs without downloads.

Every kind of product comes in a dozen variants that differ in brand, attributes, options and price. Brands
are made up, and each is used once. The same numbers and seed give the same catalogue.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from silva.data.rows import Row

COLORS = ("black", "white", "red", "navy blue", "forest green", "grey", "mustard yellow", "rose pink")
SIZES = ("x-small", "small", "medium", "large", "x-large")
SCENTS = ("unscented", "lavender", "citrus", "cedar", "vanilla")
FLAVORS = ("original", "lemon", "ginger", "mint", "dark chocolate", "sea salt")


class Kind(NamedTuple):
    """What a kind of product is called, and what its variants differ in. Prices in dollars."""

    name: str
    category: str
    prices: tuple[int, int]
    options: Mapping[str, Sequence[str]]
    attributes: Sequence[str]


FASHION, HOME, FOOD, BEAUTY, TECH, SPORT = (
    "Clothing › Everyday Wear",
    "Home & Kitchen › Household",
    "Grocery › Pantry",
    "Beauty & Care › Body",
    "Electronics › Accessories",
    "Sports & Outdoors › Equipment",
)
WORN = {"color": COLORS, "size": SIZES}

KINDS = (
    Kind("hoodie", f"{FASHION} › Hoodies", (25, 70),
         WORN,
         ("machine washable", "fleece lined", "full zip", "slim fit", "organic cotton", "wind resistant")),
    Kind("raincoat", f"{FASHION} › Raincoats", (30, 120),
         WORN,
         ("seam sealed", "packable", "reflective", "breathable", "long sleeve", "mesh lined")),
    Kind("sneakers", f"{FASHION} › Sneakers", (35, 110),
         {"color": COLORS, "size": ("6", "7", "8", "9", "10", "11")},
         ("memory foam", "non slip", "arch support", "vegan leather", "lace free", "wide fit")),
    Kind("beanie", f"{FASHION} › Beanies", (9, 35),
         {"color": COLORS},
         ("merino wool", "double layered", "itch free", "hand knitted", "cuffed", "machine washable")),
    Kind("socks", f"{FASHION} › Socks", (6, 25),
         {"color": COLORS, "size": SIZES[1:4]},
         ("moisture wicking", "cushioned sole", "seamless toe", "bamboo fiber", "knee high", "quick dry")),
    Kind("coffee mug", f"{HOME} › Mugs", (6, 30),
         {"color": COLORS, "size": ("8 ounces", "12 ounces", "16 ounces")},
         ("dishwasher safe", "microwave safe", "double walled", "hand painted", "stackable", "lead free")),
    Kind("curtain", f"{HOME} › Curtains", (18, 80),
         {"color": COLORS, "size": ("54 inches", "72 inches", "96 inches")},
         ("blackout", "noise reducing", "thermal insulated", "grommet top", "wrinkle free", "fire proof")),
    Kind("area rug", f"{HOME} › Rugs", (30, 240),
         {"color": COLORS, "size": ("2x3 feet", "4x6 feet", "8x10 feet")},
         ("stain resistant", "low pile", "pet friendly", "hand woven", "non slip", "machine washable")),
    Kind("desk lamp", f"{HOME} › Lamps", (15, 75),
         {"color": COLORS},
         ("dimmable", "eye caring", "foldable", "battery powered", "touch control", "wall mountable")),
    Kind("storage basket", f"{HOME} › Baskets", (10, 45),
         {"color": COLORS, "size": SIZES[1:4]},
         ("collapsible", "water resistant", "easy to clean", "hand woven", "with lid", "heavy duty")),
    Kind("pillow", f"{HOME} › Pillows", (14, 90),
         {"firmness": ("soft", "medium soft", "firm"), "size": ("standard", "queen", "king")},
         ("cooling gel", "hypoallergenic", "side sleeper", "machine washable", "dust proof", "goose down")),
    Kind("granola", f"{FOOD} › Cereal", (5, 28),
         {"flavor": FLAVORS, "size": ("10 ounces", "24 ounces", "48 ounces")},
         ("gluten free", "low sugar", "high protein", "non gmo", "nut free", "whole grain")),
    Kind("green tea", f"{FOOD} › Tea", (4, 32),
         {"flavor": FLAVORS, "count": ("20 bags", "50 bags", "100 bags")},
         ("caffeine free", "fair trade", "loose leaf", "stone ground", "plastic free", "usda organic")),
    Kind("crackers", f"{FOOD} › Snacks", (4, 22),
         {"flavor": FLAVORS},
         ("gluten free", "oven baked", "low sodium", "seed based", "dairy free", "individually wrapped")),
    Kind("olive oil", f"{FOOD} › Oils", (8, 60),
         {"size": ("8 ounces", "16 ounces", "32 ounces")},
         ("cold pressed", "extra virgin", "single estate", "unfiltered", "early harvest", "kosher")),
    Kind("shampoo", f"{BEAUTY} › Hair", (6, 38),
         {"scent": SCENTS, "size": ("8 ounces", "16 ounces", "33 ounces")},
         ("sulfate free", "cruelty free", "color safe", "paraben free", "volumizing", "dandruff control")),
    Kind("hand cream", f"{BEAUTY} › Skin", (5, 26),
         {"scent": SCENTS},
         ("fast absorbing", "fragrance free", "shea butter", "cruelty free", "long lasting", "travel sized")),
    Kind("bar soap", f"{BEAUTY} › Soap", (4, 30),
         {"scent": SCENTS, "count": ("1 piece", "4 pieces", "12 pieces")},
         ("palm oil free", "exfoliating", "oatmeal based", "goat milk", "plant based", "long lasting")),
    Kind("phone case", f"{TECH} › Cases", (8, 45),
         {"color": COLORS, "fit": ("model 11", "model 12", "model 13 pro")},
         ("shock proof", "wireless charging", "scratch resistant", "kickstand", "slim fit", "biodegradable")),
    Kind("headphones", f"{TECH} › Audio", (25, 260),
         {"color": COLORS[:5]},
         ("noise cancelling", "bluetooth", "foldable", "water resistant", "fast charging", "over ear")),
    Kind("keyboard", f"{TECH} › Input", (20, 150),
         {"color": COLORS[:5], "layout": ("english", "german", "nordic")},
         ("mechanical", "hot swappable", "spill proof", "wireless", "low profile", "rgb lit")),
    Kind("power bank", f"{TECH} › Power", (15, 80),
         {"capacity": ("5000 mah", "10000 mah", "20000 mah")},
         ("fast charging", "solar powered", "airline approved", "usb c", "built in cable", "shock proof")),
    Kind("yoga mat", f"{SPORT} › Yoga", (16, 90),
         {"color": COLORS, "thickness": ("4 millimeters", "6 millimeters")},
         ("non slip", "odor free", "natural rubber", "easy to clean", "extra long", "latex free")),
    Kind("water bottle", f"{SPORT} › Bottles", (9, 48),
         {"color": COLORS, "size": ("17 ounces", "25 ounces", "40 ounces")},
         ("leak proof", "vacuum insulated", "bpa free", "dishwasher safe", "with straw", "wide mouth")),
    Kind("backpack", f"{SPORT} › Backpacks", (28, 160),
         {"color": COLORS, "volume": ("15 liters", "25 liters", "40 liters")},
         ("water resistant", "padded straps", "laptop sleeve", "anti theft", "ultra light", "side pockets")),
)  # fmt: skip

_STARTS = ("Bal", "Cor", "Dren", "Fen", "Gal", "Hul", "Jor", "Kel", "Lum", "Mar", "Nov", "Orl", "Pell",
           "Quil", "Rost", "Sor", "Tarv", "Ulm", "Vex", "Wyn", "Yar", "Zel")  # fmt: skip
_MIDDLES = ("a", "e", "i", "o", "u", "ano", "eri", "imo", "ola", "uti")
_ENDS = ("bel", "dor", "fin", "gard", "kov", "lin", "mont", "nax", "quist", "rin", "sto", "tz")
BRANDS = len(_STARTS) * len(_MIDDLES) * len(_ENDS)


def catalogue(count: int, seed: int = 0) -> tuple[list[Row], dict[str, Any]]:
    """Rows of items_shuffle.json, and items_ins_v2.json.

    Args:
        count: of products, at most BRANDS.
    """
    rng = random.Random(f"catalogue/{seed}")
    brands = rng.sample(range(BRANDS), count)
    rows, instructions = [], {}
    for number, brand in enumerate(brands):
        kind = KINDS[number % len(KINDS)]
        values, about = _product(kind, _brand(brand), rng)
        rows.append(Row(f"made-up product {number + 1}", values))
        instructions[values["asin"]] = about
    return rows, instructions


def _product(kind: Kind, brand: str, rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    attributes = rng.sample(kind.attributes, 3)
    options = {name: _some(values, rng) for name, values in kind.options.items()}
    price = rng.randint(*kind.prices) - rng.choice((0.01, 0.05, 0.51))
    asked = rng.sample(attributes, 2)
    values = {
        "name": f"{brand} {' '.join(attributes[:2]).title()} {kind.name.title()}",
        "query": kind.name,
        "product_category": kind.category,
        "pricing": f"${price:.2f}",
        "customization_options": {name: [{"value": each} for each in some] for name, some in options.items()},
        "small_description": attributes[2:],
        "full_description": f"{brand} makes this {kind.name} with care. It is {attributes[1]}.",
    }
    values["asin"] = "B" + hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:9].upper()
    about = {
        "attributes": attributes,
        "instruction": f"Find {_article(asked[0])} {asked[0]}, {asked[1]} {kind.name}",
        "instruction_attributes": asked,
    }
    return values, about


def _some(values: Sequence[str], rng: random.Random) -> list[str]:
    """Up to four of the values, in their order."""
    chosen = rng.sample(values, min(len(values), 4))
    return [value for value in values if value in chosen]


def _brand(number: int) -> str:
    number, end = divmod(number, len(_ENDS))
    start, middle = divmod(number, len(_MIDDLES))
    return _STARTS[start] + _MIDDLES[middle] + _ENDS[end]


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" and not word.startswith(("usb", "usda", "uni")) else "a"
