"""Replies and episodes for checking an environment without a model."""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from silva.errors import CapabilityError
from silva.ports import derive
from silva.protocols import Environment, Scripted
from silva.rendering.tool_calls import parse_hermes
from silva.types import Message, Observation, Step, ToolCall, ToolSpec

MOST_TURNS = 200
WORDS = (
    "yes",
    "no",
    "left",
    "up",
    "A",
    "B",
    "1",
    "7",
    "42",
    "[3]",
    "<answer>5</answer>",
    "<answer>Up</answer>",
)
Replies = Callable[[int], Any]  # turn -> a message, a text, or what gives one when awaited


@dataclass
class Played:
    """An episode: what was told, and how long the slowest step took."""

    told: list[Observation | Step] = field(default_factory=list)
    ended: bool = False
    slowest: float = 0.0  # seconds of the slowest step

    @property
    def steps(self) -> list[Step]:
        return [each for each in self.told if isinstance(each, Step)]

    @property
    def reward(self) -> float:
        return sum(value for step in self.steps for value in step.rewards.values())

    @property
    def success(self) -> float | None:
        return self.steps[-1].metrics.get("success") if self.steps else None


async def play(environment: Environment, replies: Replies, turns: int = MOST_TURNS) -> Played:
    """An episode until it ends or has had so many turns; it is closed afterwards."""
    try:
        played = await begin(environment, replies, 0)
        rest = await go_on(environment, replies, 0, turns)
        return Played([*played.told, *rest.told], rest.ended, rest.slowest)
    finally:
        await environment.close()


async def begin(environment: Environment, replies: Replies, turns: int) -> Played:
    """The start of an episode and its first turns."""
    first = await environment.reset()
    played = await go_on(environment, replies, 0, turns)
    played.told.insert(0, first)
    return played


async def go_on(environment: Environment, replies: Replies, begun: int, turns: int = MOST_TURNS) -> Played:
    """The next turns of an episode that has had `begun` ones, at most to its end."""
    played = Played()
    for turn in range(begun, begun + turns):
        message = await as_message(replies(turn), turn)
        started = time.perf_counter()
        step = await environment.step(message)
        played.slowest = max(played.slowest, time.perf_counter() - started)
        played.told.append(step)
        if not isinstance(step, Step) or step.terminated or step.truncated:
            played.ended = True
            break
    return played


async def as_message(reply: Any, turn: int) -> Message:
    """As the renderer gives it to the environment; text may have to be waited for."""
    reply = await reply if inspect.isawaitable(reply) else reply
    if isinstance(reply, Message):
        return reply
    parsed = parse_hermes(reply)
    return Message(
        "assistant", parsed.content, tool_calls=parsed.calls, errors=parsed.errors, id=f"reply-{turn}"
    )


class Watched:
    """An environment whose offered tools are remembered, so that they can be called at random."""

    def __init__(self, inner: Any, tools: Sequence[ToolSpec] = ()) -> None:
        self.inner = inner
        self.tools = tools

    async def reset(self) -> Observation:
        observation = await self.inner.reset()
        self._see(observation)
        return observation

    async def step(self, message: Message) -> Step:
        step = await self.inner.step(message)
        self._see(getattr(step, "observation", None))
        return step

    async def close(self) -> None:
        await self.inner.close()

    def _see(self, observation: Any) -> None:
        self.tools = getattr(observation, "tools", ()) or self.tools


def random_replies(environment: Watched, seed: int) -> Replies:
    """The environment's own random replies; if it has none, tool calls that fit their schema, and words."""
    own = isinstance(environment.inner, Scripted)

    async def reply(turn: int) -> Any:
        nonlocal own
        if own:
            try:
                said = environment.inner.random_reply(derive(seed, turn))
                return await said if inspect.isawaitable(said) else said
            except CapabilityError:
                own = False
        return guessed(environment.tools, random.Random(f"{seed}/{turn}"), turn)

    return reply


def expert_replies(environment: Any, seed: int | None = None) -> Replies:
    """Those of the expert. With a seed, random ones if it turns out that there is no expert."""

    async def reply(turn: int) -> str:
        try:
            said = environment.expert_reply()
            return await said if inspect.isawaitable(said) else said
        except CapabilityError:
            if seed is None:
                raise
        said = environment.random_reply(derive(seed, turn))
        return await said if inspect.isawaitable(said) else said

    return reply


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
