"""One episode: an actor and an environment in turns, until either ends or a limit is met.

    reset ──> observation ──render──> context ──actor──> reply ──step──> observation ──> ...

Faults are handled here and nowhere else. If an environment raises or takes too long to reset, there is no
result (`redo`). Two results must not be used (`mask`): a reward that is not a number, and an episode that met
a limit for which the policy is responsible (a context that overflows, a step that takes too long). Neither
becomes a reward of 0 in training. Evaluation tells the two apart by the stop reason, see
`Trajectory.limited`.

The clock of an episode stops while it waits for the engine: the length of the queue says nothing about the
episode.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TypeVar

from silva.config.sections import Limits
from silva.errors import ContextOverflow, RenderingError
from silva.ports import CLOCK, derive
from silva.protocols import Environment, TaskSet
from silva.rendering.renderer import Renderer
from silva.rollouts.actors import Actor, Ask, Reply, ScriptFault
from silva.rollouts.faults import UNWATCHED, Watch, place, tell_if_long, trace, watched
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

    def __init__(self, message: str, failure: Failure, stop_reason: StopReason = "error", trace: str = ""):
        super().__init__(message)
        self.failure, self.stop_reason, self.trace = failure, stop_reason, trace


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
    calling: str = ""  # the method of the environment that was called last
    next_context: tuple[int, ...] = ()  # of an episode that was cut off


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
    watch: Watch = UNWATCHED,
) -> Trajectory:
    """Play one episode of `task`; a fault of the environment is part of the result, never raised.

    Args:
        seed: decides every random number of the episode, the actor's and the environment's; it replaces the
            task's own seed. So a task has the same prompt but different random events in every episode.
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
            environment = _construct(taskset, replace(task, seed=derive(seed, "luck")), watch)
            asks = _Asks(task, environment, actor, limits, id, seed, timer, on_turn, watch)
            stop_reason = await _turns(state, asks, renderer)
    except _EpisodeFault as fault:
        stop_reason, failure, error = fault.stop_reason, fault.failure, str(fault)
        watch.fault(task.environment, error, fault.trace)
    except TimeoutError:
        if not timer.expired():  # somebody else's
            raise
        # A step depends on what the policy did; a reset does not.
        stop_reason, failure = ("timeout", "mask") if state.calling == "step" else ("error", "redo")
        error = f"{state.calling}: no end within rollout.limits.timeout = {limits.timeout:g} s"
        watch.fault(task.environment, error, "")
    finally:
        if environment is not None and (left_open := await _close(environment, task, limits, watch)):
            error = error or left_open  # the result stands
    return Trajectory(
        id=id,
        turns=tuple(state.turns),
        stop_reason=stop_reason,
        rewards=_sum(turn.rewards for turn in state.turns),
        shaped=_sum(turn.shaped for turn in state.turns),
        metrics=_mean(turn.metrics for turn in state.turns),
        observation=state.observation,
        next_context=state.next_context if failure is None else (),
        failure=failure,
        error=error,
        episode=id,
    )


@dataclass(frozen=True)
class _Asks:
    """Asks the environment and the actor, within the limits on time."""

    task: Task
    environment: Environment
    actor: Actor
    limits: Limits
    id: str
    seed: int
    timer: asyncio.Timeout
    on_turn: Callable[[str], None]
    watch: Watch

    async def reset(self, state: _State) -> Observation:
        state.calling = "reset"
        try:
            return _expect(Observation, await self._watched(state, self.environment.reset))
        except Exception as fault:
            raise _fault("reset", fault, self.environment) from fault

    async def step(self, state: _State, message: Message) -> Step:
        state.calling = "step"
        self.on_turn(self.task.environment)
        try:
            step = _expect(Step, await self._watched(state, self.environment.step, message))
            _expect(Observation, step.observation)
            _check_numbers(step)
        except _EpisodeFault:
            raise
        except Exception as fault:
            raise _fault("step", fault, self.environment) from fault
        return step

    async def reply(self, state: _State, room: int) -> Reply:
        self.on_turn("engine")
        ask = Ask(
            context=state.context,
            world=self.task.environment,
            environment=self.environment,
            prefill=state.observation.prefill,
            tools=state.tools,
            max_tokens=min(self.limits.max_turn_tokens, room),
            seed=derive(self.seed, len(state.turns)),
            session=self.id,
        )
        try:
            with _stopped(self.timer):
                return await self.actor.reply(ask)
        except ContextOverflow as fault:
            raise _EpisodeFault(str(fault), "mask", "context_overflow") from fault
        except ScriptFault as fault:
            assert isinstance(fault.__cause__, Exception)
            raise _fault(str(fault), fault.__cause__, self.environment) from fault

    async def _watched(self, state: _State, function: Callable[..., Awaitable[T]], *arguments: object) -> T:
        def tell(seconds: float) -> None:
            self.watch.blocked(self.task.environment, state.calling, seconds)

        return await watched(function, *arguments, tell=tell)


