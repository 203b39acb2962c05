"""Questions over documents that a model searches and reads with tools: what such environments share.

Questions and documents come from a user's files, or from the made-up encyclopedia. Any reward may grade the
answer; by default it must be a right one, exactly.
"""

from __future__ import annotations

import functools
import random
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from silva.config.sections import Natural, Positive
from silva.data.documents import Document, as_id, documents, documents_inside
from silva.data.row_shapes import Shape, problem, recognised
from silva.data.rows import read_rows
from silva.environments.bases.tool_dialogue import RewardedDialogue, ToolDialogueSettings
from silva.environments.tasks import Draft, Tasks, listed
from silva.environments.worlds.encyclopedia import LARGEST, SMALLEST, Hop, encyclopedia
from silva.errors import CapabilityError, ConfigError
from silva.protocols import Reward, Toolset
from silva.rendering.tool_calls import write_calls
from silva.rewards.choice import AnyReward
from silva.rewards.exact_match import ExactMatch
from silva.types import Message, Task, ToolCall

_ENCRYPTED = re.compile(r"[A-Za-z0-9+/]{40,}={0,2}")


class CorpusQA(ToolDialogueSettings):
    """Base of the settings: define `toolset` and `episode`."""

    bounds: ClassVar = ("hops",)

    questions: str = ""
    """File of questions and answers (or a hub id); empty: a made-up encyclopedia."""
    corpus: str = ""
    """File of documents with an id or a title, and a text; empty: those inside the rows of `questions`
    (BrowseComp-Plus, HotpotQA)."""
    split: str = "train"
    """Of `questions` on the hub; "test" for BrowseComp-Plus."""
    pages: Annotated[int, Field(ge=SMALLEST, le=LARGEST)] = 240
    """Pages of the made-up encyclopedia."""
    world_seed: Natural = 0
    """Another seed makes another encyclopedia."""
    min_hops: Positive = 1
    """Pages that the easiest made-up questions need."""
    max_hops: Annotated[int, Field(ge=1, le=4)] = 2
    """Pages that the hardest made-up questions need."""
    named: bool = True
    """Made-up questions name the page to begin with; off: they describe it."""
    reward: AnyReward = ExactMatch()
    """What grades a finished dialogue: a table with `type`, the name of one, or "file.py:function"."""
    eval_size: Natural = 128
    """Held-out tasks, disjoint from the training tasks by content; 0: all."""
    eval_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of all pages (of all questions of a file) that is held out. A made-up question is held out if
    all its pages are, trained on if none is, otherwise left out."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.corpus and not self.questions:
            raise ValueError("corpus is set, but `questions` is not")
        return self

    def toolset(self, found: Sequence[Document]) -> Toolset:
        """The tools over these documents."""
        raise TypeError(f"{type(self).__name__} must define toolset()")

    def episode(self, task: Task, toolset: Any, reward: Reward, answers: Sequence[str]) -> CorpusEpisode:
        """An episode; `answers` are some to guess from."""
        raise TypeError(f"{type(self).__name__} must define episode()")

    def taskset(self) -> Tasks:
        if self.questions:
            found, drafts, shape = self._from_files()
            notes = [f"{self.label}: {len(drafts):,} questions, read as {shape}; {len(found):,} documents"]
        else:
            world = made_up(self.pages, self.world_seed)
            found, drafts = world.documents, world.drafts(self.min_hops, self.max_hops, self.named)
            notes = []
        toolset, reward = self.toolset(found), self.reward.build()
        answers = sorted({draft.answer[0] for draft in drafts})
        return listed(self, drafts, lambda task: self.episode(task, toolset, reward, answers), notes=notes)

    def _from_files(self) -> tuple[Sequence[Document], list[Draft], Shape]:
        rows = list(read_rows(self.questions, split=self.split))
        if not rows:
            raise ConfigError(f"environment {self.label}: {self.questions} holds no rows")
        shape = recognised(rows[0])
        drafts = []
        for row in rows:
            asked = problem(row, shape)
            question = asked.messages[-1].content
            if _ENCRYPTED.fullmatch(question):
                raise ConfigError(f"{row.where}: {shape.prompt} looks encrypted; decrypt the data set first")
            drafts.append(Draft({"question": question}, _answers(asked.answer, row.where), [question]))
        found = documents(read_rows(self.corpus)) if self.corpus else documents_inside(rows)
        if not found:
            raise ConfigError(
                f"environment {self.label}: no documents: set `corpus` to a file, or bring them along in "
                f"{self.questions} as gold_docs, evidence_docs, negative_docs or context"
            )
        return found, drafts, shape


