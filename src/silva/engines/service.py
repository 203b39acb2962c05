"""Requests to a paid service: how many at once and in a minute, when to try again, what they may cost.

    a place ──> reserve the most it can cost ──> pace ──> send ──> settle ──> reply
                     ^                                      │
                     └────────── pause <── Transient ───────┘

Not here: what is sent, and which faults are transient (openai.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from silva.engines.openai_settings import OpenAIEngineSettings
from silva.errors import ContextOverflow, CostLimit, EngineError, NoReply
from silva.ports import CLOCK, uniform

T = TypeVar("T")

FIRST_PAUSE = 1.0  # seconds at most before the second try; doubled for each further one


class Transient(Exception):
    """May pass if the request is sent again.

    Attributes:
        after: seconds that the service asks to wait.
        charged: the request may have been answered and charged, although no answer came through.
    """

    def __init__(self, message: str, *, after: float | None = None, charged: bool = False) -> None:
        super().__init__(message)
        self.after, self.charged = after, charged


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request as the service counts them. `cached` is part of `input`."""

    input: int
    output: int
    cached: int = 0


@dataclass
class Counts:
    """What has been sent and spent.

    Attributes:
        requests: tries included.
        uncounted: answers without a count of their tokens.
        cost: of the counted ones.
        unknown_cost: at most, of requests that may have been charged and reported no usage.
    """

    requests: int = 0
    retries: int = 0
    failed: int = 0
    uncounted: int = 0
    input: int = 0
    cached: int = 0
    output: int = 0
    cost: float = 0.0
    unknown_cost: float = 0.0


class Service:
    """Sends requests within the limits of the settings. One event loop only."""

    def __init__(self, settings: OpenAIEngineSettings) -> None:
        self.settings, self.counts = settings, Counts()
        self._places = asyncio.Semaphore(settings.max_concurrent)
        self._next_start = 0.0
        self._under_way = 0  # requests that may still cost something, and the most that they can cost
        self._held = 0.0
        self._settled = asyncio.Event()

    async def call(
        self, send: Callable[[], Awaitable[tuple[T, Usage | None]]], *, tokens: tuple[int, int], seed: int
    ) -> T:
        """The answer of `send`, which is called again after each Transient.

        Args:
            tokens: of input and output, at most: what a request can cost.
            seed: of the random share of pauses.

        Raises:
            NoReply: every try failed.
            CostLimit: one more request might cost more than is allowed.
        """
        most = self._price(Usage(*tokens))
        async with self._places:
            for attempt in range(self.settings.retries + 1):
                try:
                    return await self._try(send, most)
                except Transient as fault:
                    pause = self._pause(fault, attempt, seed)
                    if pause is None:
                        self.counts.failed += 1
                        tries = f"{attempt + 1} {'tries' if attempt else 'try'}"
                        raise NoReply(f"{fault} (after {tries})") from fault
                self.counts.retries += 1
                await CLOCK.sleep(pause)
        raise AssertionError("the last try returns or raises")

    async def _try(self, send: Callable[[], Awaitable[tuple[T, Usage | None]]], most: float) -> T:
        await self._reserve(most)
        unknown = 0.0
        try:
            await self._pace()
            self.counts.requests += 1
            unknown = most  # whatever ends this from outside: it is on its way
            reply, usage = await send()
            if usage is None:
                self.counts.uncounted += 1
            else:
                self._count(usage)
                unknown = 0.0
            return reply
        except Transient as fault:
            unknown = most if fault.charged else 0.0
            raise
        except (ContextOverflow, EngineError) as fault:  # the service has refused it
            unknown = 0.0
            self.counts.failed += isinstance(fault, NoReply)
            raise
        finally:
            self._under_way -= 1
            # Sums of fractions leave a rest; without requests there is none.
            self._held = self._held - most if self._under_way else 0.0
            self.counts.unknown_cost += unknown
            self._settled.set()

    async def _reserve(self, most: float) -> None:
        """Waits for requests on their way if only they stand against it."""
        limit, counts = self.settings.max_cost, self.counts
        while limit is not None and (spent := counts.cost + counts.unknown_cost) + self._held + most > limit:
            if not self._under_way:
                raise CostLimit(
                    f"engine.max_cost = {limit:g} would be exceeded: {spent:.4g} spent so far, and the next "
                    f"request may cost up to {most:.4g}. Raise max_cost, or evaluate fewer tasks (eval.tasks)"
                )
            self._settled.clear()
            await self._settled.wait()
        self._under_way += 1
        self._held += most

    async def _pace(self) -> None:
        if not self.settings.requests_per_minute:
            return
        now = CLOCK.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + 60.0 / self.settings.requests_per_minute
        if start > now:
            await CLOCK.sleep(start - now)

    def _pause(self, fault: Transient, attempt: int, seed: int) -> float | None:
        """Seconds before the next try; None: there is none."""
        if attempt == self.settings.retries:
            return None
        share = 0.5 + 0.5 * float(uniform(seed, attempt))
        longest = self.settings.max_wait
        own = min(FIRST_PAUSE * 2.0**attempt, longest) * share
        if fault.after is None:
            return own
        return max(fault.after, own) if fault.after <= longest else None

    def _count(self, usage: Usage) -> None:
        counts = self.counts
        counts.input += usage.input
        counts.cached += usage.cached
        counts.output += usage.output
        counts.cost += self._price(usage)

    def _price(self, usage: Usage) -> float:
        settings = self.settings
        cached = settings.input_price if settings.cached_price is None else settings.cached_price
        paid = (usage.input - usage.cached) * settings.input_price
        return (paid + usage.cached * cached + usage.output * settings.output_price) / 1e6

    def note(self) -> str:
        """The counts in one line."""
        c, priced = self.counts, self.settings.input_price or self.settings.output_price
        parts = [
            f"{c.requests} requests ({c.retries} retries, {c.failed} without a reply)",
            f"{c.input} tokens of input ({c.cached} cached), {c.output} of output",
        ]
        if priced:
            unknown = f", and up to {c.unknown_cost:.4g} for requests whose usage is unknown"
            parts.append(f"cost {c.cost:.4g}{unknown if c.unknown_cost else ''}")
        if c.uncounted:
            parts.append(f"{c.uncounted} answers without usage: their tokens count for no limit")
        return f"{self.settings.model}: {'; '.join(parts)}"
