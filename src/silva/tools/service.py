"""Requests to an HTTP service within limits: how many at once, in a minute, and ever; when to try again.

    fault                                              what becomes of the request
    408, 409, 425, 429, 5xx, no connection, too late,  sent again after a pause: Retry-After, or a growing one
    a body that is no answer                           with jitter; then ServiceFault
    another status, a body that is too large           ServiceFault
    `max_requests` are sent                            CostLimit

None of them is an answer for a model: the episode has no result. A key is never part of a message.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from silva.errors import ConfigError, CostLimit, SilvaError
from silva.ports import CLOCK, derive, uniform

if TYPE_CHECKING:
    from silva.tools.cache import Cache
    from silva.tools.search import WebBackend

T = TypeVar("T")

MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What reading an answer of another form raises."""
AGAIN = (408, 409, 425, 429)  # and all from 500
MAX_BODY = 8 << 20  # bytes of an answer
FIRST_PAUSE = 1.0  # seconds at most before the second try; doubled for each further one
SHOWN = 300  # characters of an answer in a message


class ServiceFault(SilvaError, OSError):
    """A service gave no answer. Its user is not to blame, and must not read it as a result."""


class Transient(Exception):
    """May pass if the request is sent again, after so many seconds if the service says so."""

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


class Call(NamedTuple):
    """One request. `headers` may hold a key."""

    method: str
    url: str
    headers: Mapping[str, str]
    params: Mapping[str, str]
    json: Any = None


class Service:
    """Sends calls. Its connections last from the first `enter` to the last `leave` in an event loop.

    Args:
        name: in messages, and of the count in `cache` that `max_requests` limits.
        secret: what no message may show; "" for nothing.
    """

    def __init__(self, name: str, settings: WebBackend, cache: Cache, secret: str = "") -> None:
        self.name, self.settings, self._cache, self._secret = name, settings, cache, secret
        self._loop: asyncio.AbstractEventLoop | None = None
        self._users = 0
        httpx()  # missing: an error at the start

    def enter(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # connections and semaphores belong to one loop
            self._loop, self._users, self._next_start = loop, 0, 0.0
            self._places = asyncio.Semaphore(self.settings.max_concurrent)
            self._client: Any = None
        self._users += 1

    async def leave(self) -> None:
        self._users -= 1
        if not self._users and self._client is not None:
            client, self._client = self._client, None
            await client.aclose()

    async def ask(self, call: Call, read: Callable[[Any], T]) -> T:
        """What `read` makes of the answer's JSON. It raises one of MALFORMED for another form.

        Raises:
            ServiceFault: every try failed.
            CostLimit: no more requests are allowed.
        """
        seed = derive(0, json.dumps([call.url, call.params, call.json], sort_keys=True, default=str))
        async with self._places:
            for attempt in range(self.settings.retries + 1):
                try:
                    return await self._try(call, read)
                except Transient as fault:
                    pause = self._pause(fault, attempt, seed)
                    if pause is None:
                        tries = f"{attempt + 1} {'tries' if attempt else 'try'}"
                        raise ServiceFault(f"{self.name}: {fault} (after {tries})") from None
                await CLOCK.sleep(pause)
        raise AssertionError("the last try returns or raises")

    async def _try(self, call: Call, read: Callable[[Any], T]) -> T:
        await self._pace()
        await self._spend()
        module = httpx()
        if self._client is None:
            self._client = module.AsyncClient(timeout=self.settings.timeout, verify=_ssl())
        limit = asyncio.timeout(self.settings.timeout)  # of the whole answer, not of one read
        try:
            async with (
                limit,
                self._client.stream(
                    call.method, call.url, headers=call.headers, params=call.params, json=call.json
                ) as response,
            ):
                status, headers, body = response.status_code, response.headers, bytearray()
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > MAX_BODY:
                        raise ServiceFault(f"{self.name}: an answer of more than {MAX_BODY} bytes")
        except TimeoutError:
            if not limit.expired():
                raise
            raise Transient(f"no answer within timeout = {self.settings.timeout:g} s") from None
        except module.HTTPError as error:
            raise Transient(self._hidden(f"{type(error).__name__}: {error}")) from None
        if status != 200:
            raise self._refusal(status, headers, body.decode("utf-8", "replace"))
        try:
            return read(json.loads(body))
        except MALFORMED as error:
            begin = body[:SHOWN].decode("utf-8", "replace")
            what = self._hidden(f"an answer of another form ({type(error).__name__}: {error}): {begin}")
            raise Transient(what) from None

    def _refusal(self, status: int, headers: Mapping[str, str], body: str) -> Transient | ServiceFault:
        text = self._hidden(f"HTTP {status}: {body}".rstrip(": \n"))
        if status in AGAIN or status >= 500:
            return Transient(text, _retry_after(headers))
        hint = ". Is the key right, and the account in order?" if status in (401, 402, 403) else ""
        return ServiceFault(f"{self.name}: {text}{hint}")

    async def _pace(self) -> None:
        if not self.settings.requests_per_minute:
            return
        now = CLOCK.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + 60.0 / self.settings.requests_per_minute
        if start > now:
            await CLOCK.sleep(start - now)

    async def _spend(self) -> None:
        most = self.settings.max_requests
        if most and await asyncio.to_thread(self._cache.spend, self.name, most) is None:
            raise CostLimit(
                f"{self.name}: max_requests = {most} requests have been sent. Raise it to send more, or "
                f"remove the cache ({self._cache.path or 'in memory'}), which holds the count and the answers"
            )

    def _pause(self, fault: Transient, attempt: int, seed: int) -> float | None:
        """Seconds before the next try; None: there is none."""
        longest = self.settings.max_wait
        if attempt == self.settings.retries or (fault.after or 0.0) > longest:
            return None
        own = min(FIRST_PAUSE * 2.0**attempt, longest) * (0.5 + 0.5 * float(uniform(seed, attempt)))
        return max(fault.after or 0.0, own)

    def _hidden(self, text: str) -> str:
        """Without the key, which a server may repeat, and on one line."""
        text = " ".join((text.replace(self._secret, "***") if self._secret else text).split())
        return text if len(text) <= SHOWN else text[:SHOWN] + "..."


@functools.cache
def _ssl() -> Any:
    """Made once: it reads all certificates."""
    return httpx().create_ssl_context()


def httpx() -> Any:
    try:
        import httpx2
    except ImportError as error:
        raise ConfigError("web search needs the package httpx2: pip install 'silva[search]'") from error
    return httpx2


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds, from a number or a date."""
    value = headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - CLOCK.time())
    except ValueError:
        return None
