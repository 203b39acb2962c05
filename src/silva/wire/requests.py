"""Requests to a service that others run: how many at once and in a minute, when again, what they may cost.

    a place ──> reserve the most it can cost ──> pace ──> send ──> settle ──> answer
                     ^                                      │
                     └────────── pause <── Transient ───────┘

A pause is a function of the request's seed and of how often it has failed; time is that of `ports.CLOCK`.
Not here: what is sent and how connections live, which the callers know.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeVar

from silva.errors import ConfigError, CostLimit, NoReply, SilvaError
from silva.ports import CLOCK, uniform

T = TypeVar("T")

AGAIN = (408, 409, 425, 429)  # and all from 500
SHOWN = 300  # characters of a service's words in a message


@dataclass(frozen=True, slots=True)
class Limits:
    """How requests to one service are sent.

    Attributes:
        retries: how often a request is sent again.
        max_wait: the longest pause in seconds; a service that asks for a longer one has failed.
        concurrent: requests at once; 0: any number.
        per_minute: requests started in a minute, evenly spaced; 0: any number.
        first_pause: seconds at most before the second try; doubled for each further one.
    """

    retries: int
    max_wait: float
    concurrent: int = 0
    per_minute: int = 0
    first_pause: float = 1.0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request as the service counts them. `cached` is part of `input`; `trained` are those of a
    gradient."""

    input: int
    output: int
    cached: int = 0
    trained: int = 0


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a million tokens, in any currency. `cached` is for input that the service had cached; None: as other
    input. `most` is what all requests together may cost, `setting` the configuration's key for it."""

    input: float = 0.0
    output: float = 0.0
    cached: float | None = None
    trained: float = 0.0
    most: float | None = None
    setting: str = "max_cost"

    @property
    def paid(self) -> bool:
        """Whether anything costs anything."""
        return bool(self.input or self.output or self.trained)

    def of(self, usage: Usage) -> float:
        cached = self.input if self.cached is None else self.cached
        paid = (usage.input - usage.cached) * self.input
        paid += usage.cached * cached + usage.output * self.output + usage.trained * self.trained
        return paid / 1e6


class Transient(Exception):
    """May pass if the request is sent again.

    Attributes:
        after: seconds that the service asks to wait.
        charged: the request may have been answered and charged, although no answer came through.
        busy: the service is well and has enough to do: it is asked as often as it takes.
    """

    def __init__(
        self, message: str, *, after: float | None = None, charged: bool = False, busy: bool = False
    ) -> None:
        super().__init__(message)
        self.after, self.charged, self.busy = after, charged, busy


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
    trained: int = 0
    cost: float = 0.0
    unknown_cost: float = 0.0

    def add(self, usage: Usage, cost: float) -> None:
        self.input, self.output = self.input + usage.input, self.output + usage.output
        self.cached, self.trained = self.cached + usage.cached, self.trained + usage.trained
        self.cost += cost


