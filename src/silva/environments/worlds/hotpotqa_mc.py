"""Questions that take two documents to answer: titles are given, `visit(title)` shows a document.

The rows come from `path`: files of HotpotQA (`question`, `answer`, `context`, and `supporting_facts`, which
the expert visits). HotpotQA asks for a text. Here the answer is one of `choices` texts. The others are
answers to questions that ask for the same ("which state"), titles of documents that are not needed, if the
answer is a title, and otherwise answers of the same kind to other questions. What a question compares are
choices together, and nothing else that it names is one; a row that names its answer alone is left out.
`choices = 0` asks for the text itself, compared exactly. Without `path` there are documents about people and
towns, made up.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, field_validator

from silva.config.sections import Positive
from silva.data.rows import Row
from silva.data.settings import FirstRows
from silva.environments.bases.multiple_choice import LETTERS, MultipleChoice
from silva.environments.bases.tool_dialogue import ToolDialogueSettings
from silva.environments.tasks import Draft, Tasks, generated, listed
from silva.environments.worlds.names import FIRST_NAMES, JOBS, LAST_NAMES, RIVERS, TOWNS
from silva.errors import ConfigError
from silva.rewards.text import normalise
from silva.tools.fixed import Fixed
from silva.tools.function import ToolError, tool
from silva.types import Task, ToolCall

YES_OR_NO = "yes or no"


class HotpotQA(FirstRows, ToolDialogueSettings):
    type: Literal["hotpotqa_mc"] = "hotpotqa_mc"
    path: str = ""
    """File, folder, or data set on the hub; empty: documents that are made up."""
    subset: str = ""
    """Of the data set on the hub: "distractor"."""
    choices: Annotated[int, Field(ge=0, le=len(LETTERS))] = 4
    """Texts to choose from, the right one included; 0: the answer is to be written."""
    documents: Annotated[int, Field(ge=4, le=20)] = 10
    """Documents of a question that is made up: as many people as towns."""
    max_tool_calls: Positive = 10
    """Tool calls of one episode, malformed ones and answers sent back included; one more ends it."""
    max_result_chars: Positive = 8000
    """Characters of a document that are shown."""

    @field_validator("choices")
    @classmethod
    def _none_or_several(cls, choices: int) -> int:
        if choices == 1:
            raise ValueError("expected 0 or at least 2: the only choice is always right")
        return choices

    def taskset(self) -> Tasks:
        if not self.path:
            return generated(self, self._draw, lambda task: HotpotEpisode(self, task))
        rows = [_question(row) for row in self.read()]
        return listed(self, self._drafts(rows), lambda task: HotpotEpisode(self, task))

    def _drafts(self, rows: Sequence[QA]) -> Iterator[Draft]:
        by_kind: defaultdict[str, set[str]] = defaultdict(set)  # answers of a kind, and those asked for alike
        for row in rows:
            for key in ("", _kind(row.answer), _kind(row.answer) + _asked(row.question)):
                by_kind[key].add(row.answer)
        pool = {key: sorted(answers) for key, answers in by_kind.items()}
        for row in rows:
            kind = _kind(row.answer)
            pools = [pool[kind], pool[""]]
            if kind == YES_OR_NO:
                pools = [["yes", "no"]]
            else:
                if row.answer in row.documents:
                    pools.insert(0, sorted(set(row.documents) - set(row.needs)))
                if asked := _asked(row.question):
                    pools.insert(0, pool[kind + asked])
                if self.choices and _names(row.question, row.answer) and not _compared(row):
                    continue
            yield self._draft(row, pools, random.Random(row.question), [row.question])

    def _draft(
        self, row: QA, pools: Sequence[Sequence[str]], rng: random.Random, keys: Sequence[str]
    ) -> Draft:
        """`pools`: wrong answers are drawn from the first of them, and then from the next."""
        choices, answer = [], row.answer
        if self.choices:
            choices = [row.answer, *_others(row, pools, self.choices - 1, rng)]
            if len(choices) < 2:
                raise ConfigError(
                    f"environment {self.label}: {row.question[:80]!r}: no other answers to choose from; "
                    "add rows or set choices = 0"
                )
            rng.shuffle(choices)
            answer = LETTERS[choices.index(row.answer)]
        documents = [[title, text] for title, text in row.documents.items()]
        data = {
            "question": row.question, "choices": choices, "documents": documents, "needs": row.needs
        }  # fmt: skip
        return Draft(data, answer, keys)

    def _draw(self, rng: random.Random) -> Draft:
        row, wrong = made_up(rng, self.documents // 2)
        return self._draft(row, [wrong], rng, [f"{row.question} {sorted(row.documents)}"])


class QA(NamedTuple):
    """`documents`: title -> text; `needs`: titles of those that hold the answer."""

    question: str
    answer: str
    documents: Mapping[str, str]
    needs: list[str]


class HotpotEpisode(MultipleChoice):
    settings: HotpotQA
    instructions = "Answer the question with what the documents say. `visit` shows a document."

    def __init__(self, settings: HotpotQA, task: Task) -> None:
        by_name = {_plain(title): text for title, text in task.data["documents"]}

        async def visit(title: str) -> str:
            """Show the document with this title."""
            if _plain(title) not in by_name:
                raise ToolError(f"no document has the title {title!r}; expected one of those listed")
            return by_name[_plain(title)]

        super().__init__(settings, task, [Fixed([tool(visit)])])

    def about(self) -> str:
        return "\n".join(["Documents:", *(f"- {title}" for title, _ in self.task.data["documents"])])

    def expert_calls(self) -> list[ToolCall]:
        return [ToolCall("visit", {"title": title}) for title in self.task.data["needs"]]


def made_up(rng: random.Random, count: int) -> tuple[QA, Sequence[str]]:
    """A question about so many people and the towns that they come from, and texts of the answer's kind."""
    firsts, lasts = rng.sample(FIRST_NAMES, count), rng.sample(LAST_NAMES, count)
    people = [f"{first} {last}" for first, last in zip(firsts, lasts, strict=True)]
    jobs, towns, rivers = (rng.sample(each, count) for each in (JOBS, TOWNS, RIVERS))
    born, founded = rng.sample(range(1900, 2000), count), rng.sample(range(1100, 1900), count)
    documents = {
        towns[i]: f"{towns[i]} is a town on the river {rivers[i]}. It was founded in {founded[i]}."
        for i in range(count)
    }
    for i, person in enumerate(people):
        documents[person] = f"{person} is a {jobs[i]}, born in {born[i]}, who comes from {towns[i]}."
    one, other = rng.sample(range(count), 2)
    first = min(one, other, key=lambda i: born[i])
    question, answer, wrong, needs = rng.choice(
        [
            (f"On which river is the town that {people[one]} comes from?",
             rivers[one], rivers, [people[one], towns[one]]),
            (f"In which year was the town founded that {people[one]} comes from?",
             str(founded[one]), [str(year) for year in founded], [people[one], towns[one]]),
            (f"Who was born first, {people[one]} or {people[other]}?",
             people[first], people, [people[one], people[other]]),
            (f"What is the job of the person who comes from the town on the river {rivers[one]}?",
             jobs[one], jobs, [towns[one], people[one]]),
        ]
    )  # fmt: skip
    titles = rng.sample(sorted(documents), len(documents))
    return QA(question, answer, {title: documents[title] for title in titles}, needs), wrong


