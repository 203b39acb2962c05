r"""What the words around a number do to it: tables, and the two functions that read them.

harmless    "so the answer is 5", "5 in total"          nothing
scale       "5 million", "5 dozen", "5 thirds"          they multiply
unit        "5 cm", "5 miles per hour", "5 red apples"  two of one kind are converted, exactly
change      "twice 5", "5 squared", "5 is wrong"        there is no number

Other words say nothing about the number if they have a place: before a verb ("the baker earns 5"), between
the number and what is counted, and behind that ("5 apples of the baker").
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


def _table(text: str) -> dict[str, Fraction]:
    rows = (row.split() for row in text.replace("\n", ",").split(",") if row.strip())
    return {name: Fraction(value) for value, *names in rows for name in names}


_BEFORE = _set(
    """so thus hence therefore then now finally overall namely is are was were be has have had get gets
    make makes made give gives gave yields equals becomes costs cost pays paid earns earned needs needed
    takes took spends spent sells sold buys bought sees left
    answer answers result results value values total exactly only both either find found obtain equal_to
    comes_to"""
)
"""Words that a number may follow: "is 5"; others are no reason to believe it: "of 5", "least 5"."""
_AUXILIARIES = _set("to can will must did")
_HARMLESS = _set(
    """in total all the end sum as required desired answer final is my our correct right only result value
    solution one altogether overall left remaining exactly respectively again here each old such base10"""
)
_CHANGES = _set(
    """not never no nor none neither but except isn't aren't wasn't can't cannot won't don't doesn't unless if
    rather instead or either maybe perhaps possibly sometimes always guess guesses wrong false incorrect lies
    misses fails than more less fewer most least about around almost nearly roughly approximately under over
    below above between beyond up off short too after before minus plus times by negative negatives opposite
    opposites inverse inverses reciprocal reciprocals complement twice thrice double doubled doubles triple
    triples half halved halves square squared squares cube cubed cubes root log logs logarithm
    logarithms factorial factorials power powers multiple multiples factor factors divided multiplied raised
    absolute derivative integral modulo mod digits ones nones maybes fold repeating minimum maximum until
    counting first second third exceed exceeds could might may would should suppose assume
    error next previous ago"""
)
"""Words that may make another number of it, wherever they stand."""

SCALES = _table("""
1000000000000 trillion, 1000000000 billion bn, 10000000 crore, 1000000 million mil mn, 100000 lakh
1000 thousand, 144 gross, 100 hundred, 20 score, 12 dozen, 10 ten, 2 pair couple, 1/2 half, 1/3 third
1/4 quarter fourth, 1/5 fifth, 1/6 sixth, 1/7 seventh, 1/8 eighth, 1/9 ninth, 1/10 tenth, 1/12 twelfth
1/100 hundredth, 1/1000 thousandth
""")
_AND = re.compile(r"\s*and (?:an? |one |1 )(half|third|quarter|fourth|fifth|tenth)\b")
_PERCENT = _set("percent percentage pct percents")
_PREFIXES = {"m milli": "1/1000", "c centi": "1/100", "d deci": "1/10", "k kilo": "1000"}
_METRIC = {
    **{("length", 1, "1"): "m meter metre", ("length", 3, "1/1000"): "l L liter litre"},
    **{("time", 1, "1"): "s second", ("mass", 1, "1"): "g gram gramme"},
    **{("energy", 1, "1"): "J joule", ("power", 1, "1"): "W watt"},
}
_OTHERS = {
    ("length", 1): "127/5000 in inch inches, 381/1250 ft foot feet, 1143/1250 yd yard, 201168/125 mi mile",
    ("mass", 1): "1000 kilo, 45359237/100000 lb pound, 45359237/1600000 oz ounce",
    ("length", 3): """1/1000000 cc, 473176473/125000000000 gal gallon, 473176473/500000000000 qt quart
        473176473/1000000000000 pt pint, 473176473/2000000000000 cup""",
    ("time", 1): "1 sec, 60 min minute, 3600 h hr hour, 86400 day, 604800 week",
    ("months", 1): "1 month, 12 yr year, 120 decade, 1200 century centuries",
    ("money", 1): "1/100 cent penny pennies, 1 dollar usd buck",
    ("angle", 1): "1 degree deg, 1/60 arcminute",
    ("information", 1): "1 bit, 8 byte",
    ("unit", 1): "1 unit",
}
UNITS = {
    name: (kind, power, size)
    for (kind, power), table in _OTHERS.items()
    for name, size in _table(table).items()
} | {
    prefix + name: (kind, power, Fraction(size) * Fraction(factor))
    for (kind, power, size), names in _METRIC.items()
    for prefixes, factor in [(" ", "1"), *_PREFIXES.items()]
    for name in names.split()
    for prefix in [prefixes.split(" ")[len(name) > 1]]
    if prefix or name not in ("J", "W")  # which are variables
}
"""Name of a unit, in the singular: its kind, the power of it, and how many of the kind's first unit it is."""
_COMPOUND = {"mph": "miles per hour", "kph": "km per hour", "kmh": "km per hour", "fps": "feet per second"}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_AFTER = {"squared": 2, "cubed": 3, "^2": 2, "^3": 3}
_PER = _set("per a an each every")
_NOUNS = _set(
    """person people person man men woman women child children mice fish sheep teeth geese dice euro eur yen
    rupee gbp quid radian rad celsius fahrenheit kelvin newton hz Hz hertz kj kw"""
)
"""What is counted, without an s at its end; each is a kind of its own."""
SHORT_WORDS = {
    *_set("""a an the and or nor no not yes but its it is was are be of to by in on at for he she we you has
        had get all so thus now one old new red big sum age end day way her his my our"""),
    *_set("sq cu pct ten mph kph kmh fps man men rad eur gbp yen mil bn mn"),
}  # fmt: skip
"""Words of at most three letters that are no product of variables, such as xyz."""


