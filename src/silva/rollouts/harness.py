"""One episode that a program plays: it calls its model, and somebody says what the episode was worth.

    gateway.open ──> endpoint ──> harness.run ──> graded ──> trajectory
                        └── calls.py: every call is a turn

A program that fails, or ends without a call or a reward, gives no result (`redo`), like an environment that
fails. One that meets a limit of the run (time, calls, tokens) keeps the turns that it has, and its result if
somebody knows it all the same; otherwise it is masked, for the policy may be to blame. The clock stands still
while the program waits for its model.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from silva.config.sections import ContextSettings, EpisodeLimits
from silva.errors import CapabilityError, contained
from silva.ports import derive
from silva.protocols import Actor, Driven
from silva.rendering.renderer import Renderer
from silva.rollouts.calls import CallRecorder
from silva.rollouts.checks import EpisodeFault, check_step
from silva.rollouts.context import shows_all
from silva.rollouts.faults import Watch, described, trace, watched
from silva.rollouts.state import End, State, regraded, result
from silva.types import Message, Step, StopReason, Task, Trajectory

if TYPE_CHECKING:
    from silva.rollouts.episode import OnTurn


class _Timer:
    """What is left of an episode's time, less what the program waits for its model."""

    def __init__(self, seconds: float) -> None:
        self.left, self._timer = seconds, asyncio.timeout(seconds)
        self.over = False

    async def __aenter__(self) -> None:
        await self._timer.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        self.over = True
        await self._timer.__aexit__(*error)

    @property
    def expired(self) -> bool:
        return self._timer.expired()

    def idle(self, idle: bool) -> None:
        ends, now = self._timer.when(), asyncio.get_running_loop().time()
        if self.over or self.expired:
            return
        if idle and ends is not None:
            self.left = ends - now
        self._timer.reschedule(None if idle else now + self.left)


async def play_program(
    task: Task,
    tasks: Driven,
    actor: Actor,
    renderer: Renderer | None,
    limits: EpisodeLimits,
    *,
    id: str,
    seed: int,
    on_turn: OnTurn,
    watch: Watch,
    context: ContextSettings,
) -> Trajectory:
    """The arguments are those of `Episode`; `tasks` has the program.

    Raises:
        CapabilityError: the actor gives no tokens, or `context` leaves something out.
        SilvaError: of the engine, other than that one request has no reply.
    """
    label = task.environment
    if not shows_all(context) or context.overflow != "end":
        raise CapabilityError(
            f"environment {label}: its program decides what its model is shown; leave out rollout.context"
        )
    if renderer is None or not actor.reads_tokens:
        raise CapabilityError(
            f"environment {label}: its program must play with a model that Silva samples from; for a chat "
            "API, give the program the address of that API"
        )
    timer = _Timer(limits.timeout)

    def idle(waits: bool) -> None:
        timer.idle(waits)
        if not timer.over:
            on_turn(id, "engine" if waits else label)

    calls = CallRecorder(actor, renderer, limits, id=id, seed=seed, label=label, on_idle=idle)
    on_turn(id, label)
    try:
        step, stop_reason = await _run(replace(task, seed=derive(seed, "luck")), tasks, calls, timer, watch)
        end = End(stop_reason)
    except EpisodeFault as fault:
        step, end = Step(), End(fault.stop_reason, fault.failure, str(fault))
        watch.fault(label, str(fault), fault.trace)
    finally:
        on_turn(id, None)
    turns = calls.turns()
    played = result(State(turns, tools=calls.tools), end, id=id, episode=id)
    return regraded(played, step) if turns else played


async def _run(
    task: Task, tasks: Driven, calls: CallRecorder, timer: _Timer, watch: Watch
) -> tuple[Step, StopReason]:
    """What the episode was worth, and how it ended.

    Raises:
        EpisodeFault: there is no result.
    """
    given, fault = None, None
    async with tasks.gateway.open(calls, task) as endpoint:
        try:
            async with timer:
                with contained():
                    given = await watched(
                        tasks.harness.run,
                        task,
                        endpoint,
                        tell=partial(watch.blocked, task.environment, "run"),
                    )
        except Exception as error:
            fault = _fault(error, calls, timer)
    if calls.broken is not None:
        raise calls.broken
    if given is None and calls.posted.done():
        given = calls.posted.result()
    dialogue = calls.dialogue()
    if not dialogue:
        raise fault or EpisodeFault("the program ended without a call of its model", "redo")
    if fault is not None and given is None:
        if fault.stop_reason != "max_turns":
            raise fault
        dialogue[-1] = Message("assistant", "")  # it was not meant as an answer
    try:
        with contained():
            step = await tasks.graded(task, given, dialogue)
        check_step(step)
    except EpisodeFault:
        raise
    except Exception as error:
        raise fault or EpisodeFault(f"reward: {described(error)}", "redo", trace=trace(error)) from error
    return step, "terminated" if fault is None else fault.stop_reason if calls.limit else "truncated"


def _fault(error: Exception, calls: CallRecorder, timer: _Timer) -> EpisodeFault:
    """Why a program did not end by itself."""
    if timer.expired and isinstance(error, TimeoutError):
        words = f"no end within rollout.limits.timeout = {calls.limits.timeout:g} s"
        return EpisodeFault(f"program: {words}", "mask", "timeout")
    words = f"program: {described(error)}"
    if calls.limit is not None:  # it was refused a call, and could not go on
        return EpisodeFault(words, "mask", calls.limit)
    return EpisodeFault(words, "redo", trace=trace(error))