async def _turns(state: _State, asks: _Asks, renderer: Renderer) -> StopReason:
    limits = asks.limits
    state.observation = await asks.reset(state)
    _show(state, renderer, None, asks.environment)
    if len(state.context) >= limits.max_episode_tokens:
        raise _EpisodeFault(
            f"the first observation has {len(state.context)} tokens, expected fewer than "
            f"rollout.limits.max_episode_tokens = {limits.max_episode_tokens}",
            "mask",
            "max_tokens",
        )
    while True:
        room = limits.max_episode_tokens - len(state.context)
        if room <= 0:
            state.next_context = tuple(state.context)
            return "max_tokens"
        index = len(state.turns)
        reply = await asks.reply(state, room)
        message = replace(reply.message, id=f"{asks.id}/{index}")
        step = await asks.step(state, message)
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
            return _cut_off("truncated", state, renderer, reply.segment, asks.environment)
        if reply.stop_reason == "context_overflow":
            return "context_overflow"
        if len(state.turns) >= limits.max_turns:
            return _cut_off("max_turns", state, renderer, reply.segment, asks.environment)
        _show(state, renderer, reply.segment, asks.environment)


@contextmanager
def _stopped(timer: asyncio.Timeout) -> Iterator[None]:
    """Pauses the timer: the remaining time stays the same."""
    if timer.expired():  # and the environment has swallowed the cancellation
        raise asyncio.CancelledError
    loop, when = asyncio.get_running_loop(), timer.when()
    assert when is not None
    left = when - loop.time()
    timer.reschedule(None)
    try:
        yield
    finally:
        timer.reschedule(loop.time() + left)


async def _close(environment: Environment, task: Task, limits: Limits, watch: Watch) -> str | None:
    """The error in closing, if there was one."""

    def tell(seconds: float) -> None:
        watch.blocked(task.environment, "close", seconds)

    try:
        async with asyncio.timeout(limits.timeout):
            await watched(environment.close, tell=tell)
    except Exception as fault:
        found = _fault("close", fault, environment)
        watch.fault(task.environment, str(found), found.trace)
        return str(found)
    return None


def _show(state: _State, renderer: Renderer, last: Segment | None, environment: Environment) -> None:
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
        raise _fault("observation", fault, environment) from fault
    state.shown = tokens
    state.context += tokens


def _cut_off(
    reason: StopReason, state: _State, renderer: Renderer, last: Segment, environment: Environment
) -> StopReason:
    """Records what the policy would have answered next: the state that a critic scores.

    Records nothing if the world shows nothing more. An observation that cannot be rendered is no error here.
    """
    if state.observation.messages or state.observation.context is not None:
        with suppress(_EpisodeFault):
            _show(state, renderer, last, environment)
            state.next_context = tuple(state.context)
    return reason


def _construct(taskset: TaskSet, task: Task, watch: Watch) -> Environment:
    began = CLOCK.monotonic()
    try:
        return taskset.environment(task)
    except Exception as fault:
        raise _fault("construction", fault, taskset) from fault
    finally:
        tell_if_long(began, lambda seconds: watch.blocked(task.environment, "construction", seconds))


def _fault(where: str, fault: Exception, environment: object) -> _EpisodeFault:
    found = place(fault, environment)
    at = f" ({found})" if found else ""
    return _EpisodeFault(f"{where}: {type(fault).__name__}: {fault}{at}", "redo", trace=trace(fault))


def _expect(kind: type[T], got: T) -> T:
    if not isinstance(got, kind):
        raise TypeError(f"got {type(got).__name__}, expected {kind.__name__}")
    return got


def _check_numbers(step: Step) -> None:
    for field_, what in (("rewards", "reward"), ("shaped", "reward"), ("metrics", "metric")):
        values = getattr(step, field_)
        if not isinstance(values, Mapping):
            example = '{"success": 1.0}' if what == "metric" else '{"score": 1.0}'
            raise TypeError(
                f"{field_} of the Step is {values!r}, expected named numbers, such as {field_}={example}"
            )
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
