"""Grading, splits and files of questions over documents."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from tests.environments.conftest import call, said
from tests.real_rows import DATA

from silva.environments.worlds.browsecomp_plus_search import BrowseCompPlusSearch
from silva.environments.worlds.wiki_search import WikiSearch
from silva.errors import CapabilityError, ConfigError
from silva.types import Step, Task

QUESTION = Task("q", "wiki_search", 0, {"question": "Where?"}, ["New York", "Big Apple"])
SMALL: dict[str, Any] = {"pages": 24, "max_hops": 1, "eval_size": 1}


def final(replies_to, reply: str, **settings: Any) -> Step:
    return replies_to(WikiSearch(**SMALL, **settings), QUESTION, [reply])[-1]


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("<answer>new york</answer>", 1.0),
        ("<think>Rome</think>Final Answer: Big Apple", 1.0),
        ("<answer>York New</answer>", 0.0),
        ("<answer>New York City</answer>", 0.0),
        ("New York or Rome", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_must_be_a_right_one(replies_to, reply: str, reward: float) -> None:
    step = final(replies_to, reply)
    assert step.rewards == {"correct": reward} and step.metrics["success"] == reward
    assert step.terminated and not step.truncated


def test_another_reward_may_grade(replies_to) -> None:
    """Token F1 of "New York City" is 2 * 2 / 5."""
    step = final(replies_to, "<answer>New York City</answer>", reward={"type": "token_f1"})
    assert step.rewards == {"correct": pytest.approx(0.8)} and step.metrics["success"] == 0.0


def test_what_stands_beside_a_call_too_many_is_no_answer(replies_to) -> None:
    beside = dataclasses.replace(call("search_pages", query="x"), content="New York")
    steps = replies_to(WikiSearch(**SMALL, max_tool_calls=1), QUESTION, [beside, beside])
    assert steps[-1].truncated and not steps[-1].terminated
    assert steps[-1].rewards == {"correct": 0.0} and steps[-1].metrics["success"] == 0.0


def test_files_of_ones_own(rows_file, replies_to) -> None:
    corpus = rows_file([{"id": "ems", "title": "Ems", "content": "# Course\nLong."}], "corpus.jsonl")
    asked = rows_file({"question": f"Which river is number {n}?", "answer": f"river {n}"} for n in range(12))
    settings = WikiSearch(questions=asked, corpus=corpus, eval_size=2)
    taskset = settings.taskset()
    task = taskset.tasks("train")[0]
    assert task.data["question"].startswith("Which river is number ")
    steps = replies_to(settings, task, [call("read_section", section_id="ems:course"), task.answer[0]])
    assert said(steps[0]) == "Long."
    assert steps[1].rewards == {"correct": 1.0}
    with pytest.raises(CapabilityError, match="no expert for the questions of"):
        taskset.environment(task).expert_reply()  # type: ignore[attr-defined]


def test_rows_that_bring_their_documents(rows_file) -> None:
    rows = [
        {"query_id": str(n), "query": f"Which one is {n}?", "answer": f"Number {n}",
         "gold_docs": [{"docid": str(n), "text": f"It is number {n}."}], "negative_docs": []}
        for n in range(12)
    ]  # fmt: skip
    settings = BrowseCompPlusSearch(questions=rows_file(rows), eval_size=2)
    episode: Any = settings.taskset().environment(settings.taskset().tasks("eval")[0])
    (library,) = episode.toolsets
    assert [part.id for part in library.parts] == [f"{n}#1" for n in range(12)]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "QmFzZTY0" * 8 + "=="}, "question looks encrypted; decrypt the data set first"),
        ({"answer": {"x": 1}}, "got the answer {'x': 1}, expected text, a number, or a list of"),
        ({"answer": ["here", " "]}, "got the answer ['here', ' '], expected text"),
        ({"answer": True}, "got the answer True, expected text"),
        ({}, "no documents: set `corpus` to a file"),
    ],
)
def test_a_wrong_file_is_explained(rows_file, row: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        WikiSearch(questions=rows_file([{"question": "Where?", "answer": "here", **row}])).taskset()


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="there is no shared/data beside the project")
@pytest.mark.parametrize("settings", [WikiSearch, BrowseCompPlusSearch])
def test_hotpotqa_with_its_paragraphs(settings: Any) -> None:
    """Real rows: all supporting paragraphs can be found by their titles."""
    path = DATA / "hotpotqa_distractor_100.json"
    taskset = settings(questions=str(path), eval_size=20).taskset()
    (tools,) = taskset.environment(taskset.tasks("eval")[0]).toolsets
    rows = json.loads(path.read_text())
    titles = {title for row in rows for title in row["context"]["title"]}
    wanted = {title for row in rows for title in row["supporting_facts"]["title"]}
    if settings is WikiSearch:
        assert {page.title for page in tools.pages.values()} == titles
        found = {t for t in wanted if t in {tools.titles[n] for n in tools._ranking.best(t, 10)}}
    else:
        found = {t for t in wanted if t in {tools.parts[n].title for n in tools.search(t)}}
    assert len(found) >= 0.98 * len(wanted)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="there is no shared/data beside the project")
def test_passages_of_2wiki() -> None:
    files = {"questions": str(DATA / "bamboogle_125.jsonl"), "corpus": str(DATA / "2wiki_corpus.json")}
    taskset = WikiSearch(**files, eval_size=20).taskset()
    (wiki,) = taskset.environment(taskset.tasks("eval")[0]).toolsets  # type: ignore[attr-defined]
    assert wiki.titles[wiki._ranking.best("Teutberga", 1)[0]] == "Teutberga"
    assert len(wiki.pages) > 6000
