"""What stands before every route of a server: hosts, keys, sizes, times, and the form of errors.

    request ──> Host, Origin ──> key ──> size and time of the body ──> app ──> answer
                   403           401            413, 408                 └──> exceptions as JSON

Closed by default: no path is exempt from any check, so a new route cannot be open by mistake. A page in a
browser that calls a server on loopback is stopped by its Origin or, after DNS rebinding, by its Host.
Not here: where the server listens (listening.py), and what its routes accept.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import socket
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from silva.errors import (
    CapabilityError,
    CheckpointError,
    ConfigError,
    ContextOverflow,
    ModelError,
    PartLost,
    RecordError,
    RenderingError,
    SilvaError,
)
from silva.wire.listening import Bind
from silva.wire.transport import DISK

MAX_BODY = 8 << 20  # bytes
BODY_SECONDS = 30.0
AT_ONCE = 32  # bodies of the largest size that may be on their way at once
SHOWN = 1000  # characters of a message
LOCAL = ("localhost", "127.0.0.1", "::1")
MALFORMED = "invalid_request_error"


class HttpError(SilvaError, ValueError):
    """A request is refused.

    Attributes:
        status: of HTTP.
        code: a short name for programs; None for none.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, dict(headers or {})


class Fault(NamedTuple):
    """An exception as an answer."""

    status: int
    kind: str
    message: str
    code: str | None = None
    headers: Mapping[str, str] = {}


def fault_of(error: Exception) -> Fault:
    """What a client is told of an exception: never more than its name if it was not raised on purpose."""
    name = type(error).__name__
    if isinstance(error, HttpError):
        return Fault(error.status, MALFORMED, str(error), error.code, error.headers)
    if isinstance(error, HTTPException):
        return Fault(error.status_code, MALFORMED, error.detail, None, error.headers or {})
    if isinstance(error, ContextOverflow):
        return Fault(400, name, str(error), "context_length_exceeded")
    if isinstance(error, ConfigError | RecordError | CapabilityError | RenderingError):
        return Fault(400, name, str(error))
    missing = isinstance(error, CheckpointError) and not isinstance(error.__cause__, OSError)
    if isinstance(error, ModelError) or missing:
        return Fault(409, name, str(error))
    if isinstance(error, PartLost):  # of a session that has ended
        return Fault(410, name, str(error))
    if isinstance(error, SilvaError):
        return Fault(500, name, str(error), DISK if isinstance(error.__cause__, OSError) else None)
    return Fault(500, name, f"the server failed ({name}); its log says more")


