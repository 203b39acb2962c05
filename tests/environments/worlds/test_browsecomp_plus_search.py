"""Tools that come and go, scrolling, previews, and the expert."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.environments.conftest import call, said

from silva.data.documents import Document
from silva.environments.worlds.browsecomp_plus_search import (
    BrowseCompPlusSearch,
    DocumentPart,
    Library,
    divided,
)
from silva.tools.function import ToolError

PAGES = [
    Document("ems", "Ems", "one two three four five six seven"),
    Document("lingen", "Lingen", "a town on the Ems"),
]
SETTINGS = BrowseCompPlusSearch(part_words=3, preview_words=2)


def play(*calls: tuple[str, dict[str, str]], settings: BrowseCompPlusSearch = SETTINGS) -> list[Any]:
    """What each call answers, and the tools that are on offer then."""

    async def run() -> list[Any]:
        reader = await Library(PAGES, settings).open(0)
        told: list[Any] = []
        for name, arguments in calls:
            tools = {tool.spec.name: tool for tool in reader.tools}
            text = await tools[name](arguments)
            told.append((text, [tool.spec.name for tool in reader.tools]))
        return told

    return asyncio.run(run())


SEARCH, EXPAND = ("search", {"query": "four"}), ("expand", {"doc_id": "[ems#2]"})
DOWN, UP = ("scroll_down", {}), ("scroll_up", {})


def test_documents_are_divided_into_parts() -> None:
    assert divided(PAGES[0], 3) == [
        DocumentPart("ems#1", "Ems", "one two three", 1, 3),
        DocumentPart("ems#2", "Ems", "four five six", 2, 3),
        DocumentPart("ems#3", "Ems", "seven", 3, 3),
    ]
    assert divided(Document("x", "X", ""), 3) == [DocumentPart("x#1", "X", "", 1, 1)]


def test_a_search_shows_where_the_words_stand() -> None:
    told = play(("search", {"query": "six"}), ("search", {"query": "town four"}))
    assert told[0][0] == "[ems#2] ... five six"
    assert told[1][0] == "[ems#2] four five ...\n[lingen#1] a town ..."


def test_tools_are_on_offer_when_they_can_be_used() -> None:
    everything = ["search", "expand", "scroll_up", "scroll_down"]
    told = play(SEARCH, EXPAND, DOWN, UP, UP, SEARCH)
    assert [offered for _, offered in told] == [
        ["search", "expand"],
        everything,
        ["search", "expand", "scroll_up"],
        everything,
        ["search", "expand", "scroll_down"],
        ["search", "expand"],
    ]
    always = SETTINGS.model_copy(update={"tools_change": False})
    assert [offered for _, offered in play(SEARCH, EXPAND, DOWN, settings=always)] == [everything] * 3


def test_scrolling_goes_on_from_where_it_led() -> None:
    """Act-PRM's tools forget where they scrolled to: only the parts beside the first one can be read."""
    told = play(SEARCH, ("expand", {"doc_id": "ems#1"}), DOWN, DOWN, UP)
    assert [text for text, _ in told[1:]] == [
        "[ems#1] Ems, part 1 of 3\none two three",
        "[ems#2] Ems, part 2 of 3\nfour five six",
        "[ems#3] Ems, part 3 of 3\nseven",
        "[ems#2] Ems, part 2 of 3\nfour five six",
    ]


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([DOWN], "nothing is open: expand a document first"),
        ([("expand", {"doc_id": "ems#1"}), UP], "this is the first part of the document"),
        ([("expand", {"doc_id": "ems#3"}), DOWN], "this is the last part of the document"),
        ([("expand", {"doc_id": "weser"})], "no document 'weser': search gives ids, in brackets"),
        ([("search", {"query": "zebra"})], "no document has any of the words 'zebra'"),
    ],
)
def test_what_the_model_reads_if_there_is_nothing_to_open(calls: list[Any], said: str) -> None:
    with pytest.raises(ToolError, match=said):
        play(*calls, settings=SETTINGS.model_copy(update={"tools_change": False}))


def test_a_change_of_tools_shows_the_whole_context(replies_to) -> None:
    settings = BrowseCompPlusSearch()
    task = settings.taskset().tasks("train")[0]
    calls = [call("scroll_down"), call("search", query="museum"), call("search", query="town")]
    early, first, second = replies_to(settings, task, calls)
    assert said(early) == "Error: no tool called 'scroll_down': there is search"
    assert [tool.name for tool in first.observation.tools] == ["search", "expand"]
    roles = [message.role for message in first.observation.context]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]
    assert second.observation.context is None  # the same tools
    assert [message.role for message in second.observation.messages] == ["tool"]


@pytest.mark.slow
def test_the_expert_searches_with_words_of_the_question(play_out) -> None:
    """Nearly always; only where they do not find the page it searches for its title."""
    taskset = BrowseCompPlusSearch(eval_size=60).taskset()
    honest, lengths = 0, set()
    for task in taskset.tasks("eval"):
        query, title = task.data["hops"][0][:2]
        honest += bool(taskset.environment(task)._found(query, title))
        lengths.add(len(task.data["hops"]))
        steps = play_out(taskset.environment(task))
        assert sum(step.metrics.get("tool_errors", 0.0) for step in steps) == 0.0
    assert honest >= 54 and lengths == {2, 3}


def test_a_fork_scrolls_on_its_own() -> None:
    async def run() -> None:
        reader = await Library(PAGES, SETTINGS).open(0)
        await reader.search("four")
        await reader.expand("ems#1")
        twin = await reader.fork(1)
        assert await twin.scroll_down() == "[ems#2] Ems, part 2 of 3\nfour five six"
        assert await reader.scroll_down() == "[ems#2] Ems, part 2 of 3\nfour five six"
        assert await twin.scroll_down() == "[ems#3] Ems, part 3 of 3\nseven"
        assert reader.opened == 1

    asyncio.run(run())
