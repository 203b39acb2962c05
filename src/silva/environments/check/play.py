"""Replies and episodes for checking an environment without a model."""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

from silva.errors import CapabilityError
from silva.ports import derive
from silva.protocols import Scripted
from silva.rendering.tool_calls import parse_hermes
from silva.types import Message, Observation, Step, ToolCall, ToolSpec

MOST_TURNS = 200
WORDS = "yes|no|left|up|A|B|1|7|42|[3]|<answer>5</answer>|<answer>Up</answer>".split("|")  # noqa: SIM905


@dataclass
class CheckedEpisode:
    """An episode that is played, and what it told.

    Attributes:
        tools: those that were offered last, so that they can be called at random.
        slowest: seconds of the slowest step.
    """

    inner: Any
    told: list[Observation | Step] = field(default_factory=list)
    tools: Sequence[ToolSpec] = ()
    turn: int = 0
    ended: bool = False
    slowest: float = 0.0

    @property
    def steps(self) -> list[Step]:
        return [each for each in self.told if isinstance(each, Step)]

    @property
    def reward(self) -> float:
        return sum(value for step in self.steps for value in step.rewards.values())

    @property
    def success(self) -> float | None:
        return self.steps[-1].metrics.get("success") if self.steps else None

    async def play(self, reply: Reply, turns: int = MOST_TURNS) -> Self:
        """From its start to its end, or as many turns; it is closed afterwards."""
        try:
            await self.reset()
            return await self.go_on(reply, turns)
        finally:
            await self.inner.close()

    async def reset(self) -> None:
        self._see(await self.inner.reset())

    async def go_on(self, reply: Reply, turns: int = MOST_TURNS) -> Self:
        """The next turns, at most to its end."""
        for _ in range(turns):
            message = as_message(await reply(self), self.turn)
            started = time.perf_counter()
            step = await self.inner.step(message)
            self.slowest = max(self.slowest, time.perf_counter() - started)
            self.turn += 1
            self._see(step)
            if not isinstance(step, Step) or step.terminated or step.truncated:
                self.ended = True
                break
        return self

    async def fork(self, seed: int) -> Self:
        return replace(self, inner=await self.inner.fork(seed), told=[*self.told])

    def _see(self, told: Any) -> None:
        self.told.append(told)
        self.tools = getattr(getattr(told, "observation", told), "tools", ()) or self.tools


Reply = Callable[[CheckedEpisode], Awaitable[Message | str]]


def as_message(reply: Message | str, turn: int) -> Message:
    """As the renderer gives it to the environment."""
    if isinstance(reply, Message):
        return reply
    parsed = parse_hermes(reply)
    return Message(
        "assistant", parsed.content, tool_calls=parsed.calls, errors=parsed.errors, id=f"reply-{turn}"
    )


def always(message: Message) -> Reply:
    async def reply(played: CheckedEpisode) -> Message:
        return message

    return reply


def at_random(seed: int) -> Reply:
    """The environment's own random replies; if it has none, tool calls that fit their schema, and words."""

    async def reply(played: CheckedEpisode) -> Message | str:
        if isinstance(played.inner, Scripted):
            with suppress(CapabilityError):
                return await _said(played.inner.random_reply(derive(seed, played.turn)))
        return guessed(played.tools, random.Random(f"{seed}/{played.turn}"), played.turn)

    return reply


async def expert(played: CheckedEpisode) -> str:
    return await _said(played.inner.expert_reply())


def expert_or_random(seed: int) -> Reply:
    async def reply(played: CheckedEpisode) -> Message | str:
        if isinstance(played.inner, Scripted):
            with suppress(CapabilityError):
                return await expert(played)
        return await at_random(seed)(played)

    return reply


async def _said(reply: str | Awaitable[str]) -> str:
    return await reply if inspect.isawaitable(reply) else reply


def guessed(tools: Sequence[ToolSpec], rng: random.Random, turn: int) -> Message:
    """A call of some tool with arguments of the right types, or a word."""
    if tools and rng.random() < 0.7:
        spec = rng.choice(list(tools))
        arguments = value_for(spec.parameters, rng)
        return Message(
            "assistant", "", tool_calls=(ToolCall(spec.name, arguments, f"call-{turn}"),), id=f"reply-{turn}"
        )
    return Message("assistant", rng.choice(WORDS), id=f"reply-{turn}")


def value_for(schema: Mapping[str, Any], rng: random.Random) -> Any:
    """A value that a JSON schema describes, as far as its types go."""
    if "enum" in schema:
        return rng.choice(list(schema["enum"]))
    if "const" in schema:
        return schema["const"]
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return value_for(rng.choice(list(choices)), rng)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        required = schema.get("required", ())
        return {
            name: value_for(part, rng)
            for name, part in schema.get("properties", {}).items()
            if name in required or rng.random() < 0.5
        }
    if kind == "array":
        return [value_for(schema.get("items", {}), rng) for _ in range(rng.randrange(3))]
    if kind in ("integer", "number"):
        low, high = schema.get("minimum", 0), schema.get("maximum", 20)
        return rng.randint(int(low), max(int(high), int(low)))
    return {"boolean": rng.random() < 0.5, "null": None}.get(kind, rng.choice(WORDS))
