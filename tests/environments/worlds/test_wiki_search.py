"""The tools of the wiki, and its expert."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from silva.data.documents import Document
from silva.environments.worlds.wiki_search import Wiki, WikiSearch
from silva.tools.function import ToolError

PAGES = [
    Document("ems", "Ems", "A river.\n# Course\nIt is long.\n# Towns\nLingen."),
    Document("star_wars:_a_new_hope", "Star Wars: A New Hope", "# Plot: part one\nA river is crossed."),
    Document("lingen", "Lingen", "A town."),
]
WIKI = Wiki(PAGES, results=2, titles_only=False)


def call(name: str, wiki: Wiki = WIKI, **arguments: Any) -> str:
    tools = {tool.spec.name: tool for tool in wiki.tools}
    return asyncio.run(tools[name](arguments))


def test_pages_are_found_by_title_and_text() -> None:
    assert json.loads(call("search_pages", query="Lingen")) == [
        {"page_id": "lingen", "title": "Lingen"}, {"page_id": "ems", "title": "Ems"},
    ]  # fmt: skip
    titles = Wiki(PAGES, results=2, titles_only=True)
    assert json.loads(call("search_pages", titles, query="Lingen")) == [
        {"page_id": "lingen", "title": "Lingen"}
    ]
    assert len(json.loads(call("search_pages", query="a"))) == 2  # at most


def test_sections_are_listed_and_read() -> None:
    assert json.loads(call("view_sections", page_id="ems")) == [
        {"section_id": "ems:introduction", "section_name": "Introduction"},
        {"section_id": "ems:course", "section_name": "Course"},
        {"section_id": "ems:towns", "section_name": "Towns"},
    ]
    assert call("read_section", section_id="ems:course") == "It is long."
    assert call("read_section", section_id="lingen:full_page") == "A town."


def test_names_with_colons_are_read() -> None:
    (section,) = json.loads(call("view_sections", page_id="star_wars:_a_new_hope"))
    assert call("read_section", section_id=section["section_id"]) == "A river is crossed."


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("search_pages", {"query": "zebra"}, "no page has any of the words 'zebra'"),
        ("view_sections", {"page_id": "zebra"}, "no page 'zebra': search_pages gives the ids"),
        ("read_section", {"section_id": "ems:zebra"}, "no section 'ems:zebra': view_sections lists"),
        ("read_section", {"section_id": "ems"}, "no section 'ems'"),
        ("read_section", {}, "argument section_id: Field required"),
    ],
)
def test_what_the_model_reads_if_it_asks_for_nothing_that_there_is(
    name: str, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ToolError, match=said):
        call(name, **arguments)


def test_the_expert_calls_three_tools_a_page(play_out) -> None:
    """Three calls a page, with no error, for questions of up to three pages."""
    taskset = WikiSearch(pages=60, max_hops=3, eval_size=1, train_size=120).taskset()
    for task in taskset.tasks("train"):
        steps = play_out(taskset.environment(task))
        assert steps[-1].rewards == {"correct": 1.0} and steps[-1].metrics["success"] == 1.0
        assert len(steps) == 3 * len(task.data["hops"]) + 1
        assert sum(step.metrics.get("tool_errors", 0.0) for step in steps) == 0.0


def test_what_is_shown_first(first) -> None:
    task = WikiSearch().taskset().tasks("eval")[0]
    question = f"\nQuestion: {task.data['question']}"
    told = first(WikiSearch(), task)
    assert told.startswith("Answer the question with the help of the wiki: ") and told.endswith(question)
    assert first(WikiSearch(instructions="Use the wiki."), task) == f"Use the wiki.{question}"
    assert [tool.spec.name for tool in WIKI.tools] == ["search_pages", "view_sections", "read_section"]
