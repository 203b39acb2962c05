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
from typing import Any

from silva.rewards.maths_text import canonical
from silva.rewards.maths_words import NOTHING, Quantity, leads, quantity

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
_FIXED = re.compile(  # dates, times, ratios, scores
    r"\d+(?:\s*:\s*\d+)+(?:\s*\\text\{[^{}]*\}|\s*[ap]\.?m\.?)?|\d+(?:\s*-\s*\d+)+|\d+/\d+/\d+|\d+\s*[ap]\.?m\.?",
    re.I,
)
_RELATION = re.compile(r"\\(?:le|ge)(?![a-zA-Z])|<|>")
_SIGNS = {"\\le": "<=", "\\ge": ">="}
_VARIABLE = re.compile(r"[a-zA-Z]|\\[a-zA-Z]+")
_ARGUMENTS = re.compile(
    r"(?<=[a-zA-Z}'])\s*(?:\^\s*\{-1\}\s*)?(?:\([^()]*\)|\[[^\[\]]*\])|_\s*(?:\{(?:[^{}]|\{[^{}]*\})*\}|\w)|"
    r"\^\s*(?:\{(?:-1|\\prime|\*)\}|\*)"
)
_NAME = re.compile(
    r"(?:[a-zA-Z']|\\frac\{[a-zA-Z]\}\{[a-zA-Z]\}|\\(?!sqrt|ln|log|exp|frac|sum|int|prod|lim|pm|mp)[a-zA-Z]+|\\text\{[^{}]*\}|[|{}\s]|"
    r"(?<=[a-zA-Z}\s])[-+/](?=[\sa-zA-Z\\]))+|\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])+\s*\)"
)
_BUILT = re.compile(r"\\\{\s*[a-zA-Z]\s*(?:\\mid|:|\|)(.+)\\\}")
_UNDONE = re.compile(
    r"\\(?:i*int|oint|sum|prod|lim(?:sup|inf)?|[dt]?binom|partial|gcd|det|min|max|operatorname|[bp]?mod)"
    r"(?![a-zA-Z])|(?<!\\)!|\\frac\s*\{\s*d\b"
)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_CLOSED = {"(": ")", "[": "]"}


@dataclass(frozen=True)
class Form:
    """`text`: all of it, flat; `tree`: None if it commits to no value."""

    text: str
    tree: Tree | None
    quantity: Quantity = NOTHING


def read(answer: str) -> Form:
    """What an answer or a reference says."""
    flat = canonical(answer)
    text = _flat(flat)
    if based := _BASE.fullmatch(flat):
        return Form(text, based[1] if based[2] == "10" else f"{based[1].upper()}_{{{based[2]}}}")
    if _FIXED.fullmatch(flat):
        return Form(text, None)
    said = _said(_pieces(flat))
    if said is None:
        return Form(text, None)
    maths, joined, words = said
    if len(maths) > MAX_ITEMS:
        return Form(text, None)
    whole = (
        _listed([item for each in maths for item in _items(each)], joined)
        if len(maths) > 1
        else tree(maths[0])
    )
    return Form(text, scaled(whole, words.scale, words.plus), words) if whole else Form(text, None)


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


def worked_out(given: Tree, reference: Form) -> bool:
    """Whether an answer has a form in which it may be compared with this reference."""
    assert reference.tree is not None
    said, right = list(leaves(given)), list(leaves(reference.tree))
    values = [number(each) for each in right]
    if None in values:
        return _undone(said) <= _undone(right)
    broken = reference.quantity.percent or any(
        "." in each or "^{-" in each or "frac" in each for each in right
    )
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
    if isinstance(tree, list):
        first = 2 if tree[0] == "=" else 1
        return [*tree[:first], *(scaled(each, factor, plus) for each in tree[first:])]
    value = number(tree)
    if value is not None:
        return _written(value * factor + plus)
    return f"{_written(factor)}\\cdot({tree})" + (f"+{_written(plus)}" if plus else "")


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
    found: Quantity | None = None
    joined = ""
    open_ = True  # whether a formula may come next
    for index, (piece, is_words) in enumerate(pieces):
        if not is_words:
            if not open_ and piece.lstrip()[:1] not in (",", ";"):
                return None
            maths.append(piece)
            open_ = False
            continue
        words = piece.strip(" ,;")
        if not maths:
            following = pieces[index + 1][0] if index + 1 < len(pieces) else ""
            if not leads(words, named="=" in following or "," in following):
                return None
            continue
        unit, joint = words, re.search(r"(?:^|\s)(or|and)$", words)
        following = pieces[index + 1][0].lstrip() if index + 1 < len(pieces) else ","
        if joint and index + 1 < len(pieces):
            unit, joined, open_ = words[: joint.start()], joint[1], True
        elif following[:1] not in (",", ";"):
            return None
        if unit.strip() or index + 1 == len(pieces):
            now = quantity(unit)
            if now is None or (found is not None and now != found):
                return None
            found = now
    maths = [each.strip().lstrip("=") if index == 0 else each for index, each in enumerate(maths)]
    return (maths, joined, found or NOTHING) if maths and not open_ else None