class Application(Router):
    """Routes. Every exception of theirs reaches the guard, also that of an unknown path or method."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__({**scope, "app": self}, receive, send)


class Guard:
    """An ASGI app that lets through to `app` what may pass.

    Args:
        bind: where the server listens, which says what it may be called.
        key: every request must bring it as a bearer token; "" for none.
        max_body: bytes of one body.
        body_seconds: in which a body must have arrived.
        log: gets a line for each answer from 500 on.
        takes: media types of bodies. A page in a browser may send other ones to any server without asking it
            before.
        admits: checks a request's key in another way; raises HttpError.
        names: of this server, beside the host of `bind`.
    """

    def __init__(
        self,
        app: ASGIApp,
        bind: Bind,
        *,
        key: str,
        log: Callable[[str], None],
        max_body: int = MAX_BODY,
        body_seconds: float = BODY_SECONDS,
        takes: Collection[str] = ("application/json",),
        admits: Callable[[Scope], None] = lambda scope: None,
        names: Collection[str] = (),
    ) -> None:
        self._app, self._bind, self._key, self._log = app, bind, key, log
        self._max_body, self._body_seconds, self._takes = max_body, body_seconds, takes
        self._admits = admits
        self._names = {*LOCAL, bind.host.lower(), *names}
        self._held = 0  # bytes of bodies on their way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no web sockets, and no lifespan to wait for
            raise RuntimeError(f"got a connection of type {scope['type']!r}, expected http")
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            self._admit(scope)
            body = await self._body(scope, receive)
            if body:
                self._check_type(scope)
            if body is not None:
                await self._app(scope, _replayed(body, receive), sending)
        except Exception as error:
            fault = fault_of(error)
            if fault.status >= 500:
                self._log(_line(scope, fault, error))
            if started:  # the client sees a cut connection: half an answer must not look like a whole one
                raise
            await _answer(fault, send)

    def _admit(self, scope: Scope) -> None:
        hosts, origins = _values(scope, b"host"), _values(scope, b"origin")
        if len(hosts) != 1 or not self._is_ours(f"//{hosts[0]}"):
            raise HttpError(403, f"Host: got {', '.join(hosts) or 'none'}, expected a name of this server")
        if not all(origin.partition("://")[2] == hosts[0] for origin in origins):  # the port counts too
            raise HttpError(403, f"Origin: got {', '.join(origins)}, which is another site")
        check_key(scope, self._key)
        self._admits(scope)

    def _check_type(self, scope: Scope) -> None:
        types = _values(scope, b"content-type")
        if len(types) != 1 or types[0].partition(";")[0].strip().lower() not in self._takes:
            expected = " or ".join(self._takes)
            raise HttpError(415, f"Content-Type: got {', '.join(types) or 'none'}, expected {expected}")

    def _is_ours(self, url: str) -> bool:
        """Whether the host in `url` is a name of this server."""
        try:
            host = urlsplit(url).hostname or ""
        except ValueError:
            return False
        if host in self._names:
            return True
        # On all interfaces: an attacker's page has a name of its own, no address and not this machine's name.
        return self._bind.host in ("0.0.0.0", "::") and (_is_address(host) or host == _machine())

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None if the client went away."""
        lengths = _values(scope, b"content-length")
        if lengths and lengths[0].isdecimal() and int(lengths[0][:20]) > self._max_body:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    self._held += len(part)
                    if size > self._max_body:
                        raise self._too_large()
                    if self._held > AT_ONCE * self._max_body:
                        raise HttpError(429, "too many bodies at once", headers={"retry-after": "1"})
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise HttpError(408, f"the body did not arrive within {self._body_seconds:g} s") from None
        finally:
            self._held -= size

    def _too_large(self) -> HttpError:
        return HttpError(413, f"the body is too large, expected at most {self._max_body} bytes")


def check_key(scope: Scope, key: str) -> None:
    """Raises HttpError unless the request has the key as its bearer token; "" for none."""
    tokens = [token.encode("latin-1") for token in _values(scope, b"authorization")]
    if key and not (len(tokens) == 1 and hmac.compare_digest(tokens[0], f"Bearer {key}".encode())):
        raise HttpError(
            401, "a key is needed: Authorization: Bearer KEY", headers={"www-authenticate": "Bearer"}
        )


def _line(scope: Scope, fault: Fault, error: Exception) -> str:
    """One line of the log, whatever the request and the error hold; of a bug it says where."""
    text = f"{scope['method']} {scope['path']}: {fault.status} {type(error).__name__}: {error}"[:SHOWN]
    frames = traceback.extract_tb(error.__traceback__)
    if frames and not isinstance(error, SilvaError):
        text += f" ({frames[-1].filename}:{frames[-1].lineno})"
    return "".join(character if character.isprintable() else " " for character in text)


def _values(scope: Scope, header: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == header]


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body that was read, then what comes."""
    waiting = [body]

    async def replay() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replay


def error_of(error: Exception) -> dict[str, Any]:
    """What a client reads of an exception."""
    return _error(fault_of(error))


def _error(fault: Fault) -> dict[str, Any]:
    message = fault.message[:SHOWN].encode(errors="backslashreplace").decode()
    return {"error": {"message": message, "type": fault.kind, "code": fault.code}}


async def _answer(fault: Fault, send: Send) -> None:
    content = json.dumps(_error(fault)).encode()
    headers = {
        **fault.headers,
        "content-type": "application/json",
        "content-length": str(len(content)),
    }
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": fault.status, "headers": encoded})
    await send({"type": "http.response.body", "body": content})


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _machine() -> str:
    return socket.gethostname().lower()
