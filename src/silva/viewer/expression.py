"""The language of filters: `reward < 0.3 and tool_calls > 2 and "timeout" in text`.

    any   := all ("or" all)*
    all   := one ("and" one)*
    one   := "not" one | (any) | test
    test  := value (op value)+ | value ["not"] "in" list | value "is" ["not"] "none" | a column of flags
    op    := < <= > >= == !=
    list  := (value, value, ...) | a column of text
    value := a number | "a text" | true | false | a column

A text becomes a tree (`parse`), and the tree a condition of SQL with bound parameters (`sql`): nothing of
what was typed is ever part of the SQL. A comparison with a value that is missing is false, so that its `not`
is true. An error says at which character it is. Not here: what the columns are in the files (query.py).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from silva.errors import ConfigError

MAX_LENGTH = 2000  # characters
MAX_DEPTH = 40  # of parentheses and `not`

Kind = Literal["number", "text", "flag"]
_SQL_OF = {"==": "=", "!=": "<>"}  # the others are the same
_TOKEN = re.compile(
    r"""\s*(?:(?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    |(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<op><=|>=|==|!=|<|>)
    |(?P<mark>[(),])
    |(?P<name>[A-Za-z_][A-Za-z_0-9]*(?:\.[A-Za-z_][A-Za-z_0-9]*)?))""",
    re.VERBOSE | re.DOTALL,
)
_WORDS = ("and", "or", "not", "in", "is", "none", "true", "false")
_ESCAPES = {"n": "\n", "t": "\t"}


@dataclass(frozen=True, slots=True)
class Column:
    """`key`: of a column that holds named numbers, such as `rewards.success`."""

    name: str
    kind: Kind
    key: str = ""


@dataclass(frozen=True, slots=True)
class Value:
    value: float | str | bool
    kind: Kind


Operand = Column | Value


@dataclass(frozen=True, slots=True)
class Compare:
    left: Operand
    op: str
    right: Operand


@dataclass(frozen=True, slots=True)
class Contains:
    """`needle` is a part of `text`."""

    needle: Operand
    text: Operand


@dataclass(frozen=True, slots=True)
class OneOf:
    value: Operand
    among: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Missing:
    value: Operand


@dataclass(frozen=True, slots=True)
class Is:
    """A flag alone."""

    value: Operand


@dataclass(frozen=True, slots=True)
class Not:
    inner: Any


@dataclass(frozen=True, slots=True)
class Both:
    """All of the conditions, or with `any` one of them."""

    inner: tuple[Any, ...]
    any: bool = False


def parse(text: str, columns: Mapping[str, Kind], named: Mapping[str, Kind] = {}) -> Any:
    """The tree of a filter; None for an empty one.

    Args:
        columns: the kind of each column.
        named: columns that hold values by name, with the kind of a value.

    Raises:
        ConfigError: it says what is wrong, and at which character (from 1).
    """
    if len(text) > MAX_LENGTH:
        raise ConfigError(f"filter: got {len(text)} characters, expected at most {MAX_LENGTH}")
    return _Parser(text, columns, named).whole() if text.strip() else None


def sql(node: Any, columns: Mapping[str, str]) -> tuple[str, list[Any]]:
    """A condition with question marks, and what is bound to them.

    Args:
        columns: SQL of each column; of one with values by name, with a question mark for the name.
    """
    match node:
        case Compare(left, op, right):
            return _joined(left, _SQL_OF.get(op, op), right, columns)
        case Contains(needle, text):
            (a, first), (b, second) = _operand(needle, columns), _operand(text, columns)
            return f"contains({b}, {a})", [*second, *first]
        case OneOf(value, among):
            parts = [_operand(each, columns) for each in (value, *among)]
            sides = ", ".join(part for part, _ in parts[1:])
            return f"{parts[0][0]} IN ({sides})", [each for _, bound in parts for each in bound]
        case Missing(value):
            part, bound = _operand(value, columns)
            return f"{part} IS NULL", bound
        case Is(value):
            return _operand(value, columns)
        case Not(inner):
            part, bound = sql(inner, columns)
            return f"NOT coalesce({part}, false)", bound
        case Both(inner, any_):
            parts = [sql(each, columns) for each in inner]
            word = " OR " if any_ else " AND "
            return f"({word.join(part for part, _ in parts)})", [each for _, bound in parts for each in bound]
    raise TypeError(f"a filter has no node {node!r}")


def _joined(left: Operand, op: str, right: Operand, columns: Mapping[str, str]) -> tuple[str, list[Any]]:
    (a, first), (b, second) = _operand(left, columns), _operand(right, columns)
    return f"{a} {op} {b}", [*first, *second]


def _operand(value: Operand, columns: Mapping[str, str]) -> tuple[str, list[Any]]:
    if isinstance(value, Value):
        return "?", [value.value]
    return columns[value.name], [value.key] if value.key else []


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int  # the character, from 1


class _Parser:
    def __init__(self, text: str, columns: Mapping[str, Kind], named: Mapping[str, Kind]) -> None:
        self._columns, self._named = columns, named
        self._tokens, self._place, self._depth = _tokens(text), 0, 0

    def whole(self) -> Any:
        found = self._any()
        if self._now.kind != "end":
            self._fail("and, or, or the end")
        return found

    @property
    def _now(self) -> _Token:
        return self._tokens[self._place]

    def _take(self, *texts: str) -> bool:
        """Go past the token if it is one of these words or marks."""
        if self._now.text in texts and self._now.kind in ("word", "mark", "op"):
            self._place += 1
            return True
        return False

    def _fail(self, expected: str) -> Any:
        token = self._now
        got = "the end" if token.kind == "end" else token.text
        raise ConfigError(f"filter: at character {token.at}: got {got}, expected {expected}")

    def _any(self) -> Any:
        return self._several("or", self._all)

    def _all(self) -> Any:
        return self._several("and", self._one)

    def _several(self, word: str, part: Callable[[], Any]) -> Any:
        found = [part()]
        while self._take(word):
            found.append(part())
        return found[0] if len(found) == 1 else Both(tuple(found), word == "or")

    def _one(self) -> Any:
        self._deeper()
        try:
            if self._take("not"):
                return Not(self._one())
            if self._take("("):
                inner = self._any()
                if not self._take(")"):
                    self._fail(")")
                return inner
            return self._test()
        finally:
            self._depth -= 1

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"at most {MAX_DEPTH} parentheses and nots in one another")

    def _test(self) -> Any:
        start = self._now
        left = self._value()
        if self._now.kind == "op":
            return self._comparisons(left)
        if self._take("is"):
            negative = self._take("not")
            if not self._take("none"):
                self._fail("none")
            return Not(Missing(left)) if negative else Missing(left)
        if self._take("not"):
            if not self._take("in"):
                self._fail("in")
            return Not(self._among(left))
        if self._take("in"):
            return self._among(left)
        if left.kind != "flag":
            what = f"a {left.kind} ({start.text})"
            raise ConfigError(f"filter: at character {start.at}: got {what} alone, expected a comparison")
        return Is(left)

    def _comparisons(self, left: Operand) -> Any:
        """`0 < reward < 1` is two of them."""
        found = []
        while self._now.kind == "op":
            op = self._now
            self._place += 1
            at = self._now
            right = self._value()
            if left.kind != right.kind:
                raise ConfigError(
                    f"filter: at character {at.at}: got a {right.kind} ({at.text}), expected a {left.kind}"
                )
            if left.kind == "flag" and op.text not in ("==", "!="):
                raise ConfigError(f"filter: at character {op.at}: got {op.text}, expected == or !=")
            found.append(Compare(left, op.text, right))
            left = right
        return found[0] if len(found) == 1 else Both(tuple(found))

    def _among(self, left: Operand) -> Any:
        at = self._now
        if self._take("("):
            among = [self._same(left)]
            while self._take(","):
                among.append(self._same(left))
            if not self._take(")"):
                self._fail(", or )")
            return OneOf(left, tuple(among))
        text = self._value()
        if left.kind != "text" or text.kind != "text":
            raise ConfigError(
                f"filter: at character {at.at}: got {at.text}, expected a list such as (1, 2), "
                "or for a text a text"
            )
        return Contains(left, text)

    def _same(self, as_: Operand) -> Operand:
        at = self._now
        found = self._value()
        if found.kind != as_.kind:
            raise ConfigError(f"filter: at character {at.at}: got a {found.kind}, expected a {as_.kind}")
        return found

    def _value(self) -> Operand:
        token = self._now
        self._place += token.kind != "end"
        match token.kind:
            case "number":
                return Value(float(token.text), "number")
            case "text":
                return Value(_unquoted(token.text), "text")
            case "word" if token.text in ("true", "false"):
                return Value(token.text == "true", "flag")
            case "name":
                return self._column(token)
        self._place -= token.kind != "end"
        return self._fail("a column, a number or a text in quotes")  # type: ignore[no-any-return]

    def _column(self, token: _Token) -> Column:
        name, _, key = token.text.partition(".")
        if key and name in self._named:
            return Column(name, self._named[name], key)
        if not key and name in self._columns:
            return Column(name, self._columns[name])
        known = [*self._columns, *(f"{each}.NAME" for each in self._named)]
        near = difflib.get_close_matches(token.text, known, 1)
        meant = f"; did you mean {near[0]}?" if near else f", expected one of {', '.join(known)}"
        raise ConfigError(f"filter: at character {token.at}: no column {token.text}{meant}")


def _tokens(text: str) -> list[_Token]:
    found, at, end = [], 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        start = at + len(text[at:]) - len(text[at:].lstrip())
        if match is None:
            shown = text[start : start + 12]
            closed = ": a text that is not closed" if shown[0] in "\"'" else ""
            raise ConfigError(
                f"filter: at character {start + 1}: got {shown!r}{closed}, expected a column, a number, a "
                "text in quotes, or one of < <= > >= == != ( )"
            )
        kind = match.lastgroup or ""
        word = match[kind]
        if kind == "name" and word.lower() in _WORDS:
            kind, word = "word", word.lower()
        found.append(_Token(kind, word, start + 1))
        at = match.end()
    return [*found, _Token("end", "", len(text) + 1)]


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), text[1:-1], flags=re.DOTALL)
