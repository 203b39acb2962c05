"""Requests between Silva's own processes: HTTP to an address, over TCP, a Unix socket or what a host has.

    Peer("http://127.0.0.1:8000")     Peer("unix:runs/lake/trainer.sock")     Peer("ray:trainer", carrier=...)

    fault                                           what is raised
    no connection, cut connection, no answer in     Unreachable: nobody knows whether the call had an effect
    time, a body that is no answer
    a status from 300                               Refused, with the status and the server's words

A peer is asked once: who may ask again, and whom instead, is decided by its users. A key travels in a header
and is part of no message. Not here: retries, health, pickle.
"""

from __future__ import annotations

import asyncio
import json
import math
import resource
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from silva import __version__
from silva.aio import cancelled
from silva.errors import CapabilityError, ConfigError, SilvaError
from silva.ports import CLOCK

CONNECT = 5.0  # seconds for a connection
SHOWN = 2000  # characters of an answer in a message
SLICES = 8  # of a time limit
UNIX = "unix:"
DISK = "disk"  # code of an error whose cause is the operating system's
T = TypeVar("T")


class Unreachable(SilvaError, ConnectionError):
    """A peer gave no answer."""


class Refused(SilvaError, RuntimeError):
    """A peer answered with an error.

    Attributes:
        status: of HTTP.
        kind: the server's name of the error, such as that of an exception; "" if it gives none.
        code: a short name for programs; "" if it gives none.
    """

    def __init__(self, message: str, status: int, kind: str = "", code: str = "") -> None:
        super().__init__(message)
        self.status, self.kind, self.code = status, kind, code


def web_address(address: str, forms: str = "an address that begins with http:// or https://") -> str:
    """The address. ValueError: it is not of HTTP, or holds a password."""
    scheme, _, rest = address.partition("://")
    if scheme not in ("http", "https") or not rest:
        raise ValueError(f"expected {forms}")
    if "@" in rest.partition("/")[0]:
        raise ValueError("expected an address without a name or password; a key has an option of its own")
    try:
        urlsplit(address).port  # noqa: B018 (it is read, and refused)
    except ValueError as error:
        raise ValueError(f"{error}, expected a port from 0 to 65535") from error
    return address


def part_address(address: str) -> str:
    """The address, without a slash at its end. ValueError as `web_address`."""
    if address.startswith(UNIX) and len(address) > len(UNIX):
        return address
    return web_address(address, "http://HOST:PORT, https://HOST or unix:PATH").rstrip("/")


def check_version(peer: Peer, answer: Mapping[str, Any]) -> None:
    """Refuse a server of another Silva, which may understand something else.

    Args:
        answer: of the server, with its version under `silva`.

    Raises:
        CapabilityError: with both versions.
    """
    theirs = answer.get("silva") if isinstance(answer, Mapping) else None
    if theirs != __version__:
        raise CapabilityError(
            f"the {peer.name} at {peer.address} is of Silva {theirs or 'before 0.1.0'}, this is "
            f"{__version__}: install the same version at both ends"
        )


