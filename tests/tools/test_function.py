"""Functions as tools: schema, argument errors, limits."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Annotated, Literal

import pytest
from pydantic import Field

from silva.tools.function import ToolError, cut, tool


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
    with pytest.raises(TypeError, match=r"parameter \*words has no fixed name"):
        tool(lambda *words: "")


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
        (
            {"query": ["x" * 500]},
            "argument query: .* valid string .got .* of 504 characters shown",
        ),
    ],
)
def test_bad_arguments_are_explained(arguments: dict, words: str) -> None:
    with pytest.raises(ToolError, match=f"(?s){words}"):
        run(search, arguments)


def test_a_number_written_as_text_will_do() -> None:
    assert run(search, {"query": "a", "limit": "1"}) == '["a 0 False new"]'


def test_long_results_are_cut_and_say_so() -> None:
    assert run(lambda: "x" * 12, {}, max_chars=5) == "xxxxx\n[cut: 5 of 12 characters shown]"
    assert cut("12345", 5) == "12345"


def test_a_call_that_takes_too_long_ends_sync_or_async() -> None:
    release = threading.Event()

    async def forever() -> None:
        await asyncio.Event().wait()

    start = time.monotonic()
    for function in (release.wait, forever):
        with pytest.raises(ToolError, match=r"slow took longer than 0\.02 s"):
            run(function if function is forever else lambda: release.wait(), {}, name="slow", timeout=0.02)
    assert time.monotonic() - start < 1.0
    release.set()


def test_functions_run_beside_the_event_loop() -> None:
    async def both() -> list[str]:
        meeting = threading.Barrier(2, timeout=5)
        meet = tool(lambda: meeting.wait() >= 0, name="meet")
        return await asyncio.gather(meet({}), meet({}))

    assert asyncio.run(both()) == ["true", "true"]


def test_faults_and_tool_errors_come_through() -> None:
    def fails(kind: str) -> None:
        raise {"tool": ToolError("no such page"), "bug": KeyError("x"), "time": TimeoutError("server")}[kind]

    with pytest.raises(ToolError, match="no such page"):
        run(fails, {"kind": "tool"})
    with pytest.raises(KeyError):
        run(fails, {"kind": "bug"})
    with pytest.raises(TimeoutError, match="server"):  # the function's own, not the limit
        run(fails, {"kind": "time"})
