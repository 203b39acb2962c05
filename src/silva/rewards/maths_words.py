r"""What the words around a number do to it: tables, and the function that reads them.

harmless    "so the answer is 5", "5 in total"          nothing
scale       "5 million", "5 dozen", "5 thirds"          they multiply
unit        "5 cm", "5 miles per hour", "5 apples"      two of one kind are converted, exactly
all others  "twice 5", "5 squared", "5 is wrong"        there is no number
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_LAST = _set(
    """so thus hence therefore then now finally overall namely is are was were be has have had get gets
    make makes made give gives gave yields equals becomes costs cost pays paid earns earned needs needed
    answer answers result results value values total exactly only both either find found obtain equal_to
    comes_to"""
)
_LEADS = _LAST | _set(
    """a an the and final it its this that these those which there he she they we i you must will of for in
    number numbers amount sum product difference quotient remainder average mean median mode probability ratio
    percentage price area volume perimeter circumference length width height radius diameter distance speed
    rate time age ages angle angles measure side slope degree weight mass profit change income solution
    solutions roots expression function equation interval range domain set point vertex center matrix vector
    largest smallest greatest least biggest minimum maximum possible positive integer integers"""
)
"""Words that may stand before a number. _LAST may be the last one; others may not: "of 5", "least 5"."""
_AFTER = re.compile(
    r"\b(?:in (?:total|all|the end|sum)|in base 10|as (?:required|desired|the answer|final answer)|"
    r"is (?:the|my|our|correct)(?: (?:correct|right|final|only))?(?: (?:answer|result|value|solution|one))?|"
    r"altogether|overall|total|left|remaining|exactly|only|respectively|again|here|each|old|such)\b|[.,;:!()]"
)
"""What may stand behind a number without a word about it."""

_SCALES = """
1000000000000 trillion
1000000000 billion
1000000 million
1000 thousand
144 gross
100 hundred
20 score
12 dozen
10 ten
2 pair couple
1/2 half
1/3 third
1/4 quarter fourth
1/5 fifth
1/6 sixth
1/7 seventh
1/8 eighth
1/9 ninth
1/10 tenth
1/12 twelfth
1/100 hundredth
1/1000 thousandth
"""
SCALES = {
    name: Fraction(value) for value, *names in map(str.split, _SCALES.strip().splitlines()) for name in names
}
_AND = re.compile(r"^and (?:a|an|one) (half|third|quarter|fourth|fifth|tenth)\b")
PERCENT = frozenset(["percent", "percentage", "pct", "percents"])

_UNITS = """
length 1/1000 mm millimeter millimetre
length 1/100 cm centimeter centimetre
length 1/10 dm decimeter decimetre
length 1 m meter metre
length 1000 km kilometer kilometre
length 127/5000 in inch inches
length 381/1250 ft foot feet
length 1143/1250 yd yard
length 201168/125 mi mile
mass 1/1000 mg milligram
mass 1 g gram gramme
mass 1000 kg kilogram kilo
mass 45359237/100000 lb lbs pound
mass 45359237/1600000 oz ounce
length^3 1/1000000 ml milliliter millilitre cc mL
length^3 1/1000 l L liter litre
length^3 473176473/125000000000 gal gallon
length^3 473176473/500000000000 qt quart
length^3 473176473/1000000000000 pt pint
length^3 473176473/2000000000000 cup
time 1/1000 ms millisecond
time 1 s sec second
time 60 min minute
time 3600 h hr hour
time 86400 day
time 604800 week
months 1 month
months 12 yr year
months 120 decade
months 1200 century centuries
money 1/100 cent penny pennies
money 1 dollar usd buck
euro 1 euro eur
sterling 1 gbp quid
yen 1 yen
rupee 1 rupee
angle 1 degree deg
angle 1/60 arcminute
radian 1 radian rad
celsius 1 celsius
fahrenheit 1 fahrenheit
kelvin 1 kelvin
force 1 newton
energy 1 joule
energy 1000 kilojoule kj kJ
power 1 watt
power 1000 kilowatt kw kW
frequency 1 hz Hz hertz
information 1 bit
information 8 byte
unit 1 unit
"""
UNITS = {
    name: (kind.partition("^")[0], int(kind.partition("^")[2] or 1), Fraction(factor))
    for kind, factor, *names in map(str.split, _UNITS.strip().splitlines())
    for name in names
}
"""Name of a unit, in the singular: its kind, the power of it, and how many of the kind's first unit it is."""
_COMPOUND = {"mph": "miles per hour", "kph": "km per hour", "kmh": "km per hour", "fps": "feet per second"}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_AFTER = {"squared": 2, "cubed": 3, "^2": 2, "^3": 3}
_PER = frozenset(["per", "a", "an", "each", "every"])
_NOUNS = _set("people person men man women woman children child mice fish sheep teeth geese dice")
_NO_NOUNS = _set(
    """minus plus times less unless does always perhaps sometimes wrongs guesses lies squares cubes roots
    powers factorials logarithms logs negatives opposites inverses reciprocals multiples factors doubles
    triples ones halves nones misses fails maybes"""
)
VOCABULARY = (
    _set("not or nor no yes but minus to old")
    | _LEADS
    | _NOUNS
    | _PER
    | PERCENT
    | {*SCALES, *_COMPOUND, *_POWERS}
)
"""Words that are no product of letters, such as xyz."""


