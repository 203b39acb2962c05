"""What every tool does. A new one adds itself to `MADE`, with a good call and bad ones."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest
from pydantic import Field
from tests.contracts.doubles import Slow

from silva.protocols import Tool
from silva.tools.calculator import calculator
from silva.tools.function import ToolError, tool


class Case(NamedTuple):
    make: Callable[[], Tool]
    good: Mapping[str, object]
    answer: str
    bad: tuple[Mapping[str, object], ...]


async def repeat(word: str, times: Annotated[int, Field(ge=1)] = 2) -> str:
    """Say a word again and again."""
    await asyncio.sleep(0)
    return word * times


BAD_WORDS: tuple[Mapping[str, object], ...] = (
    {},
    {"word": 3},
    {"word": "a", "times": 0},
    {"word": "a", "x": 1},
)
BAD_SUMS: tuple[Mapping[str, object], ...] = (
    {},
    {"expression": "1 +"},
    {"expression": "x"},
    {"expression": None},
)
MADE = {
    "calculator": Case(lambda: tool(calculator), {"expression": "2 * (3 + 4)"}, "14", BAD_SUMS),
    "function": Case(lambda: tool(repeat), {"word": "ab"}, "abab", BAD_WORDS),
    "slow function": Case(lambda: SlowTool(tool(repeat)), {"word": "ab", "times": 1}, "ab", BAD_WORDS),
}


def search() -> Tool:
    from silva.tools.search import Bm25Backend, SearchSettings

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "nile.md").write_text("# The Nile\nA river.")
        return SearchSettings(backend=Bm25Backend(corpus=folder), cache="").build().tools[0]


if importlib.util.find_spec("bm25s"):
    BAD_QUERIES: tuple[Mapping[str, object], ...] = ({}, {"query": ""}, {"query": ["nile"]}, {"q": "nile"})
    MADE["search"] = Case(search, {"query": "nile"}, "1. The Nile\n> A river.", BAD_QUERIES)


class SlowTool(Slow):
    async def __call__(self, arguments: Mapping[str, object]) -> str:
        await asyncio.sleep(0.01)
        return await self._inner(arguments)  # type: ignore[no-any-return]


@pytest.fixture(params=MADE)
def case(request: pytest.FixtureRequest) -> Case:
    return MADE[request.param]


def test_its_specification_is_a_json_schema_of_an_object(case: Case) -> None:
    spec = case.make().spec
    assert spec.name and spec.description
    assert spec.parameters["type"] == "object"
    assert json.loads(json.dumps(spec.parameters)) == spec.parameters
    assert set(case.good) <= set(spec.parameters["properties"])


def test_a_call_gives_text(case: Case) -> None:
    assert asyncio.run(case.make()(case.good)) == case.answer


def test_a_bad_call_is_explained_to_the_model(case: Case) -> None:
    made = case.make()
    for arguments in case.bad:
        with pytest.raises(ToolError) as caught:
            asyncio.run(made(arguments))
        assert str(caught.value).strip() and "Traceback" not in str(caught.value)


def test_calls_at_the_same_time_do_not_meet(case: Case) -> None:
    async def run() -> list[Any]:
        made = case.make()
        calls = [made(case.good if i % 2 else case.bad[0]) for i in range(20)]
        return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(run())
    assert found[1::2] == [case.answer] * 10 and all(isinstance(x, ToolError) for x in found[::2])


def test_the_arguments_are_left_as_they_are(case: Case) -> None:
    before = dict(case.good)
    asyncio.run(case.make()(case.good))
    assert case.good == before
