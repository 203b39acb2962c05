"""Grading, splits and files of questions over documents."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from silva.environments.browsecomp_plus_search import BrowseCompPlusSearch
from silva.environments.corpus_qa import grade, overlap
from silva.environments.wiki_search import WikiSearch
from silva.errors import CapabilityError, ConfigError
from silva.types import Message, Step, Task, ToolCall

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.mark.parametrize(
    ("reply", "answers", "solved"),
    [
        ("<answer>Paris</answer>", ["Paris"], True),
        ("paris.", ["Paris"], True),
        ("<think>Rome</think>The Paris!", ["Paris"], True),
        ("I looked.\nFinal Answer: Paris\nThanks", ["Paris"], True),
        ("Final answer: Rome. No.\nFINAL ANSWER: Paris", ["Paris"], True),
        ("Final Answer: Paris <answer>Rome</answer>", ["Paris"], False),
        ("It is Paris", ["Paris"], False),
        ("Paris or Rome", ["Paris"], False),
        ("", ["Paris"], False),
        ("<answer></answer>", ["Paris"], False),
        ("<answer>Big Apple</answer>", ["New York", "the Big Apple"], True),
        ("<answer>in 1912</answer>", ["1912"], True),
        ("<answer>1912 or 1913</answer>", ["1912"], False),
        ("<answer>-1912</answer>", ["1912"], False),
        ("<answer>York New</answer>", ["New York"], False),
        ("<answer>the</answer>", ["The"], True),  # an answer without any other word
        ("<answer></answer>", ["The"], False),
    ],
)
def test_which_answers_are_right(reply: str, answers: list[str], solved: bool) -> None:
    assert grade(reply, answers).solved is solved


@pytest.mark.parametrize(
    ("given_", "answer", "expected"),
    [
        ("New York", "New York", 1.0),
        ("York New", "new york", 1.0),
        ("New York City", "New York", 0.8),  # 2/3 and 2/2
        ("the a an", "New York", 0.0),
        ("York York", "York", 2 / 3),
        ("", "", 0.0),
    ],
)
def test_overlap_is_squads_f1(given_: str, answer: str, expected: float) -> None:
    assert overlap(given_, answer) == pytest.approx(expected)


def final(settings: Any, task: Task, reply: str, replies_to) -> Step:
    return replies_to(settings, task, [Message("assistant", reply, id="r0")])[-1]


QUESTION = Task("q", "wiki_search", 0, {"question": "Where?"}, ["New York", "Big Apple"])
PARTIAL = WikiSearch(pages=24, min_hops=1, max_hops=1, eval_size=1, partial=0.5)


@pytest.mark.parametrize(
    ("reply", "reward"),
    [("<answer>new york</answer>", 1.0), ("York New", 0.5), ("New York City", 0.4), ("no", 0.0)],
)
def test_words_in_common_earn_a_part(replies_to, reply: str, reward: float) -> None:
    step = final(PARTIAL, QUESTION, reply, replies_to)
    assert step.rewards == {"correct": pytest.approx(reward)} and step.terminated
    assert step.metrics["success"] == float(reward == 1.0)
    plain = final(PARTIAL.model_copy(update={"partial": 0.0}), QUESTION, reply, replies_to)
    assert plain.rewards == {"correct": float(reward == 1.0)}


WORDS = st.lists(st.sampled_from(["new", "york", "the", "a", "city"]), max_size=5)


@given(WORDS, WORDS)
def test_no_wrong_answer_reaches_the_reward_of_a_right_one(said: list[str], expected: list[str]) -> None:
    """Right: the same words without articles or, if nothing else is expected, the same articles."""

    def bare(words: list[str]) -> list[str]:
        return [word for word in words if word not in ("the", "a")]

    right = bare(said) == bare(expected) if bare(expected) else said == expected
    mark = grade(f"<answer>{' '.join(said)}</answer>", [" ".join(expected)])
    assert mark.solved is right
    assert 0.0 <= mark.overlap <= 1.0
    assert right or 0.999 * mark.overlap < 1.0


def test_a_weight_of_one_is_refused() -> None:
    with pytest.raises(ValidationError):
        WikiSearch(partial=1.0)


@pytest.mark.parametrize("settings", [WikiSearch(eval_size=300), BrowseCompPlusSearch(eval_size=300)])
def test_splits_share_no_page(settings: Any) -> None:
    """No page that is needed for a held-out question is needed in training."""
    taskset = settings.taskset()
    held_out, train = (
        {hop[1] for task in taskset.tasks(split)[:2000] for hop in task.data["hops"]}
        for split in ("eval", "train")
    )
    assert len(held_out) > 80 and len(train) > 80
    assert not held_out & train


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"min_hops": 3}, "max_hops = 2: expected min_hops = 3 or more"),
        ({"corpus": "c"}, "`questions` is not"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        WikiSearch(**changes)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def questions(count: int = 12) -> list[dict[str, Any]]:
    return [{"question": f"Which river is number {n}?", "answer": f"river {n}"} for n in range(count)]


def test_files_of_ones_own(tmp_path: Path, replies_to) -> None:
    corpus = write(tmp_path / "corpus.jsonl", [{"id": "ems", "title": "Ems", "content": "# Course\nLong."}])
    asked = write(tmp_path / "questions.jsonl", questions())
    settings = WikiSearch(questions=asked, corpus=corpus, eval_size=2)
    taskset = settings.taskset()
    task = taskset.tasks("train")[0]
    assert task.data["question"].startswith("Which river is number ")
    call = Message(
        "assistant", "", tool_calls=(ToolCall("read_section", {"section_id": "ems:course"}),), id="r"
    )
    steps = replies_to(settings, task, [call, Message("assistant", task.answer[0], id="s")])
    assert steps[0].observation.messages[0].content == "Long."
    assert steps[1].rewards == {"correct": 1.0}
    with pytest.raises(CapabilityError, match="no expert for the questions of"):
        taskset.environment(task).expert_reply()  # type: ignore[attr-defined]


def test_rows_that_bring_their_documents(tmp_path: Path) -> None:
    rows = [
        {"query_id": str(n), "query": f"Which one is {n}?", "answer": f"Number {n}",
         "gold_docs": [{"docid": str(n), "text": f"It is number {n}."}], "negative_docs": []}
        for n in range(12)
    ]  # fmt: skip
    settings = BrowseCompPlusSearch(questions=write(tmp_path / "rows.jsonl", rows), eval_size=2)
    episode: Any = settings.taskset().environment(settings.taskset().tasks("eval")[0])
    (library,) = episode.toolsets
    assert [part.id for part in library.parts] == [f"{n}#1" for n in range(12)]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"question": "QmFzZTY0" * 8 + "==", "answer": "x"},
            "question looks encrypted; decrypt the data set first",
        ),
        (
            {"question": "Where?", "answer": {"x": 1}},
            "got the answer {'x': 1}, expected text, a number, or a list of",
        ),
        ({"question": "Where?", "answer": ["here", " "]}, "got the answer ['here', ' '], expected text"),
        ({"question": "Where?", "answer": True}, "got the answer True, expected text"),
        ({"question": "Where?", "answer": "here"}, "no documents: set `corpus` to a file"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        WikiSearch(questions=write(tmp_path / "rows.jsonl", [row])).taskset()


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


@pytest.mark.skipif(not DATA.is_dir(), reason="there is no shared/data beside the project")
def test_passages_of_2wiki() -> None:
    files = {"questions": str(DATA / "bamboogle_125.jsonl"), "corpus": str(DATA / "2wiki_corpus.json")}
    taskset = WikiSearch(**files, eval_size=20).taskset()
    (wiki,) = taskset.environment(taskset.tasks("eval")[0]).toolsets  # type: ignore[attr-defined]
    assert wiki.titles[wiki._ranking.best("Teutberga", 1)[0]] == "Teutberga"
    assert len(wiki.pages) > 6000
