"""Recorded dialogues as an environment: its expert says what was recorded, and what it shows does not depend
on what is replied.

    [[environments]]
    type = "demonstrations"
    path = "demonstrations.jsonl"

Rows are those that `dataset` reads (ShareGPT, `messages`, a prompt with an answer), or steps of Act-PRM
(`state`, `action`, `done`, `return_`), of which each episode's last one holds the whole dialogue. For
`rollout.type = "thoughts"`, a warm start, and to measure how often a model does what was recorded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from silva.data.dialogues import dialogue, shape_of
from silva.data.row_shapes import Problem, Shape, shown, wrong
from silva.data.rows import Row
from silva.data.settings import GivenRows
from silva.environments.bases.environment import BaseEnvironment
from silva.environments.settings import EnvironmentSettings
from silva.environments.tasks import Draft, Tasks, listed
from silva.errors import ConfigError
from silva.rendering.dialogue import reply_text
from silva.rendering.tool_calls import parse_hermes
from silva.thoughts import split_reasoning
from silva.types import Message, Observation, Step, Task, ToolCall

FINAL = "Final Answer: "  # begins the last action of Act-PRM's dialogues


class Demonstrations(GivenRows, EnvironmentSettings):
    needs: ClassVar[str] = "rows (`path`, `hub` or `rows`)"
    reward_range: ClassVar = (0.0, 1.0)

    type: Literal["demonstrations"] = "demonstrations"
    thoughts: bool = False
    """Keep the thoughts of recorded replies; without them only the actions are demonstrated."""
    min_return: float = 0.0
    """Steps of Act-PRM: only episodes with a higher `return_`."""

    def taskset(self) -> Tasks:
        shape, recorded = self._recorded(self.read())
        if shape is None:
            raise ConfigError(f"environment {self.label}: {self.path or self.hub} holds no demonstration")
        dialogues = [self._plain(each) for each in recorded]
        problems = [Problem(each[:-1], reply_text(each[-1]), {}) for each in recorded]
        # Two recordings of one problem are on the same side.
        drafts = [Draft({"messages": each}, None, [_shown_first(each)]) for each in dialogues]
        replies = [m["content"] for each in dialogues[:1000] for m in each if m["role"] == "assistant"]
        notes = shown(self.label, shape, problems)
        return listed(self, drafts, lambda task: Demonstration(self, task, replies), notes=notes)

    def _recorded(self, rows: Iterator[Row]) -> tuple[Shape | None, list[tuple[Message, ...]]]:
        """What was recorded, up to the last reply."""
        shape, found = None, []
        for row in rows:
            if (
                "state" in row.values
                and "action" in row.values
                and not (row.values.get("done") and row.values.get("return_", 1.0) > self.min_return)
            ):
                continue
            shape = shape or shape_of(row)
            messages = dialogue(row, shape).messages
            if messages[-1].role != "assistant":
                raise wrong(row, shape.prompt, "a dialogue that ends with an answer", messages[-1].role)
            found.append(messages)
        return shape, found

    def _plain(self, recorded: Sequence[Message]) -> list[dict[str, str]]:
        said = [(m.role, reply_text(m) if m.role == "assistant" else m.content) for m in recorded]
        if not self.thoughts:
            said = [(role, action_of(text) if role == "assistant" else text) for role, text in said]
        return [{"role": role, "content": text} for role, text in said]


def action_of(reply: str) -> str:
    """A recorded reply without its thoughts: those in <think>...</think>, and the text before a call or a
    final answer."""
    text = split_reasoning(reply)[1].strip()
    for mark in ("<tool_call>", FINAL):
        if mark in text:
            return text[text.index(mark) :]
    return text


class Demonstration(BaseEnvironment):
    """One recorded dialogue: a `Forkable` and `Scripted` environment."""

    settings: Demonstrations

    def __init__(self, settings: Demonstrations, task: Task, replies: Sequence[str]) -> None:
        super().__init__(settings, task)
        self.replies = replies
        self.messages: list[dict[str, str]] = task.data["messages"]
        self.count = sum(m["role"] == "assistant" for m in self.messages)
        self.at = self.matched = 0

    async def reset(self) -> Observation:
        self._begin()
        return self._shown()

    async def step(self, message: Message) -> Step:
        """What was recorded next, whatever the reply was; a reply that does what was recorded is rewarded."""
        self._check_running()
        right = _doing(message.content, message.tool_calls) == _doing(*_parsed(self.expert_reply()))
        self.matched += right
        self.at += 1
        done = not any(m["role"] == "assistant" for m in self.messages[self.at :])
        if done:
            self._end()
        solved = {"success": float(self.matched == self.count)} if done else {}
        return Step(
            Observation() if done else self._shown(),
            rewards={"match": right / self.count},
            terminated=done,
            metrics={"match": float(right), **solved},
        )

    def expert_reply(self) -> str:
        return self.messages[self.at]["content"]

    def random_reply(self, seed: int) -> str:
        """A recorded reply, of any demonstration."""
        return random.Random(f"{seed}/{self.at}").choice(self.replies)

    def _shown(self) -> Observation:
        shown = []
        while self.messages[self.at]["role"] != "assistant":
            entry = self.messages[self.at]
            shown.append(self.say(entry["content"], entry["role"]))  # type: ignore[arg-type]
            self.at += 1
        return Observation(tuple(shown))

    def _shared(self) -> tuple[Any, ...]:
        return (*super()._shared(), self.replies, self.messages)


def _shown_first(dialogue: Sequence[Mapping[str, str]]) -> list[str]:
    roles = [message["role"] for message in dialogue]
    return [message["content"] for message in dialogue[: roles.index("assistant")]]


def _parsed(reply: str) -> tuple[str, tuple[ToolCall, ...]]:
    parsed = parse_hermes(split_reasoning(reply)[1])
    return parsed.content, parsed.calls


def _doing(content: str, calls: Sequence[ToolCall]) -> tuple[str, list[Any]]:
    """What a reply does, to compare: its text, and its calls with their arguments."""
    return " ".join(content.split()), [(call.name, dict(call.arguments)) for call in calls]
