"""One episode: an actor and an environment in turns, until either ends or a limit is met.

    reset ──> observation ──render──> context ──actor──> reply ──step──> observation ──> ...

Faults are met here and nowhere else: an environment that raises gives no result (`redo`), a reward that
is not a number or a context that overflows must not be used (`mask`). Neither is ever a reward of 0.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TypeVar

from silva.config.sections import Limits
from silva.errors import ContextOverflow, RenderingError
from silva.ports import derive
from silva.protocols import Environment, TaskSet
from silva.rendering.renderer import Renderer
from silva.rollouts.actors import Actor, Ask
from silva.types import (
    Failure,
    Message,
    Observation,
    Segment,
    Step,
    StopReason,
    Task,
    ToolSpec,
    Trajectory,
    Turn,
)

T = TypeVar("T")


class _EpisodeFault(Exception):
    """Ends an episode without a usable result."""

    def __init__(self, message: str, failure: Failure, stop_reason: StopReason = "error"):
        super().__init__(message)
        self.failure, self.stop_reason = failure, stop_reason


@dataclass
class _State:
    """What the episode has become so far."""

    messages: list[Message] = field(default_factory=list)  # the whole context as messages
    context: list[int] = field(default_factory=list)  # and as tokens
    sampled: dict[str, list[int]] = field(default_factory=dict)  # message id -> tokens, prefill included
    known: dict[str, Message] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    tools: tuple[ToolSpec, ...] = ()
    observation: Observation = field(default_factory=Observation)
    shown: list[int] = field(default_factory=list)  # tokens of the observation
    fresh: bool = True


async def play(
    task: Task,
    taskset: TaskSet,
    actor: Actor,
    renderer: Renderer,
    limits: Limits,
    *,
    id: str,
    seed: int,
    on_turn: Callable[[str], None] = lambda waiting_for: None,
) -> Trajectory:
    """Play one episode of `task`; a fault of the environment is part of the result, never raised.

    Args:
        seed: fixes every random number the actor uses.
        on_turn: told whom the episode waits for next: "engine", or the environment's name.
    """
    state = _State()
    stop_reason: StopReason = "error"
    failure: Failure | None = None
    error: str | None = None
    environment: Environment | None = None
    try:
        async with asyncio.timeout(limits.timeout) as timer:
            on_turn(task.environment)
            environment = _construct(taskset, task)
            stop_reason = await _turns(state, task, environment, actor, renderer, limits, id, seed, on_turn)
    except _EpisodeFault as fault:
        stop_reason, failure, error = fault.stop_reason, fault.failure, str(fault)
    except TimeoutError:
        if not timer.expired():  # somebody else's
            raise
        stop_reason, failure = "timeout", "mask"
        error = f"no end within rollout.limits.timeout = {limits.timeout:g} s"
    finally:
        if environment is not None:
            try:
                async with asyncio.timeout(limits.timeout):
                    await environment.close()
            except Exception as fault:  # the result stands; say what was left open
                error = error or f"close: {type(fault).__name__}: {fault}"
    return Trajectory(
        id=id,
        turns=tuple(state.turns),
        stop_reason=stop_reason,
        rewards=_sum(turn.rewards for turn in state.turns),
        shaped=_sum(turn.shaped for turn in state.turns),
        metrics=_mean(turn.metrics for turn in state.turns),
        observation=state.observation,
        failure=failure,
        error=error,
        episode=id,
    )


async def _turns(
    state: _State,
    task: Task,
    environment: Environment,
    actor: Actor,
    renderer: Renderer,
    limits: Limits,
    id: str,
    seed: int,
    on_turn: Callable[[str], None],
) -> StopReason:
    try:
        state.observation = _expect(Observation, await environment.reset())
    except Exception as fault:
        raise _fault("reset", fault) from fault
    _show(state, renderer, None)
    if len(state.context) >= limits.max_episode_tokens:
        raise _EpisodeFault(
            f"the first observation has {len(state.context)} tokens, expected fewer than "
            f"rollout.limits.max_episode_tokens = {limits.max_episode_tokens}",
            "mask",
            "max_tokens",
        )
    while True:
        index = len(state.turns)
        room = limits.max_episode_tokens - len(state.context)
        if room <= 0:
            return "max_tokens"
        on_turn("engine")
        try:
            ask = Ask(
                context=state.context,
                environment=environment,
                prefill=state.observation.prefill,
                tools=state.tools,
                max_tokens=min(limits.max_turn_tokens, room),
                seed=derive(seed, index),
                session=id,
            )
            reply = await actor.reply(ask)
        except ContextOverflow as fault:
            raise _EpisodeFault(str(fault), "mask", "context_overflow") from fault
        on_turn(task.environment)
        message = replace(reply.message, id=f"{id}/{index}")
        try:
            step = _expect(Step, await environment.step(message))
            _expect(Observation, step.observation)
            _check_numbers(step)
        except _EpisodeFault:
            raise
        except Exception as fault:
            raise _fault("step", fault) from fault
        shown = state.observation.messages if state.observation.context is None else state.observation.context
        state.turns.append(
            Turn(
                id=message.id,
                segments=(Segment("environment", tuple(state.shown)), reply.segment),
                messages=(*shown, message),
                rewards=step.rewards,
                shaped=step.shaped,
                metrics=step.metrics,
                fresh=state.fresh,
                stop_reason=reply.stop_reason,
            )
        )
        prefill = renderer.encode(state.observation.prefill)
        state.sampled[message.id] = [*prefill, *reply.segment.tokens]
        state.known[message.id] = message
        state.messages.append(message)
        state.context += reply.segment.tokens
        state.observation = step.observation
        if step.terminated:
            return "terminated"
        if step.truncated:
            return "truncated"
        if reply.stop_reason == "context_overflow":
            return "context_overflow"
        if len(state.turns) >= limits.max_turns:
            return "max_turns"
        _show(state, renderer, reply.segment)


def _show(state: _State, renderer: Renderer, last: Segment | None) -> None:
    """Add the observation to the context: as new tokens after `last`, or as a context of its own."""
    observation = state.observation
    state.tools = observation.tools or state.tools
    if observation.context is not None:
        state.messages = list(observation.context)
        for message in observation.context:
            # Edited messages are rendered anew; only what was said as it stands keeps its tokens.
            if message.id in state.sampled and state.known[message.id] != message:
                del state.sampled[message.id]
    else:
        state.messages += observation.messages
    state.fresh = last is None or observation.context is not None or renderer.rebuilds_context
    try:
        if state.fresh or last is None:
            tokens = renderer.context(
                state.messages, state.tools, sampled=state.sampled, prefill=observation.prefill
            )
            state.context = []
        else:
            tokens = renderer.extend(last.tokens, observation.messages, prefill=observation.prefill)
    except RenderingError as fault:
        raise _EpisodeFault(f"rendering: {fault}", "mask") from fault
    except Exception as fault:  # a message whose content is no text, say
        raise _fault("observation", fault) from fault
    state.shown = tokens
    state.context += tokens


def _construct(taskset: TaskSet, task: Task) -> Environment:
    try:
        return taskset.environment(task)
    except Exception as fault:
        raise _fault("construction", fault) from fault


def _fault(where: str, fault: Exception) -> _EpisodeFault:
    return _EpisodeFault(f"{where}: {type(fault).__name__}: {fault}", "redo")


def _expect(kind: type[T], got: T) -> T:
    if not isinstance(got, kind):
        raise TypeError(f"got {type(got).__name__}, expected {kind.__name__}")
    return got


def _check_numbers(step: Step) -> None:
    for what, values in (("reward", step.rewards), ("reward", step.shaped), ("metric", step.metrics)):
        for name, value in values.items():
            if not isinstance(value, Real) or not math.isfinite(value):
                raise _EpisodeFault(f"step: {what} {name!r} is {value!r}, expected a finite number", "mask")


def _sum(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + float(value)
    return total


def _mean(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of each metric, over the turns that report it."""
    parts = list(parts)
    counts = Counter(name for part in parts for name in part)
    return {name: value / counts[name] for name, value in _sum(parts).items()}