@dataclass(frozen=True)
class Quantity:
    """What the words after a number say: value * scale + plus, in a unit (kinds with powers)."""

    scale: Fraction = Fraction(1)
    plus: Fraction = Fraction(0)
    unit: tuple[tuple[str, int], ...] = ()
    factor: Fraction = Fraction(1)
    percent: bool = False


NOTHING = Quantity()


def harmless(words: str) -> bool:
    """Whether no word changes what stands beside it."""
    return not _CHANGES & set(re.sub(r"[.,;:*]", " ", words.lower()).split())


def leads(words: str, *, named: bool = False) -> bool:
    """Whether a number, or name = number, may follow these words and stay the same number."""
    words = re.sub(r"\b(equal|comes) to\b", r"\1_to", re.sub(r"[.,;:*]", " ", words.lower()))
    read = words.split()
    is_verb = not read or read[-1] in _BEFORE or (len(read) > 2 and read[-2] in _AUXILIARIES)
    return harmless(words) and (named or is_verb)


def quantity(words: str) -> Quantity | None:
    """What the words after a number do to it; None if that is another number."""
    words = re.sub(r"\s*\^\s*\{?([23])\}?", r" ^\1", words.lower().replace("/", " per "))
    words = re.sub(r"\bdegrees? (?=celsius|fahrenheit)|[.,;:!()]", " ", words)
    added = _AND.match(words)
    tokens = [part for word in words[added.end() if added else 0 :].split() for part in
              _COMPOUND.get(word, word).split()]  # fmt: skip
    scale, factor, percent = Fraction(1), Fraction(1), False
    dimensions: Counter[str] = Counter()
    unit: tuple[str, int, Fraction] | None = None  # the last one
    power, sign, open_ = 1, 1, False
    for index, token in enumerate(tokens):
        if token in _POWERS:
            power = _POWERS[token]
        elif token in _PER and unit:
            sign = -1
        elif token in _PERCENT and not percent:
            percent = True
        elif sign > 0 and (number := SCALES.get(_singular(token))) is not None:
            scale *= number
        elif (token in _POWERS_AFTER and unit) or (
            found := _unit(token, power > 1 or (unit is not None and sign > 0))
        ):
            unit = unit if token in _POWERS_AFTER else found
            assert unit is not None
            kind, degree, size = unit
            times = sign * (_POWERS_AFTER[token] - 1 if token in _POWERS_AFTER else power)
            dimensions[kind] += degree * times
            factor *= size**times
            power, open_ = 1, False
        elif power == 1 and (unit or (percent and token != "of")) and _ends(tokens[index:]):
            break
        elif token.isalpha() and not unit and not percent and token not in _CHANGES - {"more"} | {"of"}:
            open_ = open_ or token not in _HARMLESS
        else:
            return None
    if power != 1 or open_ or (added and scale != 1):
        return None
    dimension = tuple(sorted((kind, n) for kind, n in dimensions.items() if n and kind != "unit"))
    return Quantity(scale, SCALES[added[1]] if added else Fraction(0), dimension, factor, percent)


def _ends(words: list[str]) -> bool:
    """Whether words behind a unit say nothing about the number."""
    return words[0] != "and" and words[0] not in _PERCENT and harmless(" ".join(words))


def _unit(word: str, known: bool) -> tuple[str, int, Fraction] | None:
    """A unit; a thing that is counted ("apples") is a kind of its own, unless the unit is known."""
    single = _singular(word)
    if found := UNITS.get(word) or UNITS.get(single):
        return found
    is_plural = len(word) > 3 and word.isalpha() and single != word and not word.endswith("ths")
    is_noun = word not in _CHANGES and (is_plural or single in _NOUNS)
    return (single, 1, Fraction(1)) if is_noun and not known else None


def _singular(word: str) -> str:
    if word == "halves":
        return "half"
    return word if word.endswith(("ss", "us", "is")) else word.removesuffix("s")
