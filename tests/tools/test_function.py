"""Functions as tools: schema, argument errors, limits."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import threading
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from silva.errors import ConfigError, Escaped, RecordError
from silva.tools.function import ToolError, ToolException, ToolStuck, tool


def search(
    query: Annotated[str, Field(description="What to look for.")],
    limit: int = 3,
    title: bool = False,
    order: Literal["new", "old"] = "new",
) -> list[str]:
    """Search the archive.

    More about it.
    """
    return [f"{query} {number} {title} {order}" for number in range(limit)]


def run(function, arguments: dict, **keys) -> str:
    """The result of one call; a function without a docstring is given one."""
    function.__doc__ = function.__doc__ or "A function."
    return asyncio.run(tool(function, **keys)(arguments))


def test_the_schema_comes_from_names_hints_and_docstring() -> None:
    spec = tool(search).spec
    assert (spec.name, spec.description) == ("search", "Search the archive.\n\nMore about it.")
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for."},
            "limit": {"type": "integer"},
            "title": {"type": "boolean"},
            "order": {"type": "string", "enum": ["new", "old"]},
        },
        "required": ["query"],
        "additionalProperties": False,
    }
    assert tool(search, name="find").spec.name == "find"


def no_docstring(word: str) -> str:
    return word


def no_hint(word, times: int = 2):
    """Repeat a word."""


def no_fixed_name(*words: str):
    """Join words."""


def unknown_hint(word: Nowhere) -> str:  # type: ignore[name-defined] # noqa: F821
    """Say a word."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "tool no_docstring: it has no docstring"),
        (lambda: 1, "tool <lambda>: it has no docstring"),
        (no_hint, "tool no_hint: parameter word has no type hint; expected one, such as word: str"),
        (no_fixed_name, r"tool no_fixed_name: parameter \*words.* has no fixed name"),
        (unknown_hint, "tool unknown_hint: its type hints cannot be read: name 'Nowhere' is not defined"),
        (
            functools.partial(search, "a"),
            r"functools\.partial.*: it has no __name__; give tool\(\.\.\., name=",
        ),
    ],
)
def test_a_function_that_says_too_little_is_refused(function, message: str) -> None:
    for kind in (ConfigError, TypeError):
        with pytest.raises(kind, match=message):
            tool(function)


def test_results_become_text() -> None:
    assert run(search, {"query": "a", "limit": 1}) == '["a 0 False new"]'
    assert run(lambda: None, {}) == ""
    assert run(lambda: "plain", {}) == "plain"
    assert run(lambda: {"größe": 1.5}, {}) == '{"größe": 1.5}'


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "search: argument query: Field required"),
        ({"query": "a", "limit": "many"}, 'argument limit: Input should be a valid integer.*got "many"'),
        ({"query": "a", "order": "up"}, "argument order: Input should be 'new' or 'old'.*got \"up\""),
        ({"query": "a", "depth": 2}, "argument depth: Extra inputs are not permitted.*got 2"),
        ({"query": ["x" * 500]}, "argument query: .* valid string .got .* of 504 characters shown"),
    ],
)
def test_bad_arguments_are_explained(arguments: dict, words: str) -> None:
    with pytest.raises(ToolError, match=f"(?s){words}"):
        run(search, arguments)


def test_a_number_written_as_text_will_do() -> None:
    assert run(search, {"query": "a", "limit": "1"}) == '["a 0 False new"]'


def test_calls_that_never_return_are_refused_at_last(monkeypatch) -> None:
    monkeypatch.setattr("silva.tools.function.MAX_GIVEN_UP", 2)
    release = threading.Event()

    def wait() -> bool:
        """Wait to be released."""
        return release.wait(10)

    waits = tool(wait)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waits({}), 0.02)

    async def story() -> str:
        await give_up()
        await give_up()
        with pytest.raises(ToolStuck, match="tool wait: 2 calls were given up and still run"):
            await waits({})
        release.set()
        for thread in waits._given_up:
            thread.join(5)
        return await waits({})

    assert asyncio.run(story()) == "true"