def _pieces(flat: str) -> list[tuple[str, bool]]:
    """Formulas and words in turn; words in the brackets of a formula belong to it."""
    pieces: list[tuple[str, bool]] = []
    start = 0
    for found in _TEXT.finditer(flat):
        before = flat[start : found.start()]
        if _depth(before):
            continue
        if before.strip(" .,;:"):
            pieces.append((before, False))
        pieces.append((found[1] + (" ," if before.strip() == "," else ""), True))
        start = found.end()
    if flat[start:].strip(" .,;:*`"):
        pieces.append((flat[start:], False))
    return pieces


def _depth(text: str) -> int:
    text = text.replace("\\{", "(").replace("\\}", ")")
    return sum(text.count(opening) for opening in "({[") - sum(text.count(closing) for closing in ")}]")


def _split(text: str, separator: str) -> list[str]:
    """At the separators outside all brackets."""
    parts, depth, start, index = [], 0, 0, 0
    while index < len(text):
        if depth == 0 and text.startswith(separator, index):
            parts.append(text[start:index])
            index = start = index + len(separator)
            continue
        character = text[index]
        depth += (character in "({[") - (character in ")}]")
        index += 1
    return [*parts, text[start:]] if depth == 0 else [text]


def _bare(maths: str) -> str:
    maths = maths.strip(" \n,;:").removesuffix(".").strip()
    while maths.startswith("{") and maths.endswith("}") and _closes(maths):
        maths = maths[1:-1].strip()
    return maths


def _closes(text: str) -> bool:
    """Whether the bracket that opens it closes at its end alone."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character in "({[") - (character in ")}]")
        if depth == 0:
            return index == len(text) - 1
    return False


def _items(maths: str) -> list[Tree]:
    """The values of a part of a list: 1 and -1 of \\pm 1, but one of a set."""
    found = tree(maths)
    is_list = isinstance(found, list) and found[0] == "{}" and not maths.lstrip().startswith("\\{")
    return list(found[1:]) if is_list else [found]


def _listed(items: list[Tree], joined: str) -> Tree:
    """Several values; those of one name are its values, and x < 1 or x > 2 is a union."""
    names = {each[1] for each in items if each[0] == "="}
    values = [each[2] if each[0] == "=" else each for each in items]
    plain = all(len(each) == 3 for each in items if each[0] == "=")
    if len(names) == 1 and items[0][0] == "=" and plain:
        if all(isinstance(each, list) and each[0] in ("()", "(]", "[)", "[]") for each in values):
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
    if not _VARIABLE.fullmatch(name) or name == "\\infty" or any(map(_depth, parts)):
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
    text = _TEXT.sub(lambda found: f" {found[1].casefold()} ", text)
    text = re.sub(r"(?<![\\a-zA-Z])(?:[a-zA-Z]{3,}|[AP]\.?M\b)", lambda found: found[0].casefold(), text)
    text = re.sub(r"(?<=[a-zA-Z])\.|[$`]", "", text)
    text = re.sub(r"^\s*(?:it is\s+)?(?:an?|the)\s+(?=[a-z]{4})", "", text)
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text.strip())
    choice = re.fullmatch(r"\(?([a-zA-Z])\)?", text)
    return choice[1] if choice else text