def open_files() -> int:
    """How many files and connections this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


class Peer:
    """A server at an address.

    Connections belong to the event loop that uses them first; in another loop there are new ones.

    Args:
        name: what it is, in messages: "trainer".
        key: sent as a bearer token; "" for none.
        carrier: makes the transport (of httpx2) for an address of a form of its own.

    Raises:
        CapabilityError: httpx2 is not installed.
        ConfigError: the address has another form.
    """

    def __init__(
        self, address: str, *, name: str, key: str = "", carrier: Callable[[], Any] | None = None
    ) -> None:
        self.name, self._key, self._carrier = name, key, carrier
        try:
            self.address = address if carrier else part_address(address)
        except ValueError as error:
            shown = address.rpartition("@")[2]  # without a password
            raise ConfigError(f"{name}: got the address {shown!r}: {error}") from error
        try:
            import httpx2
        except ImportError as error:
            raise CapabilityError(
                f"the {name} at {address} needs the package httpx2: pip install 'silva[services]'"
            ) from error
        self._http = httpx2
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def again(self) -> Peer:
        """For another event loop at the same time."""
        return Peer(self.address, name=self.name, key=self._key, carrier=self._carrier)

    async def get(self, path: str, *, timeout: float | None = None) -> Any:
        """The JSON at `path`; without `timeout` it waits for the answer for ever.

        Args:
            timeout: seconds that this process is awake: that it heard nothing while it was stopped (Ctrl-Z),
                or too busy to look, says nothing about the peer.
        """
        return _json_of(self, path, await self._call("GET", path, None, {}, timeout))

    async def post(self, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        """Sends JSON and returns JSON."""
        return _json_of(self, path, await self.tell(path, body, timeout=timeout))

    async def tell(self, path: str, body: Any = None, *, timeout: float | None = None) -> bytes:
        """Sends JSON and returns whatever comes."""
        content = json.dumps({} if body is None else body, allow_nan=False).encode()
        return await self._call("POST", path, content, {"content-type": "application/json"}, timeout)

    async def send(self, path: str, body: bytes, *, timeout: float | None = None) -> bytes:
        """Sends bytes and returns bytes."""
        headers = {"content-type": "application/octet-stream"}
        return await self._call("POST", path, body, headers, timeout)

    async def close(self) -> None:
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.aclose()
        self._client = None

    async def _call(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str], timeout: float | None
    ) -> bytes:
        where = f"the {self.name} at {self.address}"
        try:
            asked = self._connected().request(method, path, content=content, headers=headers)
            response = await _awake(asked, timeout)
        except TimeoutError:
            raise Unreachable(f"{where}: no answer to {path} within {timeout:g} s") from None
        except (self._http.RequestError, OSError) as error:
            words = str(error) or type(error).__name__
            raise Unreachable(f"{where}: {words} ({type(error).__name__} at {path})") from error
        if response.status_code >= 300:  # it is asked nowhere else than at its address
            message, kind, code = _error_of(response.content)
            raise Refused(
                f"{where}: {path}: HTTP {response.status_code}: {message}", response.status_code, kind, code
            )
        return bytes(response.content)

    def _connected(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            http, web = self._http, self.address.startswith("http")
            self._client = http.AsyncClient(
                base_url=self.address if web else "http://localhost",
                headers={"authorization": f"Bearer {self._key}"} if self._key else {},
                timeout=http.Timeout(None, connect=CONNECT),
                transport=self._carrier() if self._carrier else self._sockets(),
                trust_env=False,  # no proxy of the environment stands between our own processes
            )
            self._loop = loop
        return self._client

    def _sockets(self) -> Any:
        unix = self.address.removeprefix(UNIX) if self.address.startswith(UNIX) else None
        limits = self._http.Limits(max_connections=None, max_keepalive_connections=None)
        return self._http.AsyncHTTPTransport(uds=unix, limits=limits)


async def silence(
    peer: Peer,
    *,
    patience: float,
    every: float,
    path: str = "/alive",
    works: Callable[[Any], bool] = lambda answer: True,
    longest_rest: float = math.inf,
) -> str:
    """Returns when `peer` has given no sign of life for `patience` seconds; a refusal is one.

    Args:
        every: seconds between a sign and the next question.
        path: what is asked for.
        works: whether an answer says that it works at what it was asked for. If none says so for
            `longest_rest` seconds, the question or its answer was lost on the way, where nobody cuts the
            connection: a router may forget one that was quiet for minutes.

    Returns:
        which of the two, in words.
    """
    silent = rest = 0.0
    while silent < patience and rest < longest_rest:
        await CLOCK.sleep(every)
        began = CLOCK.monotonic()
        try:
            answer = await peer.get(path, timeout=patience)
        except Unreachable:  # `patience` at most, as this process may have been stopped for longer
            silent += every + min(CLOCK.monotonic() - began, patience)
        except Refused:
            silent = 0.0
        else:
            silent, rest = 0.0, 0.0 if works(answer) else rest + every
    if silent < patience:
        return f"it answers, and has not worked at this for {longest_rest:g} s: the connection was lost"
    return f"no sign of life for {patience:g} s"


async def _awake(work: Coroutine[Any, Any, T], seconds: float | None) -> T:
    """TimeoutError after so many seconds, of which a pause of this process counts for an eighth at most."""
    task = asyncio.ensure_future(work)
    try:
        for _ in range(SLICES):
            if (await asyncio.wait({task}, timeout=seconds and seconds / SLICES))[0]:
                return task.result()
        raise TimeoutError
    finally:
        await cancelled([task])


def _json_of(peer: Peer, path: str, body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        text = body[:SHOWN].decode(errors="replace")
        raise Unreachable(
            f"the {peer.name} at {peer.address}: got {text!r} from {path}, expected JSON"
        ) from error


def _error_of(body: bytes) -> tuple[str, str, str]:
    """Message, kind and code of {"error": {"message": ..., "type": ..., "code": ...}}, as in OpenAI's API."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"])[:SHOWN], str(error.get("type") or ""), str(error.get("code") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        return body[:SHOWN].decode(errors="replace"), "", ""
