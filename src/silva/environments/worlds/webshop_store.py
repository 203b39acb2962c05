"""What WebShop's store sells, the search in it, and what is asked for."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Sequence

from silva.data.retrieval import Ranking
from silva.data.rows import read_rows
from silva.environments.worlds.webshop_catalogue import catalogue
from silva.environments.worlds.webshop_products import (
    Goal,
    Product,
    human_goals,
    instruction_goals,
    read_instructions,
    read_products,
)
from silva.environments.worlds.webshop_reward import has_option, match
from silva.errors import ConfigError


class Store:
    """Products and goals, shared by all episodes. `left_out`: goals that repeat an instruction, or that their
    own product does not fit."""

    def __init__(self, products: Sequence[Product], goals: Sequence[Goal]) -> None:
        self.products = products
        self.number = {product.asin: number for number, product in enumerate(products)}
        first = {goal.instruction: goal for goal in reversed(goals)}  # the same text asks for one thing only
        possible = [goal for goal in goals if first[goal.instruction] is goal and self._possible(goal)]
        self.goals = possible
        self.left_out = len(goals) - len(possible)
        self.queries = sorted({product.query for product in products})

    @functools.cached_property
    def ranking(self) -> Ranking:
        return Ranking(product.text for product in self.products)

    def wanted(self, goal: Goal) -> Product:
        return self.products[self.number[goal.asin]]

    def choices(self, goal: Goal) -> dict[str, str]:
        """The options of the goal's own product to choose, by name."""
        wanted = self.wanted(goal)
        chosen: dict[str, str] = {}
        for name, value in goal.options:
            fitting = (
                (option, offered)
                for option, values in wanted.options.items()
                for offered in values
                if option not in chosen and has_option(wanted, {option: offered}, name, value)
            )
            chosen.update(itertools.islice(fitting, 1))
        return chosen

    def _possible(self, goal: Goal) -> bool:
        wanted = self.wanted(goal)
        return match(wanted, self.choices(goal), goal, wanted).perfect


def open_store(path: str, instructions: str, human: str, most: int, goals_per_product: int) -> Store:
    """The store of a user's files.

    Args:
        path: of the products.
        instructions: path of their attributes and instructions.
        human: path of instructions written by people, or "".
        most: products to read; 0: all.

    Raises:
        ConfigError: a file cannot be read, or no goal can be reached.
    """
    about = read_instructions(instructions)
    products = read_products(itertools.islice(read_rows(path), most or None), about)
    if human:
        goals = list(human_goals(products, read_instructions(human)))
    else:
        goals = list(instruction_goals(products, about, goals_per_product))
    store = Store(products, goals)
    if not store.goals:
        raise ConfigError(
            f"{path}: none of its {len(products)} products has an instruction in {human or instructions} "
            "that it fits itself"
        )
    if store.left_out:
        logging.getLogger(__name__).warning(
            "%s: %d of %d goals are left out: repeated, or their own product does not fit them",
            human or instructions, store.left_out, len(goals),
        )  # fmt: skip
    return store


@functools.lru_cache(maxsize=4)
def made_up(size: int, seed: int, goals_per_product: int) -> Store:
    """The store of the made-up catalogue, which many task sets share."""
    rows, instructions = catalogue(size, seed)
    products = read_products(rows, instructions)
    return Store(products, list(instruction_goals(products, instructions, goals_per_product)))
