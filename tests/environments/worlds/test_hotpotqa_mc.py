"""Documents are visited by title; rows of HotpotQA; questions about made-up documents have one answer."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from tests.environments.conftest import call, said
from tests.real_rows import DATA

from silva.environments.worlds.hotpotqa_mc import HotpotQA
from silva.errors import ConfigError
from silva.types import Task

TASK = Task(
    "h",
    "hotpotqa_mc",
    0,
    {
        "question": "On which river is the town that Mia Vargas comes from?",
        "choices": ["Pinn", "Sence", "Jura"],
        "documents": [["Mia Vargas", "She comes from Oakham."], ["Oakham", "It is on the river Sence."]],
        "needs": ["Mia Vargas", "Oakham"],
    },
    "B",
)


def test_an_episode_word_by_word(first, replies_to) -> None:
    assert first(HotpotQA(), TASK) == (
        "Answer the question with what the documents say. `visit` shows a document.\n"
        "Documents:\n- Mia Vargas\n- Oakham\n"
        "Question: On which river is the town that Mia Vargas comes from?\n"
        "A. Pinn\nB. Sence\nC. Jura\n"
        "End with the letter of the right choice, in this form: Final Answer: B"
    )
    calls = [call("visit", title=title) for title in ("mia  vargas", "Paris", 3, "Oakham")]
    *steps, last = replies_to(HotpotQA(), TASK, [*calls, "Final Answer: B"])
    told = list(map(said, steps))
    assert told[0] == "She comes from Oakham." and told[3] == "It is on the river Sence."
    assert told[1] == "Error: no document has the title 'Paris'; expected one of those listed"
    assert told[2].startswith("Error: visit: argument title: ")
    assert last.terminated and last.rewards == {"correct": 1.0}
    assert last.metrics == {"success": 1, "action_is_valid": 1, "calls": 4}


def test_without_choices_the_text_is_asked_for(first, replies_to) -> None:
    task = Task("h", "hotpotqa_mc", 0, {**TASK.data, "choices": []}, "Sence")
    told = first(HotpotQA(choices=0), task)
    assert "A. " not in told and told.endswith("Final Answer: Paris")
    for reply, right in [("Final Answer: sence.", 1.0), ("Final Answer: Pinn or Sence", 0.0), ("B", 0.0)]:
        (last,) = replies_to(HotpotQA(choices=0), task, [reply])
        assert last.rewards == {"correct": right}


def solve(task: Task) -> str:
    """The answer, by reading the documents with rules of the test's own."""
    documents, question = dict(map(tuple, task.data["documents"])), task.data["question"]
    people = {title: text for title, text in documents.items() if "comes from" in text}
    home = {person: re.search(r"comes from (\w+)\.", text)[1] for person, text in people.items()}
    if "born first" in question:
        names = re.fullmatch(r"Who was born first, (.*) or (.*)\?", question).groups()
        return min(names, key=lambda name: int(re.search(r"born in (\d+)", people[name])[1]))
    if "What is the job" in question:
        river = re.search(r"river (\w+)\?", question)[1]
        (town,) = (title for title, text in documents.items() if f"river {river}." in text)
        (person,) = (name for name, where in home.items() if where == town)
        return re.search(r"is a (\w+),", people[person])[1]
    town = documents[home[re.search(r"that (.*) comes from", question)[1]]]
    return re.search(r"river (\w+)\." if "river" in question else r"founded in (\d+)", town)[1]


@pytest.mark.slow
def test_made_up_questions_have_the_answer_that_reading_gives() -> None:
    taskset = HotpotQA().taskset()
    kinds = Counter()
    for task in taskset.tasks("eval"):
        assert task.data["choices"]["ABCD".index(task.answer)] == solve(task)
        assert len(set(task.data["choices"])) == 4 and len(task.data["documents"]) == 10
        assert len(task.data["needs"]) == 2
        # What a question compares are choices together.
        assert len(named_choices(task)) == (2 if "born first" in task.data["question"] else 0)
        kinds[task.data["question"].split()[0]] += 1
    assert len(kinds) == 4 and min(kinds.values()) > 30
    letters = Counter(task.answer for task in taskset.tasks("train")[:800])
    assert min(letters.values()) > 150  # no letter is a good guess


def named_choices(task: Task) -> list[str]:
    """The choices whose words stand in the question."""
    question = re.sub(r"\W+", " ", task.data["question"].casefold())
    names = {
        text: re.sub(r"\W+", " ", re.sub(r"\(.*\)", "", text).casefold()).strip()
        for text in task.data["choices"]
    }
    return [text for text, name in names.items() if f" {name} " in f" {question} "]


