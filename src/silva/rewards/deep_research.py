r"""Questions that are answered with tools, as in ARPO (arXiv:2507.19849): format, correctness, tools.

    format_share = 0      without the format: -penalty; otherwise correctness + bonus
    format_share = 0.2    0.2 * format + 0.8 * correctness + bonus

    correctness   F1 of the answer from 0 to 1, or what another reward says
    bonus         0.1 if correctness is above 0 and every tool of `tools` gave a result
    solved        correct, and in the format; correctness then counts as 1
    not solved    at most `partial`

The format: thoughts are there and closed; one <answer>...</answer>, in the last reply; a \boxed{} in it; no
malformed or unclosed call; no result that the policy wrote itself. Only messages of the policy are read for
it, and only messages of tools count as their use, so that neither can be forged by writing the other's tags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from silva.config.schema import union
from silva.config.sections import NotNegative
from silva.errors import RewardError
from silva.protocols import Attempt, ChecksTasks, Reward, Score
from silva.rewards import REWARDS
from silva.rewards.answers import boxed
from silva.rewards.settings import RewardSettings
from silva.rewards.token_f1 import TokenF1
from silva.thoughts import CLOSE, OPEN
from silva.types import Message

if TYPE_CHECKING:
    AnyCorrectness = RewardSettings
else:
    AnyCorrectness = union(
        {name: target for name, target in REWARDS.items() if name not in ("weighted", "deep_research")}
    )

_THOUGHT = re.compile(rf"{OPEN}.*?(?:{CLOSE}|\Z)", re.S)
_EMPTY_BOX = re.compile(r"\\boxed\s*\{\s*\}")  # a wrong answer in the right form
_FORGED = re.compile(r"</?(?:result|tool_response)>")


class DeepResearch(RewardSettings):
    """Questions answered with tools: format, correctness, and a bonus for using every tool."""

    type: Literal["deep_research"] = "deep_research"
    correctness: AnyCorrectness = TokenF1()
    """What grades the answer: F1 of its words, or any other reward from 0 to 1, such as "judge"."""
    format_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """0: the format is a condition. Otherwise the share of the reward that is given for it, such as 0.2."""
    penalty: NotNegative = 1.0
    """What an attempt without the format loses where the format is a condition."""
    bonus: NotNegative = 0.1
    """For an attempt that used every tool and is at least partly correct."""
    tools: tuple[str, ...] = ("search", "python")
    """Names of the tools that the bonus asks for."""
    partial: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Most that an attempt can get that is not solved."""
    think: bool = True
    """Whether the format asks for thoughts, in <think>."""
    box: bool = True
    r"""Whether the format asks for a \boxed{} in the answer."""

    @property
    def reward_range(self) -> tuple[float, float]:
        return (0.0 if self.format_share else -self.penalty), 1.0 + (self.bonus if self.tools else 0.0)

    def build(self) -> Reward:
        return DeepResearchReward(self, self.correctness.build())


class DeepResearchReward:
    def __init__(self, settings: DeepResearch, correctness: Reward) -> None:
        self.settings, self.correctness = settings, correctness

    def check(self, answer: Any, data: Mapping[str, Any]) -> None:
        """See `silva.protocols.ChecksTasks`."""
        if isinstance(self.correctness, ChecksTasks):
            self.correctness.check(answer, data)

    async def score(self, attempt: Attempt) -> Score:
        """Raises RewardError if the correctness is not between 0 and 1."""
        wanted = self.settings
        broken = broken_rules(attempt.messages, wanted.tools, think=wanted.think, box=wanted.box)
        metrics = {"format": float(not broken), **{f"broken_{rule}": 1.0 for rule in broken}}
        if broken and not wanted.format_share:
            return Score(-wanted.penalty, False, metrics)
        graded = await self.correctness.score(attempt)
        if not 0 <= graded.value <= 1:
            raise RewardError(
                f"reward deep_research: correctness: got {graded.value:g}, expected a value from 0 to 1"
            )
        correct = 1.0 if graded.solved else graded.value
        all_used = set(wanted.tools) <= used(attempt.messages)
        bonus = wanted.bonus if wanted.tools and all_used and correct > 0 else 0.0
        share = wanted.format_share
        value = share * (not broken) + (1 - share) * correct + bonus
        solved = graded.solved and not broken
        metrics |= {**graded.metrics, "correctness": graded.value, "all_tools_used": float(all_used)}
        return Score(value if solved else min(value, wanted.partial), solved, metrics)


def broken_rules(
    messages: Sequence[Message], tools: Sequence[str], *, think: bool = True, box: bool = True
) -> list[str]:
    """The names of the rules that the policy's messages break: think, answer, box, call, result."""
    own = [message for message in messages if message.role == "assistant"]
    said = [_THOUGHT.sub("", message.content) for message in own]
    broken = []
    thinks = any(message.reasoning or OPEN in message.content for message in own)
    if think and not (thinks and all(map(_is_closed, own))):
        broken.append("think")
    answer = _answer(said)
    if answer is None:
        broken.append("answer")
    if box and not (answer and ((boxed(answer) or "").strip() or _EMPTY_BOX.search(answer))):
        broken.append("box")
    tags = [tag for tool in tools for tag in (f"<{tool}>", f"</{tool}>")]
    if any(message.errors for message in own) or any(tag in text for tag in tags for text in said):
        broken.append("call")
    if any(map(_FORGED.search, said)):
        broken.append("result")
    return broken


def used(messages: Sequence[Message]) -> set[str]:
    """Names of the tools that answered a call with a result."""
    answers = [m for m in messages if m.role == "tool" and not m.content.startswith("Error: ")]
    return {message.name for message in answers if message.name}


def _answer(said: Sequence[str]) -> str | None:
    """The text of the only <answer>; None if there is none, or several, or one before the last reply."""
    tags = [(text.count("<answer>"), text.count("</answer>")) for text in said]
    if not tags or tags[-1] != (1, 1) or any(before != (0, 0) for before in tags[:-1]):
        return None
    inside, closed, _ = said[-1].partition("<answer>")[2].partition("</answer>")
    return inside if closed else None


def _is_closed(message: Message) -> bool:
    """As many </think> as <think>, or one more: the prompt may have opened the first."""
    text = message.content if message.raw is None else message.raw
    opened, closed = text.count(OPEN), text.count(CLOSE)
    return closed == opened or (closed == opened + 1 and message.reasoning is not None)
