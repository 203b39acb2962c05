"""The tool calls of one episode: which are made, for how long, and what the model reads otherwise."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from silva.aio import gather
from silva.errors import SilvaError, contained
from silva.protocols import Tool
from silva.tools.function import ToolError, ToolException, cut
from silva.types import ToolCall, ToolSpec

GRACE = 1.0  # seconds that a cancelled call has to clean up


class CallLimits(NamedTuple):
    """Of one episode.

    Attributes:
        calls: all of them, failed ones too.
        per_tool: the same by the name of a tool.
        timeout: seconds one call may take; a tool's own attribute `timeout` goes before it.
        max_chars: characters of a result that are shown; a tool's own `max_chars` goes before it.
        concurrent: calls of one reply that run at the same time.
        late_is_fault: a call that takes too long leaves a session that cannot be used further, so the episode
            has no result. Otherwise the model reads that it took too long.
    """

    calls: int
    per_tool: Mapping[str, int]
    timeout: float
    max_chars: int
    concurrent: int
    late_is_fault: bool = False


class ToolLate(SilvaError, OSError):
    """No answer of a tool in time, where only the tool can be at fault."""


@dataclass
class SessionTool:
    """A `silva.protocols.Tool` that a session of an episode runs.

    Attributes:
        timeout: seconds of one call.
        max_chars: characters of a result that are shown; None: what the environment allows.
    """

    spec: ToolSpec
    timeout: float
    call: Callable[[Mapping[str, Any]], Awaitable[str]]
    max_chars: int | None = None

    async def __call__(self, arguments: Mapping[str, object]) -> str:
        return await self.call(arguments)


class CallResult(NamedTuple):
    """What the model reads, and how the call went: "error" if the model made a mistake."""

    text: str
    how: str = "ok"  # ok | error | exception | timeout | refused


@dataclass
class Calls:
    """Counts and runs calls. `left`: how many more there may be."""

    limits: CallLimits
    left: int
    made: Counter[str] = field(default_factory=Counter)

    async def run(self, calls: Sequence[ToolCall], tools: Mapping[str, Tool]) -> list[CallResult]:
        """The results in the order of the calls, which run side by side.

        Raises:
            Exception: what a tool raised that is no ToolError: it is broken, not its use. Calls that still
                run are cancelled.
            ToolLate: one took too long, and `late_is_fault`.
        """
        results = [self._refusal(call, tools) for call in calls]
        admitted = [i for i, refusal in enumerate(results) if refusal is None]
        slots = asyncio.Semaphore(self.limits.concurrent)

        async def one(index: int) -> None:
            async with slots:
                results[index] = await self._result(calls[index], tools[calls[index].name])

        await gather(map(one, admitted))
        return [result for result in results if result is not None]

    def _refusal(self, call: ToolCall, tools: Mapping[str, Tool]) -> CallResult | None:
        """Why the call is not made; None: it is, and counts."""
        if self.left <= 0:
            return CallResult("Error: no tool calls are left", "refused")
        self.left -= 1
        if call.name not in tools:
            there = ", ".join(tools) or "none"
            return CallResult(f"Error: no tool called {call.name!r}: there is {there}", "error")
        most = self.limits.per_tool.get(call.name)
        if most is not None and self.made[call.name] >= most:
            return CallResult(f"Error: no calls of {call.name} are left ({most} were allowed)", "refused")
        self.made[call.name] += 1
        return None

    async def _result(self, call: ToolCall, tool: Tool) -> CallResult:
        seconds = getattr(tool, "timeout", None) or self.limits.timeout
        max_chars = getattr(tool, "max_chars", None) or self.limits.max_chars
        try:
            done = await _within(seconds, tool(call.arguments))
            if done is not None:
                return CallResult(cut(done.result(), max_chars))
        except ToolError as error:
            how = "exception" if isinstance(error, ToolException) else "error"
            return CallResult(cut(f"Error: {error}", max_chars), how)
        late = f"{call.name} took longer than {seconds:g} s"
        if self.limits.late_is_fault:
            raise ToolLate(late)
        return CallResult(f"Error: {late}", "timeout")


async def _contained(call: Awaitable[str]) -> str:
    with contained():  # in the task: exit() there would end the event loop
        return await call


async def _within(seconds: float, call: Awaitable[str]) -> asyncio.Task[str] | None:
    """The call when it has ended, or None: it was cancelled after `seconds`. One that ignores that is left
    alone after GRACE."""
    task = asyncio.create_task(_contained(call))
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE)
            task.add_done_callback(lambda late: late.cancelled() or late.exception())  # nobody else asks
            return None
    except asyncio.CancelledError:
        task.cancel()
        raise
    return task