@pytest.mark.skipif(not DATA.is_dir(), reason="there is no shared/data beside the project")
@pytest.mark.parametrize("choices", [2, 4])
def test_no_choice_of_the_real_rows_is_the_only_one_that_is_named(choices: int) -> None:
    taskset = HotpotQA(
        path=str(DATA / "hotpotqa_distractor_100.json"), eval_size=20, train_size=400, choices=choices
    ).taskset()
    tasks = [*taskset.tasks("train"), *taskset.tasks("eval")]
    found = Counter(
        len(named_choices(task)) for task in tasks if task.data["choices"][0] not in ("yes", "no")
    )
    assert found[1] == 0 and found[2] + found[3] >= 7 and len(tasks) > 90


def test_a_row_that_names_its_answer_alone_is_left_out_and_choices_answer_one_question(
    rows_file,
) -> None:
    made = rows()
    for i, row in enumerate(made):
        row["question"] = f"Which {'state' if i < 30 else 'river'} is meant in number {i}?"
    made[5]["question"] = "Which state is meant, Answer 5 or something else?"
    taskset = HotpotQA(path=rows_file(made), eval_size=5, train_size=400).taskset()
    tasks = [task for split in ("train", "eval") for task in taskset.tasks(split)]
    assert not any("Answer 5 or" in task.data["question"] for task in tasks)
    for task in tasks:
        numbers = [int(text.split()[1]) for text in task.data["choices"] if text.startswith("Answer")]
        assert len({number < 30 for number in numbers}) <= 1


def rows() -> list[dict]:
    hub = [
        {
            "question": f"Question {i}?",
            "answer": f"Answer {i}" if i % 2 else ("yes" if i % 4 else "no"),
            "context": {"title": [f"Title {i}", "Other"], "sentences": [["One. ", "Two."], ["Three."]]},
            "supporting_facts": {"title": ["Other", f"Title {i}", "Other"], "sent_id": [0, 1, 0]},
        }
        for i in range(60)
    ]
    hub[1]["context"] = [["Title 1", ["One. ", "Two."]], ["Other", ["Three."]]]  # as first published
    hub[1]["supporting_facts"] = [["Other", 0], ["Title 1", 1]]
    hub[3]["answer"] = "Title 3"
    return hub


def test_rows_of_hotpotqa(rows_file) -> None:
    taskset = HotpotQA(path=rows_file(rows()), eval_size=5, train_size=400).taskset()
    tasks = {task.data["question"]: task for s in ("train", "eval") for task in taskset.tasks(s)}
    for i, task in ((int(question.split()[1][:-1]), task) for question, task in tasks.items()):
        assert task.data["documents"] == [[f"Title {i}", "One. Two."], ["Other", "Three."]]
        assert task.data["needs"] == ["Other", f"Title {i}"]
        right = task.data["choices"]["ABCD".index(task.answer)]
        if i % 2 == 0:
            assert sorted(task.data["choices"]) == ["no", "yes"] and right == ("yes" if i % 4 else "no")
        elif i != 3:
            assert right == f"Answer {i}" and len(set(task.data["choices"])) == 4
            assert not {"yes", "no"} & set(task.data["choices"])  # of the same kind


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer": ""}, r"rows\.jsonl:2: answer: got '', expected text"),
        ({"context": {"title": ["a"]}}, r"rows\.jsonl:2: context, supporting_facts: KeyError: 'sentences'"),
        ({"context": None}, r"rows\.jsonl:2: context: got no documents"),
        ({"supporting_facts": [1]}, r"rows\.jsonl:2: context, supporting_facts: TypeError"),
    ],
)
def test_wrong_rows_are_named(changes, message, rows_file) -> None:
    first, second = rows()[:2]
    with pytest.raises(ConfigError, match=message):
        HotpotQA(path=rows_file([first, {**second, **changes}])).taskset()


def test_rows_without_other_answers_are_refused(rows_file) -> None:
    with pytest.raises(ConfigError, match=r"'Question 1\?': no other answers to choose from"):
        HotpotQA(path=rows_file(rows()[1:2])).taskset()


@pytest.mark.skipif(not DATA.is_dir(), reason="there is no shared/data beside the project")
@pytest.mark.parametrize("choices", [0, 4])
def test_the_expert_reads_the_real_rows(choices: int, play_out) -> None:
    taskset = HotpotQA(
        path=str(DATA / "hotpotqa_distractor_100.json"), eval_size=20, choices=choices
    ).taskset()
    for task in taskset.tasks("eval"):
        told = play_out(taskset.environment(task))
        assert told[-1].metrics["success"] == 1 and told[-1].metrics["calls"] == len(task.data["needs"])
        assert all(step.metrics["tool_errors"] == 0 for step in told[:-1])