class Requests:
    """Sends requests within limits. Places and pace are those of one event loop, and new in the next one.

    Args:
        failed: what is raised when no further try is left, from the words and the last fault.
    """

    def __init__(
        self,
        limits: Limits,
        prices: Prices | None = None,
        *,
        failed: Callable[[str, Transient], SilvaError] = lambda words, fault: NoReply(words),
    ) -> None:
        self.limits, self.prices, self.counts = limits, prices or Prices(), Counts()
        self._failed = failed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._under_way = 0  # requests that may still cost something, and the most that they can cost
        self._held = 0.0
        self._next_start = 0.0

    async def call(
        self,
        send: Callable[[], Awaitable[T]],
        *,
        seed: int,
        most: Usage | None = None,
        usage: Callable[[T], Usage | None] = lambda answer: None,
    ) -> T:
        """The answer of `send`, which is called again after each Transient.

        Args:
            seed: of the random share of pauses.
            most: tokens that a request can take.
            usage: the tokens that an answer took, if it says so.

        Raises:
            NoReply: every try failed; or what `failed` makes of it.
            CostLimit: one more request might cost more than is allowed.
        """
        self._enter_loop()
        price = self.prices.of(most) if most else 0.0
        tries = busy = 0
        async with self._places:
            while True:
                try:
                    return await self._try(send, price, usage)
                except Transient as fault:
                    tries, busy = (tries, busy + 1) if fault.busy else (tries + 1, 0)
                    if tries > self.limits.retries or (fault.after or 0.0) > self.limits.max_wait:
                        self.counts.failed += 1
                        words = f"{fault} (after {tries} {'try' if tries == 1 else 'tries'})"
                        raise self._failed(words, fault) from fault
                    failures = tries + busy - 1
                    longest = min(self.limits.first_pause * 2.0 ** min(failures, 64), self.limits.max_wait)
                    share = 0.5 + 0.5 * float(uniform(seed, failures))
                    pause = max(fault.after or 0.0, longest * share)
                self.counts.retries += 1
                await CLOCK.sleep(pause)

    async def _try(
        self, send: Callable[[], Awaitable[T]], price: float, usage: Callable[[T], Usage | None]
    ) -> T:
        await self._reserve(price)
        unknown = 0.0
        try:
            await self._pace()
            self.counts.requests += 1
            unknown = price  # whatever ends this from outside: it is on its way
            answer = await send()
            if used := usage(answer):
                self.counts.add(used, self.prices.of(used))
                unknown = 0.0
            else:
                self.counts.uncounted += 1
            return answer
        except (Transient, SilvaError) as fault:  # of which the second is a refusal
            unknown = price if isinstance(fault, Transient) and fault.charged else 0.0
            self.counts.failed += isinstance(fault, NoReply)
            raise
        finally:
            self._under_way -= 1
            self._held -= price
            self.counts.unknown_cost += unknown
            self._settled.set()

    def charge(self, used: Usage) -> None:
        """Count a request that something else sends, whose tokens are known.

        Raises:
            CostLimit: it might cost more than is allowed, together with those on their way.
        """
        price = self.prices.of(used)
        if self._exceeds(price):
            raise self._limit(price)
        self.counts.requests += 1
        self.counts.add(used, price)

    async def _reserve(self, price: float) -> None:
        """Waits for requests on their way if only they stand against it."""
        while self._exceeds(price):
            if not self._under_way:
                raise self._limit(price)
            self._settled.clear()
            await self._settled.wait()
        self._under_way += 1
        self._held += price

    def _exceeds(self, price: float) -> bool:
        limit, counts = self.prices.most, self.counts
        return limit is not None and counts.cost + counts.unknown_cost + self._held + price > limit

    def _limit(self, price: float) -> CostLimit:
        spent, limit = self.counts.cost + self.counts.unknown_cost + self._held, self.prices.most or 0.0
        return CostLimit(
            f"{self.prices.setting} = {limit:g} would be exceeded: {spent:.4g} spent so far, and the "
            f"next request may cost up to {price:.4g}. Raise it, or ask for less (eval.tasks, steps)"
        )

    async def _pace(self) -> None:
        if not self.limits.per_minute:
            return
        now = CLOCK.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + 60.0 / self.limits.per_minute
        if start > now:
            await CLOCK.sleep(start - now)

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._settled, self._next_start = loop, asyncio.Event(), 0.0
            self._places = asyncio.Semaphore(self.limits.concurrent or sys.maxsize)

    def note(self) -> str:
        """The counts in one line."""
        c = self.counts
        parts = [
            f"{c.requests} requests ({c.retries} retries, {c.failed} without a reply)",
            f"{c.input} tokens of input ({c.cached} cached), {c.output} of output",
        ]
        if self.prices.paid:
            unknown = f", and up to {c.unknown_cost:.4g} for requests whose usage is unknown"
            parts.append(f"cost {c.cost:.4g}{unknown if c.unknown_cost else ''}")
        if c.uncounted:
            parts.append(f"{c.uncounted} answers without usage: their tokens count for no limit")
        return "; ".join(parts)


def may_pass(status: int) -> bool:
    """Whether a service that answers with this status of HTTP may answer the same request later."""
    return status in AGAIN or status >= 500


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds, from `retry-after-ms` or from `retry-after` (a number or a date)."""
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return max(0.0, float(headers[name]) * unit)
        except (KeyError, ValueError):
            continue
    try:
        return max(0.0, parsedate_to_datetime(headers["retry-after"]).timestamp() - CLOCK.time())
    except (KeyError, ValueError):
        return None


def hidden(text: str, key: str, shown: int = SHOWN) -> str:
    """A service's words without the key, which it may repeat, on one line and cut."""
    text = " ".join((text.replace(key, "***") if key else text).split())
    return text if len(text) <= shown else text[:shown] + "..."


def key_of(variable: str, setting: str = "") -> str:
    """The key in an environment variable; "" for none. ConfigError if unset and `setting` needs it."""
    key = os.environ.get(variable, "") if variable else ""
    if variable and setting and not key:
        raise ConfigError(
            f"{setting}: {variable} is not set; set it in the environment or in .env, or set {setting} = "
            '"" if no key is needed'
        )
    return key