def _question(row: Row) -> QA:
    """A row of HotpotQA, as on the hub (lists of titles and of sentences) or as first published (pairs)."""
    question, answer, context = (row.values.get(key) for key in ("question", "answer", "context"))
    for key, value in (("question", question), ("answer", answer)):
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"{row.where}: {key}: got {value!r}, expected text")
    try:
        pairs = (
            zip(context["title"], context["sentences"], strict=True) if isinstance(context, dict) else context
        )
        documents = {str(title): "".join(sentences).strip() for title, sentences in pairs or ()}
        facts = row.values.get("supporting_facts") or []
        needs = facts["title"] if isinstance(facts, dict) else [title for title, _ in facts]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{row.where}: context, supporting_facts: {type(error).__name__}: {error}; expected titles and "
            "sentences as in HotpotQA"
        ) from error
    if not documents:
        raise ConfigError(f"{row.where}: context: got no documents, expected titles and sentences")
    known = [title for title in dict.fromkeys(needs) if title in documents]
    return QA(str(question).strip(), str(answer).strip(), documents, known or [next(iter(documents))])


def _kind(answer: str) -> str:
    """Wrong answers are of the same kind, so that the kind gives nothing away."""
    if normalise(answer) in ("yes", "no"):
        return YES_OR_NO
    if any(character.isdigit() for character in answer):
        return "number"
    return "name" if answer[:1].isupper() else "words"


def _asked(question: str) -> str:
    """What a question asks for, such as "which state"; "" if that is not clear."""
    found = re.search(r"\b(?:who|when|where|how (?:many|much)|(?:which|what) [a-z]+)\b", question.lower())
    return found[0] if found else ""


def _names(question: str, text: str) -> bool:
    """Whether a text stands in a question, word by word; "(film)" in a title is no part of it."""
    return f" {_words(text)} " in f" {_words(question)} "


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", re.sub(r"\([^()]*\)", "", text).casefold()))


def _compared(row: QA) -> list[str]:
    """The other titles that a question names."""
    answer = _words(row.answer)
    return [title for title in row.documents if _names(row.question, title) and _words(title) != answer]


def _others(row: QA, pools: Sequence[Sequence[str]], count: int, rng: random.Random) -> list[str]:
    """Up to `count` different texts that are not the answer. Of those that the question names, all, as far as
    there is room, if it names the answer, and otherwise none: one named choice would give itself away."""
    chosen = {normalise(row.answer): row.answer}
    named: Sequence[str] = ()
    if _kind(row.answer) != YES_OR_NO:
        named = _compared(row) if _names(row.question, row.answer) else ()
        for title in rng.sample(named, min(len(named), count)):
            chosen.setdefault(normalise(title), title)
    for pool in pools:
        for text in rng.sample(pool, min(len(pool), 4 * count + 4)):  # more than needed: some may be the same
            if len(chosen) <= count and not _names(row.question, text):
                chosen.setdefault(normalise(text), text)
    return list(chosen.values())[1:]


def _plain(title: str) -> str:
    return " ".join(title.split()).casefold()