@dataclass(frozen=True)
class Quantity:
    """What the words after a number say: value * scale + plus, in a unit (kinds with powers)."""

    scale: Fraction = Fraction(1)
    plus: Fraction = Fraction(0)
    unit: tuple[tuple[str, int], ...] = ()
    factor: Fraction = Fraction(1)
    percent: bool = False


NOTHING = Quantity()


def leads(words: str, *, named: bool = False) -> bool:
    """Whether a number, or name = number, may follow these words and stay the same number."""
    words = re.sub(r"\bnumber of [a-z]{3,}s\b", "number", re.sub(r"[.,;:*]", " ", words.lower()))
    read = re.sub(r"\b(equal|comes) to\b", r"\1_to", words).split()
    return set(read) <= _LEADS and (named or not read or read[-1] in _LAST)


def quantity(words: str) -> Quantity | None:
    """What the words after a number do to it; None if they are not known."""
    words = re.sub(r"\s*\^\s*\{?([23])\}?", r" ^\1", words.lower())
    words = re.sub(r"\bdegrees? (?=celsius|fahrenheit)", "", words)
    words = re.sub(r"\s+", " ", _AFTER.sub(" ", words.replace("/", " per "))).strip()
    added = _AND.match(words)
    plus = SCALES[added[1]] if added else Fraction(0)
    tokens = [part for word in words[added.end() if added else 0 :].split() for part in
              _COMPOUND.get(word, word).split()]  # fmt: skip
    scale, factor, percent = Fraction(1), Fraction(1), False
    dimensions: Counter[str] = Counter()
    unit: tuple[str, int, Fraction] | None = None  # the last one
    power, sign = 1, 1
    for token in tokens:
        if token in _POWERS:
            power = _POWERS[token]
        elif token in _PER and unit:
            sign = -1
        elif token in PERCENT and not percent:
            percent = True
        elif sign > 0 and (number := SCALES.get(_singular(token))) is not None:
            scale *= number
        elif (unit := unit if token in _POWERS_AFTER else _unit(token)) is not None:
            kind, degree, size = unit
            times = sign * (_POWERS_AFTER[token] - 1 if token in _POWERS_AFTER else power)
            dimensions[kind] += degree * times
            factor *= size**times
            power = 1
        else:
            return None
    if power != 1 or (plus and scale != 1):
        return None
    dimension = tuple(sorted((kind, n) for kind, n in dimensions.items() if n and kind != "unit"))
    return Quantity(scale, plus, dimension, factor, percent)


def _unit(word: str) -> tuple[str, int, Fraction] | None:
    """A unit; a thing that is counted ("apples") is a kind of its own."""
    single = _singular(word)
    if found := UNITS.get(word) or UNITS.get(single):
        return found
    is_part = word.endswith("ths") or word in _NO_NOUNS  # "eighteenths"
    is_noun = len(word) > 3 and word.isalpha() and single != word and not is_part
    return (single, 1, Fraction(1)) if is_noun or word in _NOUNS else None


def _singular(word: str) -> str:
    if word == "halves":
        return "half"
    return word if word.endswith(("ss", "us", "is")) else word.removesuffix("s")