def test_functions_run_beside_the_event_loop() -> None:
    async def both() -> list[str]:
        meeting = threading.Barrier(2, timeout=5)

        def meet() -> bool:
            """Wait for another call."""
            return meeting.wait() >= 0

        met = tool(meet)
        return await asyncio.gather(met({}), met({}))

    assert asyncio.run(both()) == ["true", "true"]


class Panic(BaseException):
    pass


RAISED: dict[str, tuple[BaseException, type, str]] = {
    "key": (KeyError("x"), ToolException, "KeyError: 'x'"),
    "value": (ValueError("not a date"), ToolException, "ValueError: not a date"),
    "next": (StopIteration(), ToolException, "RuntimeError: coroutine raised StopIteration"),
    "exit": (SystemExit(3), Escaped, "SystemExit: 3"),
    "interrupt": (KeyboardInterrupt(), Escaped, "KeyboardInterrupt"),
    "cancelled": (asyncio.CancelledError(), Escaped, "CancelledError"),
    "panic": (Panic("of a library in Rust"), Escaped, "Panic: of a library in Rust"),
    "tool": (ToolError("no such page"), ToolError, "no such page"),
    "name": (NameError("name 'y' is not defined"), NameError, "'y' is not defined"),
    "import": (ImportError("no module"), ImportError, "no module"),
    "memory": (MemoryError("full"), MemoryError, "full"),
    "time": (TimeoutError("server"), TimeoutError, "server"),  # the function's own, not the limit
    "lost": (ConnectionError("lost"), ConnectionError, "lost"),
    "wrapped": (RuntimeError("request failed"), RuntimeError, "request failed"),
    "silva": (RecordError("broken"), RecordError, "broken"),
}
"""What a function raises, and what becomes of it: an answer (`ToolException`), or a fault."""
RAISED["wrapped"][0].__cause__ = ConnectionResetError("peer")


def fails(kind: str) -> None:
    """Raise what `kind` says."""
    raise RAISED[kind][0]


async def fails_async(kind: str) -> None:
    """Raise what `kind` says."""
    fails(kind)


@pytest.mark.parametrize("function", [fails, fails_async])
@pytest.mark.parametrize("kind", RAISED)
def test_what_a_function_raises_is_an_answer_or_a_fault(function, kind: str) -> None:
    if kind == "interrupt" and function is fails_async:
        pytest.skip("in the main thread it is Ctrl-C")
    _, error, words = RAISED[kind]
    with pytest.raises(error, match=re.escape(words)) as raised:
        run(function, {"kind": kind})
    assert type(raised.value) is error


def test_a_result_that_is_no_json_is_a_fault() -> None:
    with pytest.raises(TypeError, match="tool <lambda> returned set: expected text or what JSON can hold"):
        run(lambda: {1, 2}, {})


def test_the_traceback_is_logged_once_for_each_type(caplog) -> None:
    async def calls(*kinds: str) -> None:
        wrapped = tool(fails)
        for kind in kinds:
            with pytest.raises(ToolException):
                await wrapped({"kind": kind})

    with caplog.at_level(logging.WARNING):
        asyncio.run(calls("key", "key", "value", "key", "value"))
    assert [record.exc_info[0] for record in caplog.records] == [KeyError, ValueError]
    assert "tool fails raised on {'kind': 'key'}" in caplog.text and "in fails\n" in caplog.text


@pytest.mark.parametrize(
    "value", [float("inf"), float("nan"), [1.0, float("-inf")], {"a": {"b": float("nan")}}]
)
def test_numbers_that_json_cannot_hold_are_bad_arguments(value: object) -> None:
    def anything(value: Any, factor: float = 1.0) -> str:
        """Show a value."""
        return repr(value)

    with pytest.raises(ToolError, match="anything: argument value: expected finite numbers"):
        run(anything, {"value": value})
    for text in ("inf", "nan", "1e999"):
        with pytest.raises(ToolError, match="argument factor: Input should be a finite number"):
            run(anything, {"value": 1, "factor": text})
    assert run(anything, {"value": [1.5, 10**400], "factor": "2"}) == repr([1.5, 10**400])
