"""Filters: the same rows as Python finds, and errors that say where."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.errors import ConfigError
from silva.viewer.expression import MAX_DEPTH, MAX_LENGTH, Kind, parse, sql

KINDS: dict[str, Kind] = {"a": "number", "b": "number", "s": "text", "u": "text", "f": "flag"}
NAMED: dict[str, Kind] = {"m": "number"}
SQL = {name: name for name in KINDS} | {"m": "map_extract_value(m, ?)"}
TEXTS = [
    "",
    "time",
    "timeout in a tool",
    'a "quoted" \\ word',
    "% _ ' ; drop table rows; --",
    "ünï\ncode",
    None,
]
NUMBERS = [-2.5, 0.0, 0.25, 3.0, 1e9, None]
ROWS: list[dict[str, Any]] = [
    {"a": NUMBERS[i % 6], "b": NUMBERS[(i * 5 + i // 6) % 6], "s": TEXTS[i % 7], "u": TEXTS[(3 * i + 1) % 7],
     "f": (True, False, None)[i % 3], "m": {"x": float(i), "y": -1.0} if i % 2 else {"x": 2.0}}
    for i in range(42)
]  # fmt: skip
ERRORS = [
    ("rewrd < 1", "character 1: no column rewrd"),
    ("a < 1 and bb > 2", "character 11: no column bb; did you mean b?"),
    ("a <", "character 4: got the end, expected a column, a number or a text in quotes"),
    ("a < 'x'", "character 5: got a text ('x'), expected a number"),
    ("s < 3", "character 5: got a number (3), expected a text"),
    ("f < true", "character 3: got <, expected == or !="),
    ("a", "character 1: got a number (a) alone, expected a comparison"),
    ("(a < 1", "character 7: got the end, expected )"),
    ("a < 1 b", "character 7: got b, expected and, or, or the end"),
    ("a = 1", "character 3: got '= 1', expected"),
    ('"x in s', "character 1: got '\"x in s': a text that is not closed"),
    ("a in 3", "character 6: got 3, expected a list"),
    ("a in (1, 'x')", "character 10: got a text, expected a number"),
    ("s is 3", "character 6: got 3, expected none"),
    ("m < 3", "character 1: no column m"),
    ("a < 1; drop table rows", "character 6: got '; drop table'"),
    ("(" * (MAX_DEPTH + 1) + "f", f"at most {MAX_DEPTH} parentheses"),
    ("f " * MAX_LENGTH, f"expected at most {MAX_LENGTH}"),
]  # fmt: skip
"""Filters that are wrong, and what is said of them."""
Found = tuple[str, Callable[[dict[str, Any]], bool]]
"""A filter as text, and what it means."""


@pytest.fixture(scope="module")
def base() -> duckdb.DuckDBPyConnection:
    base = duckdb.connect(":memory:")
    base.execute(
        "CREATE TABLE t (id INT, a DOUBLE, b DOUBLE, s VARCHAR, u VARCHAR, f BOOL, m MAP(VARCHAR, DOUBLE))"
    )
    for i, row in enumerate(ROWS):
        base.execute(
            "INSERT INTO t VALUES (?, ?, ?, ?, ?, ?, map(?, ?))",
            [i, *(row[n] for n in "absuf"), [*row["m"]], [*row["m"].values()]],
        )
    return base


def found(base: duckdb.DuckDBPyConnection, text: str) -> list[int]:
    where, bound = sql(parse(text, KINDS, NAMED), SQL)
    return sorted(each[0] for each in base.execute(f"SELECT id FROM t WHERE {where}", bound).fetchall())


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
             "==": operator.eq, "!=": operator.ne}  # fmt: skip


def of(name: str) -> Callable[[dict[str, Any]], Any]:
    column, _, key = name.partition(".")
    return lambda row: row[column].get(key) if key else row[column]


@st.composite
def conditions(draw: st.DrawFn) -> Found:
    kind = draw(st.sampled_from(["number", "text", "flag", "in", "among", "none", "chain"]))
    number, text = draw(st.sampled_from(["a", "b", "m.x", "m.y"])), draw(st.sampled_from("su"))
    value = draw(st.sampled_from([n for n in NUMBERS if n is not None]))
    said = draw(st.sampled_from([t for t in TEXTS if t is not None]))
    op = draw(st.sampled_from([*OPERATORS]))

    def holds(left: Any, right: Any) -> bool:
        return left is not None and right is not None and OPERATORS[op](left, right)

    match kind:
        case "number":
            return f"{number} {op} {value!r}", lambda row: holds(of(number)(row), value)
        case "chain":
            return (
                f"-3 <= {number} {op} b",
                lambda row: (
                    of(number)(row) is not None and of(number)(row) >= -3 and holds(of(number)(row), row["b"])
                ),
            )
        case "text":
            return f"{text} == {quoted(said)}", lambda row: row[text] == said
        case "in":
            return f"{quoted(said)} in {text}", lambda row: row[text] is not None and said in row[text]
        case "among":
            return f"{number} in (0, {value!r})", lambda row: of(number)(row) in (0, value)
        case "none":
            return f"{text} is not none", lambda row: row[text] is not None
        case _:
            return "f", lambda row: row["f"] is True


def joined(inner: st.SearchStrategy[Found]) -> st.SearchStrategy[Found]:
    pairs = st.tuples(inner, inner)
    return (
        pairs.map(lambda p: (f"({p[0][0]} and {p[1][0]})", lambda row: p[0][1](row) and p[1][1](row)))
        | pairs.map(lambda p: (f"({p[0][0]} or {p[1][0]})", lambda row: p[0][1](row) or p[1][1](row)))
        | inner.map(lambda p: (f"not ({p[0]})", lambda row: not p[1](row)))
    )


filters = st.recursive(conditions(), joined, max_leaves=6)


@settings(max_examples=300)
@given(wanted=filters)
def test_a_filter_finds_what_python_finds(base: duckdb.DuckDBPyConnection, wanted: Found) -> None:
    text, means = wanted
    assert found(base, text) == [i for i, row in enumerate(ROWS) if means(row)], text


def test_and_binds_more_than_or_and_not_most(base: duckdb.DuckDBPyConnection) -> None:
    assert found(base, "a > 1 or a < 0 and f") == found(base, "(a > 1) or ((a < 0) and f)")
    assert found(base, "not f and a > 1") == found(base, "(not f) and a > 1")


def test_a_comparison_with_a_missing_value_is_false_and_its_not_is_true(
    base: duckdb.DuckDBPyConnection,
) -> None:
    missing = {i for i, row in enumerate(ROWS) if row["a"] is None}
    assert missing.isdisjoint(found(base, "a < 1 or a >= 1"))
    assert missing <= set(found(base, "not a < 1"))


@pytest.mark.parametrize(("text", "said"), ERRORS)
def test_an_error_says_where_and_what(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text, KINDS, NAMED)
    assert said in str(error.value)


@given(text=st.text(max_size=60) | st.text("ab<>=!()\"' andortifsum.,-1e\\", max_size=40))
def test_any_text_is_a_filter_or_an_error_and_never_part_of_the_sql(text: str) -> None:
    try:
        tree = parse(text, KINDS, NAMED)
    except ConfigError:
        return
    if tree is None:
        assert not text.strip()
        return
    where, bound = sql(tree, SQL)
    assert set(where) <= set("abcdefilmnopqrstuvxyz_ABDEILNORSTU?,()<>= ")
    assert where.count("?") == len(bound)
