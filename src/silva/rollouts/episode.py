"""One episode: an actor and an environment in turns, until either ends or a limit is met.

    start ──> observation ──render──> request ──actor──> reply ──step──> observation ──> ...
              └───────────────────────────── advance: one turn ──────────────────────┘

Faults are handled here and nowhere else. If an environment raises or takes too long to reset, or if the
actor gets no reply, there is no result (`redo`). Two results must not be used (`mask`): a reward that is not
a number, and an episode that met a limit for which the policy is responsible (a context that overflows, a
step that takes too long). Neither becomes a reward of 0 in training. Evaluation tells the two apart by the
stop reason, see `Trajectory.limited`.

The clock of an episode runs while its environment works, never while it waits for the engine: the length of
the queue says nothing about the episode.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from silva.actors.script import ScriptFault
from silva.config.sections import ContextSettings, EpisodeLimits
from silva.errors import CapabilityError, ContextOverflow, NoReply, RenderingError, contained
from silva.ports import CLOCK, derive
from silva.protocols import Actor, Driven, Environment, Forkable, Reply, Request, TaskSet
from silva.rendering.renderer import Renderer
from silva.rollouts.checks import EpisodeFault, check_step, expect
from silva.rollouts.context import FULL
from silva.rollouts.faults import UNWATCHED, Watch, described, place, tell_if_long, trace, watched
from silva.rollouts.harness import play_program
from silva.rollouts.state import End, State, answered, new_messages, render, result, shorter, started
from silva.types import Failure, Observation, Task, Trajectory

T = TypeVar("T")
OnTurn = Callable[[str, str | None], None]
"""Told the id of an episode and whom it waits for: "engine", its environment, or None once it is closed."""
_AT_ONCE: nullcontext[None] = nullcontext()
LONG_TEXT = 50_000
"""Characters that take about a tenth of a second to tokenise."""


async def play(
    task: Task,
    taskset: TaskSet,
    actor: Actor,
    renderer: Renderer | None,
    limits: EpisodeLimits,
    *,
    id: str,
    seed: int,
    on_turn: OnTurn = lambda episode, waiting_for: None,
    watch: Watch = UNWATCHED,
    context: ContextSettings = FULL,
) -> Trajectory:
    """Play one episode of `task` to its end; the arguments are those of `Episode`."""
    if isinstance(taskset, Driven):
        return await play_program(
            task, taskset, actor, renderer, limits, id=id, seed=seed, on_turn=on_turn, watch=watch,
            context=context,
        )  # fmt: skip
    episode = Episode(task, taskset, actor, renderer, limits, id, seed, on_turn, watch, context)
    try:
        await episode.start()
        while not episode.over:
            await episode.advance()
    finally:
        await episode.close()
    return episode.trajectory()


async def tries(redo: int, attempt: Callable[[int], Awaitable[Trajectory]]) -> Trajectory:
    """Play with `attempt`, which is given its number; again, `redo` times at most, if there was no result."""
    for number in range(redo + 1):
        trajectory = await attempt(number)
        if trajectory.failure != "redo":
            break
    return trajectory


@dataclass
class Episode:
    """An episode that can be taken up at any turn, any number of times.

        await episode.start()
        await episode.advance()                          one turn
        other = await episode.fork(id="b", seed=7)       both go on from here, independently
        await episode.close()                            each of them, whatever happened
        episode.trajectory()                             once it is `over`

    A fault of the environment is part of the result, never raised.

    Attributes:
        renderer: None for an actor that plays through messages.
        seed: decides every random number of the episode, the actor's and the environment's; it replaces the
            task's own seed. So a task has the same prompt but different random events in every episode.
        context: what the actor is shown of the dialogue.
        state: what has happened so far. Forks share it.
        end: how it ended; None as long as it goes on.
        left: seconds that the environment may still take.
        overdue: the time is over, but the environment has swallowed the cancellation.
        parent: the episode from which this one was forked, after `fork_turn` turns.
    """

    task: Task
    taskset: TaskSet
    actor: Actor
    renderer: Renderer | None
    limits: EpisodeLimits
    id: str
    seed: int
    on_turn: OnTurn = lambda episode, waiting_for: None
    watch: Watch = UNWATCHED
    context: ContextSettings = FULL
    environment: Environment | None = None
    state: State = field(default_factory=State)
    end: End | None = None
    left: float = math.nan
    overdue: bool = False
    calling: str = ""  # the method of the environment that was called last
    root: str = ""  # the episode that was not forked from another
    parent: str | None = None
    fork_turn: int | None = None

    @property
    def over(self) -> bool:
        return self.end is not None

    async def start(self) -> None:
        """Make the environment and take its first observation."""
        self.left, self.root = self.limits.timeout, self.root or self.id
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.on_turn(self.id, self.task.environment)
        try:
            self.environment = self._construct()
            self.left -= loop.time() - began
            first = await self._timed("reset", self.environment.reset, check=partial(expect, Observation))
            self._show(started, first)
            if (size := await self._size()) >= self.limits.max_episode_tokens:
                raise EpisodeFault(  # nothing was asked of the policy, and to play it again would not help
                    f"the first observation has {size} tokens, expected fewer than "
                    f"rollout.limits.max_episode_tokens = {self.limits.max_episode_tokens}",
                    "mask",
                )
        except EpisodeFault as fault:
            self._fail(fault)

    async def advance(self) -> None:
        """One turn: a reply, and what the environment makes of it."""
        if (reply := await self.reply()) is not None:
            await self.step(reply)

    async def reply(self) -> Reply | None:
        """What the actor answers, not yet played: a fork made now answers for itself. None if it cannot."""
        environment = self._running("reply")
        try:
            return await self._reply(environment)
        except EpisodeFault as fault:
            self._fail(fault)
            return None

    async def step(self, reply: Reply) -> None:
        """Play a reply: the rest of the turn."""
        environment = self._running("step")
        try:
            message = replace(reply.message, id=f"{self.id}/{len(self.state.turns)}")
            self.on_turn(self.id, self.task.environment)
            step = await self._timed("step", environment.step, message, check=check_step)
            self._show(answered, self.state, reply, message, step, self.context)
            if step.terminated:
                self.end = End("terminated")
            elif step.truncated:
                self.end = End("truncated", next_context=await self._next_context())
            elif reply.stop_reason == "context_overflow":
                self.end = End("context_overflow")
            elif len(self.state.turns) >= self.limits.max_turns:
                self.end = End("max_turns", next_context=await self._next_context())
            elif await self._size() >= self.limits.max_episode_tokens:
                self.end = End("max_tokens", next_context=self.state.context)
        except EpisodeFault as fault:
            self._fail(fault)

    async def fork(self, *, id: str, seed: int) -> Episode:
        """The same episode once more, to go on from here with the random numbers of `seed`.

        No token is copied: both share the turns so far. With the seed of this episode, the fork goes on
        exactly as this one does.

        Raises:
            CapabilityError: the environment has no `fork(seed)`.
        """
        environment = self._running("fork")
        if not isinstance(environment, Forkable):
            raise CapabilityError(
                f"environment {self.task.environment!r} cannot be forked: {type(environment).__name__} needs "
                "`async def fork(self, seed)`, as silva.environments.bases.environment.BaseEnvironment has it"
            )
        twin = replace(
            self, id=id, seed=seed, environment=None, parent=self.id, fork_turn=len(self.state.turns)
        )
        try:
            twin.environment = await twin._timed("fork", environment.fork, derive(seed, "luck"))
        except EpisodeFault as fault:
            twin._fail(fault)
        return twin

    async def close(self) -> None:
        """Close the environment. An error in closing is noted, and the result stands."""
        environment, self.environment = self.environment, None
        if environment is not None:
            self.calling = "close"
            try:
                async with asyncio.timeout(self.limits.timeout):
                    with contained():
                        await watched(environment.close, tell=self._tell)
            except Exception as fault:
                noted = _fault("close", fault, environment)
                self.watch.fault(self.task.environment, str(noted), noted.trace)
                if self.end is not None:
                    self.end = replace(self.end, error=self.end.error or str(noted))
        self.on_turn(self.id, None)

    def trajectory(self) -> Trajectory:
        """The result of an episode that is over. Its turns include those that it shares with its parent."""
        if self.end is None:
            raise RuntimeError(f"episode {self.id} is not over: it has no trajectory yet")
        return result(
            self.state, self.end,
            id=self.id, episode=self.root, parent=self.parent, fork_turn=self.fork_turn,
        )  # fmt: skip

    # --- who is asked

    def _running(self, call: str) -> Environment:
        if self.environment is None or self.over:
            state = "over" if self.over else "closed" if self.calling else "not started"
            raise RuntimeError(f"episode {self.id}: {call}() of an episode that is {state}")
        return self.environment

    def _construct(self) -> Environment:
        self.calling, began = "construction", CLOCK.monotonic()
        try:
            with contained():
                return self.taskset.environment(replace(self.task, seed=derive(self.seed, "luck")))
        except Exception as fault:
            raise _fault("construction", fault, self.taskset) from fault
        finally:
            tell_if_long(began, self._tell)

    async def _reply(self, environment: Environment) -> Reply:
        self.on_turn(self.id, "engine")
        if self.overdue:
            raise self._late()
        size = await self._size()
        request = Request(
            label=self.task.environment,
            environment=environment,
            messages=self.state.messages,
            tools=self.state.tools,
            prefill=self.state.observation.prefill,
            max_tokens=min(self.limits.max_turn_tokens, self.limits.max_episode_tokens - size),
            seed=derive(self.seed, len(self.state.turns)),
            session=self.root,
            render=self._tokens,
        )
        try:
            return await self.actor.reply(request)
        except ContextOverflow as fault:
            raise EpisodeFault(str(fault), "mask", "context_overflow") from fault
        except NoReply as fault:
            raise EpisodeFault(f"reply: {fault}", "redo") from fault
        except ScriptFault as fault:
            assert isinstance(fault.__cause__, Exception)
            raise _fault(str(fault), fault.__cause__, environment) from fault

    async def _timed(
        self,
        calling: str,
        method: Callable[..., Awaitable[T]],
        *arguments: object,
        check: Callable[[T], object] = lambda result: None,
    ) -> T:
        """The result of a method of the environment, checked, within what is left of the episode's time."""
        environment = getattr(method, "__self__", None)
        slot = getattr(environment, "worker_slot", None)  # see Queued
        async with slot() if slot else _AT_ONCE:
            self.calling, timer = calling, asyncio.timeout(self.left)
            try:
                async with timer:
                    try:
                        with contained():
                            result = await watched(method, *arguments, tell=self._tell)
                            check(result)
                            return result
                    except EpisodeFault:
                        raise
                    except Exception as fault:
                        raise _fault(calling, fault, environment) from fault
            except TimeoutError:  # of the timer: the environment's own is a fault
                raise self._late(starting=getattr(environment, "starting", False)) from None
            finally:
                ends = timer.when()
                assert ends is not None
                self.left, self.overdue = ends - asyncio.get_running_loop().time(), timer.expired()

    def _late(self, *, starting: bool = False) -> EpisodeFault:
        # A step depends on what the policy did; a reset does not, nor the start of a worker.
        failure: Failure = "mask" if self.calling == "step" and not starting else "redo"
        what = "its worker has not started" if starting else "no end"
        return EpisodeFault(
            f"{self.calling}: {what} within rollout.limits.timeout = {self.limits.timeout:g} s",
            failure,
            "timeout" if failure == "mask" else "error",
        )

    def _tell(self, seconds: float) -> None:
        self.watch.blocked(self.task.environment, self.calling, seconds)

    # --- what it becomes

    async def _size(self) -> int:
        """Tokens of the context: counted, or as the actor reported them after the last turn.

        With `overflow = "drop_oldest"` the oldest turns are dropped here, until a whole reply has room.
        """
        room = self.limits.max_episode_tokens - self.limits.max_turn_tokens
        while True:
            size = len(await self._context()) if self.actor.reads_tokens else self.state.reported
            fits = size <= room or self.context.overflow == "end"
            if fits or (less := shorter(self.state, self.context)) is None:
                return size
            self.state = less

    async def _context(self) -> Sequence[int]:
        """The tokens of the context; long texts become tokens in a thread, so that no other episode waits."""
        state = self.state
        if state.shown is not None:
            return state.context
        new = new_messages(state.observation)
        if sum(len(m.content) for m in new if isinstance(m.content, str)) > LONG_TEXT:
            mine = replace(state)  # forks share the state, and may render it meanwhile
            await asyncio.to_thread(self._render, mine)
            state.context, state.fresh, state.shown = mine.context, mine.fresh, mine.shown
        return self._tokens()

    def _tokens(self) -> Sequence[int]:
        if self.state.shown is None:
            self._render(self.state)
        return self.state.context

    def _render(self, state: State) -> None:
        if self.renderer is None:
            raise CapabilityError("an actor that reads tokens needs a renderer")
        try:
            with contained():
                render(state, self.renderer)
        except RenderingError as fault:
            raise EpisodeFault(f"rendering: {fault}", "mask") from fault
        except Exception as fault:  # a message whose content is no text, say
            raise _fault("observation", fault, self.environment) from fault

    async def _next_context(self) -> tuple[int, ...]:
        """What the policy would have answered next, for a critic; nothing if nothing more is shown.

        An observation that cannot be rendered is no error here.
        """
        observation = self.state.observation
        if self.actor.reads_tokens and (observation.messages or observation.context is not None):
            with suppress(EpisodeFault):
                await self._size()
                return self.state.context
        return ()

    def _show(self, make: Callable[..., State], *parts: object) -> None:
        """Go on in the state that `make` gives: one with a new observation, in which anything may stand."""
        try:
            with contained():
                new = make(*parts)
                if not self.actor.reads_tokens:  # rendering would find it
                    for message in new_messages(new.observation):
                        expect(str, message.content)
            self.state = new
        except Exception as fault:
            raise _fault("observation", fault, self.environment) from fault

    def _fail(self, fault: EpisodeFault) -> None:
        self.end = End(fault.stop_reason, fault.failure, str(fault))
        self.watch.fault(self.task.environment, str(fault), fault.trace)


def _fault(where: str, fault: Exception, environment: object) -> EpisodeFault:
    line = place(fault, environment)
    return EpisodeFault(
        f"{where}: {described(fault)}{f' ({line})' if line else ''}", "redo", trace=trace(fault)
    )
