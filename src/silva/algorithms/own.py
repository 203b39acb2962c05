"""Losses, advantages and credit of a user's own, by the names that a configuration gives them.

    algorithm.loss = "mine.py:loss"              a `Loss`
    algorithm.advantage = "mine.py:advantage"    a function of `Scores`, or an `Advantage`
    algorithm.credit = "mine.py:credit"          a function of samples, groups and the recipe

Reading a configuration adopts what it names: from then on it stands in the table of its kind, as long as the
process lives.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from silva.algorithms.advantages import ADVANTAGES, Advantage
from silva.algorithms.losses import LOSSES, Loss
from silva.algorithms.settings import CREDITS, Algorithm
from silva.config.plugins import load_object
from silva.config.schema import tagged

TABLES: Mapping[str, dict[str, Any]] = {"loss": LOSSES, "advantage": ADVANTAGES, "credit": CREDITS}
"""By the key of `[algorithm]`."""


def adopt(key: str, name: str) -> None:
    """Raises ConfigError where `name` is nothing that fits."""
    if key == "loss":
        loss = load_object(name, lambda value: isinstance(value, Loss), "Loss")
        LOSSES[name] = dataclasses.replace(loss, settings=tagged(loss.settings, name))
    elif key == "advantage":
        found = load_object(name, lambda value: isinstance(value, Advantage) or callable(value), "function")
        ADVANTAGES[name] = found if isinstance(found, Advantage) else Advantage(found)
    else:
        CREDITS[name] = load_object(name, callable, "function")


def widened(recipe: type[Algorithm]) -> type[Algorithm]:
    """The recipe whose keys take what has been adopted as well."""
    losses = reduce(or_, (loss.settings for loss in LOSSES.values()))
    kinds: dict[str, Any] = {
        "loss": Annotated[losses, Field(discriminator="type")],
        "advantage": Literal[tuple(ADVANTAGES)],
        "credit": Literal[tuple(CREDITS)],
    }
    fields: dict[str, Any] = {}
    for name, kind in kinds.items():
        info = copy.copy(recipe.model_fields[name])
        fields[name] = (kind, Field(default=info.default, description=info.description))
    quick: Any = {"use_attribute_docstrings": False}
    return create_model(
        recipe.__name__, __base__=recipe, __doc__=recipe.__doc__, __module__=recipe.__module__,
        __cls_kwargs__=quick, **fields,
    )  # fmt: skip