class World:
    """The encyclopedia as documents and tasks."""

    def __init__(self, pages: int, seed: int) -> None:
        self.book = encyclopedia(pages, seed)
        self.documents = [Document(as_id(page.title), page.title, page.text) for page in self.book.pages]
        self._drafts: dict[tuple[int, bool], list[Draft]] = {}

    def drafts(self, min_hops: int, max_hops: int, named: bool) -> list[Draft]:
        """Tasks of different splits need different pages: those on the way are the keys."""
        found: list[Draft] = []
        for hops in range(min_hops, max_hops + 1):
            if (hops, named) not in self._drafts:
                self._drafts[hops, named] = [
                    Draft(
                        {"question": question.text, "hops": [list(hop) for hop in question.hops]},
                        [question.answer],
                        [hop.title for hop in question.hops],
                    )
                    for question in self.book.questions(hops, named=named)
                ]
            found += self._drafts[hops, named]
        return found


made_up = functools.lru_cache(maxsize=4)(World)  # many task sets share one


class CorpusEpisode(RewardedDialogue):
    """One question: a `Forkable` and `Scripted` environment. A subclass says what its tools are used for."""

    settings: CorpusQA
    reward_name = "correct"

    def __init__(
        self, settings: CorpusQA, task: Task, toolset: Toolset, reward: Reward, answers: Sequence[str]
    ) -> None:
        super().__init__(settings, task, [toolset], reward)
        self.toolset: Any = toolset
        self.answers = answers
        self._expert: Sequence[ToolCall] | None = None

    @abstractmethod
    def rules(self) -> str:
        """What stands before the question."""

    @abstractmethod
    def expert_calls(self, hops: Sequence[Hop]) -> Sequence[ToolCall]:
        """The calls, one a turn, that show every fact on the way to the answer."""

    @abstractmethod
    def random_call(self, rng: random.Random) -> ToolCall: ...

    def opening(self) -> Sequence[Message]:
        text = self.settings.instructions or self.rules()
        return [self.say(f"{text}\nQuestion: {self.task.data['question']}")]

    def columns(self) -> Mapping[str, Any]:
        return {"question": self.task.data["question"]}

    def expert_reply(self) -> str:
        """The next call; after the last one, the answer.

        Raises:
            CapabilityError: the questions are not made up, so nobody knows where the answer is.
        """
        if "hops" not in self.task.data:
            raise CapabilityError(
                f"environment {self.settings.label}: no expert for the questions of {self.settings.questions}"
            )
        if self._expert is None:
            self._expert = self.expert_calls([Hop(*hop) for hop in self.task.data["hops"]])
        return self.next_of(self._expert, f"<answer>{self.task.answer[0]}</answer>")

    def random_reply(self, seed: int) -> str:
        """A call, or the answer to some question."""
        rng = random.Random(f"{seed}/{len(self.history)}")
        if self.calls.left and rng.random() < 0.7:
            return write_calls([self.random_call(rng)])
        return f"<answer>{rng.choice(self.answers)}</answer>"

    def _shared(self) -> tuple[Any, ...]:
        return (*super()._shared(), self.toolset, self.answers)


def _answers(answer: Any, where: str) -> list[str]:
    """The right answers of a row; an empty one would make every empty reply right."""
    answers = answer if isinstance(answer, list) else [answer]
    fitting = [each for each in answers if isinstance(each, str | int | float) and not isinstance(each, bool)]
    if not answers or len(fitting) < len(answers) or not all(str(each).strip() for each in fitting):
        raise ConfigError(f"{where}: got the answer {answer!r}, expected text, a number, or a list of these")
    return [str(each) for each in answers]
