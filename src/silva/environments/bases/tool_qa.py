"""Questions to be answered with tools: an environment of your own takes a function and a list.

    def inhabitants(city: str) -> int:
        '''How many people live in a city.'''
        if city not in CENSUS:
            raise ToolError(f"unknown city {city}")
        return CENSUS[city]

    class Cities(ToolQA):
        eval_size: int = 20

        def questions(self):
            return [Question(f"How many people live in {city}?", str(n)) for city, n in CENSUS.items()]

        def tools(self):
            return [inhabitants]

Reward 1 if every question of the episode is answered rightly (see `grade`), else 0; the first wrong answer
ends it. With `Question(..., calls=[ToolCall("inhabitants", {"city": city})])` there is an expert, so that the
environment can play itself.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from silva.environments.bases.tool_dialogue import ToolDialogue, ToolDialogueSettings
from silva.environments.tasks import Draft, listed
from silva.errors import CapabilityError
from silva.protocols import TaskSet, Tool, Toolset
from silva.rewards.text import as_number, is_right
from silva.thoughts import answer_of
from silva.tools.fixed import Fixed
from silva.types import Message, Step, Task, ToolCall


class Question(NamedTuple):
    """`calls`: the calls that an expert makes, one a turn, before it gives the answer; used only in scripted
    play. None: there is no expert."""

    text: str
    answer: str
    calls: Sequence[ToolCall] | None = None


class ToolQA(ToolDialogueSettings):
    """Base of the settings of a tool environment: define `questions` and `tools`, where wanted `grade`."""

    def questions(self) -> Sequence[Question | Sequence[Question]]:
        """One entry an episode: a question, or several that are asked one after the other.

        Entries that begin with the same question are all in one split. If some entry begins with a question
        that others ask later, those are in its split too, or left out.
        """
        raise TypeError(f"{type(self).__name__} must define questions()")

    def tools(self) -> Sequence[Callable[..., Any] | Tool]:
        """Functions whose docstring and type hints tell the model how to call them, or tools."""
        raise TypeError(f"{type(self).__name__} must define tools()")

    def grade(self, reply: str, answer: str) -> bool:
        """Whether a reply is right. The text inside <answer>...</answer> is graded, or the whole reply if it
        has no such tag. If the answer is a number, a tag must hold that number alone, perhaps with a unit,
        and a reply without a tag must end with it. Otherwise the texts must be the same; case, spaces, quotes
        around them and a full stop at the end do not matter."""
        return is_right(reply, answer)

    def taskset(self) -> TaskSet:
        chains = [[entry] if isinstance(entry, Question) else list(entry) for entry in self.questions()]
        firsts = {chain[0][:2] for chain in chains}
        # A later question means little without the earlier ones, unless it also begins an episode.
        drafts = [
            draft(chain, [q[:2] for i, q in enumerate(chain) if i == 0 or q[:2] in firsts])
            for chain in chains
        ]
        return listed(self, drafts, self.builder())

    def builder(self) -> Callable[[Task], ToolEpisode]:
        """What makes the episode of a task; the tools are shared by all of them."""
        tools = self.tools()
        toolsets = [Fixed(tools)] if tools else []
        return lambda task: ToolEpisode(self, task, toolsets)


def draft(chain: Sequence[Question], keys: Sequence[Any]) -> Draft:
    """The draft of an episode that asks these questions; `keys` as in `Draft`."""
    data: dict[str, Any] = {"questions": [q.text for q in chain]}
    if any(q.calls is not None for q in chain):
        data["calls"] = [
            None if q.calls is None else [{"name": c.name, "arguments": dict(c.arguments)} for c in q.calls]
            for q in chain
        ]
    return Draft(data, [q.answer for q in chain], keys)


class ToolEpisode(ToolDialogue):
    """A `Forkable` and `Scripted` environment: asks the questions, runs called tools, grades the answers."""

    settings: ToolQA

    def __init__(self, settings: ToolQA, task: Task, toolsets: Sequence[Toolset]) -> None:
        super().__init__(settings, task, toolsets)
        self.question = 0  # index of the one that is open

    def opening(self) -> Sequence[Message]:
        text = self.task.data["questions"][0]
        return [self.say(f"{self.settings.instructions}\n{text}".strip())]

    async def step(self, message: Message) -> Step:
        step = await super().step(message)
        return step if step.rewards else dataclasses.replace(step, rewards={"correct": 0.0})

    async def answered(self, message: Message) -> Step:
        reply = answer_of(message.content)
        if not self.settings.grade(reply, self.task.answer[self.question]):
            return self._final()
        self.question += 1
        self.called = 0
        if self.question == len(self.task.answer):
            return self._final(solved=True)
        return Step(self.show(self.say(self.task.data["questions"][self.question])))

    async def out_of_calls(self, message: Message) -> Step:
        return self._final(truncated=True)

    def expert_reply(self) -> str:
        """The question's next call; after the last call, its answer.

        Raises:
            CapabilityError: the question has no `calls`.
        """
        return self.next_of(self._expert_calls(), self.task.answer[self.question])

    def random_reply(self, seed: int) -> str:
        """A number, or letters, of about the right length."""
        rng, answer = random.Random(f"{seed}/{self.question}"), self.task.answer[self.question]
        if as_number(answer) is not None:
            return str(rng.randrange(10 ** len(answer.lstrip("-"))))
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in answer)

    def _expert_calls(self) -> list[ToolCall]:
        if not self.toolsets:
            return []
        calls = self.task.data.get("calls") or [None] * len(self.task.answer)
        if calls[self.question] is None:
            raise CapabilityError(
                f"environment {self.settings.label}: no expert for the question "
                f"{self.task.data['questions'][self.question]!r}, it has no calls; expected Question(text, "
                "answer, calls=[ToolCall(name, arguments)]), or calls=[] if it needs no tool"
            )
        return [ToolCall(**call) for call in calls[self.question]]

    def _final(self, solved: bool = False, truncated: bool = False) -> Step:
        self._end()
        metrics = {"success": float(solved), "answered": self.question / len(self.task.answer)}
        return Step(rewards={"correct": float(solved)}, terminated=not truncated, truncated=truncated,
                    metrics=metrics)  # fmt: skip
