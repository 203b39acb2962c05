"""Requests to a service on the web: JSON over HTTP, within the limits of `wire/requests.py`.

    fault                                              what becomes of the request
    408, 409, 425, 429, 5xx, no connection, too late,  sent again after a pause; then ServiceFault
    a body that is no answer
    another status, a body that is too large           ServiceFault
    `max_requests` are sent                            CostLimit

None of them is an answer for a model: the episode has no result. A key is never part of a message.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from silva.errors import ConfigError, CostLimit, SilvaError
from silva.ports import derive
from silva.wire.requests import SHOWN, Requests, Transient, hidden, may_pass, retry_after

if TYPE_CHECKING:
    from silva.tools.cache import Cache
    from silva.tools.search import WebBackend

T = TypeVar("T")

MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What reading an answer of another form raises."""
MAX_BODY = 8 << 20  # bytes of an answer


class ServiceFault(SilvaError, OSError):
    """A service gave no answer. Its user is not to blame, and must not read it as a result."""


class Call(NamedTuple):
    """One request. `headers` may hold a key."""

    method: str
    url: str
    headers: Mapping[str, str]
    params: Mapping[str, str]
    json: Any = None


class WebService:
    """Sends calls. Its connections last from the first `enter` to the last `leave` in an event loop.

    Args:
        name: in messages, and of the count in `cache` that `max_requests` limits.
        secret: what no message may show; "" for nothing.
    """

    def __init__(self, name: str, settings: WebBackend, cache: Cache, secret: str = "") -> None:
        self.name, self.settings, self._cache, self._secret = name, settings, cache, secret
        self._requests = Requests(settings.limits, failed=lambda words, _: ServiceFault(f"{name}: {words}"))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._users = 0
        httpx()  # missing: an error at the start

    def enter(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # connections belong to one loop
            self._loop, self._users = loop, 0
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
        return await self._requests.call(lambda: self._try(call, read), seed=seed)

    async def _try(self, call: Call, read: Callable[[Any], T]) -> T:
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
            raise Transient(hidden(f"{type(error).__name__}: {error}", self._secret)) from None
        if status != 200:
            text = hidden(f"HTTP {status}: {body.decode(errors='replace')}".rstrip(": \n"), self._secret)
            if may_pass(status):
                raise Transient(text, after=retry_after(headers))
            hint = ". Is the key right, and the account in order?" if status in (401, 402, 403) else ""
            raise ServiceFault(f"{self.name}: {text}{hint}")
        try:
            return read(json.loads(body))
        except MALFORMED as error:
            begin = body[:SHOWN].decode("utf-8", "replace")
            what = f"an answer of another form ({type(error).__name__}: {error}): {begin}"
            raise Transient(hidden(what, self._secret)) from None

    async def _spend(self) -> None:
        most = self.settings.max_requests
        if most and await asyncio.to_thread(self._cache.spend, self.name, most) is None:
            raise CostLimit(
                f"{self.name}: max_requests = {most} requests have been sent. Raise it to send more, or "
                f"remove the cache ({self._cache.path or 'in memory'}), which holds the count and the answers"
            )


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
