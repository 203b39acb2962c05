"""WebShop's reward (arXiv:2207.01206, equation 1): how well a bought product fits a goal.

    r = r_type * (attributes found + options chosen + [price within the limit]) / (attributes + options + 1)

r_type is lower for products of another kind, which share neither the query, two levels of the category nor a
fifth of the words of the title. A reward of 1 therefore needs all parts, and no part can make up for another.

Different from WebShop's code:

- Its counter of options goes over what was chosen, so that more choices than were wanted could earn more than
  1, and a value that occurs in the title counts as wanted. Here each wanted option counts once.
- It compares with a fuzzy ratio, here words are compared: a value of an option must be the wanted one. Only
  if the product does not offer that value, one that contains all its words will do ("navy blue" for "blue",
  but no other size).
- It looks for attributes as substrings ("led" is in "handled"), here as whole words.
- It takes nouns from titles with a tagger, here all words except short ones, numbers and those of attributes
  and wanted options, which say what a thing is like; words of the query for a product always count, as they
  say what it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from silva.data.retrieval import has_phrase, words
from silva.environments.worlds.webshop_products import Goal, Product

EXACT = frozenset({"size"})  # options of which only the very value will do
STOP_WORDS = frozenset({"and", "any", "are", "for", "from", "has", "its", "not", "our", "set", "the", "this",
                        "with", "you", "your"})  # fmt: skip


class Match(NamedTuple):
    """`score` is r, `type` is r_type; the others are shares of what was wanted (1 if nothing was)."""

    score: float
    type: float
    attributes: float
    options: float
    price: float

    @property
    def perfect(self) -> bool:
        return self.score == 1.0


def match(product: Product, chosen: Mapping[str, str], goal: Goal, wanted: Product) -> Match:
    """Compares what was bought with what was asked for.

    Args:
        product: the one that was bought.
        chosen: its options by name.
        wanted: the product of the goal.
    """
    type_ = type_match(product, goal, wanted)
    attributes = sum(has_attribute(product, attribute) for attribute in goal.attributes)
    options = sum(has_option(product, chosen, name, value) for name, value in goal.options)
    price = product.price <= goal.price_limit
    parts = len(goal.attributes) + len(goal.options) + 1
    return Match(
        type_ * ((attributes + options + price) / parts),
        type_,
        attributes / len(goal.attributes) if goal.attributes else 1.0,
        options / len(goal.options) if goal.options else 1.0,
        float(price),
    )


def type_match(product: Product, goal: Goal, wanted: Product) -> float:
    """How far both are the same kind of thing: 0, 0.1, 0.5 or 1."""
    asked = [*goal.attributes, *(value for _, value in goal.options)]
    kind = _kind(wanted, asked)
    if not kind:  # the title says nothing else
        shared = float(product.asin == wanted.asin)
    else:
        shared = len(kind & _kind(product, asked)) / len(kind)
    if shared == 0.0:
        return 0.0
    if shared < 0.1:
        return 0.1
    levels = len(set(product.category) & set(wanted.category))
    return 1.0 if product.query == wanted.query or levels >= 2 or shared > 0.2 else 0.5


def has_attribute(product: Product, attribute: str) -> bool:
    asked = words(attribute)
    if any(set(asked) <= set(words(own)) for own in product.attributes):
        return bool(asked)
    texts = (product.title, product.description, *product.features)
    return any(has_phrase(words(text), asked) for text in texts)


def has_option(product: Product, chosen: Mapping[str, str], name: str, value: str) -> bool:
    """Whether this value was chosen, of the option `name` or, if the product has no such option, of any."""
    names = [name] if name in product.options else list(product.options)
    offered = any(value in product.options[each] for each in names)
    for each in names:
        said = chosen.get(each, "")
        similar = not offered and each not in EXACT and set(words(value)) <= set(words(said))
        if said and (said == value or similar):
            return True
    return False


def _kind(product: Product, asked: Sequence[str]) -> set[str]:
    """Words of the title that say what it is, not what it is like."""
    like = STOP_WORDS.union(*(words(text) for text in (*product.attributes, *asked)))
    said = {word for word in words(product.title) if len(word) > 2 and not word.isdigit()}
    return said - (like - set(words(product.query)))
