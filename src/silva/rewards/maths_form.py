r"""What an answer says: a value, made of numbers and expressions, in a unit. Pure functions of text.

A tree is an expression (text), or a list whose first entry is its kind:

    ["{}", a, b]   in any order: 1, 2     \{1, 2\}     1 \text{ or } 2     \pm 1
    ["()", a, b]   in this order; so are the intervals "(]", "[)", "[]"; x \ge 3 is ["[)", 3, \infty]
    ["U", a, b]    a union, in any order
    ["=", name, value, ...]   x = 5, f(2) = 5; what else stands between them (2 + 3 = 5) must be equal to it

A comparison by value takes 3 + 4 for 7 and \int_0^1 x\,dx for 1/2: an agent that repeats the question would
be right. So `worked_out` asks where the reference is numbers for numbers (7, -0.5, 1/2, 3\frac{1}{2}, 20\%;
a fraction only if the reference is no integer: not 84/2 for 42), and otherwise allows sums, integrals,
limits, factorials and the like only if the reference has them. It cannot see the same expression in another
form, such as (x+1)^2 for x^2 + 2x + 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from math import gcd
from typing import Any

from silva.rewards.maths_text import canonical
from silva.rewards.maths_words import NOTHING, Quantity, harmless, leads, quantity

Tree = str | list[Any]
MAX_DIGITS = 300
MAX_ITEMS = 30
_NUMERAL = r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+"
_INTEGER = r"(?:\{\s*([-+]?[0-9]+)\s*\}|([0-9]))"
_NUMBER = re.compile(
    rf"([-+]?)\s*(?:({_NUMERAL})(?:\s*(?:\\times|\\cdot|\*)\s*(10\s*\^\s*\{{\s*[-+]?[0-9]{{1,3}}\s*\}}))?|"
    rf"(10\s*\^\s*\{{\s*[-+]?[0-9]{{1,3}}\s*\}})|(?:([0-9]+)\s*)?\\frac\s*{_INTEGER}\s*{_INTEGER}|"
    rf"(?:([0-9]+)\s+)?([0-9]+)\s*(?:/|\\div)\s*([0-9]+))"
)
_BASE = re.compile(
    r"\(?\s*([0-9][0-9A-Fa-f]*)\s*\)?\s*(?:_\s*\{?\s*\(?|(?:\\text\{\s*|\()+(?:in\s+)?base\s*\}?)\s*"
    r"([0-9]+)[\s)}]*"
)
_RATIO = re.compile(r"\d+(?:\s*:\s*\d+)+")
_TIME = re.compile(r"(\d{1,2})(?:\s*:\s*([0-5]\d))?\s*(?:([ap])\.?\s?m\.?)?", re.I)
_FIXED = re.compile(r"\d+(?:\s*-\s*\d+)+|\d+/\d+/\d+")  # dates, scores
_DAY = re.compile(
    r"(?:(\d\d?)(?:st|nd|rd|th)?(?: of)? )?([a-z]{3})[a-z]*\.?(?: (\d\d?)(?:st|nd|rd|th)?)?(?:,? (\d{4}))?"
)
_LEAD = re.compile(
    r"(?i)(?:(?:[a-z', ]*[a-z'] )?(?:is|are|was|be|falls) )?"
    r"(?:on |in |at |option |choice |(?:an?|the) (?=[a-z\d]{3}))*"
)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_RELATION = re.compile(r"\\(?:le|ge)(?![a-zA-Z])|<|>")
_SIGNS = {"\\le": "<=", "\\ge": ">="}
_VARIABLE = re.compile(r"[a-zA-Z]|\\[a-zA-Z]+")
_ARGUMENTS = re.compile(
    r"(?<=[a-zA-Z}'])\s*(?:\^\s*\{-1\}\s*)?(?:\([^()]*\)|\[[^\[\]]*\])|_\s*(?:\{(?:[^{}]|\{[^{}]*\})*\}|\w)|"
    r"\^\s*(?:\{(?:-1|\\prime|\*)\}|\*)"
)
_NAME = re.compile(
    r"(?:[a-zA-Z']|\\frac\{[a-zA-Z]{1,2}\}\{[a-zA-Z]{1,2}\}|\\(?!sqrt|ln|log|exp|frac|sum|int|prod|lim|pm|mp)[a-zA-Z]+|\\text\{[^{}]*\}|[|{}\s]|"
    r"(?<=[a-zA-Z}\s])[-+/](?=[\sa-zA-Z\\]))+|\(\s*(?:[a-zA-Z]|\\[a-z]+\s*)(?:\s*,\s*(?:[a-zA-Z]|\\[a-z]+\s*))+\s*\)"
)
_BUILT = re.compile(r"\\\{\s*[a-zA-Z]\s*(?:\\mid|:|\|)(.+)\\\}")
_UNDONE = re.compile(
    r"\\(?:i*int|oint|sum|prod|lim(?:sup|inf)?|[dt]?binom|partial|gcd|det|min|max|operatorname|[bp]?mod)"
    r"(?![a-zA-Z])|(?<!\\)!|\\frac\s*\{\s*d\b"
)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_CLOSED = {"(": ")", "[": "]"}


@dataclass(frozen=True)
class AnswerForm:
    """`text`: all of it, flat; `tree`: None if it commits to no value."""

    text: str
    tree: Tree | None
    quantity: Quantity = NOTHING
    digits: str | None = None  # of a number in another base; an answer need not repeat the base
    decimal: str | None = None  # 0,5 as a number, where the reference is one


def read(answer: str) -> AnswerForm:
    """What an answer or a reference says."""
    flat = canonical(answer)
    if based := _BASE.fullmatch(flat):
        digits = based[1].upper()
        text = f"{digits}_{{{based[2]}}}"
        return AnswerForm(text, digits if based[2] == "10" else text, digits=digits.lower())
    words = " ".join(_TEXT.sub(lambda found: f" {found[1].casefold()} ", flat).split()).replace(" ,", ",")
    lead = _LEAD.match(words)
    if lead and harmless(lead[0]):
        words = words[lead.end() :]
    if fixed := _fixed(words):
        return AnswerForm(fixed, None)
    text = _flat(words)
    said = _said(_pieces(flat))
    if said is None:
        return AnswerForm(text, None)
    maths, joined, unit = said
    if len(maths) > MAX_ITEMS:
        return AnswerForm(text, None)
    whole = (
        _listed([item for each in maths for item in _items(each)], joined)
        if len(maths) > 1
        else tree(maths[0])
    )
    decimal = flat.replace(",", ".") if re.fullmatch(r"-?\d+,\d+", flat) else None
    return AnswerForm(text, scaled(whole, unit.scale, unit.plus) if whole else None, unit, decimal=decimal)


def _fixed(flat: str) -> str | None:
    """A ratio in lowest terms, a time of day of 24 hours, a date as 4 jul 1999; None for everything else."""
    if (time := _TIME.fullmatch(flat)) and (time[2] or time[3]):
        hour = int(time[1]) % 12 + 12 * (time[3] in "pP") if time[3] else int(time[1])
        return f"{hour}:{time[2] or '00'}"
    if _RATIO.fullmatch(flat):
        parts = [int(part[:MAX_DIGITS]) for part in flat.split(":")]
        return ":".join(str(part // (gcd(*parts) or 1)) for part in parts)
    date = _DAY.fullmatch(flat.lower())
    if date and date[2] in _MONTHS and bool(date[1]) != bool(date[3]):
        return " ".join(filter(None, (date[1] or date[3], date[2], date[4])))
    return re.sub(r"\s", "", flat) if _FIXED.fullmatch(flat) else None


def number(text: str) -> Fraction | None:
    """The value of a number that is written out: 5, -0.5, 1/2, 3\\frac{1}{2}, 3 \\times 10^{5}."""
    found = _NUMBER.fullmatch(text.strip())
    if not found or len(text) > MAX_DIGITS:
        return None
    sign, numeral, times, power, whole, *rest = found.groups()
    top, bottom = rest[0] or rest[1] or rest[5], rest[2] or rest[3] or rest[6]
    if bottom:
        if not int(bottom):
            return None
        value = Fraction(int(whole or rest[4] or 0)) + Fraction(int(top), int(bottom))
    else:
        value = Fraction(numeral) if numeral else Fraction(1)
        if exponent := times or power:
            value *= Fraction(10) ** int(re.sub(r"[{}\s]", "", exponent.partition("^")[2]))
    return -value if sign == "-" else value


def is_decimal(text: str) -> bool:
    return bool(re.fullmatch(rf"[-+]?(?:{_NUMERAL})", text))


def is_broken(form: AnswerForm) -> bool:
    """Whether it is one number, and no integer."""
    value = number(form.tree) if isinstance(form.tree, str) else None
    return value is not None and value.denominator > 1


def worked_out(given: Tree, reference: Tree, percent: bool = False) -> bool:
    """Whether an answer has a form in which it may be compared with this reference."""
    said, right = list(leaves(given)), list(leaves(reference))
    if None in map(number, right):
        return _undone(said) <= _undone(right)
    broken = percent or any("." in each or "^{-" in each or "frac" in each for each in right)
    return all(number(each) is not None and ("frac" not in each or broken) for each in said)


def leaves(tree: Tree) -> Iterator[str]:
    """The expressions of a tree, without names and without what was worked out."""
    if isinstance(tree, str):
        yield tree
    else:
        for each in tree[2:3] if tree[0] == "=" else tree[1:]:
            yield from leaves(each)


def scaled(tree: Tree, factor: Fraction, plus: Fraction = Fraction(0)) -> Tree:
    """Each expression of a tree times a number."""
    if factor == 1 and not plus:
        return tree
    if isinstance(tree, str) and (value := number(tree)) is not None:
        return _written(value * factor + plus)
    return multiplied(tree, _written(factor), f"+{_written(plus)}" if plus else "")


def multiplied(tree: Tree, factor: str, plus: str = "") -> Tree:
    """Each expression of a tree times an expression."""
    if isinstance(tree, str):
        return f"{factor}\\cdot({tree}){plus}"
    first = 2 if tree[0] == "=" else 1
    return [*tree[:first], *(multiplied(each, factor, plus) for each in tree[first:])]


def tree(maths: str) -> Tree:
    """The tree of a formula without words."""
    maths = _bare(maths)
    if (value := number(maths)) is not None:
        if is_decimal(maths):
            return maths.removeprefix("+")
        return _written(value, fraction=bool(re.search(r"frac|/|div", maths)))
    for separator in (";", ","):
        parts = _split(maths, separator)
        if len(parts) > 1:
            return _listed([item for part in parts[:MAX_ITEMS] for item in _items(part)], "")
    if (parts := _split(maths, "\\in ")) and len(parts) == 2 and _VARIABLE.fullmatch(parts[0].strip()):
        return ["=", parts[0].strip(), tree(parts[1])]
    if inequality := _inequality(maths):
        return inequality
    parts = [part.strip() for part in _split(maths, "=")]
    if len(parts) > 1 and all(parts) and not _RELATION.search(maths):
        return _equation(maths, parts)
    if len(parts := _split(maths, "\\cup")) > 1:
        return ["U", *map(tree, parts)]
    if len(parts := _split(maths, "\\pm")) == 2:
        signs = ("+", "-") if parts[0].strip() else ("", "-")
        return ["{}", *(tree(f"{parts[0]}{sign}{parts[1]}") for sign in signs)]
    return _bracketed(maths)


def _said(pieces: list[tuple[str, bool]]) -> tuple[list[str], str, Quantity] | None:
    """The formulas of an answer, the word that joins them, and what the words after them do to them."""
    maths: list[str] = []
    found: list[Quantity] = []
    joined = ""
    open_ = mixed = False  # whether a formula may come next: beside the last one, or as a part of it
    for index, (piece, is_words) in enumerate(pieces):
        following = pieces[index + 1][0].lstrip() if index + 1 < len(pieces) else ""
        if not is_words:
            if maths and not open_ and piece.lstrip()[:1] not in (",", ";"):
                return None
            maths.append(piece if maths else piece.strip().lstrip("="))
            open_ = False
            continue
        words = piece.strip(" ,;")
        if not maths:
            if not leads(words, named="=" in following or "," in following):
                return None
            continue
        joint = re.search(r"(?:^|\s)(or|and)$", words)
        if joint and following:
            words, joined, open_ = words[: joint.start()], joint[1], True
        elif following and following[0] not in (",", ";"):
            mixed = open_ = True
        if words.strip() or not following:
            if (now := quantity(words)) is None:
                return None
            found.append(now)
    if not maths or open_:
        return None
    if mixed or len(set(found)) > 1:
        return None if joined == "or" else _mixed(maths, found)
    return maths, joined, found[0] if found else NOTHING


def _mixed(maths: list[str], units: list[Quantity]) -> tuple[list[str], str, Quantity] | None:
    """2 hours 30 minutes as 150 minutes: numbers in ever smaller units of a kind."""
    values = [number(_bare(each)) for each in maths]
    sizes = [unit.factor for unit in units]
    kinds = {(unit.unit, unit.scale, unit.plus, unit.percent) for unit in units}
    descend = all(one > other for one, other in pairwise(sizes))
    if None in values or len(values) != len(units) or len(kinds) > 1 or not units[0].unit or not descend:
        return None
    total = sum((value * size for value, size in zip(values, sizes, strict=True) if value), Fraction(0))
    return [_written(total / sizes[-1])], "", units[-1]


def _pieces(flat: str) -> list[tuple[str, bool]]:
    """Formulas and words in turn; words in the brackets of a formula belong to it."""
    pieces: list[tuple[str, bool]] = []
    start = 0
    for found in _TEXT.finditer(flat):
        before = flat[start : found.start()]
        if _depths(before)[-1]:
            continue
        if before.strip(" .,;:"):
            pieces.append((before, False))
        pieces.append((found[1] + (" ," if before.strip() == "," else ""), True))
        start = found.end()
    if flat[start:].strip(" .,;:*`"):
        pieces.append((flat[start:], False))
    return pieces


def _depths(text: str) -> list[int]:
    """How many brackets are open before each character, and after the last one."""
    return list(accumulate(((c in "({[") - (c in ")}]") for c in text), initial=0))


def _split(text: str, separator: str) -> list[str]:
    """At the separators outside all brackets; all of a text whose brackets do not close."""
    depths = _depths(text)
    places = [found.start() for found in re.finditer(re.escape(separator), text) if not depths[found.start()]]
    starts = [0, *(place + len(separator) for place in places)]
    parts = [text[start:end] for start, end in zip(starts, [*places, None], strict=True)]
    return [text] if depths[-1] else parts


def _bare(maths: str) -> str:
    maths = maths.strip(" \n,;:").removesuffix(".").strip()
    while maths.startswith("{") and maths.endswith("}") and _closes(maths):
        maths = maths[1:-1].strip()
    return maths


def _closes(text: str) -> bool:
    """Whether the bracket that opens it closes at its end alone."""
    _, *depths = _depths(text)
    return 0 in depths and depths.index(0) == len(text) - 1


def _items(maths: str) -> list[Tree]:
    """The values of a part of a list: 1 and -1 of \\pm 1, but one of a set."""
    found = tree(maths)
    is_list = isinstance(found, list) and found[0] == "{}" and not maths.lstrip().startswith("\\{")
    return list(found[1:]) if is_list else [found]


def _listed(items: list[Tree], joined: str) -> Tree:
    """Several values; those of one name are its values, and x < 1 or x > 2 is a union."""
    named = [each for each in items if isinstance(each, list) and each[0] == "="]
    names = {each[1] for each in named}
    one_name = len(names) == 1 and named[0] is items[0] and all(len(each) == 3 for each in named)
    if one_name and len(named) in (1, len(items)):
        values = [each[2] if isinstance(each, list) and each[0] == "=" else each for each in items]
        is_range = all(isinstance(each, list) and each[0] in ("()", "(]", "[)", "[]") for each in values)
        if is_range and len(named) == len(items):
            return "" if joined == "and" else ["=", *names, ["U", *values]]
        return ["=", *names, ["{}", *values]]
    return ["{=}" if names else "{}", *items]


def _equation(maths: str, parts: list[str]) -> Tree:
    bare = _ARGUMENTS.sub("", _ARGUMENTS.sub("", parts[0]))  # f(g(2)) has two
    if _NAME.fullmatch(bare) and re.match(r"[a-zA-Z|\\({]", parts[0]):
        name = re.sub(r"\s", "", parts[0])
        values = [each for each in parts[1:-1] if not _NAME.fullmatch(each)] + parts[-1:]
    elif not any(re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", part)) for part in parts):
        name, values = "", parts
    else:
        return maths
    return ["=", name, *map(tree, [values[-1], *values[:-1]])]


def _inequality(maths: str) -> Tree | None:
    """x > 2, 2 < x and 2 < x \\le 3 as intervals."""
    signs = [_SIGNS.get(found[0], found[0]) for found in _RELATION.finditer(maths)]
    parts = [part.strip() for part in _RELATION.split(maths)]
    if not 1 <= len(signs) <= 2 or len({sign[0] for sign in signs}) > 1 or not all(parts) or "=" in maths:
        return None
    if signs[0][0] == ">":
        signs, parts = [sign.replace(">", "<") for sign in reversed(signs)], parts[::-1]
    if len(signs) == 1:  # the other end is infinite
        first = bool(_VARIABLE.fullmatch(parts[0]))
        parts, signs = (
            (["-\\infty", *parts], ["<", *signs]) if first else ([*parts, "\\infty"], [*signs, "<"])
        )
    low, name, high = parts
    if not _VARIABLE.fullmatch(name) or name == "\\infty" or any(_depths(part)[-1] for part in parts):
        return None
    kind = ("[" if "=" in signs[0] else "(") + ("]" if "=" in signs[1] else ")")
    return ["=", name, [kind, tree(low), tree(high)]]


def _bracketed(maths: str) -> Tree:
    """A set, a point or an interval; otherwise an expression."""
    if built := _BUILT.fullmatch(maths):
        return tree(built[1])
    if maths.startswith("\\{") and maths.endswith("\\}") and _closes(maths[1:-2] + "}"):
        items = [item for part in _split(maths[2:-2], ",") for item in _items(part)]
        return ["{}", *items]
    if maths[:1] in _CLOSED and maths[-1:] in (")", "]") and _closes(maths):
        parts = _split(maths[1:-1], ",")
        if len(parts) > 1:
            return [maths[0] + maths[-1], *map(tree, parts)]
        if maths[0] == "(" and maths[-1] == ")" and maths[1:-1].strip():
            return tree(maths[1:-1])
    return maths


def _undone(expressions: list[str]) -> set[str]:
    return {sign for each in expressions for sign in _UNDONE.findall(each)}


def _written(value: Fraction, fraction: bool = False) -> str:
    """A number as a text that `number` reads; a decimal where it can be one."""
    if value.denominator == 1 and not fraction:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _flat(text: str) -> str:
    """As a text whose dress does not matter: spaces (not between numbers), case of words, dots of a.m."""
    text = re.sub(r"(?<![\\a-zA-Z])(?:[a-zA-Z]{3,}|[AP]\.?M\b)", lambda found: found[0].casefold(), text)
    text = re.sub(r"(?<=[a-zA-Z])\.|[$`]", "", text)
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text.strip())
    choice = re.fullmatch(r"\(?([a-zA-Z])\)?", text)
    return choice[1] if choice else text
